"""PSFT: proximal supervised fine-tuning (arXiv:2508.17784).

Fine-tuning on demonstrations drifts without bound, loses entropy and forgets. Read as a policy gradient, it gives every demonstrated token the
advantage 1; so PPO's trust region applies: the ratio to the policy at the start of the batch takes the place of the log-likelihood and is clipped,
and a token that has already risen by the allowed factor stops contributing. Against GRPO the trajectories are demonstrations that the task
provides, not rollouts, and every one is worth 1; the objective is PPO's own surrogate. Equations 1, 2 and 4 are those of the paper's code, 3 is
derived from them. `SFT` is the baseline. Left out: the optional warm-up with plain fine-tuning (equal to PSFT while the ratios are 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import ClippedSurrogate, clipped, token_ratio
from anypo.seams.select import NoPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


class ProximalLoss(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp
    clip_fraction: Tensor  # share of tokens whose ratio has passed 1 + clip_high


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, clip_low: float = 0.2, clip_high: float = 0.28
) -> ProximalLoss:
    """Equations 1-3: minus the token mean of PPO's clipped surrogate with the advantage 1, that is of min(ratio, 1 + clip_high).

    With a positive advantage the lower bound is never active. A batch without tokens has loss 0.
    """
    ratio = token_ratio(logp, old_logp, mask)
    value = clipped(ratio, torch.ones_like(ratio), 1 - clip_low, 1 + clip_high)
    return ProximalLoss(-masked_mean(value, mask), masked_mean((ratio > 1 + clip_high).to(ratio.dtype), mask))


def sft(logp: Float[Tensor, "N T"], mask: Tensor) -> LossValue:
    """The baseline: the mean negative log-likelihood of the demonstrated tokens."""
    return LossValue(-masked_mean(logp, mask))


@dataclass
class Demonstrations:
    """Solutions that the task shows, as a batch that the policy might have written, each in a group of its own.

    The log-probs are the policy's at the start of the batch, so the trust region lies around that policy. Nothing is generated.
    """

    count: int = 64  # demonstrations a batch, >= 1

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        show: Callable[..., list[tuple[Any, str]]] | None = getattr(run.task, "demonstrations", None)
        policy: Any = run.policy
        if show is None or not hasattr(policy, "encode"):
            raise ValueError(
                f"{run.method.name} imitates demonstrations, which the task '{run.task.name}' does not provide; take a task with known solutions such as "
                "arithmetic, or give the task demonstrations(count, rng) -> [(prompt, completion), ...]"
            )
        pairs = show(self.count, run.rng)
        written = [completion_tokens(policy, completion) for _, completion in pairs]
        action = nn.utils.rnn.pad_sequence(written, batch_first=True)
        mask = torch.arange(action.shape[1]) < torch.tensor([len(w) for w in written])[:, None]
        rows = torch.arange(len(pairs))
        ended = torch.ones(len(pairs), dtype=torch.bool)
        batch = Batch(
            action=action, mask=mask, logp=torch.zeros(mask.shape), group=rows, context=[policy.encode(prompt) for prompt, _ in pairs],
            terminated=ended, truncated=~ended, version=torch.full_like(rows, run.version), signals={"completion": [c for _, c in pairs]},
        )  # fmt: skip
        batch.logp = run.score(batch, {"logp"}).logp
        return batch


def completion_tokens(policy: Any, text: str) -> Int[Tensor, " T"]:
    """Tokens of a demonstrated completion, with the token that ends it. A completion is no prompt: no opening token, no chat template."""
    tokenizer = getattr(policy, "tokenizer", None)
    if tokenizer is None:
        return torch.cat([policy.encode(text), torch.tensor([policy.eos])])
    return torch.tensor([*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id])


@dataclass
class AllRight:
    """Every demonstration is worth 1."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return batch.logp.new_ones(len(batch))


@dataclass
class RewardItself:
    """The advantage is the reward, with nothing to compare it with: 1 for every demonstrated token."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return broadcast(batch.outcome.to(batch.logp.dtype), batch.mask)


@dataclass
class LogLikelihood:
    """Plain supervised fine-tuning: the negative log-likelihood, weighted by the advantage."""

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(sft(batch.advantage * new.logp, batch.counted).loss)


METHOD = GRPO.but(
    name="psft",
    paper=Paper("Proximal Supervised Fine-Tuning", "2508.17784", 2025),
    summary="demonstrations as trajectories of advantage 1 inside PPO's clip: fine-tuning that moves a bounded distance a batch",
    select=NoPrompts(),
    rollout=Demonstrations(),
    reward=AllRight(),
    credit=RewardItself(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
    update=GradientSteps(minibatches=8),
)
SFT = METHOD.but(name="psft.sft", summary="the negative log-likelihood of demonstrations", objective=LogLikelihood())
VARIANTS = {"sft": SFT}
