"""Mask states: what a masked language model sees when it predicts a block.

The prefix-block state of block b shows the prompt and the finished blocks before b; block b itself is masked, and after it comes nothing
(`tail="drop"`) or, for models that were trained on a fixed length, masks up to the row's limit (`tail="mask"`). A view hides further tokens of
the prompt and of the finished blocks, or shows those of the block's tokens that were revealed earlier, as in the state in which a token was
revealed. One call of the network on the state gives the log-probs of all the block's tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from anypo.batch import Batch

TAILS = ("drop", "mask")
VIEW_PROMPT, VIEW_ANSWER = "view_prompt", "view_answer"  # signals [N,P] and [N,T] bool: prompt and answer tokens that a view hides
VIEW_ORDER = "view_order"  # signal [N,T] int64 >= 0: when a token of a block becomes visible to the others of the block
ABSENT = -1  # in the place of an id: no token there, not attended to


class Canvas(NamedTuple):
    """Rows of prompt and answer side by side, padded on the right, [N,L] each."""

    ids: Tensor  # int64; a token that a view hides is the mask token already
    block: Tensor  # int64: block of an answer token, -1 for the prompt, beyond every block where nothing is
    exists: Tensor  # bool: what a state of a later block may show
    offset: Tensor  # [N] int64: where the answer begins


def canvas(
    prompts: Sequence[Tensor], answer: Int64[Tensor, "N T"], segment: Int64[Tensor, "N T"], valid: Bool[Tensor, "N T"], mask_id: int,
    view_prompt: Tensor | None = None, view_answer: Tensor | None = None,
) -> Canvas:  # fmt: skip
    """Prompt [P_n] and answer of every row in one table. `valid`: answer tokens that exist; `view_*`: those that are hidden."""
    offset = torch.tensor([len(p) for p in prompts], device=answer.device)
    length = int(offset.max()) if len(prompts) else 0
    padded = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(answer.device)
    if view_prompt is not None:
        padded = torch.where(view_prompt[:, :length], mask_id, padded)
    if view_answer is not None:
        answer = torch.where(view_answer, mask_id, answer)
    rows, horizon = answer.shape
    places = offset[:, None] + torch.arange(horizon, device=answer.device)

    def laid(of_prompt: Tensor, of_answer: Tensor, nothing: int) -> Tensor:
        out = of_answer.new_full((rows, length + horizon), nothing)
        out[:, :length] = torch.where(inside, of_prompt.to(out.dtype), out[:, :length])
        return out.scatter(1, places, of_answer)

    inside = torch.arange(length, device=answer.device) < offset[:, None]
    never = torch.iinfo(torch.int64).max
    block = laid(torch.full_like(padded, -1), torch.where(valid, segment, never), never)
    return Canvas(laid(padded, answer, mask_id), block, block < never, offset)


def block_states(
    table: Canvas, row: Int64[Tensor, " M"], block: Int64[Tensor, " M"], mask_id: int, tail: str, limit: Int64[Tensor, " N"], turns: int = 1
) -> Int64[Tensor, "M L"]:
    """The prefix-block state of block `block[m]` of row `row[m]`, ABSENT where nothing is. With `turns` all blocks, in table and argument, are
    counted as block * turns + turn, and tokens of the block's earlier turns are visible. Raises ValueError for an unknown tail."""
    if tail not in TAILS:
        raise ValueError(f"unknown tail '{tail}'; use drop (nothing after the block) or mask (masks up to the limit)")
    where = table.block[row]
    state = torch.where(where < block[:, None], table.ids[row], mask_id)
    shown = table.exists[row] & (where // turns <= block[:, None] // turns)
    if tail == "mask":
        place = torch.arange(where.shape[1], device=row.device) - table.offset[row][:, None]
        shown = shown | ((place >= 0) & (place < limit[row][:, None]))
    return torch.where(shown, state, ABSENT)


def logits_of(network: nn.Module, states: Int64[Tensor, "M L"]) -> tuple[Float[Tensor, "D L V"], Int64[Tensor, " M"]]:
    """Logits of the distinct ones among states with ABSENT entries, and which of them each state is."""
    distinct, which = torch.unique(states, dim=0, return_inverse=True)
    found: Any = network(distinct.clamp(min=0), distinct != ABSENT)
    return getattr(found, "logits", found), which


def with_hidden(batch: Batch, hidden: Bool[Tensor, "N T"]) -> Batch:
    """The batch seen with exactly the `hidden` answer tokens masked, and only they are asked for: one block a row, before which stand all other
    tokens of the answer, later ones too. Log-probs of other states (`old_*` and `ref_*`) are left out, and `logp` is not theirs any more."""
    signals = {name: value for name, value in batch.signals.items() if not name.startswith(("old_", "ref_")) and name != VIEW_ORDER}
    hidden = hidden & batch.mask
    return batch.but(mask=hidden, keep=None, segment=hidden.long(), valid=batch.mask, signals=signals)
