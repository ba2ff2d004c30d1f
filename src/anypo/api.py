"""The public functions behind the command line: put a run together, train, evaluate. Everything heavy is imported when it is needed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anypo import catalogue, checkpoint, domains, loops
from anypo.method import SEAMS, Method, Study
from anypo.report.figures import pack
from anypo.report.page import write_run_page
from anypo.report.store import read_json, write_json_atomic
from anypo.report.trackers import open_tracker
from anypo.run import Run

SAMPLES_SHOWN = 10
BUDGETS = {"tokens": 200_000, "steps": 100}  # amounts where none is given
MANY_STEPS = 1_000_000  # no limit, when actions are the budget


@dataclass
class TrainResult:
    """What a training run found. `before` and `after` hold the task's held-out numbers, headline first (`pass@1`, `return`, ...)."""

    slug: str
    task: str
    model: str
    steps: int
    before: dict[str, float]
    after: dict[str, float]
    seconds: float  # of training, evaluations left out
    tokens_per_second: float  # actions generated (tokens, environment steps) a second of training
    out: str | None
    run: Run | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON, without the live run."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "run"}


def get_method(
    method: str | Method, domain: str | None = None, seams: Mapping[str, str] | None = None, settings: Mapping[str, Any] | None = None
) -> Method:
    """A method by name, with seams taken from other methods (`{"credit": "gdpo"}`) and hyper-parameters set (`{"objective.clip_high": 0.28}`).

    Raises KeyError for an unknown name, ValueError for an unknown seam, field or a study.
    """
    found = catalogue.get(method, domain) if isinstance(method, str) else method
    if isinstance(found, Study):
        raise ValueError(f"{found.name} is a study, not a training method; run it with `anypo reproduce {found.name}`")
    for seam, slug in (seams or {}).items():
        if seam not in SEAMS:
            raise ValueError(f"unknown seam '{seam}'; the seams are {', '.join(SEAMS)}")
        found = _swap(found, seam, get_method(slug, domain))
    for path, value in (settings or {}).items():
        found = found.set(path, value)
    return found


def _swap(method: Method, seam: str, other: Method) -> Method:
    """The method with one seam of another. A credit takes along the regularizers that live on what it gives (a critic's loss on its returns),
    and those of the old credit go with it."""
    changes: dict[str, Any] = {seam: getattr(other, seam)}
    if seam == "credit":
        gives: frozenset[str] = getattr(other.credit, "gives", frozenset())
        stay = [r for r in method.regularize if not getattr(r, "wants", frozenset())]
        come = [r for r in other.regularize if getattr(r, "wants", frozenset()) and r.wants <= gives]  # type: ignore[attr-defined]
        changes["regularize"] = (*stay, *come)
    return method.but(**changes)


def build(
    method: str | Method,
    *,
    task: Any = None,
    env: str | None = None,
    model: str | None = None,
    seed: int = 0,
    seams: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Method, Any, Any, str]:
    """Method, policy, task and domain of a run, from names or objects. A task object may say by its attribute `domain` whose it is."""
    first = get_method(method)
    if env is not None and task is not None:
        raise ValueError("give --task or --env, not both")
    if env is None and task is None:
        task = first.task or None
    domain = (
        "control"
        if env is not None
        else domains.owner(task, first.domain)
        if isinstance(task, str)
        else getattr(task, "domain", "language")
        if task
        else first.domain
    )
    chosen = env or task or domains.setup(domain).DEFAULT_TASK
    resolved = get_method(method, domain, seams, settings)
    wanted = {n.removeprefix("old_").removeprefix("ref_") for n in resolved.needs()}
    policy, built = domains.setup(domain).build(chosen, model, needs=wanted, seed=seed, **options)
    return resolved, policy, built, domain


def parse_budget(budget: str) -> tuple[str, int]:
    """ "tokens", "steps", or with an amount "tokens=50000". Raises ValueError for anything else."""
    kind, _, amount = budget.partition("=")
    if kind not in BUDGETS or (amount and not amount.replace("_", "").isdigit()) or (amount and int(amount) < 1):
        raise ValueError(f"a budget is tokens, steps, tokens=N or steps=N with N at least 1, not '{budget}'")
    return kind, int(amount) if amount else BUDGETS[kind]


