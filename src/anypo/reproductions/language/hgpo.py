"""Claims of HGPO in the aliased corridor: start, left or right by chance, then a cell X that looks the same from both sides.

In X the policy picks one of two actions; the return is 0.8 for having come from the left plus 0.2 when the action matches the side. Observations:
start 0, left 1, right 2, X 3; three steps a trajectory. The true advantage in X, given the side, is known.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.method import Method
from anypo.methods.language.hgpo import METHOD as HGPO
from anypo.methods.language.hgpo import advantages, depth_advantages
from anypo.policy import Policy, Signals
from anypo.reproductions.common import ShuffledCredit, plain_sgd, steps_to, train_on
from anypo.run import Run
from anypo.task import Prompt

LEFT_BONUS, MATCH_BONUS = 0.8, 0.2
SEEDS = tuple(range(6))
Estimator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (returns, group, traj, obs) -> [S]


def corridor(rollouts: int, generator: torch.Generator, action: Tensor | None = None, side: Tensor | None = None) -> dict[str, Tensor]:
    """Step rows of `rollouts` trajectories under the uniform policy in X, and which side and action each took."""
    side = torch.randint(2, (rollouts,), generator=generator) if side is None else side  # 0 left, 1 right
    action = torch.randint(2, (rollouts,), generator=generator) if action is None else action
    gain = LEFT_BONUS * (side == 0) + MATCH_BONUS * (action == side)
    traj = torch.arange(rollouts).repeat_interleave(3)
    obs = torch.stack([torch.zeros_like(side), 1 + side, torch.full_like(side, 3)], dim=1).flatten()
    return {
        "returns": gain.double().repeat_interleave(3),
        "group": torch.zeros_like(traj),
        "traj": traj,
        "obs": obs,
        "side": side,
        "gain": gain.double(),
    }


def error_in_x(estimate: Estimator, rollouts: int, batches: int = 200) -> float:
    """Mean |estimated - true advantage| of the steps in X."""
    generator, errors = torch.Generator().manual_seed(0), []
    for _ in range(batches):
        rows = corridor(rollouts, generator)
        found = estimate(rows["returns"], rows["group"], rows["traj"], rows["obs"])[2::3]
        true = rows["gain"] - torch.where(rows["side"] == 0, LEFT_BONUS + MATCH_BONUS / 2, MATCH_BONUS / 2).double()
        errors.append(float((found - true).abs().mean()))
    return fmean(errors)


def _mixture(returns: Tensor, group: Tensor, traj: Tensor, obs: Tensor) -> Tensor:
    return advantages(returns, group, traj, obs, K=1, mode="mean_norm")


def _depth(column: int) -> Estimator:
    return lambda returns, group, traj, obs: depth_advantages(returns, group, traj, obs, 1, "mean_norm").A[:, column]


def _less_biased(deep: Estimator, mixed: Estimator) -> Evidence:
    found = {"same state": error_in_x(_depth(0), 64), "same history": error_in_x(deep, 64), "mixture": error_in_x(mixed, 64)}
    holds = found["same history"] < found["same state"] / 5 and found["mixture"] < found["same state"] / 2
    return Evidence(
        {k: round(v, 3) for k, v in found.items()}, "same history below a fifth, mixture below half of the same-state error", holds
    )


@claim("with 64 rollouts, groups of equal history are nearly unbiased in X and the mixture halves the error of same-state groups")
def less_biased() -> Evidence:
    return _less_biased(_depth(1), _mixture)


@ablation(less_biased, "same-state groups alone (K = 0)")
def same_state_alone() -> Evidence:
    return _less_biased(_depth(0), _depth(0))


def _few_rollouts(mixed: Estimator) -> Evidence:
    generator, alone, valued = torch.Generator().manual_seed(0), [], []
    for _ in range(200):
        rows = corridor(3, generator)
        arguments = (rows["returns"], rows["group"], rows["traj"], rows["obs"])
        lone = depth_advantages(*arguments, 1, "mean_norm").size[2::3, 1] < 2
        spread = len(set(rows["gain"].tolist())) > 1
        alone.append(float(lone.double().mean()))
        valued += (mixed(*arguments)[2::3][lone] != 0).tolist() if spread else []
    errors = {"mixture": error_in_x(mixed, 3), "same state": error_in_x(_depth(0), 3)}
    found = {
        "without a partner": round(fmean(alone), 3),
        "of them valued": round(fmean(valued), 3),
        **{k: round(v, 3) for k, v in errors.items()},
    }
    holds = fmean(alone) > 0.15 and fmean(valued) > 0.9 and errors["mixture"] < errors["same state"] - 0.02
    return Evidence(found, "lone steps are valued, and the error stays 0.02 below same-state groups", holds)


@claim("with 3 rollouts the mixture still values steps that have no partner of equal history, with less error than same-state groups")
def few_rollouts() -> Evidence:
    return _few_rollouts(_mixture)


@ablation(few_rollouts, "groups of equal history alone")
def few_rollouts_deep_alone() -> Evidence:
    return _few_rollouts(_depth(1))


class CorridorPolicy(Policy):
    """Logits [side, action] in X: a softmax over the state and the one before; the two steps before X have one action."""

    provides = frozenset({"logp"})
    learning_rate, optimizer = 1.0, "sgd"

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        logp = self.logits.log_softmax(-1)[batch.context, batch.action[:, 2]]
        return Signals(logp=torch.stack([torch.zeros_like(logp), torch.zeros_like(logp), logp], dim=1))


class Corridor:
    """The task: groups of rollouts from the start."""

    name, objectives, prompts_per_step = "aliased_corridor", ("reward",), 1

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(id=0, content=0)] * count

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        count = sum(p.samples for p in prompts)
        side = torch.randint(2, (count,), generator=run.generator)
        policy: Any = run.policy
        action = torch.multinomial(policy.logits.softmax(-1)[side], 1, generator=run.generator)[:, 0]
        rows = corridor(count, run.generator, action, side)
        actions = torch.stack([torch.zeros_like(action)] * 2 + [action], dim=1)
        batch = Batch(action=actions, mask=torch.ones(count, 3, dtype=torch.bool), logp=torch.zeros(count, 3, dtype=torch.float64),
                      group=torch.zeros(count, dtype=torch.int64), context=side, segment=torch.arange(3).expand(count, 3))  # fmt: skip
        batch.logp = policy.evaluate(batch, {"logp"}).logp.detach()
        reward = torch.zeros(count, 3, dtype=torch.float64)
        reward[:, 2] = rows["gain"]
        batch.signals |= {"state_id": rows["obs"].view(count, 3), "turn_reward": reward, "prompt_id": torch.zeros(count, dtype=torch.int64)}
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        return batch.signals["turn_reward"].sum(1)

    def expected_success(self, policy: CorridorPolicy) -> float:
        """Probability of the matching action, on the worse side."""
        return float(policy.logits.detach().softmax(-1).diagonal().min())

    def evaluate(self, run: Run) -> dict[str, float]:
        policy: Any = run.policy
        return {"success": self.expected_success(policy)}


def _iterations(method: Method, most: int = 200) -> float:
    """Mean number of updates until the matching action has probability 0.9 on both sides."""
    found = []
    for seed in SEEDS:
        curve = train_on(
            plain_sgd(method.but(regularize=()), 3.0, group_size=16),
            CorridorPolicy(),
            Corridor(),
            steps=most,
            seed=seed,
            stop=lambda p: p >= 0.9,
        )
        found.append(min(steps_to(curve, 0.9), most + 1))
    return fmean(found)


def _learns_faster(method: Method) -> Evidence:
    mine, same_state = _iterations(method), _iterations(HGPO.set("credit.memory", 0))
    found = {"this": round(mine, 1), "same state": round(same_state, 1)}
    return Evidence(found, "at most 0.8 of the updates of same-state groups (mean of 6 seeds)", mine <= 0.8 * same_state)


@claim("a policy that remembers the last state learns the matching action in X on both sides in fewer updates than with same-state groups")
def learns_faster() -> Evidence:
    return _learns_faster(HGPO.set("credit.memory", 1))


@ablation(learns_faster, "K = 0: same-state groups")
def learns_no_faster() -> Evidence:
    return _learns_faster(HGPO.set("credit.memory", 0))


@ablation(learns_faster, "advantages dealt to the wrong rows")
def learns_nothing() -> Evidence:
    return _learns_faster(HGPO.but(credit=ShuffledCredit(HGPO.set("credit.memory", 1).credit)))
