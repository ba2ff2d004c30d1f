"""TayPO: its recursions against sums over pairs and triples, its limits, and the method with fresh and with lagging actors."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from anypo.domains.control.setup import build
from anypo.loops import on_policy
from anypo.methods.control.taypo import (
    METHOD,
    VARIANTS,
    deviations,
    expansion_terms,
    later,
    policy_loss,
    tabular_expansion,
    trajectory_terms,
    value_targets,
)
from anypo.run import Run
from tests.helpers import assert_resumes_on_cartpole, gradient, random_rows, trained_on_cartpole

GAMMA = 0.9


def rows_and_ends(seed: int, ragged: bool = True) -> tuple:
    rows = random_rows(seed, ragged=ragged)
    g = torch.Generator().manual_seed(seed + 50)
    q = torch.randn(rows.mask.shape, generator=g, dtype=torch.float64)
    return rows, q, torch.rand(rows.mask.shape, generator=g) < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_terms_are_sums_over_ordered_tuples_inside_an_episode(seed: int) -> None:
    rows, q, ends = rows_and_ends(seed)
    ends[:, :2] = False  # some trajectories have pairs
    eps = deviations(rows.logp, rows.old_logp, rows.mask)
    found = trajectory_terms(eps, q, ends, GAMMA, 3)
    alive = torch.cat([torch.ones(len(q), 1, dtype=torch.float64), (1 - ends.double()).cumprod(1)[:, :-1]], dim=1)
    for order in (1, 2, 3):
        total = torch.zeros(len(q), dtype=torch.float64)
        for chosen in itertools.combinations(range(q.shape[1]), order):
            total += GAMMA ** chosen[-1] * eps[:, list(chosen)].prod(1) * q[:, chosen[-1]] * alive[:, chosen[-1]]
        torch.testing.assert_close(found[order - 1], total)


def test_on_policy_all_terms_are_zero_and_the_gradient_is_the_policy_gradient() -> None:
    rows, q, ends = rows_and_ends(3)
    assert all(term == 0 for term in expansion_terms(rows.old_logp, rows.old_logp, q, ends, rows.mask, GAMMA, 3))
    for c in (0.0, 1.0):
        logp = rows.old_logp.clone().requires_grad_()
        loss = policy_loss(logp, rows.old_logp, q, ends, rows.mask, GAMMA, c)
        assert loss == 0
        torch.testing.assert_close(gradient(loss, logp)[0], -q * rows.mask / rows.mask.sum())


def test_no_pairs_without_weight_range_or_a_second_action() -> None:
    rows, q, ends = rows_and_ends(4)
    first = policy_loss(rows.logp, rows.old_logp, q, ends, rows.mask, GAMMA, c=0.0)
    assert policy_loss(rows.logp, rows.old_logp, q, ends, rows.mask, GAMMA, lam2=0.0) == first
    assert policy_loss(rows.logp, rows.old_logp, q, torch.ones_like(ends), rows.mask, GAMMA) == first
    assert policy_loss(rows.logp, rows.old_logp, q, ends, rows.mask, GAMMA) != first
    one = [x[:, :1] for x in (rows.logp, rows.old_logp, q, ends, rows.mask)]
    u1, u2 = expansion_terms(*one, GAMMA, 2)
    assert u2 == 0
    torch.testing.assert_close(u1, (((rows.logp - rows.old_logp).exp() - 1) * q)[:, 0].mean())


def test_both_factors_of_a_pair_have_a_gradient() -> None:
    logp = torch.tensor([[0.2, -0.1]], dtype=torch.float64, requires_grad=True)
    old, mask, ends = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    advantage = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    (found,) = gradient(policy_loss(logp, old, advantage, ends, mask, GAMMA, c=1.0, lam2=0.5), logp)
    ratio = logp.detach().exp()[0]
    pair = GAMMA * 0.5 * torch.stack([ratio[0] * (ratio[1] - 1), (ratio[0] - 1) * ratio[1]])
    torch.testing.assert_close(found[0], -(pair + torch.stack([torch.zeros_like(ratio[1]), ratio[1]])) / 2)


def test_bounded_deviations_have_no_gradient_and_padding_does_not_matter() -> None:
    rows, q, ends = rows_and_ends(5)
    wild = torch.where(rows.mask, rows.logp, float("-inf")).requires_grad_()
    arguments = (torch.where(rows.mask, rows.old_logp, float("nan")), torch.where(rows.mask, q, float("nan")), ends, rows.mask, GAMMA)
    loss = policy_loss(wild, *arguments)
    torch.testing.assert_close(loss, policy_loss(rows.logp, rows.old_logp, q, ends, rows.mask, GAMMA))
    assert torch.isfinite(gradient(loss, wild)[0]).all()
    far = (rows.old_logp + 3.0).requires_grad_()
    assert gradient(policy_loss(far, rows.old_logp, q, ends, rows.mask, GAMMA, eps_max=1.0), far)[0].eq(0).all()
    assert policy_loss(wild, *arguments[:3], torch.zeros_like(rows.mask), GAMMA) == 0


def test_the_series_ends_at_the_new_policy_s_values() -> None:
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(4, 2, generator=g, dtype=torch.float64)
    transition = torch.rand(4, 2, 4, generator=g, dtype=torch.float64)
    transition /= transition.sum(-1, keepdim=True)
    behaviour = torch.randn(4, 2, generator=g, dtype=torch.float64).softmax(-1)
    policy = 0.8 * behaviour + 0.2 * behaviour.flip(-1)
    found = tabular_expansion(reward, transition, policy, behaviour, 0.7, 60)
    torch.testing.assert_close(found.q_orders[-1], found.q_pi)
    same = tabular_expansion(reward, transition, behaviour, behaviour, 0.7, 2)
    torch.testing.assert_close(same.q_orders, same.q_pi.expand(3, 4, 2))
    value = (behaviour * same.q_pi).sum(-1)
    torch.testing.assert_close(same.q_pi, reward + 0.7 * transition @ value)


def test_value_targets_are_the_behaviour_s_on_policy_and_one_step_away_exact() -> None:
    rows, a, ends = rows_and_ends(6)
    returns = torch.randn_like(a)
    zero = torch.zeros_like(a)
    torch.testing.assert_close(value_targets(returns, a, zero, ends, rows.mask, GAMMA), torch.where(rows.mask, returns, zero))
    eps = deviations(rows.logp, rows.old_logp, rows.mask)
    alone = value_targets(returns, a, eps, torch.ones_like(ends), rows.mask, GAMMA)
    torch.testing.assert_close(alone, torch.where(rows.mask, returns + eps * a, zero))


def test_later_discounts_by_the_way() -> None:
    values, discount = torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[0.5, 0.0, 0.5, 0.5]])
    torch.testing.assert_close(later(values, discount), torch.tensor([[1.0, 0.0, 4.0, 0.0]]))


def test_trains_and_continues_identically(tmp_path: Path) -> None:
    assert_resumes_on_cartpole(METHOD, tmp_path / "fresh")
    assert_resumes_on_cartpole(VARIANTS["lagged"], tmp_path / "lagged")
    record = trained_on_cartpole(METHOD, 2).history[-1]
    assert record["deviation"] > 0 and "value_loss" in record


def test_lagging_actors_correct_the_critic_s_targets() -> None:
    policy, task = build("CartPole-v1", None, seed=0, envs=4, horizon=16, hidden=(16, 16))
    run = Run(VARIANTS["lagged"].set("update.learning_rate", 0.01), policy, task, steps=2, seed=0)
    first, second = on_policy.step(run), on_policy.step(run)
    for batch, fresh in ((first, True), (second, False)):
        credit = METHOD.set("credit.normalize", False).credit
        plain = batch.but(signals={k: v for k, v in batch.signals.items() if k != "sampled_elsewhere"})
        credit(plain, run)
        assert torch.allclose(plain.signals["returns"], batch.signals["returns"], atol=1e-5) is fresh
