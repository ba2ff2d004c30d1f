"""DAPO: decoupled clip and dynamic sampling (arXiv:2503.14476).

Four changes against GRPO: the upper clip is wider than the lower (clip-higher), the loss is a mean over tokens, responses near the length limit
are penalized softly (overlong shaping), and prompts whose group is all right or all wrong are replaced by others until the batch is full
(dynamic sampling). No KL. The equations (2, 4, 6, 8, 9 of the GRPO family) are the pure functions of grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Reward
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import overlong
from anypo.seams.credit import last_action
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import DynamicSampling

if TYPE_CHECKING:
    from anypo.run import Run


@dataclass
class OverlongShaping:
    """The inner reward plus a soft penalty for responses that come close to the length limit."""

    inner: Reward = field(default_factory=TaskReward)
    coefficient: float = 1.0  # >= 0
    buffer_share: float = 0.2  # of the limit, in (0,1]: where the penalty begins to grow

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = self.inner(batch, run)
        limit = batch.limit
        penalty = self.coefficient * overlong(batch.lengths, limit, max(1, round(limit * self.buffer_share))).to(reward)
        if reward.dim() == 1:
            return reward + penalty
        if batch.objectives:
            return reward + penalty[:, None] / reward.shape[1]  # an equal share each, so that their sum carries the whole penalty
        return reward + penalty[:, None] * last_action(batch.mask)


METHOD = GRPO.but(
    name="dapo",
    paper=Paper("DAPO: An Open-Source LLM Reinforcement Learning System at Scale", "2503.14476", 2025),
    summary="clip-higher, token-mean loss, soft penalty for overlong responses, prompts without contrast are resampled",
    rollout=DynamicSampling(),
    reward=OverlongShaping(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
)
