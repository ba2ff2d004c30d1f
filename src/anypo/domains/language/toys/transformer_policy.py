"""A small pre-norm decoder transformer over characters, for studies that look inside a language model or push at its inside.

It does what `GruPolicy` does, by the same protocol, and three things more. Its residual stream is open: `stream` returns what every attention and
feed-forward module adds, and the policy of every layer is a signal (see `anypo.domains.language.internal`). Rows may be written under a latent code
(see `anypo.domains.language.latents`). Left out: a cache of keys and values (texts are a dozen characters), dropout, rotary positions, a value head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, rms_norm, scaled_dot_product_attention

from anypo.batch import Batch
from anypo.domains.language.internal import internal_policy, layers_in, signal_of, signals_of
from anypo.domains.language.latents import Injectable
from anypo.domains.language.toys.gru_policy import ALPHABET, GruPolicy
from anypo.policy import Policy, Signals

INJECTIONS = ("attention", "softmax", "input")
SMALL_INJECTION = 0.01  # standard deviation of the injection's weights at the start


class Stream(NamedTuple):
    """The residual stream at every position: the state after layer l is `h0` plus the first l contributions of both kinds."""

    h0: Tensor  # [N,S,D] embeddings
    attn: Tensor  # [Y,N,S,D]
    ffn: Tensor  # [Y,N,S,D]


class Block(nn.Module):
    """One layer. With a code its first norm's gain is multiplied by 1 + u, u = W z, and a key and a value made of u stand before all others."""

    def __init__(self, width: int, heads: int, latent: int) -> None:
        super().__init__()
        self.heads = heads
        self.gain1, self.gain2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.joined = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.inject = nn.Linear(latent, width, bias=False) if latent else None

    def attend(self, x: Float[Tensor, "N S D"], code: Tensor | None, has: Tensor | None) -> Float[Tensor, "N S D"]:
        """What attention adds. `code` [N,m] with `has` [N]: the rows that have one."""
        rows, length, width = x.shape
        push = None
        if code is not None and has is not None and self.inject is not None:
            push = self.inject(code) * has[:, None]
        normed = rms_norm(x, (width,)) * (self.gain1 if push is None else self.gain1 * (1 + push)[:, None])
        query, key, value = self._heads(self.mixed(normed))
        allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, 1, length, length)
        if push is not None and has is not None:
            _, extra_key, extra_value = self._heads(self.mixed(push[:, None]))
            key, value = torch.cat([extra_key, key], 2), torch.cat([extra_value, value], 2)
            allowed = torch.cat([has[:, None, None, None].expand(rows, 1, length, 1), allowed], -1)
        attended = scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.joined(attended.transpose(1, 2).reshape(rows, length, width))

    def feed(self, x: Float[Tensor, "N S D"]) -> Float[Tensor, "N S D"]:
        """What the feed-forward module adds."""
        return self.down(gelu(self.up(rms_norm(x, (x.shape[-1],)) * self.gain2)))

    def _heads(self, mixed: Tensor) -> Iterable[Tensor]:
        return (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=-1))


