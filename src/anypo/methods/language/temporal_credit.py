"""TP-Schedule: temporal scheduling of token credit by trajectory percentile (arXiv:2605.25381).

GRPO trains every token from the first step to the last; selective methods train a fixed subset. Here the subset depends on time: training begins on
a few targeted tokens and relaxes to all of them. Three criteria share one schedule: the end of the response, a window that grows backwards (the
default); the tokens of highest entropy; a bonus for entropy on the advantage, which decays. Advantages are those of any credit (`inner`), found
from whole responses before the choice. Equations from the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast

if TYPE_CHECKING:
    from anypo.run import Run

MODES = ("linear", "sigmoid", "gamma")
CRITERIA = ("percentile", "forking", "entropy")


def magnitude(
    step: Tensor, total: float, initial: float = 0.99, r_min: float = 0.0, r_max: float = 0.8, mode: str = "linear", gamma: float = 2.0
) -> Float[Tensor, " S"]:
    """Equations 1-2: how selective training is at each step, from `initial` until r_min * total down to 0 from r_max * total on.

    The gamma schedule starts at initial^gamma. Raises ValueError unless r_min < r_max, and for another mode than MODES.
    """
    if r_max <= r_min:
        raise ValueError(f"r_max is the share of training at which the schedule ends and must be above r_min; got {r_max} and {r_min}")
    q = ((step.double() - r_min * total) / ((r_max - r_min) * total)).clamp(0, 1)
    if mode == "linear":
        return initial * (1 - q)
    if mode == "sigmoid":
        low, high = torch.sigmoid(q.new_tensor([-4.0, 4.0]))
        return initial * (torch.sigmoid(-8 * (q - 0.5)) - low) / (high - low)
    if mode == "gamma":
        return (initial * (1 - q)) ** gamma
    raise ValueError(f"unknown schedule '{mode}'; use one of {', '.join(MODES)}")


def keep_percentile(mask: Tensor, magnitude: float) -> Bool[Tensor, "N T"]:
    """Equation 3: of the n tokens of a row, in their order in the mask, all but the first floor(magnitude n); the last one always."""
    inside = mask.bool()
    count = inside.sum(1, keepdim=True)
    skipped = torch.minimum((magnitude * count.double()).floor(), count - 1.0)
    return inside & (inside.long().cumsum(1) - 1 >= skipped)


def keep_forking(mask: Tensor, entropy: Float[Tensor, "N T"], magnitude: float) -> Bool[Tensor, "N T"]:
    """Equation 4: the ceil((1 - magnitude) n) tokens of a row's mask with the largest entropy, the earlier one of equals. None for magnitude 1."""
    inside = mask.bool()
    wanted = ((1 - magnitude) * inside.sum(1, keepdim=True).double()).ceil()
    order = torch.where(inside, entropy.detach(), -torch.inf).argsort(dim=1, descending=True, stable=True)
    return inside & (order.argsort(dim=1) < wanted)


def advantages_entropy(
    advantages: Tensor, entropy: Float[Tensor, "N T"], mask: Tensor, magnitude: float, alpha: float = 0.4, kappa: float = 2.0
) -> Float[Tensor, "N T"]:
    """Equation 5: advantages [N] or [N,T] plus magnitude * min(alpha H, |A| / kappa) on the mask, 0 elsewhere; an advantage of 0 stays 0."""
    inside = mask.bool()
    base = broadcast(advantages, mask) if advantages.dim() == 1 else torch.where(inside, advantages, 0.0)
    bonus = torch.minimum(alpha * torch.where(inside, entropy.detach(), 0.0).to(base), base.abs() / kappa)
    return base + magnitude * bonus


@dataclass
class ScheduledCredit:
    """The inner credit's advantages on a part of the tokens (`batch.keep`) that grows over the run to all of them, or with a decaying bonus."""

    inner: Credit = field(default_factory=GroupRelative)
    criterion: str = "percentile"  # percentile: the end of the response; forking: its most uncertain tokens; entropy: all, with a bonus
    mode: str = "linear"  # linear, sigmoid or gamma
    initial: float = 0.99  # magnitude at the start, in [0,1); 0: the inner credit
    r_min: float = 0.0  # share of the run at which the magnitude begins to fall; >= 1: never
    r_max: float = 0.8  # and at which it is 0, > r_min
    gamma: float = 2.0  # > 0, exponent of mode gamma
    alpha: float = 0.4  # >= 0, bonus for a nat of entropy
    kappa: float = 2.0  # > 0, the bonus is at most |A| / kappa

    @property
    def compares_group(self) -> bool:
        return getattr(self.inner, "compares_group", False)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.criterion == "percentile" else frozenset({"old_entropy"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        mask = batch.counted
        now = float(
            magnitude(torch.tensor(run.progress, dtype=torch.float64), 1.0, self.initial, self.r_min, self.r_max, self.mode, self.gamma)
        )
        if self.criterion == "percentile":
            batch.keep = keep_percentile(mask, now)
        elif self.criterion == "forking":
            batch.keep = keep_forking(mask, batch.signal("old_entropy"), now)
        elif self.criterion == "entropy":
            advantage = advantages_entropy(advantage, batch.signal("old_entropy"), mask, now, self.alpha, self.kappa)
        else:
            raise ValueError(f"unknown criterion '{self.criterion}'; use one of {', '.join(CRITERIA)}")
        run.log(magnitude=now, kept_share=float(batch.counted.sum() / batch.mask.sum().clamp(min=1)))
        return advantage


METHOD = GRPO.but(
    name="temporal_credit",
    paper=Paper("Not only where, But when: Temporal Scheduling for RLVR", "2605.25381", 2026),
    summary="trains the end of each response at first; the window grows backwards until it holds the whole response",
    credit=ScheduledCredit(),
)

FORKING = METHOD.but(
    name="temporal_credit.forking",
    summary="trains the tokens of highest entropy at first, in the end all of them",
    credit=ScheduledCredit(criterion="forking"),
)

ENTROPY = METHOD.but(
    name="temporal_credit.entropy",
    summary="trains all tokens; uncertain ones get a bonus on their advantage that decays to none",
    credit=ScheduledCredit(criterion="entropy"),
)

VARIANTS = {"forking": FORKING, "entropy": ENTROPY}
