"""BPO: the tree's equations, reductions, padding, precision near probability 1 and training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.methods.language.bpo_bellman import METHOD, loss, pmd_policy, residual, surrogate, weights
from anypo.run import Run
from anypo.seams.groups import broadcast, group_mean

GROUP = torch.tensor([0, 0, 1, 1, 1])


def random_rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs now and when sampled, a mask with one empty row, rewards."""
    generator = torch.Generator().manual_seed(seed)
    old = -0.01 - 2 * torch.rand(5, 4, generator=generator, dtype=torch.float64)
    logp = (old + 0.4 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).clamp(max=-1e-4).requires_grad_()
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 0, 1, 3])[:, None]
    return logp, old, mask, torch.rand(5, generator=generator, dtype=torch.float64)


def gradient(value: Tensor, logp: Tensor) -> Tensor:
    return torch.autograd.grad(value, logp)[0]


def random_tree(actions: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    nodes = sum(actions**k for k in range(depth))
    prob = torch.randn(nodes, actions, generator=generator, dtype=torch.float64).softmax(1)
    return prob, torch.rand(actions**depth, generator=generator, dtype=torch.float64)


def test_at_the_sampling_policy_it_is_reinforce_with_the_group_mean() -> None:
    logp, _, mask, reward = random_rows()
    found = loss(logp, logp.detach(), mask, reward, GROUP)
    advantage = reward - group_mean(reward, GROUP)
    plain = -(broadcast(advantage, mask) * logp).sum(1) / mask.sum(1).clamp(min=1)
    torch.testing.assert_close(found.loss, plain.mean())
    torch.testing.assert_close(gradient(found.loss, logp), gradient(plain.mean(), logp))
    assert torch.equal(found.keep, mask)


def test_large_eps_switches_the_correction_off() -> None:
    logp, old, mask, reward = random_rows()
    torch.testing.assert_close(weights(logp, old, 1e12), torch.ones_like(old))
    found = loss(logp, old, mask, reward, GROUP, eps=1e12).loss
    torch.testing.assert_close(gradient(found, logp), gradient(loss(logp, logp.detach(), mask, reward, GROUP).loss, logp))


def test_one_token_is_the_bandit_condition() -> None:
    prob, reward = random_tree(5, 1)
    found = pmd_policy(prob, reward, 0.5, 1)
    unnormalized = prob[0] * ((reward - prob[0] @ reward) / 0.5).exp()
    torch.testing.assert_close(found.policy[0], unnormalized / unnormalized.sum())
    torch.testing.assert_close(found.value, prob @ reward)
    gain = (found.policy / prob)[0].log()
    other = random_tree(5, 1, seed=1)[0]
    torch.testing.assert_close(residual(prob, found.policy, reward, 0.5, 1), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)
    expected = reward - prob[0] @ reward - 0.5 * ((other / prob)[0].log() - prob[0] @ (other / prob)[0].log())
    torch.testing.assert_close(residual(prob, other, reward, 0.5, 1), expected)
    assert gain.abs().max() > 0.1


def test_the_optimum_has_no_residual_and_advantages_telescope() -> None:
    prob, reward = random_tree(3, 4)
    found = pmd_policy(prob, reward, 0.5, 4)
    assert residual(prob, found.policy, reward, 0.5, 4).abs().max() < 1e-12
    values = torch.cat([found.value, reward])
    for leaf in (0, 37, 80):
        node, total = len(found.value) + leaf, 0.0
        while node > 0:
            parent = (node - 1) // 3
            total += float(values[node] - values[parent])
            node = parent
        assert math.isclose(total, float(reward[leaf] - values[0]), abs_tol=1e-12)


def test_weights_are_exact_near_one_and_bounded() -> None:
    tiny = torch.tensor([[-1e-9]], dtype=torch.float32)
    torch.testing.assert_close(weights(tiny, torch.tensor([[-1e-3]]), 1e-6), torch.tensor([[0.0010005 / 1.001e-6]]), rtol=1e-3, atol=0)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    torch.testing.assert_close(weights(zero, torch.full_like(zero, math.log(0.9)), 0.1), torch.full_like(zero, 2.0))
    assert weights(zero, torch.full_like(zero, -50.0)).item() == pytest.approx(11.0)
    with pytest.raises(ValueError, match="above 0"):
        weights(zero, zero, 0.0)


def test_mask_reads_the_weight_before_the_cap() -> None:
    logp, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    weight = torch.tensor([[5.0, 1.2]], dtype=torch.float64)
    found = surrogate(logp, weight, mask, torch.ones_like(logp), cap=1.1, clip_high=0.28)
    assert found.keep.tolist() == [[False, True]]
    wide = surrogate(logp.requires_grad_(), weight, mask, torch.ones_like(weight), cap=1.1, clip_high=9.0)
    torch.testing.assert_close(gradient(wide.loss, logp), torch.full_like(weight, -1.1 / 2))


def test_only_the_side_that_is_pushed_is_masked() -> None:
    weight = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    for sign, kept in ((1.0, [[True, False]]), (-1.0, [[False, True]]), (0.0, [[True, True]])):
        assert surrogate(weight.log(), weight, torch.ones(1, 2), torch.full_like(weight, sign)).keep.tolist() == kept


def test_lone_and_equal_members_give_nothing_and_empty_rows_count() -> None:
    logp, old, mask, reward = random_rows()
    for norm in ("none", "std"):
        assert not gradient(loss(logp, old, mask, reward, torch.arange(5), norm=norm).loss, logp).any()
        equal = loss(logp, old, mask, torch.full((5,), 0.3, dtype=torch.float64), GROUP, norm=norm)
        assert not equal.advantage.any()
    four = torch.tensor([0, 1, 3, 4])  # without the empty row, its reward kept out of the mean as well
    apart = torch.tensor([0, 0, 2, 1, 1])
    shorter = loss(logp[four], old[four], mask[four], reward[four], apart[four]).loss
    torch.testing.assert_close(loss(logp, old, mask, reward, apart).loss, shorter * 4 / 5)


def test_padding_may_hold_anything_and_weights_and_rewards_carry_no_gradient() -> None:
    logp, old, mask, reward = random_rows()
    filled = logp.detach().masked_fill(~mask, -math.inf).requires_grad_()
    value = loss(filled, old.masked_fill(~mask, math.nan), mask, reward.requires_grad_(), GROUP).loss
    found, none = torch.autograd.grad(value, [filled, reward], allow_unused=True)
    assert none is None and (found[~mask] == 0).all()
    torch.testing.assert_close(found, gradient(loss(logp, old, mask, reward.detach(), GROUP).loss, logp))
    result = loss(logp, old, mask, reward.detach(), GROUP)
    constant = result.advantage[:, None] * weights(logp, old).clamp(max=3.0) * result.keep / mask.sum(1, keepdim=True).clamp(min=1) / 5
    torch.testing.assert_close(gradient(result.loss, logp), -constant)


def test_all_masked_is_zero() -> None:
    logp, old, mask, reward = random_rows()
    assert loss(logp, old, torch.zeros_like(mask), reward, GROUP).loss == 0


def test_trains() -> None:
    task = TokenBandit()
    run = Run(METHOD.set("update.learning_rate", 16.0).set("update.max_grad_norm", None), task.policy(), task, steps=5)
    before = task.expected_success(run.policy)
    batch = step(run)
    assert batch.advantage is not None and not batch.advantage.requires_grad
    train(run)
    assert task.expected_success(run.policy) > before
    assert all(math.isfinite(v) for record in run.history for v in record.values() if isinstance(v, float))
    assert run.history[-1]["weight"] > 0 and run.history[-1]["clip_fraction"] >= 0
