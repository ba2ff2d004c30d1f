"""EnTRPO: TRPO with replay and entropy advantage (arXiv:2110.13373).

Against TRPO two things change: the entropy of the policy enters the advantage, summed over the steps to come like a reward, and a step of the policy
is fitted to the newest batch together with actions of the batches before it. The trust region, conjugate gradient and line search are TRPO's; the
region is drawn around the policy of this moment, while the importance ratios belong to the policies that acted. The paper's formulas are not
public here; all equations are [reconstructed] from its description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.trpo import METHOD as TRPO
from anypo.methods.control.trpo import TrustRegionStep
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward, gae, per_action_ends, whiten
from anypo.seams.groups import masked_mean, masked_std
from anypo.seams.natural import split_loss
from anypo.seams.objective import token_ratio
from anypo.seams.update import GradientSteps, flatten_actions

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

PerAction = Float[Tensor, "N T"]


class ReplayLoss(NamedTuple):
    surrogate: Tensor  # scalar, to maximize
    loss: Tensor  # its negative, differentiable in logp


def categorical_entropy(logits: Float[Tensor, "B A"]) -> Float[Tensor, " B"]:
    """Equation 1: entropy of the softmax, nats, in [0, log A]."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def entropy_advantages(
    reward: PerAction, value: PerAction, next_value: PerAction | None, terminated: Tensor, truncated: Tensor, mask: Tensor, entropy: PerAction,
    gamma: float = 0.99, lam: float = 0.97, beta: float = 0.01, first_entropy: bool = True,
) -> PerAction:  # fmt: skip
    """Equations 2 and 3: generalized advantages of reward + beta * entropy. Without `first_entropy` the entropy at the state itself, which no action
    there can change, is left out. 0 outside the mask."""
    found = gae(reward + beta * entropy, value, terminated, truncated, mask, gamma, lam, next_value).advantages
    return found if first_entropy else found - torch.where(mask.bool(), beta * entropy, torch.zeros_like(found))


def normalized(advantages: PerAction, mask: Tensor) -> PerAction:
    """Equation 4: mean 0 and standard deviation 1 over the mask; 0 where all advantages are equal up to rounding."""
    if masked_std(advantages, mask) <= 1e-6 * masked_mean(advantages.abs(), mask):
        return torch.zeros_like(advantages)
    return whiten(advantages, mask)


def replay_surrogate(logp: PerAction, old_logp: PerAction, advantages: PerAction, mask: Tensor, w_max: float = 2.0) -> ReplayLoss:
    """Equation 5: masked mean of min(ratio, w_max) * advantage; `old_logp` belongs to the policy that acted. No gradient where capped."""
    surrogate = masked_mean(token_ratio(logp, old_logp, mask).clamp(max=w_max) * advantages, mask)
    return ReplayLoss(surrogate, -surrogate)


def replay_indices(capacity: int, pushed: int) -> list[int]:
    """Which of `pushed` batches a first-in-first-out buffer of `capacity` batches keeps, oldest first. Raises ValueError for a capacity below 1."""
    if capacity < 1:
        raise ValueError(f"the buffer must hold at least the newest batch; set update.capacity to 1 or more, not {capacity}")
    return list(range(max(0, pushed - capacity), pushed))


@dataclass
class EntropyAdvantage:
    """Advantages of the reward plus beta times the acting policy's entropy, not normalized (the update does that over the actions it uses); leaves
    the critic's targets, which hold the entropies too, in `batch.signals["returns"]`."""

    gamma: float = 0.99  # discount, in [0,1]
    lam: float = 0.97  # trace decay, in [0,1]
    beta: float = 0.01  # reward for a nat of entropy, >= 0
    first_entropy: bool = True  # count the entropy at the action's own state

    needs = frozenset({"old_value", "old_entropy"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        value, (terminated, truncated) = batch.signal("old_value"), per_action_ends(batch)
        advantages = entropy_advantages(
            dense_reward(batch), value, batch.next_value, terminated, truncated, batch.mask, batch.signal("old_entropy"),
            self.gamma, self.lam, self.beta, self.first_entropy,
        )  # fmt: skip
        batch.signals["returns"] = torch.where(batch.mask, advantages + value, torch.zeros_like(advantages))
        return advantages


@dataclass
class ReplaySurrogate:
    """Capped ratio times advantage (equation 5)."""

    w_max: float = 2.0  # largest importance ratio, > 0; inf = plain importance weighting

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(replay_surrogate(new.logp, batch.logp, batch.advantage, batch.counted, self.w_max).loss)


@dataclass
class ReplayedTrustRegionStep(TrustRegionStep):
    """TRPO's step on the newest batch and a uniform sample of the batches before it (equations 4, 6, 7); the critic's regression on the newest."""

    capacity: int = 4  # batches in the buffer, the newest among them, >= 1
    sampled: int = 2  # batches' worth of actions in a step, the newest batch and sampled - 1 of older actions, >= 1
    kept: list[Batch] = field(default_factory=list, init=False, repr=False)  # oldest first, with logp and advantages of their own time

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        policy_loss, critic_loss = split_loss(loss_fn)
        metrics = super().__call__(self.with_replay(batch, run), policy_loss, run)
        return metrics | ({} if critic_loss is None else GradientSteps.__call__(self, batch, critic_loss, run))

    def with_replay(self, batch: Batch, run: Run) -> Batch:
        """The newest batch, which enters the buffer, joined by older actions (whole rows of a policy with memory); its `old_*` distributions are
        those of the policy of this moment, so that `kl_old` is the KL from it."""
        newest = flatten_actions(batch) if run.policy.memoryless else batch
        pushed = [*self.kept, newest]
        self.kept = [pushed[i] for i in replay_indices(self.capacity, len(pushed))]
        older, used, wanted = self.kept[:-1], batch, (self.sampled - 1) * len(newest)
        if older and wanted > 0:
            pool = Batch.concat(older)
            used = Batch.concat([newest, pool[torch.randperm(len(pool), generator=run.generator)[:wanted]]])
            names = {name for name in ("logits", "mean", "log_std") if f"old_{name}" in used.signals}
            used.signals |= {f"old_{name}": value for name, value in run.score(used, names).items()}
        assert used.advantage is not None
        return used.but(advantage=normalized(used.advantage, used.counted))

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [batch.state_dict() for batch in self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = [Batch(**fields) for fields in state["kept"]]


METHOD = TRPO.but(
    name="entrpo",
    paper=Paper("EnTRPO: Trust Region Policy Optimization Method with Entropy Regularization", "2110.13373", 2021),
    summary="TRPO with the policy's entropy in the advantage and a replay buffer of recent batches behind every step",
    credit=EntropyAdvantage(),
    objective=ReplaySurrogate(),
    update=ReplayedTrustRegionStep(epochs=10, minibatches=32, learning_rate=1e-3, optimizer="adam", max_grad_norm=0.5),
)
