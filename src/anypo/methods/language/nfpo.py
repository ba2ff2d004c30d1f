"""NFPO: N-step forward-trace policy optimization (arXiv:2605.20865).

PPO's surrogate corrects the probability of each token but neither that of the state it was written in nor that of the rest of the response, which
the old policy wrote: a local approximation of the exact objective, biased off-policy. NFPO multiplies a token's ratio by the cumulative ratio of
the next N-1 tokens, its forward trace. N = 1 is PPO, N up to the end of the response is the exact weight of the remaining trajectory; in between N
trades bias for variance. Against GRPO it changes the objective (a detached weight and a mask in place of min and clip, no KL term).
Equations: the trace and the masked form are the paper's; detaching the trace and the exact mask [reconstructed]; the truncation at c_F is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, log_ratio, outside, ratio_metrics

if TYPE_CHECKING:
    from anypo.run import Run


class LossValue(NamedTuple):
    loss: Tensor  # scalar whose gradient is that of equation 5; its value means nothing
    surrogate: Tensor  # scalar, detached: minus the token mean of mask M rho F A, for the log


def trace(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, N: int = 4, c_F: float | None = 5.0
) -> Float[Tensor, "N T"]:
    """Equations 2-3: the product of the ratios of the next N-1 positions of the row (positions outside the mask count as 1), clipped to
    [1/c_F, c_F] unless c_F is None. Detached; 1 at a row's last action. Raises ValueError for N < 1 or c_F < 1."""
    if c_F is not None and c_F < 1:
        raise ValueError(f"the trace's bound c_F must be at least 1 (or None for no bound), not {c_F}")
    raw = _log_trace(logp, old_logp, mask, N).exp()
    return raw if c_F is None else raw.clamp(1 / c_F, c_F)


def weight(
    logp: Tensor, old_logp: Tensor, mask: Tensor, token_advantages: Float[Tensor, "N T"], N: int = 4, c_F: float | None = 5.0,
    eps_low: float = 0.2, eps_high: float = 0.28, prefix: bool = False, mask_trace: bool = False,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """M rho F of equations 3-5, detached: the weight of every token's A grad logp. `prefix` also corrects the state by the ratios before it."""
    rho = log_ratio(logp, old_logp, mask).detach().exp()
    found = trace(logp, old_logp, mask, N, c_F)
    inside = ~outside(rho, token_advantages, 1 - eps_low, 1 + eps_high)
    if mask_trace and c_F is not None:
        raw = _log_trace(logp, old_logp, mask, N).exp()
        inside &= (raw >= 1 / c_F) & (raw <= c_F)
    if prefix:
        found = found * _log_prefix(logp, old_logp, mask).exp()
    return rho * found * inside


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, N: int = 4, c_F: float | None = 5.0,
    eps_low: float = 0.2, eps_high: float = 0.28, prefix: bool = False, mask_trace: bool = False,
) -> LossValue:  # fmt: skip
    """Equation 5: minus the token mean of the weight times A logp. `advantages` [N] or [N,T]."""
    per_token = broadcast(advantages, mask) if advantages.dim() == 1 else advantages
    scale = weight(logp, old_logp, mask, per_token, N, c_F, eps_low, eps_high, prefix, mask_trace) * per_token
    inside = torch.where(mask.bool(), logp, torch.zeros_like(logp))
    return LossValue(-masked_mean(scale * inside, mask), -masked_mean(scale, mask))


def _log_trace(logp: Tensor, old_logp: Tensor, mask: Tensor, steps: int) -> Tensor:
    """log F [N,T], detached and within +-20: a difference of the row's running sums, which cannot reach into another row."""
    if steps < 1:
        raise ValueError(f"the trace needs N >= 1 (1 is PPO), not {steps}")
    total = torch.nn.functional.pad(log_ratio(logp, old_logp, mask).detach().cumsum(1), (1, 0))  # [N, T+1], total[:, k] sums the first k
    horizon = logp.shape[1]
    after = torch.arange(1, horizon + 1)
    ahead = total[:, (after + steps - 1).clamp(max=horizon)] - total[:, after]
    return torch.where(mask.bool(), ahead, torch.zeros_like(ahead)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _log_prefix(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Sum of the log-ratios before each position [N,T], detached and within +-20."""
    inside = log_ratio(logp, old_logp, mask).detach()
    return (inside.cumsum(1) - inside).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass
class ForwardTrace:
    """Masked policy gradient whose token ratios carry their N-step forward trace."""

    N: int = 4  # tokens whose ratios are multiplied, the token itself included, >= 1; 1 = PPO
    c_F: float | None = 5.0  # the trace stays in [1/c_F, c_F], >= 1; None = no bound
    eps_low: float = 0.2  # a token with A < 0 counts while its ratio is at least 1 - eps_low
    eps_high: float = 0.28  # and one with A > 0 while it is at most 1 + eps_high
    prefix: bool = False  # also correct the state by the ratios of the tokens before: unbiased, high variance
    mask_trace: bool = False  # drop tokens whose trace leaves its bounds

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        value = loss(
            new.logp, batch.logp, mask, batch.advantage, self.N, self.c_F, self.eps_low, self.eps_high, self.prefix, self.mask_trace
        )  # fmt: skip
        found = trace(new.logp, batch.logp, mask, self.N, self.c_F)
        metrics = {"surrogate": float(value.surrogate), "trace_spread": float(masked_mean((found - 1).abs(), mask))}
        rho = log_ratio(new.logp, batch.logp, mask).exp()
        return Loss(value.loss, metrics | ratio_metrics(rho, 1 - self.eps_low, 1 + self.eps_high, mask))


METHOD = GRPO.but(
    name="nfpo",
    paper=Paper("Multi-Step Likelihood-Ratio Correction for Reinforcement Learning with Verifiable Rewards", "2605.20865", 2026),
    summary="a token's ratio carries the cumulative ratio of the next N-1 tokens, a bridge from PPO's surrogate to the exact policy gradient",
    objective=ForwardTrace(),
    regularize=(),
)
