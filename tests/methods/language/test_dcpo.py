"""DCPO: when it is GRPO, the target ratio, odd batches, tempered scoring, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.spell_grid import SpellGrid, SpellPolicy
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import ToyArith
from anypo.methods.language.dcpo import (
    METHOD,
    TargetDistribution,
    advantages,
    mix,
    old_logp_at,
    target_share,
    target_temperature,
    tempered_logp,
)
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.policy import MissingSignal
from anypo.run import Run
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast
from tests.helpers import assert_resumes, assert_trains, random_rows, trained


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_at_the_target_and_without_success_it_is_grpo(seed: int) -> None:
    rows = random_rows(seed)
    plain = broadcast(group_relative(rows.reward, rows.group, ddof=1), rows.mask)
    at_target = advantages(rows.reward, rows.group, rows.old_logp, rows.logp, rows.mask, entropy=0.5)
    assert at_target.alpha == 0 and torch.equal(at_target.advantages, plain)
    wrong = -rows.reward.abs()
    failed = advantages(wrong, rows.group, rows.old_logp, rows.logp, rows.mask, entropy=0.1)
    assert failed.success == failed.alpha == 0
    assert torch.equal(failed.advantages, broadcast(group_relative(wrong, rows.group, ddof=1), rows.mask))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), entropy=st.floats(0.0, 2.0))
def test_at_temperature_one_correct_rows_gain_alpha(seed: int, entropy: float) -> None:
    rows = random_rows(seed)
    found = advantages(rows.reward, rows.group, rows.old_logp, rows.old_logp, rows.mask, entropy)
    plain, alpha = group_relative(rows.reward, rows.group, ddof=1), found.alpha
    wanted = (1 - alpha) * plain + alpha * (rows.reward > 0.05).double()
    torch.testing.assert_close(found.advantages, broadcast(wanted, rows.mask))


def test_the_share_is_capped_and_independent_of_the_success_rate_in_total() -> None:
    assert target_share(0.9, 0.5, 0.5) == target_share(5.0, 0.5, 0.5) == pytest.approx(0.2 / 1.2)
    assert target_share(0.45, 0.5, 1.0) == pytest.approx(target_share(0.55, 0.5, 1.0))
    odds = [target_share(0.4, 0.5, f) / (1 - target_share(0.4, 0.5, f)) * f for f in (0.1, 0.5, 1.0)]
    assert odds == pytest.approx([0.1] * 3)  # the term's weight against GRPO's, times the responses it reaches
    assert [target_temperature(h, 0.5) for h in (0.4, 0.5, 0.6)] == [1.2, 1.2, 0.8]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), temperature=st.floats(0.3, 3.0))
def test_weighted_averages_are_those_of_the_tempered_policy(seed: int, temperature: float) -> None:
    g = torch.Generator().manual_seed(seed)
    logits, values = torch.randn(6, 1, 4, generator=g, dtype=torch.float64), torch.randn(6, 4, generator=g, dtype=torch.float64)
    actions = torch.arange(4).expand(6, 4)
    old, tempered = (tempered_logp(logits.expand(6, 4, 4), actions, t) for t in (1.0, temperature))
    ratio = mix(torch.zeros_like(old), torch.ones(6, dtype=torch.bool), old, tempered, torch.ones(6, 4), alpha=1.0)
    torch.testing.assert_close((old.exp() * ratio * values).sum(1), ((logits[:, 0] / temperature).softmax(-1) * values).sum(1))


def test_padding_lone_members_and_equal_rewards() -> None:
    reward, group = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([3, 3, 7, 5, 5])
    old, mask = torch.full((5, 2), -1.0, dtype=torch.float64), torch.ones(5, 2, dtype=torch.bool)
    mask[0, 1], mask[1] = False, False
    old[0, 1], old[1] = -torch.inf, torch.nan
    tempered = (old + 0.1).requires_grad_(True)
    found = advantages(reward, group, old, tempered, mask, entropy=0.3)
    assert torch.isfinite(found.advantages).all() and found.advantages[~mask].eq(0).all() and not found.advantages.requires_grad
    torch.testing.assert_close(
        found.advantages[2:], torch.full((3, 2), found.alpha, dtype=torch.float64) * torch.exp(torch.tensor(0.1)).double()
    )


def arithmetic(temperature: float | None = None) -> tuple[Run, Batch]:
    task, policy = ToyArith(small=True), GruPolicy()
    run = Run(METHOD, policy, task, steps=1)
    prompts = [p.but(temperature=temperature) for p in METHOD.select(task, run)]
    return run, run.collect(prompts)


@pytest.mark.parametrize("sampled_at", [None, 0.7])
def test_the_policy_scores_its_actions_at_the_other_temperature(sampled_at: float | None) -> None:
    run, batch = arithmetic(sampled_at)
    logits = run.score(batch, {"logits"}).logits
    wanted = torch.where(batch.mask, tempered_logp(logits, batch.action, 1.2), torch.zeros(()))
    torch.testing.assert_close(old_logp_at(batch, run, 1.2) * batch.mask, wanted, atol=1e-5, rtol=1e-5)
    known = batch.but(signals=batch.signals | {"old_logits": logits})
    torch.testing.assert_close(old_logp_at(known, run, 1.2) * batch.mask, wanted, atol=1e-5, rtol=1e-5)


def test_the_first_step_and_cap_zero_are_grpo() -> None:
    plain = METHOD.but(credit=GroupRelative(ddof=1))
    assert torch.equal(trained(METHOD, 1).policy.logits, trained(plain, 1).policy.logits)
    assert torch.equal(trained(METHOD.set("credit.cap", 0.0), 5).policy.logits, trained(plain, 5).policy.logits)
    assert not torch.equal(trained(METHOD, 5).policy.logits, trained(plain, 5).policy.logits)


def test_the_entropy_is_that_of_the_step_before() -> None:
    run = trained(METHOD, 3)
    estimates = [record["entropy_estimate"] for record in run.history]
    shares = [record["target_share"] for record in run.history]
    assert run.method.credit.entropy == estimates[-1]
    assert shares[0] == 0
    successes = [record["reward"] for record in run.history]
    assert shares[1:] == pytest.approx([target_share(h, 0.5, f) for h, f in zip(estimates[:-1], successes[1:], strict=True)])


def test_the_loop_trains_with_any_credit_and_reward() -> None:
    assert_trains(METHOD)

    def short(prompt: torch.Tensor, action: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (mask.sum(1) < 3).double()

    around = assert_trains(METHOD.but(credit=TargetDistribution(inner=RLOO.credit)), eos=0, horizon=4, reward=short)
    assert not torch.equal(around.policy.logits, trained(METHOD.but(credit=RLOO.credit), 4, eos=0, horizon=4, reward=short).policy.logits)

    def two(prompt: torch.Tensor, action: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)

    assert_trains(METHOD, reward=two, objectives=("a", "b"))


def test_a_policy_that_has_no_temperature_is_refused() -> None:
    with pytest.raises(MissingSignal, match="logits"):
        Run(METHOD, SpellPolicy(), SpellGrid(), steps=1)
    Run(METHOD, TokenBandit().policy(), TokenBandit(), steps=1)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
