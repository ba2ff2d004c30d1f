"""ShopTask: dispatching in a job shop as a task of the common loop. A trajectory is an instance run to its end, an action a rule pair."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial.shop import OBJECTIVES, RULE_PAIRS, Instances, Schedule, interval_rewards, run_rules, run_shop
from anypo.domains.combinatorial.shop_instances import ShopSetting
from anypo.domains.control.envs import Spaces
from anypo.domains.control.policy import ControlPolicy
from anypo.run import Run
from anypo.task import Prompt

EVALUATION_SEED = 1_000_000  # held-out instances have seeds from here on; training seeds are drawn below it


class ShopTask:
    """Fresh instances of one setting. Rewards are dense [N,T], in units of the mean processing time P.

    A prompt is an instance; several samples of it are several schedules of the same instance. Rows end when their last operation has started, and
    instances of unequal length are padded. The policy is a `ControlPolicy`.
    """

    objectives: tuple[str, ...] = ("reward",)

    def __init__(
        self, setting: ShopSetting | None = None, *, objective: str = "makespan", instances: int = 32, evaluation_instances: int = 50
    ) -> None:
        """`objective`: makespan, or sum for the total time that jobs spend in the shop. `instances`: of a step.

        Raises ValueError for an unknown objective or counts below 1.
        """
        if objective not in OBJECTIVES:
            raise ValueError(f"unknown objective '{objective}'; use {' or '.join(OBJECTIVES)}")
        if instances < 1 or evaluation_instances < 1:
            raise ValueError(f"instances and evaluation_instances must be at least 1, not {instances} and {evaluation_instances}")
        self.setting = setting or ShopSetting()
        self.name = f"shop:{self.setting.kind}"
        self.objective, self.prompts_per_step, self.evaluation_instances = objective, instances, evaluation_instances
        self.scale = self.setting.mean_time
        self.spaces = Spaces(self.name, 8 + self.setting.machines, False, len(RULE_PAIRS), None, None)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` instances, named by their seeds."""
        return [Prompt(id=int(seed), content=int(seed)) for seed in rng.integers(EVALUATION_SEED, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: ControlPolicy = run.policy  # type: ignore[assignment]
        group = np.repeat(np.arange(len(prompts)), [p.samples for p in prompts])
        instances = Instances(*(x[group] for x in self.setting.draw([p.content for p in prompts])))
        policy.begin_collection()
        act = policy.actor()
        done = run_shop(instances, lambda state, live: act(state.astype(np.float32), policy.noise(run.rng, (len(group),))), self.scale)
        policy.end_collection(done.state[done.mask])
        run.log(makespan=float(done.makespan.mean()), flow=float(done.flow(instances.arrival).mean()))
        return self._batch(done, instances, torch.from_numpy(group), torch.tensor([p.id for p in prompts]), run)

    def _batch(self, done: Schedule, instances: Instances, group: Tensor, ids: Tensor, run: Run) -> Batch:
        mask = torch.from_numpy(done.mask)
        reward = interval_rewards(done, instances.arrival, self.objective) / self.scale
        last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        batch = Batch(
            action=torch.from_numpy(done.action), mask=mask, logp=torch.zeros(mask.shape), group=group, context=torch.from_numpy(done.state).float(),
            terminated=last, truncated=torch.zeros_like(last), version=torch.full((len(group),), run.version),
            signals={"prompt_id": ids[group], "raw_reward": torch.from_numpy(reward).float()},
        )  # fmt: skip
        found = run.policy.observe(batch, {"logp", "entropy", "logits"})
        batch.logp = found.pop("logp")
        batch.signals.update({f"old_{name}": value for name, value in found.items()})
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T]; those of a row add up to minus its makespan (or flow time) over P."""
        return batch.signal("raw_reward")

    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean makespan and flow time on held-out instances by the likeliest rule pairs, the objective's first, beside the best fixed pair's."""
        done = self.held_out(run.policy)  # type: ignore[arg-type]
        arrival = self.held_out_instances.arrival
        found = {"makespan": done.makespan, "flow": done.flow(arrival)}
        names = ("makespan", "flow") if self.objective == "makespan" else ("flow", "makespan")
        best = {f"best_rule_{name}": float(self.rules[name].mean(1).min()) for name in names}
        return {name: float(found[name].mean()) for name in names} | best

    def figures(self, run: Run) -> list[tuple[str, str]]:
        """The schedule of the held-out instance that is in the middle by what the best rules make of it, machine by machine."""
        from anypo.report import plots

        middle = self.rules["makespan"].min(0).argsort(kind="stable")[self.evaluation_instances // 2]
        one = Instances(*(x[[middle]] for x in self.held_out_instances))
        done = self.held_out(run.policy, one)  # type: ignore[arg-type]
        start, machine = done.start[0], done.machine[0]
        spans = [
            plots.Span(f"machine {m + 1}", start[j, o], start[j, o] + one.proc[0, j, o, m], f"job {j + 1}", str(j + 1))
            for m in range(self.setting.machines)
            for j, o in zip(*np.nonzero(machine == m), strict=True)
        ]
        return [("schedule of a held-out instance", plots.gantt(spans, f"time (makespan {done.makespan[0]:.4g})"))]

    @cached_property
    def held_out_instances(self) -> Instances:
        """The same for every policy and run."""
        return self.setting.draw(range(EVALUATION_SEED, EVALUATION_SEED + self.evaluation_instances))

    @cached_property
    def rules(self) -> dict[str, np.ndarray]:
        """`makespan` and `flow` [10, instances] of every fixed rule pair on the held-out instances."""
        done = run_rules(self.held_out_instances)
        arrival = np.concatenate([self.held_out_instances.arrival] * len(RULE_PAIRS))
        return {name: x.reshape(len(RULE_PAIRS), -1) for name, x in (("makespan", done.makespan), ("flow", done.flow(arrival)))}

    def held_out(self, policy: ControlPolicy, instances: Instances | None = None) -> Schedule:
        """Schedules of the held-out instances, or of those given, by the likeliest rule pairs."""
        act = policy.actor()
        return run_shop(instances or self.held_out_instances, lambda state, live: act(state.astype(np.float32), None), self.scale)