def limits(kind: str, amount: int) -> dict[str, Any]:
    """A run's length as arguments of `Run`."""
    return {"steps": amount} if kind == "steps" else {"steps": MANY_STEPS, "max_actions": amount}


def train(
    method: str | Method, *, task: Any = None, env: str | None = None, model: str | None = None, steps: int = 100, seed: int = 0,
    out: Path | str | None = None, resume: Path | str | None = None, seams: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None, evaluate_every: int = 0, checkpoint_every: int = 25, log: str | None = None,
    budget: str | None = None, on_step: Callable[[dict[str, Any]], None] | None = None, on_error: str = "stop", **options: Any,
) -> TrainResult:  # fmt: skip
    """Train a model or a policy with a method.

    `task` is a name (`arithmetic`, `jsonl:file`, ...), a list of dicts with `prompt` and `answer`, or a Task; `env` a Gymnasium id. `options` go
    to the domain: `rewards`, `max_tokens`, `lora_rank`, ... `budget` ends the run by what it generated ("tokens=50000") instead of `steps`.
    With `out`, metrics.jsonl, config.json, checkpoints/, model/ and report.html are written there; `resume` continues such a folder to the same
    numbers as a run never stopped.
    Raises KeyError or ValueError with one sentence for what the user can mend.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    kind, amount = parse_budget(budget) if budget else ("steps", steps)
    where = resume or out
    folder = Path(where) if where else None
    if resume is not None and not (Path(resume) / "config.json").exists():
        raise ValueError(f"{resume} holds no run to resume (no config.json); start one with --out {resume}")
    resolved, policy, built, domain = build(method, task=task, env=env, model=model, seed=seed, seams=seams, settings=settings, **options)
    if folder is not None and resume is None and (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} already holds a run; continue it with --resume {folder}, or choose another --out")
    run = Run(resolved, policy, built, **limits(kind, amount), seed=seed, out=folder, checkpoint_every=checkpoint_every)
    names = {"slug": resolved.name, "task": built.name, "model": model or getattr(policy, "name", type(policy).__name__)}
    before, samples = _start(
        run,
        folder,
        resume is not None,
        names | {"domain": domain},
        run_arguments(amount, seed, settings, seams, task, env, model, options, kind),
    )
    tracker = open_tracker(log, folder or Path("."), names) if log else None
    if evaluate_every:
        run.on_step.append(lambda record: record.update(run.task.evaluate(run)) if run.step % evaluate_every == 0 else None)
    run.on_step += [f for f in (tracker.log if tracker else None, on_step) if f]
    start, first = time.perf_counter(), run.actions
    loop = loops.named(resolved.loop)
    try:
        loop(run)
    except Exception:
        if folder is not None and on_error == "checkpoint":
            run.save()
        raise
    finally:
        if tracker:
            tracker.close()
    seconds = time.perf_counter() - start
    result = TrainResult(
        **names, steps=run.step, before=before, after=run.task.evaluate(run), seconds=round(seconds, 3),
        tokens_per_second=round((run.actions - first) / max(seconds, 1e-9), 1), out=str(folder) if folder else None, run=run,
    )  # fmt: skip
    if folder is not None:
        _finish(run, folder, result, samples)
    return result


def evaluate(target: str, *, task: str | None = None, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """Held-out performance of a run's folder or of a model, by the domain's own measure (pass@k and maj@k, or returns), with 95% intervals.

    Raises ValueError when there is no such folder or model.
    """
    folder = Path(target)
    config = read_json(folder / "config.json") if (folder / "config.json").exists() and (folder / "metrics.jsonl").exists() else {}
    domain = config.get("domain") or (domains.owner(task, "language") if task else "language")
    chosen = task or config.get("task") or domains.setup(domain).DEFAULT_TASK
    model = str(folder / "model") if config else target
    return domains.setup(domain).evaluate(model, chosen, k=k, seed=seed, **options)


def arguments_of(folder: Path, slug: str) -> dict[str, Any]:
    """The arguments that a run's config.json recorded, to resume it with. Raises ValueError when it is another method's run or none."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no run to resume (no config.json); start one with --out {folder}")
    config = read_json(folder / "config.json")
    if config["slug"] != slug:
        raise ValueError(
            f"{folder} holds a run of {config['slug']}, not of {slug}; resume it with `anypo train {config['slug']} --resume {folder}`"
        )
    names = {
        "task": config["task_argument"],
        "env": config["env"],
        "model": config["model_argument"],
        "steps": config["steps"],
        "budget": config.get("budget"),
        "seed": config["seed"],
    }
    return names | {"settings": config["settings"], "seams": config["seams"], **config["options"]}


