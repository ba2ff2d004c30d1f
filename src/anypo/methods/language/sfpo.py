"""SFPO: slow-fast policy optimization (arXiv:2510.04072).

Reusing a batch for several steps drifts off-policy. SFPO splits one training step in three: a fast trajectory of K steps on the same batch, a pull
back towards the start by interpolation, and one slow step at the repositioned point. Objective and rollouts are untouched, so it wraps any loss;
against GRPO it changes the update. When the policy's entropy jumps, the fast part is switched off for good. Equations 1-3 from the paper; the
window of the entropy monitor, and that the optimizer's state is not interpolated, are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import masked_mean
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

EPS = 1e-8  # added to the window's standard deviation


class Steps(NamedTuple):
    fast: Tensor  # [D] after the K fast steps
    repositioned: Tensor  # [D] pulled back towards the start
    next: Tensor  # [D] after the slow step


class Schedule(NamedTuple):
    z: Tensor  # [S] deviation of each step's entropy from its window, in standard deviations; 0 before the window is full
    alpha: Tensor  # [S] interpolation weight of each step


def reposition(start: Tensor, fast: Tensor, alpha: float) -> Tensor:
    """Equation 2: start + alpha (fast - start)."""
    return start + alpha * (fast - start)


def step(
    theta: Float[Tensor, " D"], matrix: Float[Tensor, "D D"], bias: Float[Tensor, " D"], lr: float, inner_steps: int, alpha: float
) -> Steps:
    """Equations 1-3 with plain SGD on a loss whose gradient is matrix @ theta - bias."""
    fast = theta
    for _ in range(inner_steps):
        fast = fast - lr * (matrix @ fast - bias)
    back = reposition(theta, fast, alpha)
    return Steps(fast, back, back - lr * (matrix @ back - bias))


def alpha_schedule(entropy: Float[Tensor, " S"], alpha0: float = 0.8, window: int = 20, tau: float = 5.0) -> Schedule:
    """Equation 5: alpha0 until the entropy first leaves tau standard deviations of the `window` steps before it; 0 from that step on."""
    z = torch.zeros_like(entropy)
    if len(entropy) > window:
        before = entropy.unfold(0, window, 1)[:-1]  # [S - window, window]
        z[window:] = (entropy[window:] - before.mean(1)) / (before.std(1, correction=0) + EPS)
    triggered = (z.abs() >= tau).long().cumsum(0) > 0
    return Schedule(z, torch.where(triggered, 0.0, torch.full_like(entropy, alpha0)))


@dataclass
class SlowFast(GradientSteps):
    """The base update applied K times, interpolation back to the start, and the base update once more."""

    inner_steps: int = 3  # K, fast applications of the base update, >= 0
    alpha: float = 0.8  # how much of the fast displacement is kept, in [0,1]; 0 is the base update
    tau: float = 5.0  # standard deviations at which the entropy switches the fast part off, > 0
    window: int = 20  # steps of entropy that the monitor looks back on, >= 2
    entropies: list[float] = field(default_factory=list, init=False, repr=False)
    stopped: bool = field(default=False, init=False, repr=False)

    needs = frozenset({"old_entropy"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        alpha = self.watch(float(masked_mean(batch.signal("old_entropy"), batch.mask)))
        if alpha > 0 and self.inner_steps > 0:
            start = [p.detach().clone() for p in run.policy.parameters()]
            for _ in range(self.inner_steps):
                super().__call__(batch, loss_fn, run)
            with torch.no_grad():
                for parameter, origin in zip(run.policy.parameters(), start, strict=True):
                    parameter.copy_(reposition(origin, parameter, alpha))
        return super().__call__(batch, loss_fn, run) | {"alpha": alpha}

    def watch(self, entropy: float) -> float:
        """Note this step's mean entropy; the interpolation weight of the step."""
        self.entropies = [*self.entropies, entropy][-self.window - 1 :]
        recent = torch.tensor(self.entropies, dtype=torch.float64)
        self.stopped = self.stopped or bool(alpha_schedule(recent, 1.0, self.window, self.tau).alpha[-1] == 0)
        return 0.0 if self.stopped else self.alpha

    def state_dict(self) -> dict[str, Any]:
        return {"entropies": self.entropies, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entropies, self.stopped = list(state["entropies"]), state["stopped"]


METHOD = GRPO.but(
    name="sfpo",
    paper=Paper("Slow-Fast Policy Optimization: Reposition-Before-Update for LLM Reasoning", "2510.04072", 2025),
    summary="several fast steps on a batch, a pull back towards the start, one slow step",
    update=SlowFast(),
)
