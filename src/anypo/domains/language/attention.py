"""Attention over packed trees, as an attention implementation that transformers' models can use.

Every block of edges (see `tree.py`) is one call of PyTorch's scaled dot-product attention on the keys of the edges' own paths, so that neither
the sibling branches nor the other trees in the row cost anything. Without blocks it is transformers' own `sdpa`, so that a model that was
prepared this way behaves as before everywhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anypo.domains.language.tree import Block, PackedRow

NAME = "anypo_tree"


def register() -> None:
    """Make the implementation known to transformers under `NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: PackedRow | None = None,
    **settings: Any,
) -> tuple[Float[Tensor, "B L H D"], None]:
    """What transformers calls in every layer. `packed` is the row that was handed to the model as a keyword."""
    if packed is not None:
        return tree_attention(query, key, value, packed, settings.get("scaling")), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


def tree_attention(
    query: Float[Tensor, "1 H L D"], key: Float[Tensor, "1 K L D"], value: Float[Tensor, "1 K L D"], packed: PackedRow, scale: float | None
) -> Float[Tensor, "1 L H D"]:
    """Every token's attention over its ancestors and itself. H is a multiple of K: query heads share key heads in order."""
    parts = [_block_attention(query[0], key[0], value[0], block, scale) for block in packed.blocks]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0]
    return flat.index_select(0, packed.output)[None]


def _block_attention(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None) -> Float[Tensor, "bQ H D"]:
    heads, groups = query.shape[0], query.shape[0] // key.shape[0]
    q, k, v = _take(query, block.query), _take(key, block.key), _take(value, block.key)
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.requires_grad:
        q, k, v = q.float(), k.float(), v.float()  # PyTorch's backward kernel for bfloat16 takes half as long again on a CPU
    if block.seen is None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups > 1)
    else:
        # Query heads of one key head stand in line as further queries, which spares copies of the keys.
        count, width = block.query.shape
        folded = q.reshape(count, heads // groups, groups * width, q.shape[-1])
        out = scaled_dot_product_attention(folded, k, v, attn_mask=block.bias(groups, q.dtype), scale=scale)
        out = out.reshape(count, heads, width, q.shape[-1])
    return out.transpose(1, 2).flatten(0, 1).to(query.dtype)


def _take(states: Float[Tensor, "H L D"], places: Tensor) -> Float[Tensor, "b H Q D"]:
    picked = states.index_select(1, places.flatten())
    return picked.view(len(states), *places.shape, states.shape[-1]).transpose(0, 1)
