"""Mask states and block-wise decoding on networks whose answers are known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anypo.domains.masked.decode import Decoder, reveal
from anypo.domains.masked.policy import Characters, MaskedPolicy
from anypo.domains.masked.states import ABSENT, block_states, canvas

MASK = 9


def states(tail: str = "drop", limit: int = 5, **view: Tensor) -> list[list[int]]:
    """Of two rows with prompts of 1 and 3 tokens, answers of 5 and 2 in blocks of 2; every block of the first row and the second's only one."""
    prompts = [torch.tensor([1]), torch.tensor([2, 3, 4])]
    answer = torch.tensor([[5, 6, 7, 8, 5], [6, 6, 0, 0, 0]])
    segment = (torch.arange(5) // 2).expand(2, 5)
    valid = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    table = canvas(prompts, answer, segment, valid, MASK, **view)
    found = block_states(table, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0]), MASK, tail, torch.tensor([limit, 2]))
    assert all((row == ABSENT).long().diff().ge(0).all() for row in found)  # whatever is missing is missing at the end
    return [row[row != ABSENT].tolist() for row in found]


def test_a_state_shows_the_prompt_and_the_finished_blocks() -> None:
    assert states() == [[1, 9, 9], [1, 5, 6, 9, 9], [1, 5, 6, 7, 8, 9], [2, 3, 4, 9, 9]]


def test_a_fixed_length_is_filled_with_masks() -> None:
    assert states("mask") == [[1, 9, 9, 9, 9, 9], [1, 5, 6, 9, 9, 9], [1, 5, 6, 7, 8, 9], [2, 3, 4, 9, 9]]
    with pytest.raises(ValueError, match="unknown tail"):
        states("keep")


def test_a_view_hides_tokens_of_prompt_and_finished_blocks() -> None:
    prompt = torch.tensor([[False, True, True], [True, False, True]])
    answer = torch.zeros(2, 5, dtype=torch.bool)
    answer[0, 1] = True
    assert states(view_prompt=prompt, view_answer=answer) == [[1, 9, 9], [1, 5, 9, 9, 9], [1, 5, 9, 7, 8, 9], [9, 3, 9, 9, 9]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1), st.data())
def test_reveal_keeps_what_is_sure_and_at_least_the_surest(confidence: list[float], threshold: float, data: st.DataObject) -> None:
    masked = data.draw(st.lists(st.booleans(), min_size=len(confidence), max_size=len(confidence)).filter(any))
    kept = reveal(torch.tensor(confidence, dtype=torch.float64), torch.tensor(masked), threshold).tolist()
    best = max(c for c, m in zip(confidence, masked, strict=True) if m)
    assert any(kept) and not any(k and not m for k, m in zip(kept, masked, strict=True))
    assert all(k for k, m, c in zip(kept, masked, confidence, strict=True) if m and c > threshold)
    assert all(c > threshold or c == best for k, c in zip(kept, confidence, strict=True) if k)


class Counting(nn.Module):
    """Says with certainty `sure` that the token at place i is i % 5, and spreads the rest evenly; notes how many states it read."""

    def __init__(self, sure: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.sure, self.read = sure, []

    def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
        self.read.append(len(ids))
        length = ids.shape[1]
        right = torch.nn.functional.one_hot(torch.arange(length) % 5, 6).bool()
        right[:, 5] = False
        sure = self.sure[:length, None]
        probabilities = torch.where(right, sure, (1 - sure) / 4)
        probabilities[:, 5] = 0.5  # of the mask token: never to be written
        return probabilities.log().expand(len(ids), length, 6)


def sampled(sure: list[float], threshold: float, block: int = 3, end: str = "", limit: int = 6) -> tuple[MaskedPolicy, object]:
    policy = MaskedPolicy(Counting(torch.tensor(sure)), Characters("01234", end))
    prompts = [torch.tensor([0]), torch.tensor([0, 1])]
    out = policy.sample(
        prompts,
        [2, 1],
        max_tokens=[limit, limit - 1],
        generator=torch.Generator().manual_seed(0),
        block=block,
        threshold=threshold,
        greedy=True,
    )
    return policy, out


def test_threshold_zero_is_one_pass_a_block_and_one_is_a_token_a_pass() -> None:
    sure = [0.5, 0.6, 0.9, 0.7, 0.8, 0.95, 0.55, 0.99]
    _, fast = sampled(sure, 0.0)
    assert fast.decoded.passes.tolist() == [2, 2, 2]
    assert fast.tokens.tolist() == [[1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1], [2, 3, 4, 0, 1, 0]]
    assert fast.valid.tolist() == [[True] * 6, [True] * 6, [True] * 5 + [False]]
    _, slow = sampled(sure, 1.0)
    assert slow.decoded.passes.tolist() == [6, 6, 5]
    assert slow.decoded.reveal_pass.tolist() == [[2, 0, 1, 1, 0, 2], [2, 0, 1, 1, 0, 2], [0, 2, 1, 0, 1, -1]]
    _, some = sampled(sure, 0.75)
    assert some.decoded.reveal_pass[0].tolist() == [2, 0, 1, 0, 0, 1]
    assert some.decoded.passes.tolist() == [5, 5, 4]


def test_equal_states_are_read_once() -> None:
    policy, _ = sampled([0.5] * 8, 0.0)
    assert policy.network.read == [2, 2]  # three rows, two prompts; greedy rows of a prompt stay alike


def test_nothing_is_written_after_an_end_token() -> None:
    _, out = sampled([0.9] * 8, 0.0, block=2, end="3")
    assert out.tokens[0].tolist() == [1, 2, 3, 4, 0, 0]  # block 1 holds the end token and what was written beside it
    assert out.decoded.valid[0].tolist() == [True] * 4 + [False] * 2
    assert out.valid[0].tolist() == [True] * 3 + [False] * 3
    assert out.finished.tolist() == [True, True, True] and out.decoded.passes.tolist() == [2, 2, 1]
    assert (out.logp[~out.valid] == 0).all() and (out.entropy[~out.valid] == 0).all()
    _, never = sampled([0.9] * 8, 0.0, block=2, end="3", limit=2)
    assert never.finished.tolist() == [False, False, False]


@pytest.mark.parametrize(("setting", "says"), [({"block": 0}, "at least 1 token"), ({"threshold": 1.5}, "is a probability")])
def test_settings_out_of_range_are_refused(setting: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Decoder(lambda *_: torch.zeros(0), torch.Generator(), **({"block": 1, "threshold": 0.0} | setting), mask_id=5, eos_ids=())
