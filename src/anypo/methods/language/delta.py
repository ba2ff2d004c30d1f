"""DelTA: discriminative token credit assignment (arXiv:2605.21467).

A policy-gradient step separates token-gradient vectors linearly: it moves along the advantage-weighted mean vector of good responses and against that of
bad ones. Tokens frequent in both, such as formatting, dominate both means. DelTA multiplies a token's advantage by a coefficient that is the larger
the nearer the token's vector lies to the mean of its own side than to the other's; the means are refined with these coefficients. Against DAPO it
changes the credit and adds a dual clip. Equations from the authors' code; it uses the gradient in the last layer as a token's vector, and plain
Euclidean distances. Statistics are over the whole batch, not over groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast, masked_std
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import Run

SMALLEST_MASS = 1e-8  # floor of a side's total weight
SMALLEST_VARIANCE = 1e-8  # of a side's margins


class Discriminator(NamedTuple):
    """A token's score W.v + b; above 0 on the side of good responses."""

    W: Tensor  # [H]
    b: Tensor  # scalar


class Sides(NamedTuple):
    """What the coefficients are made of."""

    advantage: Tensor  # [N,T], 0 outside the mask
    line: Discriminator  # between the refined means
    margin: Tensor  # [N,T] squared distance to the other side's mean minus that to the own; 0 where the advantage is
    chance: Tensor  # [N,T] sigmoid of the margin over its side's scale


def proxy(hidden: Float[Tensor, "N T H"], logp: Float[Tensor, "N T"], mask: Tensor) -> Float[Tensor, "N T H"]:
    """Equation 1: (1 - pi) h, the gradient of the token's log-prob in its own output vector; at least float32, detached, 0 outside the mask."""
    inside, zero = mask.bool(), logp.new_zeros(())
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    surprise = 1 - torch.where(inside, logp.detach(), zero).to(dtype).exp()
    return surprise[..., None] * torch.where(inside[..., None], hidden.detach().to(dtype), surprise.new_zeros(()))


def mean_vector(vector: Float[Tensor, "N T H"], weight: Float[Tensor, "N T"]) -> Float[Tensor, " H"]:
    """Equation 2: the weighted mean of the tokens' vectors; 0 for a side without weight. Weights >= 0."""
    return torch.einsum("nt,nth->h", weight, vector) / weight.sum().clamp(min=SMALLEST_MASS)


def sides(hidden: Float[Tensor, "N T H"], logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, K: int = 1) -> Sides:
    """Equations 1-6 with `K` >= 0 rounds of refinement; `advantages` [N], or [N,T] of any credit. Detached."""
    vector = proxy(hidden, logp, mask)
    inside = mask.bool()
    given = advantages.detach().to(vector)
    advantage = broadcast(given, mask) if given.dim() == 1 else torch.where(inside, given, given.new_zeros(()))
    positive, negative = advantage > 0, advantage < 0

    def measured(weight: Tensor) -> tuple[Discriminator, Tensor]:
        line = between(mean_vector(vector, weight * positive), mean_vector(vector, weight * negative))
        return line, 2 * advantage.sign() * (vector @ line.W + line.b)  # |v|^2 cancels in the difference of the distances

    def scaled(margin: Tensor, like: Tensor) -> Tensor:
        scale = torch.where(positive, side_scale(like, positive), side_scale(like, negative))
        return torch.sigmoid(margin / scale)

    line, margin = measured(advantage.abs())
    scale_of = margin
    for _ in range(K):
        chance, scale_of = scaled(margin, scale_of), margin
        line, margin = measured(chance * advantage.abs())
    return Sides(advantage, line, margin, scaled(margin, scale_of))


def between(positive: Float[Tensor, " H"], negative: Float[Tensor, " H"]) -> Discriminator:
    """Equation 9: the plane half-way between two means."""
    W = positive - negative
    return Discriminator(W, -0.5 * W @ (positive + negative))


