"""Block-wise decoding: blocks from left to right, and inside a block as many tokens a pass as the network is sure of.

In every pass the network proposes a token for each masked position of the block. Those whose distribution has a maximum above the threshold are
kept, at least the surest one: threshold 0 writes a block in one pass, threshold 1 one token a pass. Left out: masking again what was written,
caches of finished blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from anypo.domains.masked.states import block_states, canvas

Read = Callable[[Tensor, Tensor, Tensor], Tensor]  # (states [n,L], places [n,W] in them, rows [n]) -> log-probs [n,W,V]


class Decoded(NamedTuple):
    """What was written, N rows of T places, T the largest limit."""

    tokens: Tensor  # [N,T] int64, 0 where nothing is
    valid: Tensor  # [N,T] bool: places of the blocks that were begun
    mask: Tensor  # [N,T] bool: of those, the tokens up to and with the first end token
    logp: Tensor  # [N,T] of the token in its prefix-block state, 0 outside the mask
    entropy: Tensor  # [N,T] of that state's distribution over the token, 0 outside the mask
    reveal_pass: Tensor  # [N,T] int64: the pass of its block, from 0, in which the token was kept; -1 where nothing is
    reveal_logp: Tensor  # [N,T] of the token in the state in which it was kept
    passes: Tensor  # [N] int64: calls of the network for this row
    finished: Tensor  # [N] bool: an end token was written


def reveal(confidence: Float[Tensor, "*N W"], masked: Tensor, threshold: float) -> Bool[Tensor, "*N W"]:
    """Which masked positions of a block are kept: those with a confidence (largest probability) above the threshold, at least the surest."""
    masked = masked.bool()
    sure = torch.where(masked, confidence, -torch.inf)
    surest = torch.zeros_like(masked).scatter(-1, sure.argmax(-1, keepdim=True), True)
    return masked & ((sure > threshold) | surest)


def end_tokens(tokens: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Where a token is one of the end tokens."""
    return torch.isin(tokens, torch.tensor(list(eos_ids), dtype=torch.int64))


