"""How a language run is put together from names: a task, a model, and the stand-ins."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

log = logging.getLogger(__name__)
DEFAULT_TASK = "arithmetic"
DEFAULT_MODEL = "builtin"
LARGE_ON_CPU = {"prompts_per_step": 2, "evaluation_prompts": 16}  # a step, and an evaluation, of about a minute at most
TOYS = (
    "token_bandit",
    "toy_arith",
    "key_chain",
    "certified_ranking",
    "event_video",
    "toy_roles",
    "toy_languages",
    "copy_or_compute",
    "check_again",
    "errands",
    "household",
    "rubric_sums",
    "lock",
    "lookup_chain",
    "registers",
    "toy_ct",
)


def owns(task: str) -> bool:
    """Whether this domain knows the task by name. `jsonl:`, `hf:` and `reasoning_gym:` tasks are its own."""
    from anypo.domains.language.problems import PROBLEMS

    return (
        task in TOYS
        or task in PROBLEMS
        or task.split(":")[0] in ("jsonl", "hf", "reasoning_gym", "calculator", "grid", "textarena", "textworld")
    )


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `rewards`, `max_tokens`, ... go to the task, `lora_rank`, `dtype`, `token_budget`, ... to the model.

    Raises ValueError for an unknown task, model or option.
    """
    if task in TOYS:
        return _toy(task, seed, needs, options)
    from anypo.domains.language.models import load_policy
    from anypo.domains.language.tasks import make_task

    model_options = {
        k: options.pop(k) for k in list(options) if k in ("lora_rank", "dtype", "token_budget", "gradient_checkpointing", "temperature")
    }
    built = make_task(task, **options)
    policy = load_policy(model or DEFAULT_MODEL, value_head="value" in needs, **model_options)
    if policy.is_large and policy.network.device.type == "cpu":
        for name, value in LARGE_ON_CPU.items():
            if isinstance(task, str) and hasattr(built, name) and name not in options:
                log.warning("a model of this size on a CPU: %s is %d (set it with --option %s=...)", name, value, name)
                setattr(built, name, value)
    return policy, built


def load(folder: Path, needs: Set[str] = frozenset()) -> Policy:
    """A policy saved by a run."""
    from anypo.domains.language.models import load_policy

    return load_policy(str(folder), value_head="value" in needs)


def evaluate(model: str, task: str, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """pass@k and maj@k with 95% intervals of a saved or named model. Raises ValueError when there is no such model or task."""
    if task in TOYS:
        from anypo import checkpoint

        policy, toy = _toy(task, seed, frozenset(), options)
        state = checkpoint.load_latest(Path(model))
        if state is None:
            raise ValueError(f"{model} holds no saved policy")
        policy.load_state_dict(state["policy"])
        exact = toy.expected_success(policy)  # type: ignore[attr-defined]
        return {"pass@1": {"value": exact, "low": exact, "high": exact}}
    from anypo.domains.language.evaluation import evaluate_policy
    from anypo.domains.language.models import load_policy
    from anypo.domains.language.tasks import make_task

    return evaluate_policy(load_policy(model), make_task(task, **options), k, seed)


def _toy(task: str, seed: int, needs: Set[str], options: dict[str, Any]) -> tuple[Policy, Task]:
    if task == "token_bandit":
        from anypo.domains.language.toys.token_bandit import TokenBandit

        bandit = TokenBandit(seed=seed, **options)
        policy = bandit.policy()
        policy.learning_rate = float(bandit.count)  # an SGD step of 1 for each prompt
        return policy, bandit
    if task == "toy_arith":
        from anypo.domains.language.toys.toy_arith import make_toy_arith

        if "latent" in needs or any(name.startswith("layer_logp_") for name in needs):  # what the GRU has not
            options = {"layers": 4, "latent": 16 * ("latent" in needs)} | options
        return make_toy_arith(seed=seed, value_head="value" in needs, **options)
    if task == "certified_ranking":
        from anypo.domains.language.toys.certified_ranking import CertifiedRanking

        ranking = CertifiedRanking(seed=seed, **options)
        return ranking.policy(), ranking
    if task == "event_video":
        from anypo.domains.language.toys.event_video import make_event_video

        return make_event_video(**options)
    if task == "copy_or_compute":
        from anypo.domains.language.toys.copy_or_compute import CopyOrCompute

        questions = CopyOrCompute(seed=seed, **options)
        return questions.policy(seed), questions
    if task == "check_again":
        from anypo.domains.language.toys.check_again import make_check_again

        return make_check_again(seed=seed, **options)
    if task == "errands":
        from anypo.domains.language.toys.errands import Errands

        history = options.pop("history", False)
        places = Errands(**options)
        return places.policy(history=history, seed=seed), places
    if task == "household":
        from anypo.domains.language.toys.household import Household

        chores = Household(seed=seed, **options)
        return chores.policy(seed=seed), chores
    if task == "lock":
        from anypo.domains.language.toys.lock import make_lock

        return make_lock(seed=seed, **options)
    if task == "lookup_chain":
        from anypo.domains.language.toys.lookup_chain import make_lookup_chain

        return make_lookup_chain(seed=seed, **options)
    if task == "registers":
        from anypo.domains.language.toys.registers import make_registers

        return make_registers(**options)
    if task == "toy_ct":
        from anypo.domains.language.toys.toy_ct import make_toy_ct

        return make_toy_ct(**options)
    if task == "rubric_sums":
        from anypo.domains.language.toys.rubric_sums import make_rubric_sums

        return make_rubric_sums(seed=seed, **options)
    if task in ("toy_roles", "toy_languages"):
        from anypo.domains.language.toys.toy_languages import ToyLanguages
        from anypo.domains.language.toys.toy_roles import ToyRoles

        toy: Any = ToyRoles(seed=seed, **options) if task == "toy_roles" else ToyLanguages(seed=seed, **options)
        table: Policy = toy.policy()
        table.learning_rate = float(toy.prompts_per_step)  # an SGD step of 1 for each prompt
        return table, toy
    from anypo.domains.language.toys.key_chain import KeyChain

    chain = KeyChain(seed=seed, **options)
    walker: Policy = chain.policy()
    return walker, chain
