"""CGPO: what its sampling distribution reduces to, its pitfalls, and that it trains, resumes and refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.domains.diffusion.setup import build
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion.cgpo import (
    CURRICULUM,
    METHOD,
    CurriculumPrompts,
    TrackVariance,
    categories,
    draw,
    ema,
    group_stats,
    probabilities,
)
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from tests.helpers import assert_continues, assert_resumes, trained

CATEGORY = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])


def state(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(8, generator=g, dtype=torch.float64) / 4, torch.rand(8, generator=g, dtype=torch.float64)


def digits_run(method=METHOD, steps: int = 4, out: Path | None = None) -> Run:
    policy, task = build("styled_digits", None, evaluation_steps=4, evaluation_samples=30)
    return Run(method.set("select.prompts", 4), policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def by_category(prob: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3, dtype=torch.float64).index_add(0, CATEGORY, prob)


def test_without_exponent_and_calibration_all_prompts_are_alike() -> None:
    torch.testing.assert_close(probabilities(*state(), CATEGORY, eta=0.0, kappa=0.0, delta=0.3), torch.full((8,), 1 / 8).double())


def test_full_exploration_is_even_inside_a_category() -> None:
    found = probabilities(*state(), CATEGORY, delta=1.0)
    mass = categories(*state(), CATEGORY).mass
    torch.testing.assert_close(found, mass[CATEGORY] / torch.tensor([4, 3, 1])[CATEGORY])


def test_strong_calibration_shares_by_difficulty_alone() -> None:
    score, mean = state()
    hard = torch.stack([1 - mean[c == CATEGORY].mean() for c in range(3)])
    torch.testing.assert_close(categories(score, mean, CATEGORY, eta=1e12).mass, hard / hard.sum())


def test_one_category_is_the_variance_curriculum() -> None:
    score, mean = state()
    found = probabilities(score, mean, torch.zeros(8, dtype=torch.int64), eta=3.0, delta=0.0, eps=1e-6)
    torch.testing.assert_close(found, (score + 1e-6) / (score + 1e-6).sum())


def test_equal_variances_are_even_inside_each_category() -> None:
    found = probabilities(torch.full((8,), 0.1).double(), state()[1], CATEGORY)
    for c in range(3):
        assert float(found[c == CATEGORY].max() - found[c == CATEGORY].min()) < 1e-12


@given(st.integers(0, 10_000), st.floats(0, 5), st.floats(0, 3), st.floats(0, 1))
def test_it_is_a_distribution_and_the_mass_is_proportionally_fair(seed: int, eta: float, kappa: float, delta: float) -> None:
    score, mean = state(seed)
    prob = probabilities(score, mean, CATEGORY, eta, kappa, delta)
    assert bool((prob >= 0).all()) and abs(float(prob.sum()) - 1) < 1e-9
    curriculum, difficulty, mass = categories(score, mean, CATEGORY, eta, kappa)
    torch.testing.assert_close(by_category(prob), mass)
    other = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    gain = curriculum + eta * difficulty
    assert float((gain * mass.log()).sum()) >= float((gain * (other / other.sum()).log()).sum()) - 1e-9


def test_mastered_and_out_of_reach_prompts_keep_their_exploration() -> None:
    score = torch.tensor([0.0, 0.0, 0.25, 0.0]).double()
    prob = probabilities(score, torch.tensor([0.0, 1.0, 0.5, 1.0]).double(), torch.zeros(4, dtype=torch.int64), delta=0.2)
    assert float(prob[2]) > 0.8 and bool((prob > 0.049).all())
    done = categories(torch.zeros(8).double(), torch.full((8,), 1.0 + 1e-16).double(), CATEGORY)
    torch.testing.assert_close(done.difficulty, torch.full((3,), 1 / 3).double())


def test_statistics_need_two_attempts_and_merge_draws_of_one_prompt() -> None:
    found = group_stats(torch.tensor([0.0, 1.0, 1.0, 0.5, 1.0]), torch.tensor([7, 7, 3, 7, 9]))
    assert found.prompt.tolist() == [7]
    torch.testing.assert_close(found.variance, torch.tensor([1 / 6]))
    assert group_stats(torch.tensor([1.0]), torch.tensor([0])).prompt.tolist() == []


def test_the_first_visit_replaces_the_guess() -> None:
    value, seen = torch.tensor([0.25, 0.1]), torch.tensor([0, 2])
    found = ema(value, seen, torch.tensor([1, 0]), torch.tensor([0.2, 0.03]), 0.3)
    torch.testing.assert_close(found.value, torch.tensor([0.03, 0.13]))
    assert found.seen.tolist() == [1, 3] and value.tolist() == pytest.approx([0.25, 0.1])


def test_draws_follow_the_distribution() -> None:
    prob = probabilities(*state(), CATEGORY)
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    torch.testing.assert_close(torch.bincount(draw(prob, u), minlength=8).double() / 100_000, prob, atol=2e-5, rtol=0)
    assert draw(prob * (1 - 1e-9), torch.tensor([1 - 1e-12])).tolist() == [7]


def test_a_step_draws_by_what_was_known_and_notes_what_it_saw_after() -> None:
    run = digits_run()
    batch = step(run)
    known, expected = run.state[CURRICULUM], group_stats(batch.reward.double(), batch.signal("prompt_id"))
    assert sorted(known) == expected.prompt.tolist()
    for prompt, variance, mean in zip(*(part.tolist() for part in expected), strict=True):
        assert known[prompt] == [pytest.approx(variance), pytest.approx(mean), 1]
    assert run.history[0]["effective_prompts"] == pytest.approx(40)  # nothing known: even


def test_the_pool_holds_every_prompt_once_and_stays() -> None:
    run, select = digits_run(), CurriculumPrompts(prompts=6, group_size=2)
    first = select.candidates(run.task, run)
    assert [p.id for p in first] == list(range(40)) and {p.columns["category"] for p in first} == {"any", "thin", "regular", "bold"}
    assert [p.samples for p in select(run.task, run)] == [2] * 6
    assert CurriculumPrompts().candidates(run.task, run) == first


def test_it_trains_and_resumes_on_digits(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = digits_run(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    run = train(digits_run())
    assert all(np.isfinite([r["loss"], r["reward"], r["kl"], r["drawn_variance"]]).all() for r in run.history)


def test_its_parts_go_with_another_method(tmp_path: Path) -> None:
    method = GRPO.but(select=CurriculumPrompts(prompts=4, group_size=8), control=(TrackVariance(),))
    assert_resumes(method, tmp_path)
    run = trained(method, 3)
    assert sum(visits for *_, visits in run.state[CURRICULUM].values()) <= 12


def test_rewards_outside_the_scale_are_refused() -> None:
    policy, task = build("gaussians:0", None)
    with pytest.raises(ValueError, match="set control.0.low and control.0.high"):
        step(Run(METHOD, policy, task, steps=1))
    step(Run(METHOD.set("control.0.low", -100.0), policy, task, steps=1))
    bandit = TokenBandit(prompts=4)
    with pytest.raises(ValueError, match="must be above"):
        step(Run(GRPO.but(control=(TrackVariance(high=0.0),)), bandit.policy(), bandit, steps=1))
