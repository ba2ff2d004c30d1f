"""S2L-PO: when it is GRPO, the schedule, whose log-probs the ratio holds, two sizes of one family, and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.models import load_companion, load_policy
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.s2l_po import METHOD, SmallToLarge, loss, pass_at_k, rollout_cost, schedule, split
from anypo.reproductions.common import plain_sgd
from anypo.run import Run
from tests.helpers import assert_continues, assert_resumes, assert_trains, gradient, random_rows, trained

SMALL = METHOD.set("select.group_size", 4)


def run_with(explorer: TabularTokens | str, t_mix: int | None, steps: int = 4, out: Path | None = None, **options: object) -> Run:
    """On a small token_bandit; nothing has run yet."""
    task = TokenBandit(prompts=4)
    method = SMALL.but(rollout=SmallToLarge(explorer, t_mix))
    return Run(method, task.policy(scale=0.1), task, steps=steps, out=out, checkpoint_every=2, **options)


def other_policy() -> TabularTokens:
    return TokenBandit(prompts=4).policy(scale=2.0, seed=7).snapshot()


@settings(max_examples=60, deadline=None)
@given(t_mix=st.integers(0, 30), g=st.integers(1, 20))
def test_groups_are_whole_and_the_explorers_part_falls_from_all_to_none(t_mix: int, g: int) -> None:
    parts = split(torch.arange(1, 41), t_mix, g)
    assert parts.sum(1).eq(g).all() and bool((parts >= 0).all())
    assert bool((parts[1:, 0] <= parts[:-1, 0]).all())
    assert int(parts[0, 0]) == (g if t_mix else 0) and parts[max(t_mix, 1) :, 0].eq(0).all()


def test_rounding_up_does_not_round_up_whole_numbers() -> None:
    assert split(torch.tensor([4]), 5, 8).tolist() == [[2, 6]]
    assert split(torch.arange(1, 12), 11, 10)[:, 0].tolist() == list(range(10, -1, -1))
    assert schedule(torch.tensor([1, 2]), 0).tolist() == [0, 0]


def test_the_loss_is_grpos() -> None:
    rows = random_rows(spread=1.0)
    logp = rows.logp.requires_grad_()
    plain = grpo.loss(logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, beta=0.0)
    found = loss(logp, rows.old_logp, rows.advantages[:, None] * rows.mask, rows.mask)
    torch.testing.assert_close(found, plain.loss)
    torch.testing.assert_close(gradient(found, logp)[0], gradient(plain, logp)[0])


def test_cost_and_diversity() -> None:
    assert rollout_cost(10, 0, 8, 0.1, 1.0) == (80, 80)
    assert rollout_cost(10, 10**9, 8, 0.1, 1.0).mixed == pytest.approx(8)
    n, c = torch.full((3,), 8), torch.tensor([0, 4, 8])
    torch.testing.assert_close(pass_at_k(n, c, 1), c.double() / 8)
    assert pass_at_k(n, c, 5).tolist() == [0, 1, 1]


# -- reductions in the loop --------------------------------------------------------------------------------------------------------------------


def test_without_mixing_it_is_grpo_to_the_last_bit() -> None:
    plain = trained(grpo.METHOD.set("select.group_size", 4), 4)
    mine = train(run_with("a folder that nobody opens", 0))
    assert torch.equal(mine.policy.logits, plain.policy.logits)


def test_an_explorer_that_is_the_learner_is_grpo() -> None:
    """In its first step, before the learner has moved away from the copy: the same rows, log-probs and parameters."""
    task = TokenBandit(prompts=4)
    plain = Run(grpo.METHOD.set("select.group_size", 4), task.policy(scale=0.1), task, steps=4)
    mine = run_with("", 4)
    theirs, ours = step(plain), step(mine)
    assert ours.signals["explorer"].all() and torch.equal(ours.action, theirs.action)
    torch.testing.assert_close(ours.logp, theirs.logp)
    torch.testing.assert_close(mine.policy.logits, plain.policy.logits)


def test_with_a_share_of_one_every_row_is_the_explorers() -> None:
    mine = run_with(other_policy(), 10**9)
    for _ in range(3):
        assert step(mine).signals["explorer"].all()


@pytest.mark.parametrize("explorer", ["", "other"])
def test_log_probs_and_entropies_are_the_learners_own(explorer: str) -> None:
    other = other_policy()
    run = run_with(other if explorer else "", 4)
    step(run)
    learner = run.policy.snapshot()
    batch = step(run)
    written = batch.signals["explorer"]
    assert written.any() and (~written).any()
    found = learner.observe(batch, {"logp", "entropy"})
    torch.testing.assert_close(batch.logp, found.logp)
    torch.testing.assert_close(batch.signals["old_entropy"], found.entropy)
    if explorer:
        assert not torch.allclose(batch.logp[written], other.observe(batch, {"logp"}).logp[written])
    assert run.history[-1]["approx_kl"] == pytest.approx(0, abs=1e-12), "the ratio is 1 at the first inner step"


def test_both_write_at_the_same_prompts_and_share_their_groups() -> None:
    run = run_with(other_policy(), 3)
    step(run)
    batch = step(run)
    for number in range(4):
        rows = batch.group == number
        assert int(rows.sum()) == 4 and int(batch.signals["explorer"][rows].sum()) == 2
        assert len(batch.signals["prompt_id"][rows].unique()) == 1
    assert run.history[-1]["explorer_share"] == 0.5


def test_by_default_half_of_the_run_is_mixed_also_under_a_budget_of_actions() -> None:
    run = train(run_with("", None, steps=8))
    assert [record["explorer_share"] for record in run.history] == [1, 0.75, 0.5, 0, 0, 0, 0, 0]
    budget = train(run_with("", None, steps=10**6, max_actions=10 * 4 * 4 * 2))
    shares = [record["explorer_share"] for record in budget.history]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True) and shares[0] == 1 and shares[5:] == [0] * 5


def test_a_small_and_a_large_model_of_one_family() -> None:
    task, large, small = ToyArith(small=True), GruPolicy(hidden=24, seed=1), GruPolicy(hidden=8).snapshot()
    frozen = [p.clone() for p in small.parameters()]
    method = SMALL.but(rollout=SmallToLarge(small, 3)).set("select.prompts", 4)
    run = train(Run(method, large, task, steps=4))
    assert [record["explorer_share"] for record in run.history] == [1, 0.5, 0, 0]
    assert all(torch.isfinite(p).all() for p in large.parameters())
    used = run.recipe.rollout.explorer
    assert all(torch.equal(a, b) for a, b in zip(frozen, used.parameters(), strict=True)) and "explorer" not in run.policies


def test_explorers_by_name_share_the_learners_tokens() -> None:
    assert not any(p.requires_grad for p in load_companion("builtin", load_policy("builtin"), "explorer").parameters())
    with pytest.raises(ValueError, match="the explorer 'builtin' does not write the policy's tokens"):
        train(run_with("builtin", 2))


def test_it_trains() -> None:
    assert_trains(SMALL, vocabulary=2, horizon=3, eos=0)
    assert_trains(plain_sgd(SMALL, 1.0, epochs=2).set("update.minibatches", 2))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(SMALL.set("rollout.t_mix", 4), tmp_path / "start")

    def run_to(out: Path, upto: int) -> Run:
        run = run_with(other_policy(), 4, out=out)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path / "model")
