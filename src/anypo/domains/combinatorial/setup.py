"""How a scheduling or an inventory run is put together from names: a problem, its policy, saved policies and their evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "shop:heterogeneous"
POLICY_OPTIONS = {
    "shop": ("hidden",),
    "inventory": ("policy", "hidden", "initial_log_std"),
    "blocking": ("hidden", "layers"),
    "tsp": ("state", "layers", "width", "heads"),
    "queue": ("threshold", "hidden"),
    "hydro": ("policy", "hidden", "sigma"),
}
FAMILIES = tuple(POLICY_OPTIONS)


def owns(task: str) -> bool:
    """Whether the task's name begins with shop:, inventory:, blocking:, tsp:, queue: or hydro:."""
    return task.partition(":")[0] in FAMILIES and ":" in task


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `shop:homogeneous` and `shop:heterogeneous` take the options `load`, `jobs`, `operations`, `machines`, `objective`,
    `instances`, `evaluation_instances` and `hidden`; `inventory:one_store`, `one_store_lost`, `serial`, `warehouse` and `transshipment` those of their
    setting (`lead_time`, `underage`, `stores`), `scenarios`, `batch`, `periods`, `warm_up`, `test_scenarios`, `test_periods`, `policy` (mlp, graph,
    base_stock), `hidden` and `initial_log_std`; `blocking:random` those of its setting (`smallest`, `largest`, `longest`, `p_down`, `d_max`),
    `instances`, `evaluation_instances`, `jobs`, `machines`, `hidden` and `layers`; `tsp:random` `cities`, `labelled`, `batch`,
    `evaluation_instances`, `state` (reduced, direct), `layers`, `width` and `heads`; `queue:criss_cross`, `tandem`, `rybko_stolyar` and
    `n_model` `services` (exponential, hyperexponential, uniform), `horizon`, `copies`, `test_horizon`, `test_copies`, `reward_scale`, `threshold`
    (of the guard) and `hidden`; `hydro:one_reservoir` and `cascade` `months`, `paths`, `test_paths`, `policy` (lstm, affine), `hidden` and `sigma`.
    `model`: the folder of a saved policy to go on from.

    Raises ValueError for an unknown task or option and for a policy that does not fit.
    """
    import torch

    torch.set_num_threads(1)  # networks of this size are slower with several threads
    family = (task if isinstance(task, str) else task.name).partition(":")[0]
    if family not in FAMILIES:
        raise ValueError(f"unknown task '{task}'; there are {', '.join(f'{name}:...' for name in FAMILIES)}")
    chosen = {name: options.pop(name) for name in POLICY_OPTIONS[family] if name in options}
    task_of, policy_of = {
        "shop": (_shop, _dispatcher), "inventory": (_inventory, _orderer), "blocking": (_blocking, _mover), "tsp": (_tours, _traveller),
        "queue": (_queue, _scheduler), "hydro": (_hydro, _keeper),
    }[family]  # fmt: skip
    built = task_of(task, options, seed) if isinstance(task, str) else task
    return policy_of(built, model, needs, seed, chosen), built


def evaluate(model: str, task: str, *, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """What a task measures (makespan, flow time, cost, excess over the shortest tours) of a saved policy, held out, with 95% bootstrap intervals.

    `k` and `seed` mean nothing here: the held-out problems are the same for everyone.
    """
    from anypo.report.statistics import mean_with_interval

    policy, built = build(task, model, **options)
    measured: dict[str, Any]
    if hasattr(built, "measure"):
        measured = built.measure(policy)
    elif hasattr(built, "spaces"):
        done = built.held_out(policy)  # type: ignore[attr-defined]
        measured = {"makespan": done.makespan, "flow": done.flow(built.held_out_instances.arrival)}  # type: ignore[attr-defined]
    else:
        measured = {"cost": built.costs(policy).numpy()}  # type: ignore[attr-defined]
    intervals = {name: mean_with_interval(values) for name, values in measured.items()}
    return {name: {"value": value, "low": low, "high": high} for name, (value, low, high) in intervals.items()}


def _shop(task: str, options: dict[str, Any], seed: int) -> Task:
    from anypo.domains.combinatorial.shop_instances import ShopSetting
    from anypo.domains.combinatorial.shop_tasks import ShopTask

    setting = [f.name for f in fields(ShopSetting) if f.name != "kind"]
    own = _keywords(ShopTask)
    _refuse_unknown(options, [*setting, *own, *POLICY_OPTIONS["shop"]], "shops")
    return ShopTask(
        ShopSetting(task.partition(":")[2], **{n: v for n, v in options.items() if n in setting}),
        **{n: v for n, v in options.items() if n in own},
    )


def _inventory(task: str, options: dict[str, Any], seed: int) -> Task:
    from anypo.domains.combinatorial.inventory_settings import SETTINGS
    from anypo.domains.combinatorial.inventory_tasks import InventoryTask

    name = task.partition(":")[2]
    if name not in SETTINGS:
        raise ValueError(f"unknown inventory setting '{name}'; there are {', '.join(SETTINGS)}")
    setting = [p for p in inspect.signature(SETTINGS[name]).parameters if p != "seed"]
    own = [p for p in _keywords(InventoryTask) if p != "seed"]
    _refuse_unknown(options, [*setting, *own, *POLICY_OPTIONS["inventory"]], name)
    arguments = {n: v for n, v in options.items() if n in setting}
    return InventoryTask(SETTINGS[name](**arguments), seed=seed, **{n: v for n, v in options.items() if n in own})


def _blocking(task: str, options: dict[str, Any], seed: int) -> Task:
    from anypo.domains.combinatorial.blocking_tasks import BlockingSetting, BlockingTask

    setting, own = [f.name for f in fields(BlockingSetting)], _keywords(BlockingTask)
    _refuse_unknown(options, [*setting, *own, *POLICY_OPTIONS["blocking"]], "blocking shops")
    chosen = BlockingSetting(**{n: v for n, v in options.items() if n in setting})
    return _only(task, BlockingTask(chosen, **{n: v for n, v in options.items() if n in own}))


def _tours(task: str, options: dict[str, Any], seed: int) -> Task:
    from anypo.domains.combinatorial.tour_tasks import TourTask

    _refuse_unknown(options, [*(n for n in _keywords(TourTask) if n != "seed"), *POLICY_OPTIONS["tsp"]], "tours")
    return _only(task, TourTask(seed=seed, **options))


def _queue(task: str, options: dict[str, Any], seed: int) -> Task:
    from anypo.domains.combinatorial.queue_tasks import QueueTask
    from anypo.domains.combinatorial.queues import NETWORKS

    name = task.partition(":")[2]
    if name not in NETWORKS:
        raise ValueError(f"unknown queueing network '{name}'; there are {', '.join(NETWORKS)}")
    _refuse_unknown(options, [*_keywords(QueueTask), *POLICY_OPTIONS["queue"]], "queues")
    return QueueTask(NETWORKS[name], **options)


def _hydro(task: str, options: dict[str, Any], seed: int) -> Task:
    from dataclasses import replace

    from anypo.domains.combinatorial.hydro import SETTINGS
    from anypo.domains.combinatorial.hydro_tasks import HydroTask

    name = task.partition(":")[2]
    if name not in SETTINGS:
        raise ValueError(f"unknown dispatch problem '{name}'; there are {', '.join(SETTINGS)}")
    _refuse_unknown(options, ["months", *_keywords(HydroTask), *POLICY_OPTIONS["hydro"]], "dispatch problems")
    months = options.pop("months", SETTINGS[name].months)
    return HydroTask(replace(SETTINGS[name], months=months), **options)


def _only(name: str, task: Any) -> Task:
    if task.name != name:
        raise ValueError(f"unknown task '{name}'; did you mean {task.name}?")
    return task


def _mover(task: Any, model: str | None, needs: Set[str], seed: int, options: dict[str, Any]) -> Policy:
    from anypo.domains.combinatorial.blocking_policy import BlockingPolicy, load_blocking_policy

    return BlockingPolicy(seed=seed, **options) if model is None else load_blocking_policy(Path(model))


def _traveller(task: Any, model: str | None, needs: Set[str], seed: int, options: dict[str, Any]) -> Policy:
    from anypo.domains.combinatorial.tour_policy import TourPolicy, load_tour_policy

    return TourPolicy(seed=seed, **options) if model is None else load_tour_policy(Path(model))


def _scheduler(task: Any, model: str | None, needs: Set[str], seed: int, options: dict[str, Any]) -> Policy:
    from anypo.domains.combinatorial.queue_tasks import QueuePolicy, load_queue_policy

    if model is None:
        return QueuePolicy(task.network, value=bool(needs & {"value", "old_value"}), seed=seed, **options)
    policy = load_queue_policy(Path(model))
    if policy.network != task.network:
        raise ValueError(f"the policy in {model} was trained for {policy.network.name}; give the task it was trained on")
    return policy


def _keeper(task: Any, model: str | None, needs: Set[str], seed: int, options: dict[str, Any]) -> Policy:
    from anypo.domains.combinatorial.hydro_tasks import HydroPolicy, load_hydro_policy

    if model is None:
        return HydroPolicy(task.setting, options.pop("policy", "lstm"), seed=seed, **options)
    return load_hydro_policy(Path(model), task.setting)


def _dispatcher(task: Any, model: str | None, needs: Set[str], seed: int, options: dict[str, Any]) -> Policy:
    from anypo.domains.control.policy import ControlPolicy
    from anypo.domains.control.setup import load

    if model is None:
        hidden = options.get("hidden", (64, 64))
        return ControlPolicy(task.spaces, hidden=(hidden, hidden) if isinstance(hidden, int) else tuple(hidden), seed=seed)
    policy = load(Path(model))
    if policy.spaces.observation_size != task.spaces.observation_size or policy.spaces.actions != task.spaces.actions:  # type: ignore[union-attr]
        raise ValueError(f"the policy in {model} was trained for another problem; it does not fit the machines of {task.name}")
    return policy


def _orderer(task: Any, model: str | None, needs: Set[str], seed: int, options: dict[str, Any]) -> Policy:
    """A policy whose cost can be differentiated acts without noise; every other method gets one that explores."""
    from anypo.domains.combinatorial.inventory_policy import InventoryPolicy, load_policy

    if model is None:
        body = options.pop("policy", "mlp")
        return InventoryPolicy(task.setting, body, stochastic="cost" not in needs, seed=seed, **options)
    policy = load_policy(Path(model))
    if policy.setting != task.setting:
        raise ValueError(f"the policy in {model} was trained for another network; give the task and options it was trained with")
    return policy


def _keywords(kind: Any) -> list[str]:
    return [name for name, p in inspect.signature(kind.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY]


def _refuse_unknown(options: dict[str, Any], known: list[str], what: str) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{what} know no option '{unknown[0]}'; there are {', '.join(sorted(known))}")
