"""TAPO: when it is GRPO, what a trait's error moves, invalid rows, text and its tokens, kappa, and the components in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.tapo import METHOD, TraitAware, combine, enhanced_prompt, parse, qwk, rewards, token_advantages
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import standardize
from tests.helpers import assert_continues, assert_trains, trained

LOW, HIGH = torch.tensor([0.0, 1.0, 0.0]).double(), torch.tensor([5.0, 6.0, 10.0]).double()


def essays(seed: int, traits: int = 3, rows: int = 12) -> dict[str, Tensor]:
    """Arguments of token_advantages: scores in range, one right answer a group, some invalid rows, a ragged mask, one segment a trait."""
    g = torch.Generator().manual_seed(seed)
    low, high = LOW[:traits], HIGH[:traits]
    group = torch.arange(rows) % 3
    pred, gold = (low + (torch.rand(rows, traits, generator=g, dtype=torch.float64) * (high - low)).round() for _ in range(2))
    length = torch.randint(1, traits + 3, (rows,), generator=g)
    segment = torch.arange(-1, traits + 1)
    segment[-1] = -1
    return {
        "pred": pred,
        "gold": gold[group],
        "lo": low,
        "hi": high,
        "valid": (torch.rand(rows, generator=g) < 0.8).long(),
        "group": group,
        "trait_segment": segment.expand(rows, -1),
        "mask": torch.arange(traits + 2) < length[:, None],
    }


def terms_of(case: dict[str, Tensor]) -> Any:
    return rewards(*(case[name] for name in ("pred", "gold", "lo", "hi", "valid")))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_without_trait_weight_it_is_grpo_on_the_sample_reward(seed: int) -> None:
    case = essays(seed)
    terms = terms_of(case)
    plain = grpo_advantages(terms.consistency + 0.5 * terms.dependency + 0.5 * terms.format, case["group"])
    assert torch.equal(token_advantages(**case, w_t=0.0), torch.where(case["mask"], plain[:, None], 0.0))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_one_trait_alone_ranks_valid_rows_the_same_way_twice(seed: int) -> None:
    case = essays(seed, traits=1)
    terms, valid = terms_of(case), case["valid"].bool()
    assert torch.equal(terms.dependency, terms.format) and torch.equal(terms.format, valid.double())
    order = [values[valid].argsort(stable=True) for values in (terms.trait[:, 0], terms.consistency)]
    torch.testing.assert_close(terms.consistency[valid][order[0]], terms.consistency[valid][order[1]])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_terms_are_bounded_and_invalid_rows_earn_nothing(seed: int) -> None:
    case = essays(seed)
    case["pred"][case["valid"] == 0] = torch.nan
    terms = terms_of(case)
    flat = torch.cat([terms.trait, *(t[:, None] for t in terms[1:])], dim=1)
    assert (flat >= 0).all() and (flat <= 1).all() and (flat[case["valid"] == 0] == 0).all()
    assert torch.isfinite(token_advantages(**case)).all()


def test_equally_accurate_traits_have_no_advantage_and_traits_are_normalized_apart() -> None:
    case = essays(1)
    case["valid"][:] = 1
    case["pred"][:, 0] = case["gold"][:, 0]
    case["trait_segment"], case["mask"] = torch.tensor([-1, 0, 1, 2]).expand(12, -1), torch.ones(12, 4, dtype=torch.bool)
    found = token_advantages(**case)
    assert torch.equal(found[:, 1], found[:, 0])  # trait 0 is right everywhere: the sample's part alone
    own = standardize(terms_of(case).trait[:, 1], case["group"])
    torch.testing.assert_close(found[:, 2] - found[:, 0], own)


def test_a_trait_moves_the_other_traits_tokens_through_the_sample_alone() -> None:
    case = essays(2)
    case["valid"][:] = 1
    case["mask"] = torch.ones_like(case["mask"])
    changed = case | {"pred": case["pred"].clone()}
    changed["pred"][0, 2] = 10.0 - changed["pred"][0, 2]
    before, after = (token_advantages(**c, w_c=0.0, w_d=0.0) for c in (case, changed))
    assert torch.equal(before[:, :3], after[:, :3]) and not torch.equal(before[:, 3], after[:, 3])
    before, after = token_advantages(**case), token_advantages(**changed)
    torch.testing.assert_close((after - before)[:, 1], (after - before)[:, 0])
    assert not torch.equal(before[:, 0], after[:, 0])


def test_lone_rows_and_masked_rows_are_zero_and_nothing_is_differentiated() -> None:
    case = essays(3)
    case["group"], case["mask"] = torch.arange(12), case["mask"].clone()
    assert (token_advantages(**case) == 0).all()
    case = essays(3)
    case["mask"][4] = False
    found = token_advantages(**case)
    assert (found[4] == 0).all() and (found[~case["mask"]] == 0).all() and not found.requires_grad


def test_ranges_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="above its lowest"):
        terms_of(essays(0) | {"hi": LOW})


def test_kappa_of_known_tables() -> None:
    gold = torch.tensor([0, 1, 2, 3, 4, 4])
    assert (
        qwk(gold, gold, 5) == 1.0 and float(qwk(torch.full((6,), 2), gold, 5)) == pytest.approx(0.0) and qwk(gold * 0, gold * 0, 5) == 0.0
    )
    assert float(qwk(4 - torch.arange(5), torch.arange(5), 5)) == pytest.approx(-1.0)


@pytest.mark.parametrize("text", ["content 4", "content 4, style 3, content 4", "style 3, content 4", "content four, style 3", ""])
def test_incomplete_and_disordered_text_is_refused(text: str) -> None:
    assert parse(text, ["content", "style"]) is None


def test_text_is_parsed_with_the_place_of_each_score() -> None:
    text = " content: 4, style 2.5."
    found = parse(text, ["content", "style"])
    assert found is not None and [(score, text[a:b]) for score, a, b in found] == [(4.0, "4"), (2.5, "2.5")]


def test_the_enhanced_prompt_holds_question_descriptions_and_ranges() -> None:
    traits = {"content": {"low": 1, "high": 6, "description": "relevance of the ideas"}, "style": {"low": 0, "high": 3}}
    text = enhanced_prompt("Why?", "Because.", traits)
    for part in (
        "Question: Why?",
        "content (1 to 6): relevance of the ideas",
        "style (0 to 3)\n",
        "Because.",
        "content <score>, style <score>",
    ):
        assert part in text


class Letters(TokenBandit):
    """Strings over the letters of a tiny score sheet, with the columns and completions of a text task."""

    letters = "abc 0123,"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(2, len(self.letters), 8, seed=seed)

    def policy(self, **options: Any) -> Any:
        """Likely writes "a 1, b 2" with some wrong digits."""
        policy = super().policy(**options)
        for t, letter in enumerate("a 1, b 2"):
            policy.logits.data[:, t, self.letters.index(letter)] += 5.0
        for t in (2, 7):
            policy.logits.data[:, t, 4:8] += 4.0
        policy.decode = lambda tokens: "".join(self.letters[i] for i in tokens.tolist())
        return policy

    def continue_from(
        self, prompt: Tensor, group: Tensor, run: Run, prefix: Tensor | None = None, temperature: Tensor | None = None
    ) -> Batch:
        batch = super().continue_from(prompt, group, run, prefix, temperature)
        traits = {"a": {"score": 2, "low": 0, "high": 3}, "b": {"score": 1, "low": 0, "high": 2}}
        return batch.but(
            signals=batch.signals
            | {"completion": [run.policy.decode(row) for row in batch.action], "columns": [{"traits": traits} for _ in range(len(batch))]}
        )


def letters_run(out: Path | None = None, upto: int = 4, method: Any = METHOD) -> Run:
    from anypo.loops.on_policy import step

    task = Letters()
    run = Run(method, task.policy(), task, steps=4, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    while run.step < upto:
        step(run)
    return run


def test_text_gets_its_terms_and_each_score_its_token() -> None:
    run = letters_run(upto=0)
    batch = run.collect(run.method.select(run.task, run))
    batch.reward = run.method.reward(batch, run)
    assert batch.objectives == ("consistency", "dependency", "format", "trait_0", "trait_1")
    valid = batch.reward[:, 2] == 1
    assert valid.any()
    for text, row, terms, segment in zip(batch.signals["completion"], valid, batch.reward, batch.signals["trait_segment"], strict=True):
        found = parse(text, ["a", "b"])
        assert bool(row) == (found is not None and found[0][0] <= 3 and found[1][0] <= 2)
        if found is not None:
            places = [next((k for k, (_, start, end) in enumerate(found) if start <= t < end), -1) for t in range(8)]
            assert segment.tolist() == places and {0, 1} <= set(places)
        if row:
            assert terms[3] == pytest.approx(1 - ((found[0][0] - 2) / 3) ** 2)  # type: ignore[index]
        else:
            assert (terms == 0).all()
    expected = combine(terms_from(batch.reward), batch.group, batch.signals["trait_segment"], batch.mask)
    assert torch.equal(run.method.credit(batch, run), expected)


def terms_from(reward: Tensor) -> Any:
    from anypo.methods.language.tapo import Terms

    return Terms(reward[:, 3:], reward[:, 0], reward[:, 1], reward[:, 2])


def test_the_loop_trains_on_scores_and_logs_every_term(tmp_path: Path) -> None:
    run = letters_run()
    assert {"reward/format", "reward/trait_1"} <= run.history[-1].keys()
    assert all(np.isfinite(v) for record in run.history for v in record.values() if isinstance(v, float))
    assert_continues(lambda out, upto: letters_run(out, upto), tmp_path)
    assert letters_run(method=METHOD.but(credit=GroupRelative())).step == 4  # the scalar baseline: the sum of all terms, one advantage


def test_without_traits_it_is_grpo() -> None:
    same = GRPO.but(objective=METHOD.objective, regularize=METHOD.regularize)
    assert torch.equal(assert_trains(METHOD).policy.logits, trained(same, 4).policy.logits)
    assert_trains(METHOD.but(credit=TraitAware(w_t=2.0)), reward=lambda p, a, m: (a == 1).double(), objectives=("first", "second"))


def test_problems_must_agree_in_the_number_of_traits() -> None:
    run = letters_run(upto=0)
    batch = run.collect(run.method.select(run.task, run))
    batch.signals["columns"][0] = {"traits": {"a": {"score": 1, "low": 0, "high": 3}}}
    with pytest.raises(ValueError, match="same number of traits"):
        run.method.reward(batch, run)