class TransformerPolicy(Injectable, GruPolicy):
    """Token and position embeddings, pre-norm layers, a final norm and a linear output. Token 0 is the end token.

    `hidden` is the state after the last layer and the final norm. `layer_logp_<l>` is the policy of layer l; its gradient reaches the layers up to l,
    the embeddings and the output alone. With `latent` > 0 a row may have a code of that width, which acts by `injection`: "attention" (every layer's
    gain and one more key and value), "softmax" (the logits) or "input" (the embeddings).
    """

    learning_rate = 5e-4
    imitation_rate = 2e-3
    context_limit = 32

    def __init__(
        self, *, width: int = 64, layers: int = 4, heads: int = 4, latent: int = 0, injection: str = "attention", alphabet: str = ALPHABET,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """The weights do not depend on `latent`. Raises ValueError for an unknown injection."""
        Policy.__init__(self)
        if injection not in INJECTIONS:
            raise ValueError(f"unknown injection '{injection}'; use one of {', '.join(INJECTIONS)}")
        self.alphabet, self.vocabulary, self.injection, self.latent = alphabet, len(alphabet) + 1, injection, latent
        inside = latent if injection == "attention" else 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(self.vocabulary, width)
            self.position = nn.Embedding(self.context_limit, width)
            self.blocks = nn.ModuleList(Block(width, heads, 0) for _ in range(layers))
            self.gain = nn.Parameter(torch.ones(width))
            self.output = nn.Linear(width, self.vocabulary, bias=False)
            self.value_head = None
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.3 * width**-0.5 if parameter is self.output.weight else width**-0.5)
            for block in self.blocks if inside else ():
                block.inject = nn.Linear(latent, width, bias=False)
                nn.init.normal_(block.inject.weight, std=SMALL_INJECTION)
            shift = {"softmax": self.vocabulary, "input": width}.get(injection, 0) if latent else 0
            self.shift = nn.Linear(latent, shift, bias=False) if shift else None
            if self.shift is not None:
                nn.init.normal_(self.shift.weight, std=SMALL_INJECTION)
        provided = {"logp", "entropy", "logits", "hidden", "prompt_hidden", "prompt_logp", "prompt_mask"} | signals_of(layers)
        self.provides = frozenset(provided | ({"latent"} if latent else set()))

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def injection_parameters(self) -> list[nn.Parameter]:
        """The weights through which codes act."""
        return [p for name, p in self.named_parameters() if ".inject." in name or name.startswith("shift.")]

    # -- the pass --------------------------------------------------------------------------------------------------------------------------

    def stream(self, tokens: Int[Tensor, "N S"], layer: int | None = None, rows: Tensor | None = None) -> Stream:
        """Contributions of the first `layer` layers (None = all). `rows`: which rows of the codes in force these are (None = all, in order)."""
        code, has = self.codes_of(rows, len(tokens))
        x = h0 = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        if code is not None and has is not None and self.injection == "input" and self.shift is not None:
            x = h0 = h0 + (self.shift(code) * has[:, None])[:, None]
        attn, ffn = [], []
        for block in list(self.blocks)[:layer]:
            attn.append(block.attend(x, code if self.injection == "attention" else None, has))  # type: ignore[operator]
            x = x + attn[-1]
            ffn.append(block.feed(x))  # type: ignore[operator]
            x = x + ffn[-1]
        return Stream(h0, torch.stack(attn), torch.stack(ffn))

    def layer_states(self, tokens: Int[Tensor, "N S"], layer: int, rows: Tensor | None = None) -> Float[Tensor, "N S D"]:
        """The stream after `layer` layers; that of the last one with the final norm."""
        found = self.stream(tokens, layer, rows)
        x = found.h0 + (found.attn + found.ffn).sum(0)
        return rms_norm(x, (x.shape[-1],)) * self.gain if layer == self.layers else x

    def logits(self, states: Float[Tensor, "*N D"], rows: Tensor | None = None) -> Float[Tensor, "*N V"]:
        """The output, with the code's bias where codes act there."""
        logits = self.output(states)
        code, has = self.codes_of(rows, len(states))
        if code is not None and has is not None and self.injection == "softmax" and self.shift is not None:
            bias = self.shift(code) * has[:, None]
            logits = logits + (bias if states.dim() == 2 else bias[:, None])
        return logits

    def laid_out(self, context: Sequence[Tensor], action: Int[Tensor, "N T"]) -> tuple[Int[Tensor, "N S"], Int[Tensor, "N T+1"]]:
        """Prompt and completion as rows padded on the right, and where the state before every action and after all of them lies."""
        lengths = self._lengths(context)
        tokens = nn.utils.rnn.pad_sequence(list(context), batch_first=True)
        tokens = pad(tokens, (0, action.shape[1]))
        tokens = tokens.scatter(1, lengths[:, None] + torch.arange(action.shape[1]), action)
        return tokens, lengths[:, None] - 1 + torch.arange(action.shape[1] + 1)

    def _read(self, context: Sequence[Tensor], action: Int[Tensor, "N T"]) -> tuple[Float[Tensor, "N T+1 D"], Float[Tensor, "N S D"]]:
        tokens, where = self.laid_out(context, action)
        states = self.layer_states(tokens, self.layers)
        return states.gather(1, where[..., None].expand(-1, -1, states.shape[-1])), states

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """As in GruPolicy, and the policies of single layers. Rows with a code in `batch.signals` (see `Injectable`) are read under it."""
        with self.injected_in(batch):
            signals = super().evaluate(batch, needs)
            for layer in layers_in(needs):
                signals[signal_of(layer)] = self._layer_logp(batch, layer)
        return signals

    def _layer_logp(self, batch: Batch, layer: int) -> Float[Tensor, "N T"]:
        tokens, where = self.laid_out(batch.context, batch.action)
        states = self.layer_states(tokens, layer)
        before = states.gather(1, where[:, :-1, None].expand(-1, -1, states.shape[-1]))
        return internal_policy(before, self.output.weight, batch.action, batch.mask, batch.signals.get("temperature", 1.0)).logp

    # -- sampling: the text so far is read again for every token ---------------------------------------------------------------------------

    def _begin(self, prompts: Sequence[Tensor], source: Int[Tensor, " N"], horizon: int) -> Any:
        tokens, where = self.laid_out(prompts, torch.zeros(len(prompts), horizon, dtype=torch.int64))
        return tokens[source], where[source, 0]

    def _last(self, state: Any, active: Bool[Tensor, " N"]) -> Float[Tensor, "N D"]:
        tokens, place = state
        rows = active.nonzero().flatten()
        found = self.layer_states(tokens[rows, : int(place[rows].max()) + 1], self.layers, rows)
        states = found.new_zeros(len(tokens), found.shape[-1])
        return states.index_copy(0, rows, found[torch.arange(len(rows)), place[rows]])

    def _advance(self, state: Any, chosen: Int[Tensor, " N"]) -> Any:
        tokens, place = state
        place = (place + 1).clamp(max=tokens.shape[1] - 1)
        return tokens.scatter(1, place[:, None], chosen[:, None]), place
