"""BlockingTask: dispatching in a blocking job shop as a task of the common loop. A trajectory is an instance run to its end, an action a job to move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial.blocking_policy import BlockingPolicy, Observer, View
from anypo.domains.combinatorial.blocking_shop import RULES, BlockingShop, Instance, by_rule, draw_shutdowns, run_by
from anypo.run import Run
from anypo.task import Prompt

EVALUATION_SEED = 1_000_000  # held-out instances have seeds from here on; training seeds are drawn below it


@dataclass(frozen=True)
class BlockingSetting:
    """A distribution of instances: every job visits every machine once, in an order of its own, for a time in U{1..longest}."""

    smallest: int = 4  # numbers of jobs and of machines are drawn from U{smallest..largest}, >= 2
    largest: int = 6
    longest: int = 9  # duration of an operation, >= 1
    p_down: float = 0.05  # chance of a machine to fail in a unit of time, in [0,1); of a training instance U(0, p_down)
    d_max: int = 5  # longest shutdown, >= 1

    def __post_init__(self) -> None:
        if not 2 <= self.smallest <= self.largest or self.longest < 1 or self.d_max < 1 or not 0 <= self.p_down < 1:
            raise ValueError("a blocking shop needs 2 <= smallest <= largest, longest and d_max of at least 1, and p_down in [0,1)")

    @property
    def mean_time(self) -> float:
        return (1 + self.longest) / 2

    def draw(self, seed: int) -> Instance:
        """A training instance."""
        rng = np.random.default_rng(seed)
        jobs, machines = rng.integers(self.smallest, self.largest + 1, size=2)
        return self.shop(rng, int(jobs), int(machines), float(rng.uniform(0, self.p_down)))

    def shop(self, rng: np.random.Generator, jobs: int, machines: int, p_down: float) -> Instance:
        """An instance of a given size; its jobs do not depend on `p_down`."""
        machine = [rng.permutation(machines).tolist() for _ in range(jobs)]
        duration = rng.integers(1, self.longest + 1, size=(jobs, machines)).tolist()
        horizon = 3 * sum(map(sum, duration))  # no schedule is as long, unless machines hardly ever run
        return Instance(machine, duration, draw_shutdowns(rng, machines, p_down, self.d_max, horizon))

    def held_out(self, count: int, jobs: int, machines: int, p_down: float) -> list[Instance]:
        """The same for every policy and run, and the same jobs for every `p_down`."""
        return [self.shop(np.random.default_rng(EVALUATION_SEED + i), jobs, machines, p_down) for i in range(count)]


class Played(NamedTuple):
    """B shops with their T decisions; rows that end earlier are padded."""

    shops: list[BlockingShop]
    machine: Tensor  # [B,J,O] int64, -1 for no operation
    view: View  # arrays [B,T,...]
    action: NDArray  # [B,T] int64
    time: NDArray  # [B,T] of each decision
    mask: NDArray  # [B,T] bool


def play(instances: list[Instance], choose: Callable[[Int[Tensor, "B J O"], View], NDArray], scale: float) -> Played:
    """All shops from one decision to the next, side by side, until the last has ended. `choose` maps those that wait for a decision to jobs [b]."""
    jobs = max(len(i.machine) for i in instances)
    operations = max(len(route) for i in instances for route in i.machine)
    shops = [BlockingShop(instance) for instance in instances]
    observers = [Observer(shop, jobs, operations, scale) for shop in shops]
    machine = torch.from_numpy(np.stack([o.machine for o in observers]))
    empty = View(*(np.zeros_like(x) for x in observers[0].look([])))
    views, actions, times, masks = list[View](), list[NDArray](), list[NDArray](), list[NDArray]()
    while True:
        found = [shop.advance() for shop in shops]
        live = np.array([bool(f) for f in found])
        if not live.any():
            break
        looks = [o.look(f) if f else empty for o, f in zip(observers, found, strict=True)]
        view = View(*(np.stack(x) for x in zip(*looks, strict=True)))
        action = np.zeros(len(shops), dtype=np.int64)
        action[live] = choose(machine[torch.from_numpy(live)], View(*(x[live] for x in view)))
        views.append(view)
        actions.append(action)
        times.append(np.array([shop.time for shop in shops]))
        masks.append(live)
        for b in np.flatnonzero(live):
            shops[b].move(int(action[b]))
    if not views:
        raise ValueError("none of these shops leaves anything to choose; give them more jobs")
    stacked = View(*(np.stack(x, axis=1) for x in zip(*views, strict=True)))
    return Played(shops, machine, stacked, *(np.stack(x, axis=1) for x in (actions, times, masks)))


class BlockingTask:
    """Fresh instances of one setting, with their shutdowns. Rewards are dense [N,T]: minus the time until the next decision, over the mean duration.

    A prompt is an instance; several samples of it are several schedules under the same shutdowns. The policy is a `BlockingPolicy`.
    """

    objectives: tuple[str, ...] = ("reward",)
    name = "blocking:random"
    domain = "combinatorial"

    def __init__(
        self, setting: BlockingSetting | None = None, *, instances: int = 16, evaluation_instances: int = 30, jobs: int = 6, machines: int = 6
    ) -> None:  # fmt: skip
        """`instances`: of a step; `jobs` and `machines`: of the held-out shops, whose chance to fail is the setting's. Raises ValueError for counts below
        1 or held-out shops of fewer than 2 jobs or machines."""
        if min(instances, evaluation_instances) < 1 or min(jobs, machines) < 2:
            raise ValueError("instances and evaluation_instances must be at least 1, jobs and machines at least 2")
        self.setting = setting or BlockingSetting()
        self.prompts_per_step = instances
        self.held_out = self.setting.held_out(evaluation_instances, jobs, machines, self.setting.p_down)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` instances, named by their seeds."""
        return [Prompt(id=int(seed), content=int(seed)) for seed in rng.integers(EVALUATION_SEED, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: BlockingPolicy = run.policy  # type: ignore[assignment]
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        drawn = [self.setting.draw(p.content) for p in prompts]
        done = play([drawn[g] for g in group], lambda machine, view: policy.choose(machine, view, run.generator), self.setting.mean_time)
        makespan = np.array([shop.makespan for shop in done.shops])
        run.log(makespan=float(makespan.mean()))
        end = np.where(done.mask[:, 1:], done.time[:, 1:], makespan[:, None])
        end = np.concatenate([end, makespan[:, None]], axis=1)
        reward = np.where(done.mask, done.time - end, 0) / self.setting.mean_time
        mask = torch.from_numpy(done.mask)
        last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        signals = {name: torch.from_numpy(x) for name, x in done.view._asdict().items()}
        batch = Batch(
            action=torch.from_numpy(done.action), mask=mask, logp=torch.zeros(mask.shape), group=group, context=done.machine, terminated=last,
            truncated=torch.zeros_like(last), version=torch.full((len(group),), run.version),
            signals=signals | {"prompt_id": torch.tensor([p.id for p in prompts])[group], "raw_reward": torch.from_numpy(reward).float()},
        )  # fmt: skip
        found = policy.observe(batch, {"logp", "entropy", "value"})
        batch.logp = found.pop("logp")
        batch.signals.update({f"old_{name}": value for name, value in found.items()})
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T]; those of a row add up to minus its makespan over the mean duration."""
        return batch.signal("raw_reward")

    def makespans(self, policy: BlockingPolicy, instances: list[Instance] | None = None) -> NDArray:
        """[B]: of the held-out instances, or of those given, by the likeliest jobs."""
        done = play(instances or self.held_out, policy.choose, self.setting.mean_time)
        return np.array([shop.makespan for shop in done.shops])

    def measure(self, policy: BlockingPolicy) -> dict[str, NDArray]:
        """What an evaluation reports, an entry a held-out instance."""
        return {"makespan": self.makespans(policy)}

    @cached_property
    def rules(self) -> NDArray:
        """[6,B]: makespans of the held-out instances under the priority rules."""
        return rule_makespans(self.held_out)

    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean makespan on held-out instances by the likeliest jobs, beside those of the best rule and of all rules."""
        found = float(self.makespans(run.policy).mean())  # type: ignore[arg-type]
        mean = self.rules.mean(1)
        return {"makespan": found, "best_rule_makespan": float(mean.min()), "mean_rule_makespan": float(mean.mean())}


def rule_makespans(instances: list[Instance]) -> NDArray:
    """[6,B]: makespans under the priority rules, in the order of `RULES`."""

    def under(rule: str, instance: Instance) -> int:
        return run_by(instance, lambda shop, found: by_rule(shop, found, rule)).makespan

    return np.array([[under(rule, instance) for instance in instances] for rule in RULES])


def random_makespans(instances: list[Instance], seed: int = 0) -> NDArray:
    """[B]: makespans when jobs are chosen at random."""
    rng = np.random.default_rng(seed)
    return np.array([run_by(i, lambda shop, found: int(rng.choice(found))).makespan for i in instances])
