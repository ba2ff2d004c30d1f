"""The command line: a thin layer over the public API. Progress when a person watches, JSON when asked, one sentence for a mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from anypo.engines.memory import restart_with_large_pages

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Any policy optimization.")
USER_MISTAKES = (ValueError, KeyError, OSError, FloatingPointError, ImportError)
COMPUTING = {"train", "compare", "reproduce", "eval"}
debugging = False

AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Out = Annotated[Path | None, typer.Option(help="folder for metrics, checkpoints, model and report")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="SEAM.FIELD=VALUE", help="change a hyper-parameter; may be repeated")]


def command() -> None:
    """Entry point of the command: `main`, with large pages for the commands that compute."""
    if COMPUTING & set(sys.argv[1:3]):
        restart_with_large_pages()
    main()


def main() -> None:
    """Runs the command; a user's mistake becomes one sentence and exit code 2."""
    global debugging
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        debugging = True
    try:
        app(standalone_mode=True)
    except USER_MISTAKES as error:
        if debugging:
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
        print(f"anypo: {' '.join(str(text).split())}", file=sys.stderr)
        sys.exit(2)


@app.command("list")
def list_(domain: str | None = None, seam: str | None = None, kind: str | None = None, json_: AsJson = False) -> None:
    """What exists. Instant: torch is not imported."""
    from dataclasses import asdict

    from anypo import catalogue

    rows = catalogue.entries()
    for name, wanted, known in (
        ("domain", domain, {r.domain for r in rows}),
        ("kind", kind, {r.kind for r in rows}),
        ("seam", seam, {s for r in rows for s in r.seams}),
    ):
        if wanted is not None and wanted not in known:
            raise ValueError(f"no {name} '{wanted}'; there are {', '.join(sorted(known))}")
    rows = [r for r in rows if domain in (None, r.domain) and kind in (None, r.kind) and (seam is None or seam in r.seams)]
    if json_:
        print(json.dumps([{k: v for k, v in asdict(r).items() if k != "module"} for r in rows]))
        return
    width = max((len(r.slug) for r in rows), default=0)
    for r in rows:
        print(f"{r.slug:<{width}}  {r.domain:<13}{r.kind:<10}{r.status:<18}{r.name}")


@app.command()
def show(slug: str) -> None:
    """What a method changes against its base, its equations, defaults, claims and source."""
    from anypo import catalogue
    from anypo.report.describe import method_page

    print(method_page(slug, catalogue.get(slug)))


@app.command()
def train(
    slug: str,
    task: str | None = None,
    env: str | None = None,
    model: str | None = None,
    steps: int = 100,
    budget: Annotated[str | None, typer.Option(help="tokens=N: end by what was generated, not by --steps")] = None,
    seed: int = 0,
    set_: Settings = None,
    prepare: str | None = None,
    select: str | None = None,
    rollout: str | None = None,
    reward: str | None = None,
    credit: str | None = None,
    objective: str | None = None,
    regularize: str | None = None,
    update: str | None = None,
    control: str | None = None,
    out: Out = None,
    resume: Path | None = None,
    engine: str = "local",
    log: str | None = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="for the task or model: max_tokens, lora_rank, ...")
    ] = None,
    evaluate_every: Annotated[int, typer.Option(help="held-out evaluation every so many steps; 0 = only before and after")] = 0,
    checkpoint_every: int = 25,
    json_: AsJson = False,
) -> None:
    """Train your model or environment with a method; swap a seam with --credit, --objective, ... SLUG."""
    from anypo import api

    if engine != "local":
        from anypo.engines import check

        check(engine)
    seams = {"prepare": prepare, "select": select, "rollout": rollout, "reward": reward, "credit": credit, "objective": objective,
             "regularize": regularize, "update": update, "control": control}  # fmt: skip
    arguments: dict[str, Any] = {"task": task, "env": env, "model": model, "steps": steps, "budget": budget, "seed": seed}
    arguments |= {
        "settings": _pairs(set_, "--set"),
        "seams": {k: v for k, v in seams.items() if v},
        **_pairs(option, "--option", literal=True),
    }
    if resume is not None:
        arguments |= api.arguments_of(resume, slug)
    kind, amount = api.parse_budget(arguments["budget"]) if arguments["budget"] else ("steps", arguments["steps"])
    with _progress(amount, quiet=json_, unit=kind) as advance:
        result = api.train(
            slug,
            out=out,
            resume=resume,
            log=log,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            on_step=lambda record: advance(record, None if kind == "steps" else record["actions"]),
            **arguments,
        )
    if json_:
        print(json.dumps(result.as_json()))
        return
    speed = f"{result.tokens_per_second:,.0f} {result.run.policy.unit}/s" if result.run else ""
    print(f"{result.slug} on {result.task} ({result.model}): {result.steps} steps in {result.seconds:.1f} s, {speed}")
    for name, after in result.after.items():
        print(f"  {name:<14}{result.before.get(name, float('nan')):>9.3f} -> {after:.3f}")
    if result.out:
        print(f"  report        {result.out}/report.html")


