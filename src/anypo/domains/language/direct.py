"""Direct: a Llama-type body computed straight from its weights, for packed rows; `decoder.py` is its counterpart for decoding.

The layers of Llama, Qwen2, Qwen3 and their kin are written out because with the modules autograd keeps every intermediate of the norms, rotations
and gates, which here are recomputed or inverted in the backward pass. Whether a model is of that kind is found by trying: the states must be the
model's own (see `network.py`). Left out: every other architecture, and layers with adapters; their own modules compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from anypo.domains.language import kernels
from anypo.domains.language.attention import tree_attention
from anypo.domains.language.tree import PackedRow

Record = Callable[[Tensor, Tensor, int], Any]
LARGE = 1 << 14  # with fewer numbers than that a gate's passes are not what costs


class Direct:
    """The weights of one body, read in place so that they follow the optimizer. Make a new one when modules are replaced."""

    def __init__(self, body: Any, config: Any) -> None:
        """Raises AttributeError for a body of another kind."""
        self.body = body
        self.in_place = False  # whether a backward pass adds gradients of weights to their `.grad` itself; see `Total`
        self.heads: int = config.num_attention_heads
        self.key_heads: int = config.num_key_value_heads
        self.layers = [Layer(layer) for layer in body.layers]
        self.final = _norm_of(body.norm)

    def read(self, row: PackedRow, record: Record | None = None, checkpointing: bool = False) -> Float[Tensor, "L D"]:
        """States of a packed row, differentiable. `record(key, value, layer)` is shown the keys and values [1,K,L,W] of every layer;
        `checkpointing` keeps nothing but the states between layers for the backward pass."""
        state = self._embed(row.tokens)
        cosine, sine = (x[0, :, None] for x in self.body.rotary_emb(state[None], row.position[None]))
        for index, layer in enumerate(self.layers):
            if checkpointing and torch.is_grad_enabled():
                state = checkpoint(self._layer, layer, index, state, cosine, sine, row, None, use_reentrant=False)
            else:
                state = self._layer(layer, index, state, cosine, sine, row, record)
        return normalize(state, *self.final)

    def _layer(
        self, layer: Layer, index: int, state: Tensor, cosine: Tensor, sine: Tensor, row: PackedRow, record: Record | None
    ) -> Float[Tensor, "L D"]:
        query, key, value = (x.transpose(0, 1)[None] for x in self._attended(layer, state, cosine, sine))
        if record is not None:
            record(key, value, index)
        out = tree_attention(query, key, value, row, layer.scale)[0].flatten(1)
        state = Sum.apply(state, out, *layer.output, self.in_place)
        return GatedMlp.apply(state, *layer.norm_after, layer.gate, layer.up, layer.down, self.in_place)

    def _embed(self, tokens: Tensor) -> Float[Tensor, "L D"]:
        module = self.body.embed_tokens
        if not (self.in_place and type(module) is nn.Embedding and module.weight.requires_grad and torch.is_grad_enabled()):
            return module(tokens)
        return Embedding.apply(module.weight, tokens, module.padding_idx)

    def _attended(self, layer: Layer, state: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n,H,W] and keys [n,K,W], and values [n,K,W]."""
        mixed = Projections.apply(state, *layer.norm_before, self.in_place, *layer.query, *layer.key, *layer.value)
        query, key, value = (
            x.unflatten(1, (heads, -1)) for x, heads in zip(mixed, (self.heads, self.key_heads, self.key_heads), strict=True)
        )
        if layer.norm_query is not None and layer.norm_key is not None:
            query, key = normalize(query, *layer.norm_query), normalize(key, *layer.norm_key)
        return Rotation.apply(query, cosine, sine), Rotation.apply(key, cosine, sine), value


