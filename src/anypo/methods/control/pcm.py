"""PCM: probabilistic chunk masking (arXiv:2605.16154).

Most of a step of group-relative fine-tuning of robot policies goes into gradients of phases that the policy already masters. PCM scores the phases of
a task by how differently successful and failed attempts act in them, keeps a fixed number of action chunks of every attempt, drawn by phase, and removes
the others before the forward and backward pass. Against GRPO it changes the credit (which also chooses) and the update (which removes). Fixed budget,
online scores, exploration and the absence of importance weights are the paper's; the score's formula, its moving average, the draw and the phases by
relative time are [reconstructed]. No KL penalty. Left out: importance weights, which raise the variance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast, group_mean
from anypo.seams.objective import aggregate, clipped, token_ratio
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Phase = Int[Tensor, "N T"]  # 0 to k - 1, -1 outside the mask
PerPhase = Float[Tensor, " K"]


def phases(mask: Tensor, k: int) -> Phase:
    """Equation 1 [reconstructed]: phases by relative time, min(floor(t k / length), k - 1)."""
    inside = mask.bool()
    length = inside.sum(1, keepdim=True).clamp(min=1)
    return torch.where(inside, ((inside.cumsum(1) - 1) * k // length).clamp(max=k - 1), -1)


def scores(actions: Float[Tensor, "N T D"], reward: Float[Tensor, " N"], group: Int[Tensor, " N"], phase: Phase, k: int) -> PerPhase:
    """Equation 2 [reconstructed]: p (1 - p) |mean action of the successes - of the failures|^2 of every phase of every group that has chunks of both,
    p the successes' share; the mean over groups, -1 where there is none. A success has more reward than its group's mean."""
    number = torch.unique(group, return_inverse=True)[1]
    cells = (int(number.max()) + 1) * k
    won = (reward > group_mean(reward, group)).long()
    inside = phase >= 0
    cell = (2 * (number[:, None] * k + phase) + won[:, None])[inside]
    count = actions.new_zeros(2 * cells).index_add(0, cell, actions.new_ones(len(cell)))
    mean = actions.new_zeros(2 * cells, actions.shape[-1]).index_add(0, cell, actions[inside]) / count.clamp(min=1)[:, None]
    failures, successes = count.view(cells, 2).T
    share = successes / (failures + successes).clamp(min=1)
    gap = (mean.view(cells, 2, -1)[:, 1] - mean.view(cells, 2, -1)[:, 0]).square().sum(-1)
    both = ((failures > 0) & (successes > 0)).view(-1, k)
    found = torch.where(both, (share * (1 - share) * gap).view(-1, k), 0.0)
    return torch.where(both.any(0), found.sum(0) / both.sum(0).clamp(min=1), -1.0)


def update(state: PerPhase, new: PerPhase, rho: float) -> PerPhase:
    """Equation 3 [reconstructed]: a moving average; uninformed phases (below 0) stay."""
    return torch.where(new < 0, state, (1 - rho) * state + rho * new)


def keep_prob(state: PerPhase, eps: float) -> PerPhase:
    """Equation 4: shares of the scores mixed with `eps` of the uniform distribution, which it is where all scores are 0."""
    total, uniform = state.sum(), torch.full_like(state, 1 / len(state))
    return uniform if total <= 0 else (1 - eps) * state / total + eps * uniform


def sample(phase: Phase, mask: Tensor, keep_prob: PerPhase, gumbel: Float[Tensor, "N T"], budget: int) -> Float[Tensor, "N T"]:
    """Equation 5 [reconstructed]: the `budget` chunks of each row that are largest in log weight + Gumbel noise, as 0/1; a chunk's weight is its phase's
    probability over the row's chunks of that phase. Rows of no more chunks keep all; chunks of probability 0 are never drawn from the others."""
    inside = mask.bool() & (phase >= 0)
    of_phase = torch.nn.functional.one_hot(phase.clamp(min=0), len(keep_prob)) * inside[..., None]
    share = keep_prob / of_phase.sum(1).clamp(min=1)
    weight = share.gather(1, phase.clamp(min=0))
    score = torch.where(inside, weight.log() + gumbel, -torch.inf)
    rank = score.argsort(dim=1, descending=True).argsort(dim=1)
    chosen = (rank < budget) & (score > -torch.inf)
    few = mask.bool().sum(1, keepdim=True) <= budget
    return torch.where(few, mask.bool(), chosen).to(keep_prob.dtype)