@dataclass
class Slate:
    """Answers being written, N rows of T places."""

    prompts: Sequence[Tensor]
    limit: Tensor  # [N] int64
    tokens: Tensor  # [N,T] int64
    open: Tensor  # [N,T] bool: not written yet
    valid: Tensor  # [N,T] bool: in a block that was begun
    logp: Tensor
    entropy: Tensor
    reveal_pass: Tensor
    reveal_logp: Tensor
    passes: Tensor

    @staticmethod
    def empty(prompts: Sequence[Tensor], limit: Int64[Tensor, " N"]) -> Slate:
        shape = (len(prompts), int(limit.max()))
        zeros, nothing = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        return Slate(
            prompts, limit, zeros, zeros == 0, zeros > 0, nothing, nothing.clone(), zeros - 1, nothing.clone(), torch.zeros_like(limit)
        )

    def begin(self, begun: Int64[Tensor, "N t"], depth: Int64[Tensor, " N"]) -> None:
        """The first `depth[n]` tokens are those of `begun`."""
        given = torch.arange(self.tokens.shape[1]) < torch.minimum(depth, self.limit)[:, None]
        width = min(given.shape[1], begun.shape[1])
        self.tokens[:, :width] = torch.where(given[:, :width], begun[:, :width], 0)
        self.open, self.valid = ~given, given

    def states(self, rows: Int64[Tensor, " n"], number: int, block: int, mask_id: int, tail: str) -> tuple[Tensor, Tensor]:
        """The states of block `number` as far as it is written [n,L], and where in them the answer begins [n]."""
        segment = torch.where(self.open[rows], torch.arange(self.tokens.shape[1]) // block, -1)
        table = canvas([self.prompts[i] for i in rows.tolist()], self.tokens[rows], segment, self.valid[rows], mask_id)
        every = torch.arange(len(rows))
        return block_states(table, every, torch.full_like(every, number), mask_id, tail, self.limit[rows]), table.offset

    def ended(self, eos_ids: Sequence[int]) -> Bool[Tensor, " N"]:
        """Rows with an end token."""
        return (end_tokens(self.tokens, eos_ids) & self.valid & ~self.open).any(1)


@dataclass
class Decoder:
    """Writes answers with `read`, which gives log-probs of chosen places of states."""

    read: Read
    generator: torch.Generator
    block: int  # tokens, >= 1
    threshold: float  # of the largest probability, in [0,1]
    mask_id: int
    eos_ids: Sequence[int]
    tail: str = "drop"  # or mask, see `states.py`
    greedy: bool = False  # propose the likeliest token instead of a drawn one

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"a block holds at least 1 token, not {self.block}; set block to 1 or more")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold is a probability, not {self.threshold}; 0 writes a block in one pass, 1 one token a pass")

    def __call__(self, prompts: Sequence[Tensor], limit: Int64[Tensor, " N"], begun: tuple[Tensor, Tensor] | None = None) -> Decoded:
        """Answers of up to `limit[n]` tokens to every prompt, one row each.

        `begun`: tokens [N,t] and depth [N]; the first `depth[n]` tokens of a row are given, and `logp` and `entropy` are 0 there and mean nothing in
        a block that was begun.
        """
        slate = Slate.empty(prompts, limit)
        if begun is not None:
            slate.begin(*begun)
        place = torch.arange(slate.tokens.shape[1])
        finished = slate.ended(self.eos_ids)
        for number in range(-(-len(place) // self.block)):
            span = slice(number * self.block, (number + 1) * self.block)
            slate.valid[:, span] |= (place[span] < limit[:, None]) & ~finished[:, None]
            self.write_block(slate, number, span)
            finished = slate.ended(self.eos_ids)
        ends = end_tokens(slate.tokens, self.eos_ids) & slate.valid
        mask = slate.valid & (ends.long().cumsum(1) - ends.long() == 0)
        logp, entropy = torch.where(mask, slate.logp, 0.0), torch.where(mask, slate.entropy, 0.0)
        return Decoded(slate.tokens, slate.valid, mask, logp, entropy, slate.reveal_pass, slate.reveal_logp, slate.passes, finished)

    def write_block(self, slate: Slate, number: int, span: slice) -> None:
        """Passes over a block until no row has an open place in it. The first one is the block's prefix-block state."""
        first = begun = torch.empty(0)
        for turn in itertools.count():
            hidden = slate.open[:, span] & slate.valid[:, span]
            rows = hidden.any(1).nonzero().flatten()
            if len(rows) == 0:
                break
            states, offset = slate.states(rows, number, self.block, self.mask_id, self.tail)
            places = offset[:, None] + span.start + torch.arange(hidden.shape[1])
            log_probs = self.read(states, places, rows)
            proposed = log_probs.argmax(-1) if self.greedy else self.draw(log_probs)
            kept = reveal(log_probs.exp().amax(-1), hidden[rows], self.threshold)
            place_of = (rows[:, None].expand(kept.shape)[kept], span.start + kept.nonzero()[:, 1])
            slate.tokens[place_of], slate.open[place_of], slate.reveal_pass[place_of] = proposed[kept], False, turn
            slate.reveal_logp[place_of] = log_probs.gather(-1, proposed[..., None])[..., 0][kept]
            slate.passes[rows] += 1
            if turn == 0:
                first, begun = log_probs, rows
        if len(first):
            slate.logp[begun, span] = first.gather(-1, slate.tokens[begun, span][..., None])[..., 0]
            slate.entropy[begun, span] = -(first.exp() * first).sum(-1)

    def draw(self, log_probs: Float[Tensor, "n W V"]) -> Int64[Tensor, "n W"]:
        """A token for every place."""
        return torch.multinomial(log_probs.flatten(0, 1).exp(), 1, generator=self.generator).view(log_probs.shape[:2])
