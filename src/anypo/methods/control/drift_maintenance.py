"""Drift maintenance: chronological adaptive maintenance of a malware detector with a PPO controller (arXiv:2605.24294).

A deployed detector ages as programs drift. Period by period a controller sees how well it serves, what it still knows of the first period, how far the
frozen latents have moved and what was spent, and chooses whether to keep the detector, fit its head, its adapter too, replay a memory, or refit it all.
Against PPO it changes what is trained on: rows are whole deployments in time order, the reward of a period is what the next one is served with. The
detector and its measures (equations 1 to 7, all [reconstructed]: the abstract alone was at hand) are `domains/control/malware.py`, the environment
`domains/control/maintenance.py`. Here are the controller, the policies without learning that it is measured against, and equation 8. Left out: the
real data sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anypo.domains.control.collect import Actor, episodes
from anypo.domains.control.maintenance import DECISIONS
from anypo.domains.control.malware import COSTS, SEEN
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.seams.credit import GAE
from anypo.seams.regularize import EntropyBonus, ValueLoss
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.domains.control.tasks import GymTask
    from anypo.run import Run

UTILITY, RETENTION, SHIFT = (SEEN.index(name) for name in ("utility", "retention", "shift"))


class Summary(NamedTuple):
    aut: Any  # mean utility by the trapezoid rule over time
    forgetting: Any  # how far retention ended below its best
    cost: Any  # of all actions


def summary(utility: Float[Tensor, "*B T"], retention: Float[Tensor, "*B T"], action: Int[Tensor, "*B K"]) -> Summary:
    """Equation 8 of deployments along the last axis (a single period: its utility). `action` may lack the last period's."""
    u, kept = np.asarray(utility, dtype=np.float64), np.asarray(retention, dtype=np.float64)
    aut = u[..., 0] if u.shape[-1] == 1 else (0.5 * (u[..., 1:] + u[..., :-1])).mean(-1)
    return Summary(aut, kept.max(-1) - kept[..., -1], COSTS[np.asarray(action)].sum(-1))


def always(action: int) -> Actor:
    """The same action in every period."""
    return lambda seen, noise: np.full(len(seen), action)


def when_drifting(threshold: float, action: int) -> Actor:
    """An action in periods whose shift is above the threshold, keep in the others."""
    return lambda seen, noise: np.where(seen[:, SHIFT] > threshold, action, 0)


def at_random(seed: int) -> Actor:
    """Every action with the same chance."""
    rng = np.random.default_rng(seed)
    return lambda seen, noise: rng.integers(len(COSTS), size=len(seen))


class Deployment(NamedTuple):
    """What N paths of T periods were served with: utility and retention [N,T], actions [N,T-1] and the score [N], the sum of rewards."""

    utility: NDArray
    retention: NDArray
    action: NDArray
    score: NDArray

    @property
    def summary(self) -> Summary:
        return summary(self.utility, self.retention, self.action)  # type: ignore[arg-type]


def deploy(task: GymTask, act: Actor, seeds: ArrayLike, noise: Callable[[int], NDArray] | None = None) -> Deployment:
    """Whole deployments on the paths of these seeds. `act` is one of the policies above or a trained policy's `actor()`; `noise` makes that one sample."""
    starts = np.asarray(seeds).tolist()
    seen = episodes(task.environments(len(starts)), starts, act, lambda action: action, noise)
    whole = np.concatenate([seen.observation, seen.following[:, -1:]], axis=1)
    return Deployment(whole[..., UTILITY], whole[..., RETENTION], seen.action, seen.reward.sum(1, dtype=np.float64))


@dataclass
class WholeDeployments(UniformPrompts):
    """Environments that are followed for as many actions as a deployment has, so that a batch holds whole ones."""

    prompts: int | None = 16  # deployments a step, >= 1
    group_size: int = 1  # attempts at each, >= 1
    actions: int = DECISIONS  # of a deployment, >= 1

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        return [prompt.but(max_actions=self.actions) for prompt in super().__call__(task, run)]


METHOD = PPO.but(
    name="drift_maintenance",
    paper=Paper("Chronological adaptive maintenance of a malware detector with a PPO controller", "2605.24294", 2026),
    kind="system",
    summary="a PPO controller that chooses, period by period, how a detector with a frozen encoder is kept up with drift",
    task="MalwareMaintenance-v0",
    select=WholeDeployments(),
    credit=GAE(gamma=0.95, lam=0.95),
    regularize=(ValueLoss(coefficient=0.5), EntropyBonus(coefficient=0.01)),
    update=GradientSteps(epochs=4, minibatches=4, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
)
