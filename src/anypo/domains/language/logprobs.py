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

CHUNK_ELEMENTS = 1 << 24  # logits held at once: 64 MB in float32


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
    return torch.nn.functional.linear(hidden, weight).float().mul_(scale[:, None])


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
            logits = tempered_logits(hidden[part], weight, scale[part])
            partition = logits.logsumexp(dim=1)
            logp[part] = logits.gather(1, target[part, None])[:, 0] - partition
            if want_entropy:
                entropy[part] = _entropy(logits.sub_(partition[:, None]))
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
            # d logp / d logit_j = [j is the target] - p_j, and d entropy / d logit_j = -p_j (log p_j + entropy).
            centred = tempered_logits(hidden[part], weight, scale[part])
            centred.sub_(centred.logsumexp(dim=1, keepdim=True))
            if ctx.want_entropy:
                slope = (centred + _entropy(centred)[:, None]).mul_(grad_entropy[part, None]).add_(grad_logp[part, None]).neg_()
                slope.mul_(centred.exp_())
            else:
                slope = centred.exp_().mul_(-grad_logp[part, None])
            slope.scatter_add_(1, target[part, None], grad_logp[part, None])
            slope = slope.mul_(scale[part, None]).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                _add_product(grad_weight, slope.T, hidden[part])
        returned = None if grad_weight is None or (ctx.gradient_only and weight.is_leaf) else grad_weight.to(weight.dtype)
        return grad_hidden, returned, None, None, None, None


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