def side_scale(margin: Float[Tensor, "N T"], side: Tensor) -> Tensor:
    """Equation 4: the population standard deviation of one side's margins, with a floor."""
    return masked_std(margin, side).square().clamp(min=SMALLEST_VARIANCE).sqrt()


def coefficients(
    hidden: Float[Tensor, "N T H"], logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, K: int = 1, lam_min: float = 0.8,
    lam_max: float = 1.2,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 6-7: between lam_min and lam_max, lam_min where the advantage is 0, then divided by their mean over the mask; 0 outside."""
    return normalized(sides(hidden, logp, mask, advantages, K), mask, lam_min, lam_max)


def normalized(found: Sides, mask: Tensor, lam_min: float, lam_max: float) -> Float[Tensor, "N T"]:
    """Equations 6-7 from what the sides give. Raises ValueError unless 0 < lam_min and 0 < lam_max."""
    if not (lam_min > 0 and lam_max > 0):
        raise ValueError(f"lam_min and lam_max bound a token's coefficient and must be above 0; got {lam_min} and {lam_max}")
    inside = mask.to(found.chance)
    raw = inside * (lam_min + (lam_max - lam_min) * torch.where(found.advantage != 0, found.chance, inside.new_zeros(())))
    return raw * inside.sum() / raw.sum().clamp(min=torch.finfo(raw.dtype).tiny)


def token_advantages(
    hidden: Float[Tensor, "N T H"], logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, K: int = 1, lam_min: float = 0.8,
    lam_max: float = 1.2,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equation 8: each advantage times its token's coefficient."""
    found = sides(hidden, logp, mask, advantages, K)
    return found.advantage * normalized(found, mask, lam_min, lam_max)


def discriminator(
    hidden: Float[Tensor, "N T H"], logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, K: int = 1, lam_min: float = 0.8,
    lam_max: float = 1.2,
) -> Discriminator:  # fmt: skip
    """Equation 9 with the refined means; the bounds have no part in it."""
    return sides(hidden, logp, mask, advantages, K).line


def predicting(batch: Batch) -> Float[Tensor, "N T H"]:
    """The state from which each action was predicted. Language models report the state after reading an action, and the prompt's; a policy without
    a state of the prompt (a table) reports the one before the action."""
    hidden = batch.signal("old_hidden")
    prompt = batch.signals.get("old_prompt_hidden")
    return hidden if prompt is None else torch.cat([prompt[:, None], hidden[:, :-1]], dim=1)


@dataclass
class DiscriminativeCredit:
    """The inner credit's advantages, larger on the tokens that tell good responses from bad ones."""

    inner: Credit = field(default_factory=GroupRelative)
    rounds: int = 1  # K, refinements of the two means, >= 0
    lam_min: float = 0.8  # smallest coefficient before normalization, > 0
    lam_max: float = 1.2  # largest; equal to lam_min: the inner credit

    needs = frozenset({"old_hidden"})

    @property
    def compares_group(self) -> bool:
        return getattr(self.inner, "compares_group", False)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        hidden, mask = predicting(batch), batch.counted
        found = sides(hidden, batch.logp.to(hidden.device), mask.to(hidden.device), advantage.to(hidden.device), self.rounds)
        coefficient = normalized(found, mask.to(hidden.device), self.lam_min, self.lam_max).to(advantage)
        sided = found.advantage != 0
        accuracy = ((found.margin > 0) & sided).sum() / sided.sum().clamp(min=1)
        run.log(discriminator_accuracy=float(accuracy), largest_coefficient=float(coefficient.max()) if coefficient.numel() else 0.0)
        return advantage * coefficient


METHOD = DAPO.but(
    name="delta",
    paper=Paper("DelTA: Discriminative Token Credit Assignment for Reinforcement Learning from Verifiable Rewards", "2605.21467", 2026),
    summary="a token's advantage grows with how well its gradient direction tells good responses from bad ones",
    select=UniformPrompts(group_size=16),
    credit=DiscriminativeCredit(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean", dual_clip=10.0),
)
