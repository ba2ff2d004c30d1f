"""VSPO: vector-steered policy optimization (arXiv:2605.15604).

A behaviour that the policy almost never shows earns GRPO with a shaped reward nothing to learn from. VSPO changes only the rollouts: the members of a
group are written with a steering vector added to the hidden states at intensities of their own, 0 included, so that the behaviour is frequent and the
group diverse; the unsteered policy is then updated on them and takes its own steering vector in. Equations 1-7: the group-relative update is the
paper's, the vector (activation addition), the grid, the form of the reward, the uncorrected ratio and the bandit are [reconstructed], the sizes of
the grid are [ours]. The vector acts on the last hidden states (see `Steerable`). Left out: renewing it during training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.steerable import Steerable
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast
from anypo.seams.objective import aggregate, clipped, token_ratio
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

PerRow = Float[Tensor, " N"]
VECTOR = "vspo.vector"  # where the run keeps it, intensity 1
EMPTY = torch.finfo(torch.float32).tiny


class BanditStep(NamedTuple):
    mixture: Tensor  # [A] mean of the steered policies
    new_logits: Tensor  # [A]
    expected_reward: Tensor  # scalar, of the unsteered policy before the step


def steering_vector(hidden_pos: Float[Tensor, "P D"], hidden_neg: Float[Tensor, "Q D"], normalize: bool = True) -> Float[Tensor, " D"]:
    """Equation 1: mean hidden state with the behaviour minus that without, over its norm when `normalize` (0 stays 0)."""
    difference = hidden_pos.mean(0) - hidden_neg.mean(0)
    return difference / difference.norm().clamp(min=EMPTY) if normalize else difference


def intensities(n: int, grid: Sequence[float] | Tensor) -> Float[Tensor, " n"]:
    """Equation 2: member i of a group has intensity grid[i mod its size]. Raises ValueError for an empty grid."""
    if len(grid) == 0:
        raise ValueError("the grid of steering intensities is empty; give it at least 0")
    values = torch.as_tensor(grid, dtype=torch.float64)
    return values[torch.arange(n) % len(values)]


def steer(hidden: Float[Tensor, "N T D"], vector: Float[Tensor, " D"], alpha: PerRow) -> Float[Tensor, "N T D"]:
    """Equation 3: each row's states pushed along the vector at its own intensity."""
    return hidden + alpha[:, None, None] * vector


def combined(accuracy: PerRow, behaviour: PerRow, lam: float = 0.5, gated: bool = False) -> PerRow:
    """Equation 4: accuracy + lam behaviour; when `gated`, behaviour counts in right answers alone."""
    return accuracy * (1 + lam * behaviour) if gated else accuracy + lam * behaviour


def advantages(
    accuracy: PerRow, behaviour: PerRow, group: Int[Tensor, " N"], lam: float = 0.5, gated: bool = False, eps: float = 1e-6
) -> PerRow:
    """Equations 4-5: relative to the group of mixed intensities, population std."""
    return group_relative(combined(accuracy, behaviour, lam, gated), group, eps=eps)


def loss(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: PerRow, mask: Tensor, clip: float = 0.2) -> Tensor:
    """Equation 6: the clipped surrogate, both log-probs of the unsteered policy, mean over rows of token means."""
    return aggregate(-clipped(token_ratio(logp, old_logp, mask), broadcast(advantages, mask), 1 - clip, 1 + clip), mask, "seq_mean")


def expected_update(
    logits: Float[Tensor, " A"], score: Float[Tensor, " A"], reward: Float[Tensor, " A"], grid: Sequence[float] | Tensor, lr: float = 1.0
) -> BanditStep:
    """Equation 7: the exact step on a bandit whose arms are aligned with the vector by `score`."""
    policy = logits.softmax(0)
    mixture = (logits + torch.as_tensor(grid, dtype=logits.dtype)[:, None] * score).softmax(1).mean(0)
    advantage = reward - mixture @ reward
    return BanditStep(mixture, logits + lr * (mixture * advantage - policy * (mixture @ advantage)), policy @ reward)


def usage(batch: Batch) -> PerRow:
    """Verbosity: the share of the allowed actions that a row took."""
    return batch.lengths.to(batch.logp.dtype) / max(batch.limit, 1)


def shown(batch: Batch, run: Run) -> tuple[PerRow, PerRow]:
    """Accuracy and behaviour of every row: of a task with several rewards the last one is the behaviour and the others add up to accuracy, else the
    reward (dense values added up) and the verbosity."""
    reward = run.score_rewards(batch)
    if batch.objectives:
        return reward[:, :-1].sum(1), reward[:, -1]
    total = reward if reward.dim() == 1 else reward.sum(1)
    return total, usage(batch).to(total)


def mean_hidden(batch: Batch, run: Run) -> tuple[Float[Tensor, "N D"], Bool[Tensor, " N"]]:
    """Mean hidden state over each row's own actions, and which rows have any."""
    hidden = run.score(batch, {"hidden"}).hidden
    inside = batch.mask.to(hidden.device)[..., None]
    total = torch.where(inside, hidden, hidden.new_zeros(())).sum(1)
    return total / inside.sum(1).clamp(min=1), batch.mask.any(1).to(hidden.device)


