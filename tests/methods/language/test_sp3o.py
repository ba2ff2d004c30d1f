"""SP3O: when it is PPO, which states are supervised, the variance identity, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.control import ppo
from anypo.methods.language.sp3o import METHOD, SparseValueLoss, flattening, supervised_states, value_loss, variance_identity
from anypo.run import Run
from anypo.seams.regularize import ValueLoss
from tests.helpers import assert_resumes, assert_trains, trained

LONG = {"horizon": 6, "partial": True}
PPO = ppo.FOR_DOMAIN["language"].but(regularize=(ValueLoss(0.5, 0.5),))


def rows(seed: int, count: int = 10, horizon: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """A mask with holes, of which row 0 is empty and row 1 has one state; values and old values."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, horizon, generator=g) < 0.7
    mask[0], mask[1] = False, torch.arange(horizon) == 3
    value, old = torch.randn(2, count, horizon, generator=g, dtype=torch.float64)
    return mask, value, old


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, 14), top=st.sampled_from([0.0, 0.5, 1 - 2**-24, None]))
def test_every_stratum_of_a_row_has_one_state(seed: int, k: int, top: float | None) -> None:
    mask, _, _ = rows(seed)
    g = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(mask), k, generator=g) if top is None else torch.full((len(mask), k), top)
    sup = supervised_states(mask, draws, k)
    length = mask.sum(1)
    assert not bool((sup & ~mask).any()) and torch.equal(sup.any(1), mask.any(1))
    for i, n in enumerate(length.tolist()):
        number = (mask[i].cumsum(0) - 1)[sup[i]].tolist()  # places among the row's own actions
        if n <= k:
            assert number == list(range(n))
            continue
        assert all(any(j * n // k <= place < (j + 1) * n / k for place in number) for j in range(k))
        assert len(number) == k if n % k == 0 else k / 2 <= len(number) <= k  # neighbouring strata may share the state on their border


def test_as_many_states_as_actions_is_the_dense_loss() -> None:
    mask, value, old = rows(0)
    returns = torch.ones_like(value)
    sup = supervised_states(mask, torch.full((len(mask), 12), 0.5), 12)
    assert torch.equal(sup, mask)
    for clip in (None, 0.3):
        assert torch.equal(value_loss(value, returns, sup, old, clip), 0.5 * ppo.value_loss(value, old, returns, mask, clip))


def test_as_many_states_as_actions_trains_as_ppo() -> None:
    off = METHOD.but(regularize=(SparseValueLoss(states=6, random=False),))
    mine, plain = trained(off, 3, **LONG).policy, trained(PPO, 3, **LONG).policy
    assert torch.equal(mine.logits, plain.logits) and torch.equal(mine.values, plain.values)
    assert not torch.equal(trained(METHOD, 3, **LONG).policy.values, plain.values)


def test_one_state_has_no_variance_penalty() -> None:
    mask, value, _ = rows(1)
    one = supervised_states(mask, torch.rand(len(mask), 1), 1)
    found = variance_identity(value, torch.ones(len(mask)).double(), one)
    assert found.variance.eq(0).all()
    torch.testing.assert_close(found.dense, found.bias)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_dense_loss_is_bias_plus_variance_and_so_are_the_gradients(seed: int) -> None:
    mask, value, old = rows(seed)
    reward = old[:, 0]
    value = torch.where(mask, value, torch.nan).requires_grad_(True)
    found = variance_identity(value, reward, mask)
    torch.testing.assert_close(found.dense, found.bias + found.variance)
    gradients = [torch.autograd.grad(part.sum(), value, retain_graph=True)[0] for part in found]
    assert all(torch.isfinite(g).all() and g[~mask].eq(0).all() for g in gradients)
    torch.testing.assert_close(gradients[0] - gradients[1], gradients[2])


def test_the_loss_has_a_gradient_at_supervised_states_alone_and_is_their_mean() -> None:
    mask, value, _ = rows(2)
    value.requires_grad_(True)
    sup = supervised_states(mask, torch.full((len(mask), 3), 0.5), 3)
    loss = value_loss(value, torch.zeros_like(value), sup)
    torch.testing.assert_close(loss, 0.5 * (value[sup] ** 2).mean())
    (gradient,) = torch.autograd.grad(loss, value)
    assert bool((gradient[sup] != 0).all()) and gradient[~sup].eq(0).all()


def test_flattening_is_one_for_equal_values_and_zero_for_flat_ones() -> None:
    mask, value, old = rows(3)
    assert flattening(value, value, mask) == (1.0, 1.0)
    assert flattening(torch.ones_like(value), value, mask) == (0.0, 0.0)
    assert flattening(value, torch.ones_like(value), mask) == (0.0, 0.0)
    torch.testing.assert_close(flattening(0.3 * value + 5, value, mask).ratio, torch.tensor(0.3).double())
    assert flattening(value, old, mask).ratio == flattening(torch.where(mask, value, torch.nan), old, mask).ratio


def test_the_policy_is_not_sparse() -> None:
    one_step = {"update.max_grad_norm": None, "update.epochs": 1, "update.minibatches": 1, "credit.normalize": False}
    logits, values = [], []
    for method in (METHOD.but(regularize=(SparseValueLoss(random=False),)), PPO):
        for path, value in one_step.items():
            method = method.set(path, value)
        policy = trained(method, 1, **LONG).policy
        logits.append(policy.logits)
        values.append(policy.values)
    assert torch.equal(*logits) and not torch.equal(*values)
    assert values[0].eq(0).any(0).tolist() == [True, False, True, False, True, False]  # the middles of strata of two


def test_draws_are_refused_unless_there_are_k() -> None:
    with pytest.raises(ValueError, match="draws"):
        supervised_states(torch.ones(2, 4), torch.rand(2, 2), 3)
    with pytest.raises(ValueError, match="k = 0"):
        trained(METHOD.set("regularize.0.states", 0), 1)


def arith(method: Method, steps: int) -> Run:
    policy, task = make_toy_arith(steps=True, value_head=True, target=0.05)
    return train(Run(method.set("select.prompts", 4), policy, task, steps=steps))


def test_it_trains_on_the_bandit_and_on_written_sums() -> None:
    assert_trains(METHOD, **LONG)
    run = arith(METHOD, 2)
    assert all(torch.isfinite(torch.tensor([r["loss"], r["value_loss"], r["explained_variance"]])).all() for r in run.history)
    assert bool((run.policy.value_head.weight != 0).any())


def test_four_steps_equal_two_and_two_more(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path, **LONG)