def loss(logp: Tensor, old_logp: Tensor, advantages: Float[Tensor, " N"], keep: Tensor, clip: float = 0.2) -> Tensor:
    """Equation 6: the clipped surrogate, mean over rows of the mean over their kept chunks, without importance weights."""
    value = clipped(token_ratio(logp, old_logp, keep), broadcast(advantages, keep), 1 - clip, 1 + clip)
    return aggregate(-value, keep, "seq_mean")


def gathered(batch: Batch) -> Batch:
    """The kept actions alone, in their order: [N,T,...] becomes [N,B,...], B the most that a row keeps."""
    kept, horizon = batch.counted, batch.horizon
    place = (~kept).long().argsort(dim=1, stable=True)[:, : int(kept.sum(1).max())]
    rows = torch.arange(len(batch))[:, None]

    def picked(value: Any) -> Any:
        return value[rows, place] if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == horizon else value

    names = [name for name in Batch.__dataclass_fields__ if name not in ("signals", "objectives", "keep", "mask")]
    names = [name for name in names if not (name == "reward" and batch.objectives)]
    signals = {name: picked(value) for name, value in batch.signals.items()}
    return batch.but(**{name: picked(getattr(batch, name)) for name in names}, mask=kept[rows, place], keep=None, signals=signals)


@dataclass
class PhaseMaskedCredit(GroupRelative):
    """Group-relative advantages over all attempts, and which chunks are kept for the update.

    Phases are the signal `phase` [N,T] where the task gives it, else relative time.
    """

    phases: int = 4  # K, >= 1
    budget: int = 12  # B, chunks kept of each attempt, >= 1
    rate: float = 0.3  # rho of the scores' moving average, in [0,1]; 0 = probabilities stand still
    exploration: float = 0.2  # share of the uniform distribution in the probabilities, in [0,1]; 1 = chunks of all phases alike
    state: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # s [K]

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantages = super().__call__(batch, run)
        phase = batch.signals.get("phase")
        phase = phases(batch.mask, self.phases) if phase is None else torch.where(batch.mask, phase, -1)
        state = torch.ones(self.phases, dtype=torch.float64) if self.state is None else self.state
        found = scores(_standardized(batch), row_reward(batch, self.weights), batch.group, phase, self.phases)
        self.state = update(state, found, self.rate)
        chance = keep_prob(self.state, self.exploration)
        noise = -torch.empty(phase.shape, dtype=torch.float64).exponential_(generator=run.generator).log()
        batch.keep = sample(phase, batch.mask, chance, noise, self.budget).bool()
        run.log(kept=float(batch.keep.sum() / batch.mask.sum()), **{f"keep_{i}": float(q) for i, q in enumerate(chance)})
        return advantages

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def _standardized(batch: Batch) -> Float[Tensor, "N T D"]:
    """Actions over the batch's standard deviation of each dimension; discrete ones as indicators, as they are."""
    if batch.action.dim() == 2:
        return torch.nn.functional.one_hot(batch.action.clamp(min=0)).double()
    actions = batch.action.double()
    spread = actions[batch.mask].std(0, correction=0)
    return actions / torch.where(spread > 1e-8, spread, 1.0)


@dataclass
class KeptSteps(GradientSteps):
    """Gradient steps over the kept actions alone, where they can be looked at one by one (policies without memory); elsewhere only the loss skips the
    others."""

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        return super().__call__(gathered(batch) if run.policy.memoryless else batch, loss_fn, run)


METHOD = GRPO.but(
    name="pcm",
    paper=Paper("PCM: probabilistic chunk masking", "2605.16154", 2026),
    domain="control",
    summary="gradients of a fixed number of action chunks an attempt, drawn from the phases in which successes and failures act differently",
    select=UniformPrompts(prompts=2, group_size=16),
    credit=PhaseMaskedCredit(),
    regularize=(),
    update=KeptSteps(unit="row"),
)
