"""SP3O: sparse proximal policy optimization against value flattening (no paper found; from its abstract).

A critic trained on every token of a response, all with the same return, has a penalty on the variance of its predictions within the response, and
neighbouring states with nearly equal gradients repeat one update many times: its values come out flatter than the true ones. SP3O supervises the
critic at a few well-separated states of each response, three by default. Against PPO only the critic's loss changes; advantages and policy loss keep
all tokens. Three states and the two causes from the abstract; the stratified choice of states, the variance identity in this form and the measures of
flattening are [reconstructed]. Left out: a larger learning rate for the critic by default (`update.value_learning_rate` sets one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import FOR_DOMAIN
from anypo.policy import Loss, Signals
from anypo.seams.regularize import ValueLoss
from anypo.seams.regularize import value_loss as critic_loss

if TYPE_CHECKING:
    from anypo.run import Run

PerAction = Float[Tensor, "N T"]
PerRow = Float[Tensor, " N"]


class Identity(NamedTuple):
    """The dense loss of each row and the two terms it is the sum of, [N] each, differentiable in the values."""

    dense: Tensor  # mean squared error over the row's states
    bias: Tensor  # squared error of the row's mean value
    variance: Tensor  # population variance of the values along the row, the implicit penalty


class Flattening(NamedTuple):
    """How much a critic moves along a response, over how much the true values do: 1 alike, towards 0 flat; 0 where the true values never move."""

    ratio: Tensor  # of mean standard deviations along rows
    step_ratio: Tensor  # of summed absolute changes from state to state


def supervised_states(mask: Tensor, draws: Float[Tensor, "N k"], k: int = 3) -> Bool[Tensor, "N T"]:
    """Equation 2: one state in each of k equal strata of a row's L unmasked actions, at floor((j + u_j) L / k) in their order, u_j = `draws` in [0,1).
    All of a row with L <= k actions, none of an empty one; where k does not divide L, two strata may meet in one state.
    Raises ValueError for k below 1 or another number of draws."""
    if k < 1 or draws.shape[1] != k:
        raise ValueError(f"k states need k >= 1 draws a row in [0,1); got k = {k} and {draws.shape[1]} draws")
    inside = mask.bool()
    length = inside.sum(1, keepdim=True)
    place = ((torch.arange(k, device=mask.device) + draws.double()) * length / k).floor().long()
    place = torch.minimum(place, (length - 1).clamp(min=0))  # rounding could reach L
    number = inside.long().cumsum(1) - 1
    chosen = (number[:, :, None] == place[:, None]).any(2)
    return inside & (chosen | (length <= k))


def value_loss(
    value: PerAction, returns: PerAction, sup: Tensor, old_value: PerAction | None = None, clip_value: float | None = None
) -> Tensor:
    """Equation 3: half the mean squared error over the supervised states, with `clip_value` the larger of the plain and the clipped one; 0 without."""
    return 0.5 * critic_loss(value, returns, sup, old_value, clip_value)


def variance_identity(value: PerAction, reward: PerRow, mask: Tensor) -> Identity:
    """Equation 1: for a return that is constant along the row, dense = bias + variance. Rows without actions have 0 in all three."""
    mean, variance = _moments(value, mask)
    error = torch.where(mask.bool(), value - reward[:, None], value.new_zeros(()))
    some = mask.bool().any(1)
    bias = torch.where(some, (mean - reward) ** 2, torch.zeros_like(mean))
    return Identity((error**2).sum(1) / mask.sum(1).clamp(min=1), bias, variance)


def flattening(value: PerAction, true_value: PerAction, mask: Tensor) -> Flattening:
    """Equation 5. Standard deviations are the population's over a row's unmasked states; changes are those between one such state and the next."""
    (spread, moved), (true_spread, true_moved) = (_movement(values.detach(), mask) for values in (value, true_value))
    return Flattening(_over(spread, true_spread), _over(moved, true_moved))


def _moments(value: PerAction, mask: Tensor) -> tuple[PerRow, PerRow]:
    """Mean and population variance of each row over its mask."""
    inside, count, zero = mask.bool(), mask.sum(1).clamp(min=1), value.new_zeros(())
    mean = torch.where(inside, value, zero).sum(1) / count
    return mean, (torch.where(inside, value - mean[:, None], zero) ** 2).sum(1) / count


def _movement(value: PerAction, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over rows of the standard deviation along the row, and the sum of absolute changes."""
    inside = mask.bool()
    some = inside.any(1)
    spread = _moments(value, mask)[1].sqrt().sum() / some.sum().clamp(min=1)
    listed, row = value[inside], inside.nonzero()[:, 0]  # the unmasked states of all rows, one row after another
    change = listed.diff().abs()
    return spread, change[row[1:] == row[:-1]].sum()


def _over(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, torch.ones_like(whole)), torch.zeros_like(part))


@dataclass
class SparseValueLoss(ValueLoss):
    """Critic regression at a few states of each row, drawn anew at every optimizer step. Rows must be whole responses, so not `update.unit=action`."""

    clip: float | None = 0.5  # > 0, how far a value may move from the old one; None = no clipping
    states: int = 3  # k, supervised states a response, >= 1; responses no longer than that are supervised whole
    random: bool = True  # a uniform place in each stratum; False: its middle

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        shape = (len(batch), self.states)
        draws = torch.rand(shape, generator=run.generator) if self.random else torch.full(shape, 0.5)
        chosen = supervised_states(batch.counted, draws.to(batch.mask.device), self.states)
        return super().__call__(batch.but(keep=chosen), new, run)


METHOD = FOR_DOMAIN["language"].but(
    name="sp3o",
    paper=Paper("SP3O: sparse PPO against value flattening"),
    summary="the critic is trained at three well-separated states of each response; policy and advantages keep all tokens",
    regularize=(SparseValueLoss(coefficient=0.5),),
)
