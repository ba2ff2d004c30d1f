"""What is good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from anypo.batch import Batch

if TYPE_CHECKING:
    from anypo.run import Run


@dataclass
class TaskReward:
    """The task's own reward: [N], [N,K] with several named rewards, or [N,T] when it is dense."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return run.score_rewards(batch)


def weighted_sum(reward: Tensor, weights: tuple[float, ...] | None = None) -> Tensor:
    """[N,K] objectives as one number a row [N]; a reward [N] passes unchanged. Raises ValueError when the number of weights is not K."""
    if reward.dim() == 1:
        return reward
    if weights is None:
        return reward.sum(dim=1)
    if len(weights) != reward.shape[1]:
        raise ValueError(f"{len(weights)} weights for {reward.shape[1]} rewards; give one weight for each reward")
    return reward @ reward.new_tensor(weights)
