"""IH-GRPO: implicit hierarchy for delayed tool execution (arXiv:2605.18500).

A model that writes code between its thoughts is interrupted wherever a block ends. Here blocks are only written down; a token of its own, the execute
token, runs all that wait, in one namespace, with one observation. When to execute is a decision above what to write: a gate of probability p_e over the
distribution q of the other tokens. The loss stays that of one softmax; a term c adds, at weight 1, what the gradient of the explicit hierarchy has
beyond it. Changes the rollout, the loss (dual clip, mean over tokens, no KL) and the group's deviation (unbiased) against GRPO. Formulas and weights
are those of the authors' code; log Z_- is computed over the other tokens directly, so that nothing has to be clamped, and a lone member has advantage 0.

What runs the blocks is the task's environment, which is told by the column `delayed` of a problem. A task says which tokens end a block and execute
(`block_token`, `execute_token`); where it has none, this is GRPO with the loss above.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import masked_mean
from anypo.seams.objective import ClippedSurrogate, clipped, token_ratio
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


class Losses(NamedTuple):
    logp: Tensor  # [N,T] of the tokens
    pg_loss: Tensor  # scalar, equation 3
    c_item: Tensor  # [N,T], equation 2, masked or not
    c_loss: Tensor  # scalar, the second term of equation 4 without its weight


class Executions(NamedTuple):
    runs: list[list[int]]  # the blocks of each execute token, numbered as they appear; none for a void one
    delayed_calls: int  # blocks that waited for another before they were run with it
    unexecuted: list[int]  # blocks that never ran


def logz_non_tool(logits: Float[Tensor, "*N V"], tool: int) -> Float[Tensor, "*N"]:
    """Equation 1: log Z_-, the log-partition over all tokens but `tool`; its gradient is q. Finite even where all others are impossible."""
    execute = torch.arange(logits.shape[-1], device=logits.device) == tool
    return logits.masked_fill(execute, torch.finfo(logits.dtype).min).logsumexp(-1)


def hierarchy_item(logits: Float[Tensor, "*N V"], tokens: Int[Tensor, "*N"], tool: int) -> Float[Tensor, "*N"]:
    """Equation 2: (1 - p_e - m) log Z_-, m = 1 where the token is another than `tool`; only log Z_- carries a gradient."""
    gate = 1 - logits.detach().softmax(-1)[..., tool]
    return (gate - (tokens != tool).to(logits.dtype)) * logz_non_tool(logits, tool)


def policy_item(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> Float[Tensor, "N T"]:
    """Equation 3: the policy loss of every token."""
    return -clipped(token_ratio(logp, old_logp, mask), advantages, 1 - clip_low, 1 + clip_high, dual_clip)


def loss(
    logits: Float[Tensor, "N T V"], tokens: Int[Tensor, "N T"], advantages: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor,
    tool: int, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0,
) -> Losses:  # fmt: skip
    """Equations 2-4 of tempered logits; the loss to minimize is pg_loss + lam * c_loss. The policy loss inside c_loss carries no gradient."""
    logp = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    item = policy_item(logp, old_logp, advantages, mask, clip_low, clip_high, dual_clip)
    c_item = hierarchy_item(logits, tokens, tool)
    return Losses(logp, masked_mean(item, mask), c_item, masked_mean(c_item * item.detach(), mask))


def implicit_gradient(logits: Float[Tensor, " V"], tool: int, token: int, advantage: float, lam: float = 1.0) -> Float[Tensor, " V"]:
    """Gradient in the logits of the loss of one token at ratio 1: flat softmax plus `lam` times the surrogate; at lam = 1 that of the hierarchy."""
    place = torch.arange(logits.shape[-1])
    p = logits.softmax(-1)
    q = torch.where(place == tool, 0.0, p / (1 - p[tool]))
    return -advantage * ((place == token).to(p) - p + lam * (1 - p[tool] - int(token != tool)) * q)


def delayed_execution(tokens: Int[Tensor, " T"], block: int, execute: int) -> Executions:
    """Equation 6: a token `block` ends a block, a token `execute` runs all that wait. It goes on after a void one: what ends there is the rollout's."""
    runs: list[list[int]] = []
    pending: list[int] = []
    seen = 0
    for token in tokens.tolist():
        if token == block:
            pending.append(seen)
            seen += 1
        elif token == execute:
            runs.append(pending)
            pending = []
    return Executions(runs, sum(max(len(run) - 1, 0) for run in runs), pending)


@dataclass
class DelayedExecution:
    """The inner rollout of problems whose code waits for the execute token, or (`delayed` off) is run block by block as it is written."""

    inner: Rollout = field(default_factory=OnPolicy)
    delayed: bool = True

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = self.inner([p.but(columns=p.columns | {"delayed": self.delayed}) for p in prompts], run)
        block, execute = (getattr(run.task, name, None) for name in ("block_token", "execute_token"))
        if self.delayed and block is not None and execute is not None:
            found = [delayed_execution(row[here], block, execute) for row, here in zip(batch.action, batch.mask, strict=True)]
            ran = sum(len(blocks) for f in found for blocks in f.runs)
            run.log(delayed_share=sum(f.delayed_calls for f in found) / max(ran, 1))
        return batch


@dataclass
class HierarchySurrogate:
    """lam times the mean of c times the detached policy loss of each token; nothing where there is no execute token."""

    lam: float = 0.001  # >= 0; 1 = the gradient of the explicit hierarchy
    token: int | None = None  # number of the execute token; None = the task's own, if it has one
    clip_low: float = 0.2  # of the policy loss, as in the objective
    clip_high: float = 0.28
    dual_clip: float = 3.0  # > 1

    needs = frozenset({"logp", "logits"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        tool = getattr(run.task, "execute_token", None) if self.token is None else self.token
        if tool is None:
            return Loss(new.logp.new_zeros(()))
        mask = batch.counted
        item = policy_item(new.logp.detach(), batch.logp, batch.advantage, mask, self.clip_low, self.clip_high, self.dual_clip)
        surrogate = masked_mean(hierarchy_item(new.logits, batch.action, tool) * item, mask)
        return Loss(self.lam * surrogate, {"hierarchy_loss": float(surrogate.detach())})


METHOD = GRPO.but(
    name="ih_grpo",
    paper=Paper("IH-GRPO: implicit hierarchy for delayed tool execution", "2605.18500", 2026),
    summary="code runs at an execute token of its own; a surrogate adds the gradient of a hierarchy that decides when to execute above what to write",
    rollout=DelayedExecution(),
    credit=GroupRelative(std=True, ddof=1, eps=1e-6),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean", dual_clip=3.0),
    regularize=HierarchySurrogate(),
    task="registers",
)
