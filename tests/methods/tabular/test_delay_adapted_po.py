import math

import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.tabular.delayed import DelayedFeedback, multiplicative_weights
from anypo.domains.tabular.tasks import EpisodicLosses
from anypo.loops.tabular import step, train
from anypo.methods.tabular.delay_adapted_po import (
    METHOD,
    DelayAdaptedSurrogate,
    arrivals,
    bonus,
    dappo_loss,
    occupancy,
    q_estimate,
    update,
)
from anypo.run import Run
from anypo.seams.objective import aggregate, clipped, token_ratio

NO_BONUS = METHOD.but(regularize=())


def run_of(method, steps, out=None, seed=0, **task):
    problem = EpisodicLosses(seed=seed, **task)
    run = Run(method, problem.policy(), problem, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def tables(seed, *shape):
    raw = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double() + 0.05
    return raw / raw.sum(-1, keepdim=True)


def test_without_delay_the_estimate_is_importance_weighting_and_unbiased():
    play, first = tables(0, 1, 2, 3), torch.tensor([[0.3, 0.7]]).double()
    loss = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)).double()
    total = torch.zeros(1, 2, 3).double()
    for s in range(2):
        for a in range(3):
            found = q_estimate(torch.tensor([s]), torch.tensor([a]), loss[s, a][None], first, play, play, 0.0)
            assert (found.ratio == 1).all()
            total += first[0, s] * play[0, s, a] * found.q
    torch.testing.assert_close(total[0], loss)


def test_the_estimate_is_bounded_by_the_larger_probability():
    play, arrive = tables(1, 50, 1, 1, 4), tables(2, 50, 1, 1, 4)
    for a in range(4):
        one = torch.ones(50, 1).double()
        found = q_estimate(torch.zeros(50, 1).long(), torch.full((50, 1), a), one, one[..., None], play, arrive, 0.0)
        torch.testing.assert_close(found.q[..., a], 1 / torch.maximum(play, arrive)[..., a])
        assert ((found.ratio > 0) & (found.ratio <= 1)).all()


def test_probability_zero_and_unreachable_states_stay_finite():
    play, arrive = torch.tensor([[[0.0, 1.0]]]).double(), torch.tensor([[[1.0, 0.0]]]).double()
    found = q_estimate(torch.tensor([0]), torch.tensor([0]), torch.ones(1).double(), torch.ones(1, 1).double(), play, arrive, 0.0)
    torch.testing.assert_close(found.q, arrive)
    nowhere = q_estimate(torch.tensor([0]), torch.tensor([0]), torch.ones(1).double(), torch.zeros(1, 1).double(), play, arrive, 0.0)
    assert (nowhere.q == 0).all()


def test_one_state_is_delayed_exp3():
    problem = EpisodicLosses(horizon=1, states=1, copies=2)
    policy = problem.policy()
    run = Run(NO_BONUS.set("rollout.delay", 3), policy, problem, steps=12)
    played, mine = [], policy.table[:, 0, 0]
    for k in range(12):
        torch.testing.assert_close(policy.table[:, 0, 0], mine)
        batch = step(run)
        newest = run.method.rollout.waiting[-1][1]
        played.append((mine.clone(), newest.action[:, 0], newest.signals["loss"][:, 0]))
        if k >= 3:
            old, action, loss = played[k - 3]
            rows = torch.arange(2)
            chance = old[rows, action]
            estimate = torch.zeros_like(mine)
            estimate[rows, action] = loss * chance / torch.maximum(chance, mine[rows, action]) / (chance + 0.02)
            mine = multiplicative_weights(mine, estimate, 0.05)
        else:
            assert not batch.counted.any()


def test_no_delay_is_plain_policy_optimization():
    adapted, plain = (run_of(NO_BONUS.set("rollout.delay", 0).set("credit.adapt", on), 20) for on in (True, False))
    assert torch.equal(adapted.policy.logits, plain.policy.logits)
    late, late_plain = (run_of(NO_BONUS.set("rollout.delay", 5).set("update.eta", 0.5).set("credit.adapt", on), 30) for on in (True, False))
    assert not torch.equal(late.policy.logits, late_plain.policy.logits)


def test_a_step_is_the_update_of_the_pure_functions():
    problem = EpisodicLosses(copies=2)
    policy = problem.policy()
    run = Run(METHOD.set("rollout.delay", 2).set("update.eta", 0.5), policy, problem, steps=9)
    for _ in range(8):
        step(run)
    before = policy.table
    old = run.method.rollout.waiting[0][1]
    step(run)
    play = old.signals["play_table"]
    assert not torch.allclose(play, before)
    q = q_estimate(old.context, old.action, old.signals["loss"], old.signals["occupancy"], play, before, 0.02).q
    extra = bonus(problem.transition, occupancy(problem.transition, play).occupancy, play, before, 0.02, 2).bonus
    torch.testing.assert_close(policy.table, update(before, q[None], extra[None], 0.5).policy)


def test_what_arrives_together_is_added():
    policy, q, extra = tables(3, 2, 2, 3), tables(4, 2, 2, 2, 3), tables(5, 2, 2, 2, 3)
    once = update(policy, q, extra, 0.3).policy
    twice = update(update(policy, q[:1], extra[:1], 0.3).policy, q[1:], extra[1:], 0.3).policy
    torch.testing.assert_close(once, twice)


