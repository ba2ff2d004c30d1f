"""Decoder: one token a row through a Llama-type body, straight through its weights.

Decoding runs a model once for every token, on a handful of rows, where the modules' bookkeeping costs as much as the arithmetic. The layers
of Llama, Qwen2, Qwen3 and their kin are written out here instead. Whether a model is of that kind is found by trying: the step must
give the states that the model itself gives. Left out: every other architecture (its own modules decode it) and adapters that are not merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

Update = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class Decoder:
    """The step of one body. It reads the weights in place, so that it follows the optimizer; make a new one when modules are replaced."""

    def __init__(self, body: Any, config: Any) -> None:
        """Raises AttributeError for a body of another kind."""
        self.body = body
        self.heads: int = config.num_attention_heads
        self.key_heads: int = config.num_key_value_heads
        self.layers = [_Layer(layer) for layer in body.layers]
        self.final = (body.norm.weight, body.norm.variance_epsilon)

    def __call__(
        self, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"], update: Update, bias: Float[Tensor, "n 1 1 S"] | None
    ) -> Float[Tensor, "n D"]:
        """States after reading `token` at `position`. `update(key, value [n,K,width], layer)` returns all keys and values [n,K,S,width];
        `bias` is added to the scores, -inf where a row must not look."""
        state = self.body.embed_tokens(token)
        cosine, sine = (x[:, 0, None] for x in self.body.rotary_emb(state, position[:, None]))
        for index, layer in enumerate(self.layers):
            state = state + self._attend(layer, index, state, cosine, sine, update, bias)
            inner = _norm(state, layer.norm_after)
            state = state + _linear(layer.act(_linear(inner, layer.gate)).mul_(_linear(inner, layer.up)), layer.down)
        return _norm(state, self.final)

    def _attend(
        self, layer: _Layer, index: int, state: Tensor, cosine: Tensor, sine: Tensor, update: Update, bias: Tensor | None
    ) -> Float[Tensor, "n D"]:
        count, inner = len(state), _norm(state, layer.norm_before)
        query = _linear(inner, layer.query).unflatten(1, (self.heads, -1))
        key = _linear(inner, layer.key).unflatten(1, (self.key_heads, -1))
        value = _linear(inner, layer.value).unflatten(1, (self.key_heads, -1))
        if layer.norm_query is not None:
            query, key = _norm(query, layer.norm_query), _norm(key, layer.norm_key)
        both = torch.cat([query, key], dim=1)
        low, high = both.chunk(2, dim=2)
        both = both * cosine + torch.cat([-high, low], dim=2) * sine
        keys, values = update(both[:, self.heads :], value, index)
        # Query heads that share a key head stand in line as several queries, so that the keys need not be repeated.
        folded = both[:, : self.heads].unflatten(1, (self.key_heads, -1))
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=layer.scale)
        return _linear(out.reshape(count, -1), layer.output)


class _Layer:
    """The weights of one layer, looked up once."""

    def __init__(self, layer: Any) -> None:
        mixer, mlp = layer.self_attn, layer.mlp
        self.query, self.key, self.value, self.output = (_plain(m) for m in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj))
        self.gate, self.up, self.down = (_plain(m) for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.norm_before, self.norm_after = (
            (norm.weight, norm.variance_epsilon) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        normed = hasattr(mixer, "q_norm")
        self.norm_query = (mixer.q_norm.weight, mixer.q_norm.variance_epsilon) if normed else None
        self.norm_key = (mixer.k_norm.weight, mixer.k_norm.variance_epsilon) if normed else None
        self.act, self.scale = mlp.act_fn, mixer.scaling


def _plain(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    if type(module) is not nn.Linear:
        raise AttributeError(f"{type(module).__name__} is not a plain linear layer")
    return module.weight, module.bias


def _linear(rows: Float[Tensor, "n D"], parameters: tuple[Tensor, Tensor | None]) -> Float[Tensor, "n E"]:
    # For few rows the product with the weight on the left is up to four times as fast on a CPU in bfloat16, and no slower in float32.
    weight, bias = parameters
    out = torch.mm(weight, rows.t()).t()
    return out if bias is None else out + bias


def _norm(x: Tensor, parameters: tuple[Tensor, float]) -> Tensor:
    weight, eps = parameters
    return rms_norm(x, weight.shape, weight, eps)