class Layer:
    """The weights of one layer, looked up once."""

    def __init__(self, layer: Any) -> None:
        mixer, mlp = layer.self_attn, layer.mlp
        self.query, self.key, self.value, self.output = (_linear_of(m) for m in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj))
        (self.gate, gate_bias), (self.up, up_bias), (self.down, down_bias) = (
            _linear_of(m) for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        if (gate_bias, up_bias, down_bias) != (None, None, None) or "silu" not in type(mlp.act_fn).__name__.lower():
            raise AttributeError("the gated layer has biases or another activation than SiLU")
        self.norm_before, self.norm_after = _norm_of(layer.input_layernorm), _norm_of(layer.post_attention_layernorm)
        self.norm_query = _norm_of(mixer.q_norm) if hasattr(mixer, "q_norm") else None
        self.norm_key = _norm_of(mixer.k_norm) if hasattr(mixer, "k_norm") else None
        self.scale: float = mixer.scaling


def _linear_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    if type(module) is not nn.Linear:
        raise AttributeError(f"{type(module).__name__} is not a plain linear layer")
    return module.weight, module.bias


def _norm_of(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def normalize(x: Float[Tensor, "*n D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*n D"]:
    """Root-mean-square norm, x / sqrt(mean(x^2) + eps) * weight. For the backward pass it keeps `x` and one number a row."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return Norm.apply(x, weight, eps)
    return _normalize(x, weight, eps)[0]


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    inverse = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype) * weight, inverse


def _normalize_backward(slope: Tensor, unit: Tensor, inverse: Tensor, weight: Tensor, needs_weight: bool) -> tuple[Tensor, Tensor | None]:
    """With u = x * inverse in float32 and y = u * weight: dx = inverse * (g - u * mean(g * u)) for g = dy * weight, and dweight = sum(dy * u)."""
    wide = slope.float()
    product = wide * unit
    grad_weight = product.flatten(0, -2).sum(dim=0).to(weight.dtype) if needs_weight else None
    along = (product @ weight.float()).div_(-weight.numel()).unsqueeze(-1)
    return (wide * weight).addcmul_(unit, along).mul_(inverse).to(slope.dtype), grad_weight


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse = _normalize(x, weight, eps)
        ctx.save_for_backward(x, inverse, weight)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, inverse, weight = ctx.saved_tensors
        return *_normalize_backward(slope, x.float() * inverse, inverse, weight, ctx.needs_input_grad[1]), None


def rotate(x: Float[Tensor, "n H W"], cosine: Float[Tensor, "n 1 W"], sine: Float[Tensor, "n 1 W"]) -> Float[Tensor, "n H W"]:
    """Rotary position embedding, without a gradient."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1).mul_(sine).add_(x * cosine)


class Rotation(torch.autograd.Function):
    """Rotary position embedding of [n,H,W] by [n,1,W] cosines and sines. The backward pass turns back, so that nothing of `x` is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return rotate(x, cosine, sine)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        low, high = (slope * sine).chunk(2, dim=-1)
        return torch.cat([high, -low], dim=-1).add_(slope * cosine), None, None


class Total:
    """Where the gradient of a weight is summed, `left.T @ right` after `left.T @ right`.

    In place it is the weight's own `.grad`, which spares a second matrix of its size and a pass over both; only for a backward pass whose one aim
    is to fill the `.grad` of all parameters. Made in the forward pass: with checkpointing, the saved weight of the backward pass is a detached copy.
    """

    def __init__(self, weight: Tensor, in_place: bool) -> None:
        self.weight, self.in_place = weight, in_place and weight.is_leaf

    def add(self, left: Float[Tensor, "n E"], right: Float[Tensor, "n D"]) -> Tensor | None:
        """The gradient for autograd, None where it is in place already."""
        if not self.in_place:
            return left.t() @ right
        if self.weight.grad is None:
            self.weight.grad = left.t() @ right
        else:
            self.weight.grad.addmm_(left.t(), right)
        return None


class Embedding(torch.autograd.Function):
    """Rows of a table; the backward pass adds to the rows that were looked up instead of making a gradient of the table's size."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
        ctx.weight, ctx.tokens, ctx.padding = weight, tokens, padding
        return weight[tokens]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None, None]:
        if ctx.padding is not None:
            slope = slope.masked_fill((ctx.tokens == ctx.padding)[:, None], 0.0)
        if ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(ctx.weight)
        ctx.weight.grad.index_add_(0, ctx.tokens, slope)
        return None, None, None


class Projections(torch.autograd.Function):
    """Several linear maps of one normalized state. Kept for the backward pass: the state and one number a row."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, scale: Tensor, eps: float, in_place: bool, *maps: Tensor | None) -> tuple[Tensor, ...]:
        """`maps`: weight and bias (or None) of each map in turn."""
        inner, inverse = _normalize(state, scale, eps)
        weights = [weight for weight in maps[::2] if weight is not None]
        ctx.save_for_backward(state, inverse, scale, *weights)
        ctx.totals = [Total(weight, in_place) for weight in weights]
        return tuple(linear(inner, weight, bias) for weight, bias in zip(weights, maps[1::2], strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        state, inverse, scale, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        unit = state.float() * inverse
        inner = unit.to(state.dtype) * scale
        maps: list[Tensor | None] = []
        for total, slope, for_weight, for_bias in zip(ctx.totals, slopes, needs[::2], needs[1::2], strict=True):
            maps += [total.add(slope, inner) if for_weight else None, slope.sum(dim=0) if for_bias else None]
        back = slopes[0] @ weights[0]
        for weight, slope in zip(weights[1:], slopes[1:], strict=True):
            back = back.addmm_(slope, weight)
        grad_state, grad_scale = _normalize_backward(back, unit, inverse, scale, ctx.needs_input_grad[1])
        return grad_state, grad_scale, None, None, *maps


class Sum(torch.autograd.Function):
    """state + x @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, in_place: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = Total(weight, in_place)
        out = torch.addmm(state, x, weight.t())
        return out if bias is None else out.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, _, for_weight, for_bias, _ = ctx.needs_input_grad
        grad_weight = ctx.total.add(slope, x) if for_weight else None
        return slope, slope @ weight, grad_weight, slope.sum(dim=0) if for_bias else None, None


class GatedMlp(torch.autograd.Function):
    """state + down(silu(gate(y)) * up(y)) with y the normalized state. Kept for the backward pass: the state, gate and up; the rest is computed
    anew."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, scale: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor, in_place: bool) -> Tensor:
        inner, inverse = _normalize(state, scale, eps)
        opened, raised = linear(inner, gate), linear(inner, up)
        ctx.save_for_backward(state, inverse, opened, raised, scale, gate, up, down)
        ctx.totals = [Total(weight, in_place) for weight in (gate, up, down)]
        return torch.addmm(state, _gate(opened, raised), down.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        state, inverse, opened, raised, scale, gate, up, down = ctx.saved_tensors
        _, needs_scale, _, needs_gate, needs_up, needs_down, _ = ctx.needs_input_grad
        total_gate, total_up, total_down = ctx.totals
        gated, grad_opened, grad_raised = _gate_backward(opened, raised, slope @ down)
        grad_down = total_down.add(slope, gated) if needs_down else None
        del gated
        unit = state.float() * inverse
        inner = unit.to(state.dtype) * scale
        grad_gate = total_gate.add(grad_opened, inner) if needs_gate else None
        grad_up = total_up.add(grad_raised, inner) if needs_up else None
        back = (grad_opened @ gate).addmm_(grad_raised, up)
        grad_state, grad_scale = _normalize_backward(back, unit, inverse, scale, needs_scale)
        return grad_state.add_(slope), grad_scale, None, grad_gate, grad_up, grad_down, None


def _gate(opened: Float[Tensor, "n I"], raised: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
    return kernels.gate(opened, raised) if _in_c(opened, raised) else silu(opened).mul_(raised)


def _gate_backward(
    opened: Float[Tensor, "n I"], raised: Float[Tensor, "n I"], slope: Float[Tensor, "n I"]
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(opened) * raised, and its gradients in both for `slope`, which is overwritten."""
    if _in_c(opened, raised, slope):
        return kernels.gate_backward(opened, raised, slope)
    active = silu(opened)
    by_opened = torch.ops.aten.silu_backward(slope * raised, opened)
    return active * raised, by_opened, slope.mul_(active)


def _in_c(*tensors: Tensor) -> bool:
    plain = all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    return plain and tensors[0].numel() >= LARGE and kernels.available()
