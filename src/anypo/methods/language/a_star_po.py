"""A*-PO: policy optimization by optimal advantage regression (arXiv:2505.20686).

Two stages for max E[r] - beta KL(pi || reference). Before training, several responses a prompt from the reference estimate the optimal value V*(x)
by a log-mean-exp of their rewards. Then every step takes one response a prompt and regresses beta times its log-ratio to the reference onto the
optimal advantage r - V*. No critic, no groups, no clip, no normalization. Against GRPO it changes prepare, select, credit and objective.
Equations: the objective and its optimum from the paper, the estimate and its two temperatures from the authors' code. Prompts that a task invents
only later are estimated, from the same frozen reference, when they first appear. Left out: keeping the estimates on disk between runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast
from anypo.seams.regression import AdvantageRegression, regression_error, sequence_log_ratio, soft_value
from anypo.seams.reward import row_reward
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

VALUES = "optimal_value"  # run.state: prompt id -> V*(x)
KEEP = "optimal_value_keep"  # run.state: prompt id -> whether a reference response earned anything


class Values(NamedTuple):
    v_star: Tensor  # [P] estimated optimal value
    keep: Tensor  # [P] 0 where every reference response has reward 0


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp
    advantages: Tensor  # [N] optimal advantage of each row


class Optimum(NamedTuple):
    v_star: Tensor  # scalar, the optimal value
    prob: Tensor  # [A] the optimal policy
    objective: Tensor  # scalar, its expected reward minus beta KL, equal to v_star


def v_star(ref_reward: Float[Tensor, "P N"], beta1: float = 0.5) -> Values:
    """Equation 1: beta1 log mean exp(r / beta1) over the reference's responses; beta1 = 0 stands for the plain mean, as in the authors' code
    (the mathematical limit at 0 is the maximum)."""
    prompts, samples = ref_reward.shape
    group = torch.arange(prompts).repeat_interleave(samples)
    value = soft_value(ref_reward.flatten(), group, beta1 if beta1 else float("inf")).view(prompts, samples)[:, 0]
    return Values(value, (ref_reward != 0).any(1).long())


def loss(
    logp: Float[Tensor, "N T"], ref_logp: Float[Tensor, "N T"], mask: Tensor, reward: Float[Tensor, " N"], v_star: Float[Tensor, " N"],
    beta2: float = 1e-3,
) -> LossValue:  # fmt: skip
    """Equations 2-4: the mean over rows of (beta2 (S - S_ref) - (r - V*))^2; no gradient through r - V*."""
    advantages = reward - v_star
    return LossValue(regression_error(sequence_log_ratio(logp, ref_logp, mask), advantages, beta2).mean(), advantages)


def optimal_policy(ref_prob: Float[Tensor, " A"], reward: Float[Tensor, " A"], beta: float) -> Optimum:
    """The closed-form optimum of the KL-regularized problem over one prompt's responses."""
    scores = ref_prob.log() + reward / beta
    prob = scores.softmax(-1)
    covered = prob > 0
    kl = (prob * (prob.clamp(min=1e-300).log() - ref_prob.clamp(min=1e-300).log()))[covered].sum()
    return Optimum(beta * scores.logsumexp(-1), prob, prob @ reward - beta * kl)


@dataclass
class ReferenceValues:
    """Stage 1: V* of the prompts from rewards of the reference's responses, noted in the run's state by prompt id and never refreshed."""

    samples: int = 8  # reference responses a prompt, >= 1
    beta1: float = 0.5  # temperature of the estimate, > 0; 0 = plain mean
    prompts: int | None = (
        None  # estimated before the first step; None = the task's own default batch. Others are estimated when first drawn
    )
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, run: Run) -> None:
        run.named_policy("reference")
        self.estimate(run.task.prompts(self.prompts or run.task.prompts_per_step, run.rng), run)

    def estimate(self, prompts: list[Prompt], run: Run) -> None:
        """Sample, score and note V* of those prompts that have none yet."""
        values, keep = run.state.setdefault(VALUES, {}), run.state.setdefault(KEEP, {})
        fresh = list({p.id: p for p in prompts if p.id not in values}.values())
        if not fresh:
            return
        batch = run.collect([p.but(samples=self.samples) for p in fresh], "reference")
        batch.reward = run.score_rewards(batch)
        reward = row_reward(batch, self.weights)
        found = v_star(reward.double()[batch.group.argsort(stable=True)].view(len(fresh), self.samples), self.beta1)
        ids = [p.id for p in fresh]
        values.update(zip(ids, found.v_star.tolist(), strict=True))
        keep.update(zip(ids, found.keep.tolist(), strict=True))
        run.log(reference_actions=float(batch.mask.sum()))


@dataclass
class ValuedPrompts:
    """Fresh prompts, each attempted once; those without V* get it from the method's `ReferenceValues`, with its settings."""

    prompts: int | None = None  # prompts a step, >= 1; None = the task's own default
    group_size: int = 1  # attempts at each prompt, >= 1
    drop_unsolved: bool = False  # leave out prompts of which no reference response earned anything

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        drawn = task.prompts(self.prompts or task.prompts_per_step, run.rng)
        estimator = next((c for c in run.method.prepare if isinstance(c, ReferenceValues)), None)
        if estimator is None:
            raise ValueError("the prompts of a_star_po need their optimal values; keep ReferenceValues in the method's prepare")
        estimator.estimate(drawn, run)
        if self.drop_unsolved:
            drawn = [p for p in drawn if run.state[KEEP][p.id]] or drawn
        return [p.but(samples=self.group_size) for p in drawn]


@dataclass
class OptimalAdvantage:
    """Reward minus the V* that stage 1 noted for the prompt."""

    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        values = run.state.get(VALUES, {})
        ids = batch.signal("prompt_id").tolist()
        missing = next((i for i in ids if i not in values), None)
        if missing is not None:
            raise ValueError(f"no optimal value is known for prompt {missing}; keep a_star_po's prepare and select with this credit")
        return broadcast(reward - reward.new_tensor([values[i] for i in ids]), batch.mask)


METHOD = GRPO.but(
    name="a_star_po",
    paper=Paper("Accelerating RL for LLM Reasoning with Optimal Advantage Regression", "2505.20686", 2025),
    summary="V* is estimated from the reference before training; then one response a prompt is regressed onto its optimal advantage",
    prepare=(ReferenceValues(),),
    select=ValuedPrompts(),
    credit=OptimalAdvantage(),
    objective=AdvantageRegression(beta=1e-3, anchor="ref"),
    regularize=(),
)