@dataclass
class SteeringVector:
    """Before training: the vector of a behaviour, from attempts under two instructions that are put before every problem.

    Without instructions, from the attempts that show the behaviour more than the mean attempt and those that do not. At intensity 1 the vector is
    `strength` times as long as the mean hidden state.
    """

    behaviour: str = ""  # such as "Explain every step at length."
    neutral: str = ""  # such as "Answer with the number alone."
    runs: int = 64  # attempts in all, >= 2
    strength: float = 0.3  # > 0
    normalize: bool = True  # False: the plain difference, whatever its length

    needs = frozenset({"old_hidden"})

    def __call__(self, run: Run) -> None:
        with_it, without = self.contrast(run)
        vector = steering_vector(with_it, without, self.normalize)
        run.state[VECTOR] = vector * self.strength * torch.cat([with_it, without]).norm(dim=1).mean() if self.normalize else vector

    def contrast(self, run: Run) -> tuple[Float[Tensor, "P D"], Float[Tensor, "Q D"]]:
        """Mean hidden states of attempts with the behaviour and without it."""
        if self.behaviour or self.neutral:
            half = self.runs // 2
            sides = [self.collect(run, half, text) for text in (self.behaviour, self.neutral)]
            found = [hidden[exists] for hidden, exists in (mean_hidden(side, run) for side in sides)]
            return found[0], found[1]
        batch = self.collect(run, self.runs)
        hidden, exists = mean_hidden(batch, run)
        amount = shown(batch, run)[1].to(hidden)
        more = amount > amount.mean()
        if not bool((more & exists).any() and (~more & exists).any()):
            return hidden[:1], hidden[:1]  # nobody shows it or everybody does: a vector of 0, which is GRPO
        return hidden[more & exists], hidden[~more & exists]

    def collect(self, run: Run, attempts: int, text: str = "") -> Batch:
        """One attempt at each of so many problems, the text before the problem."""
        prompts = run.task.prompts(attempts, run.rng)
        return run.collect([p.but(samples=1, content=instructed(p.content, text)) for p in prompts])


def instructed(content: Any, text: str) -> Any:
    """A problem with an instruction before it. Raises ValueError for one that is no text."""
    if not text:
        return content
    if isinstance(content, str):
        return f"{text}\n{content}"
    if isinstance(content, list):
        return [{"role": "system", "content": text}, *content]
    raise ValueError("vspo can put instructions before problems that are text; leave prepare.0.behaviour and prepare.0.neutral empty")


@dataclass
class SteeredRollout:
    """The members of a group are written at different intensities. The log-probs are those of the policy without steering.

    Signal: `intensity` [N].
    """

    grid: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)  # of the run's vector; without 0 no member is the policy's own
    corrected: bool = False  # True keeps the steered log-probs, so that ratios correct for the steering: no distillation, for comparison
    inner: Rollout = field(default_factory=OnPolicy)

    needs = frozenset({"old_hidden"})

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if not isinstance(run.policy, Steerable):
            raise ValueError(
                f"vspo steers the policy while it samples, which {type(run.policy).__name__} does not offer; make it Steerable"
            )
        if VECTOR not in run.state:
            raise ValueError("vspo has no steering vector; keep its SteeringVector among the prepare components")
        parts = [self.part(k, prompts, run) for k in range(len(self.grid))]
        batch = Batch.concat([part for part in parts if part is not None])
        return batch[batch.group.argsort(stable=True)]

    def part(self, k: int, prompts: list[Prompt], run: Run) -> Batch | None:
        """The members that number k of the grid belongs to; None when there are none."""
        alpha, size = self.grid[k], len(self.grid)
        samples = [len(range(k, p.samples, size)) for p in prompts]
        chosen = [i for i, n in enumerate(samples) if n]
        if not chosen:
            return None
        asked = [prompts[i].but(samples=samples[i]) for i in chosen]
        vector = run.state[VECTOR]
        if alpha == 0:
            batch = self.inner(asked, run)
        else:
            assert isinstance(run.policy, Steerable)
            with run.policy.steered(alpha * vector):
                batch = self.inner(asked, run)
            self.unsteered(batch, run)
        batch.group = torch.tensor(chosen)[batch.group]
        batch.signals["intensity"] = torch.full((len(batch),), alpha, dtype=torch.float64)
        if self.corrected:
            batch.signals["sampled_elsewhere"] = torch.ones(len(batch), dtype=torch.bool)  # its log-probs are not those of the policy
        return batch

    def unsteered(self, batch: Batch, run: Run) -> None:
        """Equation 6: what was sampled under the steering, scored without it."""
        names = {"logp", "entropy"} if "old_entropy" in batch.signals else {"logp"}
        found = run.score(batch, names)
        if not self.corrected:
            batch.logp = torch.where(batch.mask, found.logp.to(batch.logp), torch.zeros_like(batch.logp))
        if "entropy" in names:
            batch.signals["old_entropy"] = torch.where(batch.mask, found.entropy.to(batch.logp), torch.zeros_like(batch.logp))


@dataclass
class BehaviourReward:
    """Accuracy and a secondary behaviour as one number; see `shown`."""

    lam: float = 0.5  # >= 0, weight of the behaviour
    gated: bool = False  # behaviour counts in right answers alone

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        accuracy, behaviour = shown(batch, run)
        run.log(accuracy=float(accuracy.double().mean()), behaviour=float(behaviour.double().mean()))
        return combined(accuracy, behaviour, self.lam, self.gated)


METHOD = GRPO.but(
    name="vspo",
    paper=Paper("VSPO: Vector-Steered Policy Optimization for Behavioral Control", "2605.15604", 2026),
    summary="groups are written under a steering vector at several intensities; the unsteered policy learns from them",
    prepare=(SteeringVector(),),
    rollout=SteeredRollout(),
    reward=BehaviourReward(),
    regularize=(),
)
