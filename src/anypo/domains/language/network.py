"""Network: a Hugging Face causal language model seen as a body (tokens to states) and a linear read-out (states to logits).

The split lets the policy compute states once a tree and read logits off the few positions that need them. What a model can do is found by
trying it once: a packed tree must give the states of plain rows, and the read-out must give the model's own logits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from anypo.domains.language import attention
from anypo.domains.language.decoder import Decoder
from anypo.domains.language.direct import Direct
from anypo.domains.language.tree import PackedRow, pack

log = logging.getLogger(__name__)


@dataclass
class States:
    """Hidden states of a set of sequences, each distinct prefix once."""

    final: Float[Tensor, "M D"]  # after the last layer and its norm
    chosen: Float[Tensor, "M D"]  # of the layer asked for
    node: Int64[Tensor, "N S"]  # where the state after token s of sequence n lies; -1 beyond its end


class Network:
    """Body and read-out of `model`. Raises ValueError for a model whose logits are not a linear function of its last hidden states."""

    def __init__(self, model: Any) -> None:
        self.body: Any = getattr(model, model.base_model_prefix)
        self.head: Any = model.get_output_embeddings()
        self.config = model.config
        # Cohere multiplies its logits, Granite divides them.
        self.scale = float(getattr(self.config, "logit_scale", None) or 1 / (getattr(self.config, "logits_scaling", None) or 1.0))
        # transformers renamed the argument in 5.x.
        self.cache_argument = "cache" if "cache" in inspect.signature(self.body.forward).parameters else "past_key_values"
        self.push: Tensor | None = None  # [D] added to the states that samples are drawn from
        self.checkpointing = False  # keep only the states between layers for the backward pass
        self._check_readout(model)
        self.direct = self._try_direct()
        attention.register()
        if self.config._attn_implementation == "sdpa":
            self.config._attn_implementation = attention.NAME
        self.takes_trees = self.direct is not None or self._try_tree()
        if not self.takes_trees:
            log.warning("%s cannot take tree attention; its rows are evaluated one by one, which is slower", type(model).__name__)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def vocabulary(self) -> int:
        return self.head.weight.shape[0]

    def __call__(
        self,
        tokens: Int64[Tensor, "B L"],
        mask: Tensor | None,
        position: Int64[Tensor, "B L"] | None,
        cache: Any = None,
        layer: int | None = None,
        **more: Any,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """(final states, states of `layer`); `mask` is [B,1,L,K] bool, a padding mask [B,K], or None for plain causal rows."""
        arguments = {"input_ids": tokens, "attention_mask": mask, "position_ids": position, "output_hidden_states": layer is not None}
        output = self.body(**arguments, use_cache=cache is not None, **{self.cache_argument: cache}, **more)
        return output.last_hidden_state, output.last_hidden_state if layer is None else output.hidden_states[layer]

    def read_packed(self, row: PackedRow, cache: Any = None, layer: int | None = None) -> tuple[Float[Tensor, "L D"], Float[Tensor, "L D"]]:
        """(final states, states of `layer`) of a packed row. A cache only records."""
        row = row.to(self.device)
        if self.direct is not None and layer is None:
            final = self.direct.read(row, None if cache is None else cache.update, self.checkpointing)
            return final, final
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)  # four dimensions keep transformers from making a mask itself
        states, chosen = self(row.tokens[None], unused, row.position[None], cache, layer, packed=row)
        return states[0], chosen[0]

    def readout(self, hidden: Float[Tensor, "M D"]) -> tuple[Float[Tensor, "M D"], Float[Tensor, "V D"]]:
        """(hidden, weight) such that the logits are `scale * hidden @ weight.T`; a bias becomes one more column."""
        bias = getattr(self.head, "bias", None)
        if bias is None:
            return hidden, self.head.weight
        return torch.cat([hidden, hidden.new_full((len(hidden), 1), 1 / self.scale)], 1), torch.cat([self.head.weight, bias[:, None]], 1)

    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """float32 logits of a few states."""
        return self.scaled(self.head(hidden))

    def scaled(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """What the head put out as the model's own logits, in float32."""
        return logits.float() if self.scale == 1.0 else logits.float() * self.scale

    def states(self, sequences: Sequence[Tensor], prompt_lengths: Sequence[int], budget: int, layer: int | None = None) -> States:
        """States of all sequences: as packed trees of at most `budget` tokens a row where the model takes them, else as padded rows."""
        if not self.takes_trees:
            return self._plain_states(sequences, layer)
        final, chosen, start = [], [], 0
        node = torch.full((len(sequences), max(len(s) for s in sequences)), -1)
        for row in pack(sequences, budget, prompt_lengths):
            one, other = self.read_packed(row, layer=layer)
            final.append(one)
            chosen.append(other)
            node[row.rows, : row.node.shape[1]] = torch.where(row.node < 0, row.node, row.node + start)
            start += len(row.tokens)
        return States(torch.cat(final), torch.cat(chosen), node.to(self.device))

    def _plain_states(self, sequences: Sequence[Tensor], layer: int | None) -> States:
        tokens, exists = pad_right(sequences)
        final, chosen = self(tokens.to(self.device), exists.long().to(self.device), None, layer=layer)
        node = torch.arange(exists.numel()).view_as(exists).masked_fill(~exists, -1)
        return States(final.flatten(0, 1), chosen.flatten(0, 1), node.to(self.device))

    @torch.no_grad()
    def _check_readout(self, model: Any) -> None:
        tokens = torch.arange(1, 5, device=self.device)[None] % self.vocabulary
        own = model(input_ids=tokens, use_cache=False).logits[0]
        ours = self.logits(self(tokens, None, None)[0][0])
        if own.shape != ours.shape or not _close(ours, own):
            raise ValueError(
                f"{type(model).__name__} does not read its logits linearly off its last hidden states; such a head is not supported"
            )

    def _attends_fully(self) -> bool:
        """Whether every layer sees the whole prefix; windows longer than any trial are known from the configuration alone."""
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        windowed = getattr(self.config, "sliding_window", None) is not None and getattr(self.config, "use_sliding_window", True)
        return kinds == {"full_attention"} and not windowed and getattr(self.config, "attention_chunk_size", None) is None

    @torch.no_grad()
    def _try_tree(self) -> bool:
        """Whether the model's own modules give the states of plain rows when they read a packed tree."""
        self.takes_trees = self._attends_fully()
        try:
            return self.takes_trees and self._reads_trees()
        except (TypeError, ValueError, RuntimeError):  # models differ in how they refuse what they do not know
            return False

    @torch.no_grad()
    def _try_direct(self) -> Direct | None:
        """The body computed from its weights, where that gives the states of the model itself: for a packed tree and token by token."""
        try:
            self.direct, self.takes_trees = Direct(self.body, self.config), True
        except AttributeError:  # another architecture, or layers with adapters
            return None
        return self.direct if self._attends_fully() and self._reads_trees() and self._steps() else None

    def _reads_trees(self) -> bool:
        trial = [torch.tensor(t) % self.vocabulary for t in ([1, 2, 3, 4, 5], [1, 2, 3, 6, 7, 8], [9, 10, 11])]
        packed, plain = self.states(trial, [3, 3, 2], 64), self._plain_states(trial, None)
        return _close(packed.final[packed.node[plain.node >= 0]], plain.final[plain.node[plain.node >= 0]])

    def _steps(self) -> bool:
        tokens = torch.tensor([[1, 2, 3], [4, 5, 6]], device=self.device) % self.vocabulary
        expected, _ = self(tokens, None, None)
        seen: dict[int, tuple[tuple[Tensor], tuple[Tensor]]] = {}

        def attend(mixed: Tensor, layer: int, scale: float) -> Tensor:
            assert self.direct is not None
            query, key, value = mixed.split([self.direct.heads, self.direct.key_heads, self.direct.key_heads], dim=1)
            keys, values = (torch.cat([*old, new[:, :, None]], 2) for old, new in zip(seen.get(layer, ((), ())), (key, value), strict=True))
            seen[layer] = ((keys,), (values,))
            return scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]

        assert self.direct is not None
        decoder = Decoder(self.direct, self.head, rows=2)
        found = [decoder.step(tokens[:, t], torch.full((2,), t, device=self.device), attend) for t in range(3)]
        return _close(torch.stack(found, dim=1), expected)


def pad_right(sequences: Sequence[Tensor], pad: int = 0) -> tuple[Int64[Tensor, "N S"], Bool[Tensor, "N S"]]:
    """The sequences as rows of one tensor, and which of its places exist."""
    tokens = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(s) for s in sequences])
    return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]


def _close(found: Float[Tensor, "*M D"], expected: Float[Tensor, "*M D"]) -> bool:
    """Equal up to rounding. In low precision single states may differ much where rounding decides what is attended to, so the median counts."""
    exact = found.dtype == expected.dtype == torch.float32
    found, expected = found.float(), expected.float()
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)
    return bool(error.max() <= 1e-3 if exact else error.median() <= 1e-1)
