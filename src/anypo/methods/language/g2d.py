"""G2D: GRPO warm-up, static preferences, offline DPO (arXiv:2605.21266).

Rollouts at every step are expensive; DPO on rollouts of a cold policy learns little. G2D runs a few steps of GRPO, freezes the policy, builds one
fixed set of right-and-wrong pairs from its rollouts, and ends with DPO on that set. What counts is how informative the pairs are, not how many:
a moderate warm-up gives mixed groups, a long one overconfident data. Two stages of the same Method type. Stages from the paper; the difficulty
band, the pair rules and the informativeness report are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from anypo.batch import Batch
from anypo.method import Paper, Stage
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import group_mean, group_size
from anypo.seams.regression import preference_margin, row_advantage
from anypo.seams.select import NoPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

RULES = ("zip", "all", "hard")
PerRow = Float[Tensor, " N"]


class Preference(NamedTuple):
    margin: Tensor  # [M] beta times the difference of the log-ratios to the reference
    loss: Tensor  # scalar, differentiable in logp
    grad_weight: Tensor  # [M] beta sigmoid(-margin), how hard each pair pulls
    accuracy: Tensor  # scalar, share of positive margins


class Report(NamedTuple):
    success: Tensor  # [P] share of right rollouts of each prompt
    variance: Tensor  # [P] success (1 - success)
    confidence: Tensor  # [P] mean over rollouts of exp(mean token log-prob)
    mean_variance: Tensor
    usable: Tensor  # share of prompts with both outcomes
    calibration_gap: Tensor  # mean |confidence - success|


class Cost(NamedTuple):
    online: float
    static: float
    dpo: float
    total: float


def pairs(
    reward: PerRow, group: Int[Tensor, " N"], logp_seq: PerRow, lo: float = 0.1, hi: float = 0.9, rule: str = "zip"
) -> list[list[int]]:
    """Equation 2: [right, wrong] rows of the prompts whose success rate lies in [lo, hi] and that have both, prompts ascending.

    Rules: "zip" the i-th right with the i-th wrong, "all" every one with every other, "hard" the least likely right with the likeliest wrong.
    Raises ValueError for another rule.
    """
    if rule not in RULES:
        raise ValueError(f"unknown pair rule '{rule}'; use one of {', '.join(RULES)}")
    found: list[list[int]] = []
    rate, right = group_mean((reward > 0.5).double(), group), reward > 0.5
    for g in group.unique(sorted=True):
        rows = (group == g).nonzero().flatten()
        good, bad = rows[right[rows]], rows[~right[rows]]
        if len(good) == 0 or len(bad) == 0 or not lo <= float(rate[rows[0]]) <= hi:
            continue
        if rule == "all":
            found += [[i, j] for i in good.tolist() for j in bad.tolist()]
        elif rule == "zip":
            found += [[i, j] for i, j in zip(good.tolist(), bad.tolist(), strict=False)]
        else:
            found.append([int(good[logp_seq[good].argmin()]), int(bad[logp_seq[bad].argmax()])])
    return found


def dpo(
    logp: Float[Tensor, "N T"], ref_logp: Float[Tensor, "N T"], mask: Tensor, pairs: Int[Tensor, "M 2"], beta: float = 0.1
) -> Preference:
    """Equation 3: the mean over pairs of log(1 + exp(-margin)); token log-probs are summed, not averaged."""
    margin = preference_margin(logp, ref_logp, mask, pairs, beta)
    return Preference(margin, -logsigmoid(margin).mean(), beta * torch.sigmoid(-margin.detach()), (margin > 0).to(logp.dtype).mean())


def informativeness(reward: PerRow, group: Int[Tensor, " N"], logp: Float[Tensor, "N T"], mask: Tensor) -> Report:
    """Equation 4: what a static set can teach, prompts ascending."""
    inside = torch.where(mask.bool(), logp, torch.zeros_like(logp))
    confidence = (inside.sum(1) / mask.sum(1).clamp(min=1)).exp()
    _, index = group.unique(sorted=True, return_inverse=True)
    first = torch.stack([(index == i).nonzero()[0, 0] for i in range(int(index.max()) + 1)])
    success = group_mean((reward > 0.5).to(logp.dtype), group)[first]
    sure = group_mean(confidence, group)[first]
    variance = success * (1 - success)
    return Report(success, variance, sure, variance.mean(), (variance > 0).to(logp.dtype).mean(), (sure - success).abs().mean())


def compute(k: int, g: int, n: int, prompts: int, rollouts: int, pairs: int, cost_rollout: float = 1.0, cost_train: float = 0.5) -> Cost:
    """Equation 5: cost in rollout units of k GRPO steps (n prompts, g rollouts), the static set, and one pass of DPO over its pairs."""
    online, static, offline = k * g * n * (cost_rollout + cost_train), prompts * rollouts * cost_rollout, 2 * pairs * cost_train
    return Cost(online, static, offline, online + static + offline)


@dataclass
class StaticPairs:
    """Batches of pairs from one set of rollouts, sampled and scored when the stage begins. The reference becomes the policy of that moment."""

    prompts: int | None = None  # in the pool, >= 1; None = eight of the task's batches
    samples: int = 8  # rollouts a prompt, >= 2
    lo: float = 0.1  # success rates kept, from
    hi: float = 0.9  # to, in [0,1]
    rule: str = "zip"  # zip, all or hard
    batch_pairs: int = 32  # pairs a step, >= 1
    reference: str = "warm"  # warm: the policy when the stage begins; cold: the one that the run started from
    data: Batch | None = field(default=None, init=False, repr=False)  # rows: all right ones, then their wrong ones
    order: list[int] = field(default_factory=list, init=False, repr=False)  # pairs left in this pass

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.data is None:
            self.data = self.build(run)
        count = len(self.data) // 2
        if not self.order:
            self.order = torch.randperm(count, generator=run.generator).tolist()
        chosen, self.order = torch.tensor(self.order[: self.batch_pairs]), self.order[self.batch_pairs :]
        batch = self.data[torch.cat([chosen, chosen + count])]
        return batch.but(group=torch.arange(len(chosen)).repeat(2), signals=dict(batch.signals))

    def build(self, run: Run) -> Batch:
        """The static set. Raises ValueError when no prompt of the pool has both outcomes inside the band."""
        if self.reference not in ("warm", "cold"):
            raise ValueError(f"rollout.reference is warm or cold, not '{self.reference}'")
        if self.reference == "warm":
            run.move_policy("reference")
        pool = run.task.prompts(self.prompts or 8 * run.task.prompts_per_step, run.rng)
        batch = run.collect([p.but(samples=self.samples) for p in pool])
        batch.reward = run.score_rewards(batch)
        found = pairs(batch.outcome, batch.group, batch.logp.sum(1), self.lo, self.hi, self.rule)
        if not found:
            raise ValueError(
                f"none of {len(pool)} prompts has right and wrong rollouts with a success rate in [{self.lo}, {self.hi}]; warm up longer, widen the band or "
                "raise the number of samples"
            )
        report = informativeness(batch.outcome, batch.group, batch.logp, batch.mask)
        run.log(pairs=float(len(found)), mean_variance=float(report.mean_variance), usable=float(report.usable))
        return batch[torch.tensor(found).T.flatten()]

    def state_dict(self) -> dict[str, Any]:
        return {"data": None if self.data is None else self.data.state_dict(), "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data = None if state["data"] is None else Batch(**state["data"])
        self.order = list(state["order"])


@dataclass
class DirectPreference:
    """DPO on groups of two: the row with the larger advantage is preferred to the other."""

    beta: float = 0.1  # weight of the log-ratio to the reference, > 0

    needs = frozenset({"logp", "ref_logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        if bool((group_size(batch.group) != 2).any()):
            raise ValueError("direct preference optimization needs groups of two; set select.group_size to 2 or use g2d's rollout")
        order = row_advantage(batch.advantage, mask).argsort(descending=True, stable=True)
        order = order[batch.group[order].argsort(stable=True)]
        found = dpo(new.logp, batch.signal("ref_logp"), mask, order.view(-1, 2), self.beta)
        return Loss(found.loss, {"margin": float(found.margin.detach().mean()), "preference_accuracy": float(found.accuracy)})


WARM_UP = GRPO.but(name="g2d_warm_up", summary="GRPO", regularize=())
OFFLINE = GRPO.but(
    name="g2d_offline",
    summary="DPO on static pairs",
    select=NoPrompts(),
    rollout=StaticPairs(),
    credit=GroupRelative(std=False),
    objective=DirectPreference(),
    regularize=(),
    update=GradientSteps(),
)
METHOD = GRPO.but(
    name="g2d",
    paper=Paper("How Much Online RL is Enough? Informative Rollouts for Offline Preference Optimization in RLVR", "2605.21266", 2026),
    summary="a short GRPO warm-up, one static set of preferences, offline DPO",
    stages=(Stage(WARM_UP, 0.4), Stage(OFFLINE, 0.6)),
)