def run_arguments(
    amount: int, seed: int, settings: Any, seams: Any, task: Any, env: str | None, model: str | None, options: Mapping[str, Any],
    kind: str = "steps",
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a run as its config.json keeps them; what is no plain value is kept by name. `amount` of `kind` is the run's length."""
    by_steps = kind == "steps"
    plain = {k: v if isinstance(v, str | int | float | bool | type(None)) else repr(v) for k, v in options.items()}
    return {"steps": amount if by_steps else MANY_STEPS, "budget": None if by_steps else f"{kind}={amount}", "seed": seed,
            "settings": dict(settings or {}), "seams": dict(seams or {}), "env": env, "options": plain,
            "model_argument": model, "task_argument": task if isinstance(task, str | type(None)) else None}  # fmt: skip


def command(slug: str, config: Mapping[str, Any]) -> str:
    """The command line that repeats a run."""
    length = ["--budget", config["budget"]] if config.get("budget") else ["--steps", str(config["steps"])]
    parts = ["anypo", "train", slug, *length, "--seed", str(config["seed"])]
    parts += ["--env", config["env"]] if config.get("env") else ["--task", config["task_argument"]] if config.get("task_argument") else []
    parts += ["--model", config["model_argument"]] if config.get("model_argument") else []
    parts += [x for seam, other in config.get("seams", {}).items() for x in (f"--{seam}", other)]
    parts += [x for path, value in config.get("settings", {}).items() for x in ("--set", f"{path}={value}")]
    parts += [x for name, value in config.get("options", {}).items() for x in ("--option", f"{name}={value}")]
    return shlex.join(parts)


def _start(
    run: Run, folder: Path | None, resuming: bool, names: dict[str, Any], arguments: dict[str, Any]
) -> tuple[dict[str, float], list[Any]]:
    """Resume, or evaluate the untrained policy and write config.json; (held-out numbers, sample completions) from before training."""
    if folder is not None and resuming:
        saved = read_json(folder / "before.json")
        run.resume()
        return saved["before"], saved["samples"]
    before, samples = run.task.evaluate(run), sample_completions(run)
    if folder is not None:
        method = run.recipe
        config = names | arguments
        config |= {"describe": method.describe(), "diff": [list(d) for d in method.diff()], "command": command(method.name, config)}
        write_json_atomic(folder / "config.json", config)
        write_json_atomic(folder / "before.json", {"before": before, "samples": samples})
        write_json_atomic(folder / "figures.json", {"before": figures(run)})
    return before, samples


def sample_completions(run: Run) -> list[Any]:
    """Some held-out attempts of the current policy, for people to read: [{prompt, completion, reward}]; [] when the task has none to show."""
    show = getattr(run.task, "sample_completions", None)
    return show(run, SAMPLES_SHOWN) if show else []


def figures(run: Run) -> list[dict[str, str]]:
    """What the task draws of the current policy for the run's page (see `anypo.report.figures`); [] when it draws nothing."""
    draw = getattr(run.task, "figures", None)
    return pack(draw(run)) if draw else []


def _finish(run: Run, folder: Path, result: TrainResult, samples: list[Any]) -> None:
    write_json_atomic(folder / "summary.json", result.as_json())
    write_json_atomic(folder / "samples.json", {"before": samples, "after": sample_completions(run)})
    drawn = read_json(folder / "figures.json") if (folder / "figures.json").exists() else {}  # runs of older versions drew nothing
    write_json_atomic(folder / "figures.json", drawn | {"after": figures(run)})
    save = getattr(run.policy, "save_pretrained", None)
    if save:
        save(folder / "model")
    else:
        checkpoint.save(folder / "model", run.step, {"policy": dict(run.policy.state_dict())})
    write_run_page(folder)