@app.command()
def compare(
    slugs: list[str],
    task: Annotated[list[str] | None, typer.Option(help="may be repeated")] = None,
    env: str | None = None,
    model: str | None = None,
    seeds: int = 3,
    budget: Annotated[str, typer.Option(help="tokens, steps, tokens=N or steps=N: equal for all methods")] = "tokens",
    set_: Settings = None,
    out: Path = Path("runs/compare"),
    jobs: int = 1,
    json_: AsJson = False,
) -> None:
    """Several methods under equal budgets: interquartile means with 95% intervals, and a page."""
    from anypo.comparison import compare as run_comparison

    count = len(slugs) * seeds * max(1, len(task or []))
    with _progress(count, quiet=json_, unit="runs") as advance:
        found = run_comparison(
            *slugs, task=task or None, env=env, model=model, seeds=seeds, budget=budget, out=out, jobs=jobs, settings=_pairs(set_, "--set"),
            progress=lambda runs: advance({}, runs),
        )  # fmt: skip
    if json_:
        print(json.dumps(found))
        return
    for method in sorted(found["methods"], key=lambda m: -(m["final"]["iqm"] or -1e9)):
        final = method["final"]
        text = "failed" if final["iqm"] is None else f"{final['iqm']:.3f}  [{final['low']:.3f}, {final['high']:.3f}]"
        print(f"{method['slug']:<18}{text}")
    print(f"report {out}/report.html")


@app.command()
def reproduce(
    slugs: Annotated[list[str] | None, typer.Argument()] = None,
    all_: Annotated[bool, typer.Option("--all")] = False,
    quick: Annotated[bool, typer.Option(help="leave out slow claims")] = False,
    domain: str | None = None,
    jobs: int = 1,
    json_: AsJson = False,
) -> None:
    """Run the papers' claims and their ablations; exit code 1 if any fails."""
    from anypo.claims import reproduce_slugs

    if not slugs and not all_:
        raise ValueError("name the rows to reproduce, or give --all")
    results = reproduce_slugs(*(slugs or []), quick=quick, jobs=jobs, domain=domain, done=None if json_ else _print_row)
    if json_:
        print(json.dumps(results))
    if not all(r["holds"] for r in results):
        raise typer.Exit(1)


@app.command("eval")
def eval_(target: str, task: str | None = None, k: str = "1", seed: int = 0, json_: AsJson = False) -> None:
    """pass@k and maj@k (or returns) of a run's folder or a model, with confidence intervals."""
    from anypo.api import evaluate

    if not all(part.strip().isdigit() and int(part) > 0 for part in k.split(",")):
        raise ValueError(f"--k takes numbers of samples such as 1,8, not '{k}'")
    found = evaluate(target, task=task, k=tuple(int(part) for part in k.split(",")), seed=seed)
    if json_:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(
            f"{name:<12}{value['value']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]"
            if isinstance(value, dict)
            else f"{name:<12}{value}"
        )


@app.command()
def report(dirs: list[Path], out: Path = Path("report.html")) -> None:
    """One self-contained HTML page from one or more run folders."""
    from anypo.report.page import write_report

    print(write_report(list(dirs), out))


def _pairs(items: list[str] | None, option: str, literal: bool = False) -> dict[str, Any]:
    import ast

    found: dict[str, Any] = {}
    for item in items or []:
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise ValueError(f"{option} takes NAME=VALUE, not '{item}'")
        found[name] = value
        if literal:
            with suppress(ValueError, SyntaxError):  # plain text stays text
                found[name] = ast.literal_eval(value)
    return found


def _print_row(row: dict[str, Any]) -> None:
    print(f"{'ok  ' if row['holds'] else 'FAIL'} {row['slug']}")
    for c in row["claims"]:
        verdict = "holds" if c["holds"] else "not reproduced" if not c["reproduced"] else "DOES NOT HOLD"
        print(f"     {verdict}: {c['text']}  (measured {c['measured']}, expected {c['expected']}, {c['seconds']} s)", flush=True)


@contextmanager
def _progress(total: int, quiet: bool, unit: str = "steps") -> Any:
    """A callback that shows a progress line while a person watches, and does nothing else."""
    if quiet or not sys.stderr.isatty():
        yield lambda record, completed=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TextColumn("{task.fields[numbers]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("", total=total, numbers="")
        yield _shower(bars, bar)


def _shower(bars: Any, bar: Any) -> Callable[..., None]:
    def show_record(record: dict[str, Any], completed: float | None = None) -> None:
        parts = [f"{name} {record[name]:.3g}" for name in ("reward", "kl", "entropy") if isinstance(record.get(name), int | float)]
        if "tokens_per_second" in record.get("time", {}):
            parts.append(f"{record['time']['tokens_per_second']:,.0f} actions/s")
        bars.update(bar, advance=1 if completed is None else None, completed=completed, numbers="  ".join(parts))

    return show_record


if __name__ == "__main__":
    command()
