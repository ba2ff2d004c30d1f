"""BuPO: bottom-up policy optimization of internal layer policies (arXiv:2512.19673).

The unembedding applied to the state after any layer is a policy one can sample from. Against GRPO, whose loss is about the last layer alone, the
first optimizer steps train such an internal policy of a lower layer, with the rewards and the rollouts of the whole model; afterwards the ordinary
objective takes over, with the optimizer's moments kept. Only the layers up to the chosen one, the embedding and the unembedding move in the first
phase. Equations 1-3 (the policies and their entropies) are in `anypo.domains.language.internal`; 4-6, the dual clip and the sizes follow the paper
and its code as the row's specification gives them. Left out: the final norm on layers in between, which the code does not apply either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.internal import internal_policy, signal_of
from anypo.method import Objective, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, token_ratio

if TYPE_CHECKING:
    from anypo.run import Run


class InternalLoss(NamedTuple):
    ratio: Tensor  # [N,T], 0 where masked
    loss: Tensor  # scalar, differentiable in hidden and unembed


def loss(
    hidden: Float[Tensor, "N T D"], old_hidden: Float[Tensor, "N T D"], unembed: Float[Tensor, "V D"], action: Int[Tensor, "N T"], mask: Tensor,
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 10.0,
    temperature: float = 1.0, ddof: int = 1, eps: float = 1e-6,
) -> InternalLoss:  # fmt: skip
    """Equations 4-5: the clipped surrogate, mean over tokens, on the ratio of the internal policy to itself before the update."""
    logp = internal_policy(hidden, unembed, action, mask, temperature).logp
    with torch.no_grad():
        old_logp = internal_policy(old_hidden, unembed, action, mask, temperature).logp
    ratio = token_ratio(logp, old_logp, mask)
    advantage = broadcast(group_relative(reward, group, True, ddof, eps), mask)
    value = clipped(ratio, advantage, 1 - clip_low, 1 + clip_high, dual_clip)
    return InternalLoss(torch.where(mask.bool(), ratio, 0.0), aggregate(-value, mask, "token_mean"))


def phase(step: Int[Tensor, " S"], inner_steps: int = 30) -> Int[Tensor, " S"]:
    """Equation 6: 1 for optimizer steps (counted from 1) that train the internal policy, 0 for those that train the whole model."""
    return (step <= inner_steps).long()


@dataclass
class BottomUp:
    """An objective on the policy of one layer for the first optimizer steps of a run, and on the policy itself afterwards.

    Which phase it is follows from the run's count of optimizer steps. Once the first one is over, its signals are asked for no more.
    """

    layer: int = 1  # l*, 1 ... number of layers of the model; the paper has 6 of 36
    inner_steps: int = 30  # optimizer steps on the layer's policy, >= 0; the paper has 30 of a few hundred
    inner: Objective = field(default_factory=lambda: ClippedSurrogate(aggregation="token_mean", dual_clip=10.0))
    over: bool = field(default=False, init=False, repr=False)  # whether the first phase is

    @property
    def needs(self) -> frozenset[str]:
        own = frozenset(getattr(self.inner, "needs", frozenset()))
        return own if self.over or not self.inner_steps else own | {signal_of(self.layer), "old_" + signal_of(self.layer)}

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not self.internal(run):
            self.over = True
            found = self.inner(batch, new, run)
        else:
            name = signal_of(self.layer)
            found = self.inner(batch.but(logp=batch.signal("old_" + name)), Signals(new | {"logp": new[name]}), run)
        return Loss(found.value, found.metrics | {"internal": float(not self.over)})

    def internal(self, run: Run) -> bool:
        """Whether the optimizer step that comes next trains the layer's policy."""
        return bool(phase(torch.tensor(run.version + 1), self.inner_steps))

    def state_dict(self) -> dict[str, Any]:
        return {"over": self.over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.over = state["over"]


METHOD = GRPO.but(
    name="bupo",
    paper=Paper("Bottom-up Policy Optimization (internal layer policies)", "2512.19673", 2025),
    summary="the first optimizer steps train the policy read off a lower layer, with the whole model's rollouts and rewards; then GRPO",
    credit=GroupRelative(std=True, ddof=1, eps=1e-6),
    objective=BottomUp(),
    regularize=(),
)
