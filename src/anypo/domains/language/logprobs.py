"""Log-probs and entropies read off hidden states, without ever holding the logits of all positions.

The read-out `hidden @ weight.T` is the largest tensor of a small language model by far. Here it exists for one chunk of positions at a time, in
the forward pass and, computed anew, in the backward pass. Sums run in float32 whatever the model's precision is.
Left out: second derivatives (the backward pass is written by hand) and biases (no current causal language model has one on its head).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import linear

CHUNK_ELEMENTS = 1 << 24  # logits held at once: 64 MB in float32
BLOCK_ELEMENTS = 1 << 19  # logits worked on at once: 2 MB in float32, which stay in a processor's cache from one operation to the next


def token_logprobs(
    hidden: Float[Tensor, "M D"],
    weight: Float[Tensor, "V D"],
    target: Int64[Tensor, " M"],
    scale: Float[Tensor, " M"],
    want_entropy: bool = False,
    gradient_only: bool = False,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"] | None]:
    """log softmax(scale * hidden @ weight.T)[target] and, when asked for, the entropy of that softmax; both float32 and differentiable.

    `scale` is the inverse temperature of each position, > 0. The gradient is exact with respect to `hidden` and `weight`. With
    `gradient_only` the values are not computed (they are zero) and the gradient of a leaf `weight` is added to its `.grad` at once: for a
    backward pass into the parameters whose incoming gradients are known beforehand.
    """
    logp, entropy = _TokenLogprobs.apply(hidden, weight, target, scale.float(), want_entropy, gradient_only)
    return logp, entropy if want_entropy else None


def tempered_logits(hidden: Tensor, weight: Tensor, scale: Float[Tensor, " M"]) -> Float[Tensor, "M V"]:
    """float32 logits of a few positions, divided by their temperatures."""
    return linear(hidden, weight).float().mul_(scale[:, None])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, scale: Tensor, want_entropy: bool, gradient_only: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, target, scale)
        ctx.want_entropy, ctx.gradient_only = want_entropy, gradient_only
        logp = hidden.new_zeros(len(hidden), dtype=torch.float32)
        entropy = torch.zeros_like(logp) if want_entropy else logp.new_empty(0)
        for part in [] if gradient_only else _chunks(len(hidden), weight.shape[0]):
            logits = linear(hidden[part], weight)
            for rows in _blocks(logits):
                table = logits[rows].float().mul(scale[part][rows, None]).log_softmax(dim=1)
                logp[part][rows] = table.gather(1, target[part][rows, None])[:, 0]
                if want_entropy:
                    entropy[part][rows] = _entropy(table)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, target, scale = ctx.saved_tensors
        grad_logp, grad_entropy = gradients
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = _weight_gradient(weight, in_place=ctx.gradient_only) if needs_weight else None
        for part in _chunks(len(hidden), weight.shape[0]):
            slope = linear(hidden[part], weight)
            for rows in _blocks(slope):
                by_entropy = grad_entropy[part][rows] if ctx.want_entropy else None
                slope[rows] = _slope(slope[rows], target[part][rows], scale[part][rows], grad_logp[part][rows], by_entropy)
            if grad_hidden is not None:
                grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                _add_product(grad_weight, slope.T, hidden[part])
        returned = None if grad_weight is None or (ctx.gradient_only and weight.is_leaf) else grad_weight.to(weight.dtype)
        return grad_hidden, returned, None, None, None, None


def _slope(
    logits: Float[Tensor, "m V"],
    target: Int64[Tensor, " m"],
    scale: Float[Tensor, " m"],
    grad_logp: Float[Tensor, " m"],
    grad_entropy: Float[Tensor, " m"] | None,
) -> Float[Tensor, "m V"]:
    """Gradient in the untempered logits: d logp / d logit_j = [j is the target] - p_j, and d entropy / d logit_j = -p_j (log p_j + entropy)."""
    tempered = logits.float().mul(scale[:, None])
    grad_logp = grad_logp * scale
    if grad_entropy is None:
        slope = tempered.softmax(dim=1).mul_(-grad_logp[:, None])
    else:
        table = tempered.log_softmax(dim=1)
        slope = (table + _entropy(table)[:, None]).mul_((grad_entropy * scale)[:, None]).add_(grad_logp[:, None]).neg_().mul_(table.exp_())
    return slope.scatter_add_(1, target[:, None], grad_logp[:, None])


def _weight_gradient(weight: Tensor, in_place: bool) -> Tensor:
    """Where the gradient of the read-out is summed: the parameter's own `.grad`, which spares a copy of the largest matrix, or a float32 buffer."""
    if not (in_place and weight.is_leaf):
        return torch.zeros_like(weight, dtype=torch.float32)
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _entropy(log_probability: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    return -(log_probability.exp() * log_probability).sum(dim=1)


def _chunks(count: int, vocabulary: int) -> list[slice]:
    """Slices of equal size: a small rest would cost a pass over the whole weight."""
    pieces = -(-count * vocabulary // CHUNK_ELEMENTS)
    size = max(1, -(-count // max(pieces, 1)))
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def _blocks(logits: Float[Tensor, "M V"]) -> list[slice]:
    """Slices of rows that fit the cache; on another device than a CPU, where calls are what costs, all rows."""
    size = max(1, BLOCK_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return [slice(i, i + size) for i in range(0, len(logits), size)]
