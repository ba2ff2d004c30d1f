"""ADORA: when it is GRPO, the criteria and their empty sets, groups whose direction stays, and the component in the loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.method import Method
from anypo.methods.language.adora import CRITERIA, METHOD, VARIANTS, RolloutAdaptation, advantageous, advantages, base_advantages, weights
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.seams.groups import broadcast
from tests.helpers import assert_resumes, assert_trains, trained


@dataclass
class Responses:
    reward: Tensor  # [N] of 0 and 1
    group: Tensor  # [N]
    mask: Tensor  # [N,T]


def responses(seed: int, rows: int = 24, horizon: int = 6, groups: int = 5) -> Responses:
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, horizon + 1, (rows, 1), generator=g)
    reward = torch.bernoulli(torch.full((rows,), 0.5, dtype=torch.float64), generator=g)
    return Responses(reward, torch.randperm(rows, generator=g) % groups, torch.arange(horizon) < length)


def short(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    """Right when the response ends at once, so that no prompt has a length advantage."""
    return (mask.sum(1) == 1).double()


SHORT = {"eos": 0, "horizon": 4, "reward": short}


def one_group(*pairs: tuple[int, int], l_max: float = 9, **options: object) -> bool:
    """Whether a group of (reward, length) pairs is advantageous."""
    reward = torch.tensor([float(r) for r, _ in pairs], dtype=torch.float64)
    mask = torch.arange(10) < torch.tensor([n for _, n in pairs])[:, None]
    found = advantageous(reward, torch.zeros(len(pairs), dtype=torch.int64), mask, l_max=l_max, **options)  # type: ignore[arg-type]
    assert len(set(found.tolist())) == 1
    return bool(found[0])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), mode=st.sampled_from(["attenuate", "amplify"]), criterion=st.sampled_from(CRITERIA))
def test_weight_one_is_grpo(seed: int, mode: str, criterion: str) -> None:
    rows = responses(seed)
    found = advantages(rows.reward, rows.group, rows.mask, mode=mode, criterion=criterion, lam=1.0)
    assert torch.equal(found, broadcast(base_advantages(rows.reward, rows.group), rows.mask))


def test_all_advantageous_is_grpo_and_none_is_a_smaller_step() -> None:
    group = torch.arange(3).repeat_interleave(4)
    reward = torch.tensor([1.0, 0, 0, 1], dtype=torch.float64).repeat(3)
    longer = torch.tensor([5, 2, 3, 4]).repeat(3)
    plain = base_advantages(reward, group)
    for length, factor in ((longer, 1.0), (6 - longer, 0.1)):
        mask = torch.arange(6) < length[:, None]
        torch.testing.assert_close(advantages(reward, group, mask, lam=0.1), factor * broadcast(plain, mask))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), lam=st.floats(0.01, 3))
def test_a_weight_is_one_number_for_the_whole_group(seed: int, lam: float) -> None:
    rows = responses(seed)
    found = weights(rows.reward, rows.group, rows.mask, lam=lam)
    assert all(len(found[rows.group == g].unique()) == 1 for g in rows.group.unique())
    assert torch.equal(
        advantages(rows.reward, rows.group, rows.mask, lam=lam).sign()[:, 0], base_advantages(rows.reward, rows.group).sign()
    )


def test_a_prompt_turns_advantageous_when_its_right_responses_grow() -> None:
    assert not one_group((1, 2), (1, 3), (0, 5), (0, 4))
    assert one_group((1, 2), (1, 6), (0, 5), (0, 4))


def test_empty_sets_and_ties() -> None:
    assert not one_group((0, 3), (0, 5))  # no right response
    assert not one_group((0, 9), (0, 9))  # -inf against -inf
    assert one_group((1, 3), (1, 5))  # no wrong response
    assert not one_group((1, 4), (0, 4))  # strict
    assert not one_group((1, 4), (0, 3), (0, 5))
    assert one_group((0, 3), (0, 5), empty_correct_is_tas=True)


def test_wrong_responses_that_were_cut_off_do_not_count() -> None:
    assert one_group((1, 4), (0, 3), (0, 8), l_max=8)
    assert not one_group((1, 4), (0, 3), (0, 8), l_max=9)
    assert one_group((1, 1), (0, 8), l_max=8)  # the only wrong one was cut off


def test_difficulty_is_solvable_but_hard() -> None:
    right, wrong = (1, 1), (0, 5)
    shares = [(wrong, wrong, wrong, wrong), (right, wrong, wrong, wrong), (right, right, wrong, wrong), (right, right, right, wrong)]
    assert [one_group(*pairs, criterion="difficulty") for pairs in shares] == [False, True, True, False]
    assert one_group(*shares[3], criterion="difficulty", kappa=0.75)
    assert not one_group(*shares[1], criterion="both") and one_group(*shares[1], criterion="either")


def test_padding_and_rows_without_tokens() -> None:
    reward, group = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    mask = torch.tensor([[1, 1], [0, 0], [0, 0], [0, 0]], dtype=torch.bool)
    found = advantages(reward, group, mask)
    assert torch.isfinite(found).all() and found[~mask].eq(0).all() and found[0, 0] > 0
    assert weights(reward, group, mask).tolist() == pytest.approx([1, 1, 0.1, 0.1])


def test_a_lone_response_keeps_its_reward() -> None:
    assert base_advantages(torch.tensor([0.7, 1.0, 1.0]), torch.tensor([4, 2, 2])).tolist() == pytest.approx([0.7, 0.0, 0.0])


@pytest.mark.parametrize(("options", "message"), [({"criterion": "size"}, "unknown criterion"), ({"mode": "mute"}, "unknown mode")])
def test_unknown_names_are_refused(options: dict[str, str], message: str) -> None:
    rows = responses(0)
    with pytest.raises(ValueError, match=message):
        weights(rows.reward, rows.group, rows.mask, **options)  # type: ignore[arg-type]


def test_weight_one_trains_as_grpo_with_the_sample_deviation() -> None:
    plain = trained(GRPO.set("credit.ddof", 1), 4, **SHORT).policy.logits
    assert torch.equal(trained(METHOD.set("credit.lam", 1.0), 4, **SHORT).policy.logits, plain)
    assert not torch.equal(trained(METHOD, 4, **SHORT).policy.logits, plain)


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda method: method.name)
def test_the_loop_trains_and_logs_the_share(method: Method) -> None:
    run = assert_trains(method, **SHORT)
    assert all(record["tas_share"] < 1 for record in run.history)


def test_it_weights_the_advantages_of_another_credit() -> None:
    around = METHOD.but(credit=RolloutAdaptation(lam=1.0, inner=RLOO.credit))
    assert torch.equal(trained(around, 3).policy.logits, trained(METHOD.but(credit=RLOO.credit), 3).policy.logits)
    assert_trains(METHOD.but(credit=RolloutAdaptation(inner=RLOO.credit)), **SHORT)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path, **SHORT)