def test_every_episode_arrives_once_or_is_lost():
    delays = torch.randint(9, (40,), generator=torch.Generator().manual_seed(0))
    matrix = arrivals(delays).matrix
    assert matrix.sum(0).tolist() == [int(j + d < 40) for j, d in enumerate(delays.tolist())]
    assert (arrivals(torch.zeros(4).long()).matrix == torch.eye(4)).all()
    run = run_of(METHOD.but(rollout=DelayedFeedback(4, random=True)), 60)
    assert sum(r["arrived"] for r in run.history) == 60 - len(run.method.rollout.waiting)
    assert max(r["arrived"] for r in run.history) > 1


def test_feedback_after_the_end_changes_nothing():
    run = run_of(METHOD.set("rollout.delay", 50), 20)
    assert (run.policy.logits == 0).all() and run.version == 0


def test_no_exploration_no_bonus_and_the_last_step_has_the_local_one():
    problem = EpisodicLosses(copies=2, horizon=3)
    play, arrive = tables(6, 2, 3, 2, 3), tables(7, 2, 3, 2, 3)
    visits = occupancy(problem.transition, play).occupancy
    assert (bonus(problem.transition, visits, play, arrive, 0.0, 3).bonus == 0).all()
    found = bonus(problem.transition, visits, play, arrive, 0.1, 3)
    torch.testing.assert_close(found.bonus[:, -1], found.local[:, -1, :, None].expand(-1, -1, 3))
    assert (found.bonus >= found.local[..., None]).all()


def log_probs(seed):
    return -torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)).double()


def test_without_delay_dappo_is_the_ppo_loss_exactly():
    mask, advantage = torch.rand(4, 5, generator=torch.Generator().manual_seed(9)) > 0.3, log_probs(2) + 0.5
    new = log_probs(0).requires_grad_()
    mine = dappo_loss(new, log_probs(1), log_probs(1), advantage, mask).loss
    other = aggregate(-clipped(token_ratio(new, log_probs(1), mask), advantage, 0.8, 1.2), mask, "token_mean")
    assert torch.equal(mine, other)
    assert torch.equal(torch.autograd.grad(mine, new)[0], torch.autograd.grad(other, new)[0])


def test_dappo_never_weighs_by_more_than_the_arriving_policy_allows():
    found = dappo_loss(log_probs(1), log_probs(0) - 3, log_probs(1), log_probs(2), torch.ones(4, 5).bool())
    torch.testing.assert_close(found.ratio, torch.ones(4, 5).double())


def test_padding_of_dappo_may_hold_anything():
    mask = torch.ones(4, 5).bool()
    mask[0], mask[1, 3:] = False, False
    new, advantage = log_probs(0).requires_grad_(), log_probs(2)
    clean = dappo_loss(new, log_probs(1), log_probs(3), advantage, mask).loss
    slope = torch.autograd.grad(clean, new)[0]
    dirty = log_probs(0).masked_fill(~mask, -math.inf).requires_grad_()
    bad = advantage.masked_fill(~mask, math.nan)
    loss = dappo_loss(dirty, log_probs(1).masked_fill(~mask, -math.inf), log_probs(3), bad, mask).loss
    torch.testing.assert_close(loss, clean)
    torch.testing.assert_close(torch.autograd.grad(loss, dirty)[0], slope)
    assert dappo_loss(new, log_probs(1), log_probs(3), advantage, torch.zeros(4, 5).bool()).loss == 0


def test_dappo_trains_a_language_policy():
    from anypo.loops.on_policy import train as train_on_policy
    from anypo.methods.language.grpo import METHOD as GRPO

    bandit = TokenBandit(2, 3, 2)
    run = train_on_policy(Run(GRPO.but(objective=DelayAdaptedSurrogate()), bandit.policy(), bandit, steps=2))
    assert all(math.isfinite(r["loss"]) for r in run.history)


@pytest.mark.parametrize("random", [False, True])
def test_it_trains_and_resumes_to_the_same_numbers(random, tmp_path):
    method = METHOD.but(rollout=DelayedFeedback(1, random))
    whole = run_of(method, 6, tmp_path / "whole")
    run_of(method, 4, tmp_path / "halves")
    halves = run_of(method, 6, tmp_path / "halves")
    assert torch.equal(whole.policy.logits, halves.policy.logits)
    assert [r["regret"] for r in whole.history] == [r["regret"] for r in halves.history]
    assert (whole.policy.table - 1 / 3).abs().max() > 1e-3
    assert all(math.isfinite(r["regret"]) and math.isfinite(r["loss"]) for r in whole.history)


def test_what_it_cannot_learn_from_is_refused():
    problem = EpisodicLosses(copies=2)
    with pytest.raises(ValueError, match="at least 0"):
        train(Run(METHOD.set("rollout.delay", -1), problem.policy(), problem, steps=1))
    bandit = TokenBandit(2, 3, 2)
    with pytest.raises(ValueError, match="table"):
        train(Run(METHOD, bandit.policy(), bandit, steps=1))
