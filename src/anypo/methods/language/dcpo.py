"""DCPO: distribution-centric policy optimization.

Under GRPO the entropy falls and keeps falling. DCPO steers it by the distribution under which a gradient is taken: to GRPO's advantages it adds
REINFORCE on the correct responses under a target distribution, the old policy at a higher temperature while the entropy is below its target and at a
lower one while it is above. Nothing is sampled from that target: importance weights of the on-policy tokens stand in, and the term's share follows
the distance of the entropy from its target. Not the "dynamic clipping" method of the same abbreviation. Equations 1-6 from the authors' code; that
nothing is added when no response is correct, where the code divides by zero, is [ours].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import ClippedSurrogate, token_ratio
from anypo.seams.reward import row_reward

if TYPE_CHECKING:
    from anypo.run import Run

WARM, COOL = 1.2, 0.8  # temperatures of the target distribution below and above the target entropy


class Mixed(NamedTuple):
    """Advantages with the numbers that made them."""

    temperature: float
    success: float  # share of correct responses in the batch
    alpha: float  # share of the target term, in [0,1)
    advantages: Tensor  # [N,T]


def target_temperature(entropy: float, target_entropy: float, warm: float = WARM, cool: float = COOL) -> float:
    """Equation 1: `warm` up to the target entropy, `cool` above it."""
    return warm if entropy <= target_entropy else cool


def tempered_logp(logits: Float[Tensor, "N T V"], action: Int[Tensor, "N T"], temperature: float) -> Float[Tensor, "N T"]:
    """Equation 2: log-probs of the actions under softmax(logits / temperature)."""
    return (logits / temperature).log_softmax(-1).gather(-1, action[..., None])[..., 0]


def target_share(entropy: float, target_entropy: float, success: float, cap: float = 0.1) -> float:
    """Equation 4: a / (1 + a) with a = min(|target - entropy|, cap) / success; 0 when nothing succeeded."""
    if success == 0:
        return 0.0
    strength = min(abs(target_entropy - entropy), cap) / success
    return strength / (1 + strength)


def mix(
    plain: Float[Tensor, "N T"], correct: Tensor, old_logp: Float[Tensor, "N T"], old_logp_temp: Float[Tensor, "N T"], mask: Tensor, alpha: float
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equation 5: (1 - alpha) * plain + alpha * target ratio (equation 2) on the correct rows; 0 outside the mask. Constants of the step."""
    ratio = token_ratio(old_logp_temp, old_logp, mask).detach()
    return torch.where(mask.bool(), (1 - alpha) * plain + alpha * correct[:, None].to(plain) * ratio, plain.new_zeros(()))


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], old_logp: Float[Tensor, "N T"], old_logp_temp: Float[Tensor, "N T"], mask: Tensor,
    entropy: float, target_entropy: float = 0.5, cap: float = 0.1, threshold: float = 0.05, ddof: int = 1, eps: float = 1e-6,
) -> Mixed:  # fmt: skip
    """Equations 1-5 around GRPO's advantages. `old_logp_temp`: under the old policy at the temperature of equation 1."""
    correct = reward > threshold
    success = float(correct.double().mean())
    alpha = target_share(entropy, target_entropy, success, cap)
    plain = broadcast(group_relative(reward, group, ddof=ddof, eps=eps), mask)
    return Mixed(target_temperature(entropy, target_entropy), success, alpha, mix(plain, correct, old_logp, old_logp_temp, mask, alpha))


def old_logp_at(batch: Batch, run: Run, temperature: float) -> Float[Tensor, "N T"]:
    """Log-probs of the batch's actions under the policy that acted, at `temperature` times the one it acted at. Where the batch carries no logits
    the policy scores its actions once more, so that logits over a whole vocabulary are never kept."""
    if "old_logits" in batch.signals:
        return tempered_logp(batch.signal("old_logits"), batch.action, temperature)
    acted_at = torch.full((len(batch),), getattr(run.policy, "temperature", 1.0), dtype=batch.logp.dtype, device=batch.logp.device)
    acted_at = batch.signals.get("temperature", acted_at)
    return run.score(batch.but(signals=batch.signals | {"temperature": acted_at * temperature}), {"logp"}).logp


@dataclass
class TargetDistribution:
    """The inner credit's advantages, mixed with REINFORCE on correct responses under the tempered old policy. For rollouts of the current policy: it
    is the one that is tempered."""

    target_entropy: float = 0.5  # nats a token, > 0; near that of the untrained policy
    warm: float = WARM  # > 1, temperature up to the target entropy
    cool: float = COOL  # in (0,1), temperature above it
    cap: float = 0.1  # nats, >= 0; a larger distance from the target strengthens the term no further; 0 = off
    threshold: float = 0.05  # a response with a reward above it is correct
    weights: tuple[float, ...] | None = None  # of the K rewards, for telling correct responses; None = all 1
    inner: Credit = field(default_factory=lambda: GroupRelative(ddof=1))
    entropy: float | None = field(default=None, init=False, repr=False)  # of the step before, nats a token; None = no step yet

    needs = frozenset({"logits"})  # what a policy has that can be read at another temperature; none are kept

    @property
    def compares_group(self) -> bool:
        return getattr(self.inner, "compares_group", False)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        before = self.target_entropy if self.entropy is None else self.entropy
        self.entropy = -float(masked_mean(batch.logp, batch.mask))
        plain = self.inner(batch, run)
        correct = row_reward(batch, self.weights) > self.threshold
        alpha = target_share(before, self.target_entropy, float(correct.double().mean()), self.cap)
        run.log(entropy_estimate=self.entropy, target_share=alpha)
        if alpha == 0:
            return plain
        temperature = target_temperature(before, self.target_entropy, self.warm, self.cool)
        return mix(plain, correct, batch.logp, old_logp_at(batch, run, temperature), batch.mask, alpha)

    def state_dict(self) -> dict[str, Any]:
        return {"entropy": self.entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entropy = state["entropy"]


METHOD = GRPO.but(
    name="dcpo",
    paper=Paper("Distribution-Centric Policy Optimization Dominates Exploration-Exploitation Trade-off", "2601.12730", 2026),
    summary="correct responses count under the old policy at another temperature too, which steers the entropy to a target",
    credit=TargetDistribution(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean", dual_clip=3.0),
    regularize=(),
)
