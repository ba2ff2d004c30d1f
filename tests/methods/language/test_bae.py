"""BAE: when it is GRPO, strata and their small ones, what never leaks between blocks, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language.bae import METHOD, SCALES, VARIANTS, BlockSurrogate, advantages, block_mean, loss, spread, strata
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.grpo import loss as grpo_loss
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.run import Run
from anypo.seams.groups import broadcast, group_mean, group_sum, leave_one_out_mean
from anypo.seams.objective import ClippedSurrogate
from tests.helpers import assert_resumes, assert_trains, random_rows, trained


class Two(TokenBandit):
    """Two tokens, each a block: the first is right when it is 1, the second when it repeats the first."""

    def __init__(self, **options) -> None:
        super().__init__(4, objectives=("first", "second"), **options)

    def rewards(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == action[:, 0]).double()], dim=1)

    def continue_from(self, *args, **options):
        batch = super().continue_from(*args, **options)
        batch.signals["block"] = torch.arange(2).expand(len(batch), 2)
        return batch


def rows_of(seed: int, rows: int = 24, blocks: int = 3, horizon: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """reward [N,K], outcome [N,K], group [N], segment [N,T] and a ragged mask."""
    g = torch.Generator().manual_seed(seed)
    outcome = torch.randint(0, 2, (rows, blocks), generator=g)
    outcome[:, 0] = 0
    reward = torch.randn(rows, blocks, generator=g, dtype=torch.float64)
    mask = torch.arange(horizon) < torch.randint(1, horizon + 1, (rows, 1), generator=g)
    return reward, outcome, torch.randperm(rows, generator=g) % 3, torch.randint(-1, blocks, (rows, horizon), generator=g), mask


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), scaled=st.booleans())
def test_one_block_is_grpo(seed: int, scaled: bool) -> None:
    reward, outcome, group, segment, mask = rows_of(seed, blocks=1)
    whole = torch.zeros_like(segment)
    found = advantages(reward, outcome, group, whole, mask, scale="group" if scaled else "none")
    torch.testing.assert_close(found.advantages, broadcast(grpo_advantages(reward[:, 0], group, std=scaled), mask))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_all_tokens_of_block_0_are_grpo_on_its_reward(seed: int) -> None:
    reward, outcome, group, segment, mask = rows_of(seed)
    found = advantages(reward, outcome, group, torch.zeros_like(segment), mask)
    torch.testing.assert_close(found.advantages, broadcast(grpo_advantages(reward[:, 0], group), mask))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), loo=st.booleans())
def test_a_constant_outcome_is_the_group_mean_of_each_block(seed: int, loo: bool) -> None:
    reward, outcome, group, segment, mask = rows_of(seed)
    found = advantages(reward, torch.full_like(outcome, 7), group, segment, mask, loo=loo)
    torch.testing.assert_close(found.baseline, leave_one_out_mean(reward, group) if loo else group_mean(reward, group))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from(SCALES), loo=st.booleans(), fallback=st.sampled_from(["zero", "group"]))
def test_baselines_are_the_loop_over_strata_and_sum_to_zero(seed: int, scale: str, loo: bool, fallback: str) -> None:
    reward, outcome, group, segment, mask = rows_of(seed, rows=13)
    found = advantages(reward, outcome, group, segment, mask, scale=scale, loo=loo, fallback=fallback)
    assert torch.isfinite(found.block_advantages).all()
    for i in range(13):
        for k in range(3):
            peers = [j for j in range(13) if group[j] == group[i] and outcome[j, k] == outcome[i, k]]
            if len(peers) == 1:
                assert fallback == "group" or found.block_advantages[i, k] == 0
                continue
            counted = [j for j in peers if j != i] if loo else peers
            torch.testing.assert_close(found.baseline[i, k], reward[counted, k].mean())
    if fallback == "zero":
        total = group_sum(found.block_advantages.flatten(), strata(outcome, group).flatten())
        torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-10, rtol=0)


@pytest.mark.parametrize("scale", SCALES)
def test_a_blocks_advantage_depends_on_its_own_reward_alone(scale: str) -> None:
    reward, outcome, group, segment, mask = rows_of(5)
    other = reward.clone()
    other[:, 1] = torch.arange(len(reward), dtype=torch.float64)
    a, b = (advantages(r, outcome, group, segment, mask, scale=scale).advantages for r in (reward, other))
    assert torch.equal(a[segment != 1], b[segment != 1]) and not torch.equal(a, b)


@pytest.mark.parametrize("scale", SCALES)
def test_an_outcome_that_tells_the_reward_leaves_no_signal(scale: str) -> None:
    reward, outcome, group, segment, mask = rows_of(3)
    reward = (reward > 0).double()
    found = advantages(reward, reward.long(), group, segment, mask, scale=scale)
    assert found.advantages.eq(0).all()


def test_small_strata_and_eps_zero_are_finite() -> None:
    reward = torch.tensor([[1.0, 0.3], [0.0, 0.9], [1.0, 0.5]], dtype=torch.float64)
    outcome, group = torch.tensor([[0, 1], [0, 0], [0, 1]]), torch.tensor([4, 4, 9])
    segment, mask = torch.tensor([[0, 1]]).expand(3, 2), torch.ones(3, 2, dtype=torch.bool)
    for scale in SCALES:
        found = advantages(reward, outcome, group, segment, mask, scale=scale, eps=0.0).block_advantages
        assert torch.isfinite(found).all() and found[:, 1].eq(0).all() and found[2].eq(0).all() and found[0, 0] > 0 > found[1, 0]
    fallen = advantages(reward, outcome, group, segment, mask, scale="none", fallback="group")
    torch.testing.assert_close(fallen.block_advantages[:, 1], torch.tensor([-0.3, 0.3, 0.0], dtype=torch.float64))
    assert advantages(reward, outcome * 0, group, segment, mask, min_stratum=3).advantages.eq(0).all()


def test_tokens_between_blocks_and_padding_have_no_advantage() -> None:
    block = torch.tensor([[2.0, -3.0]])
    found = spread(block, torch.tensor([[0, -1, 1, 5, 1]]), torch.tensor([[1, 1, 1, 1, 0]]))
    assert found.tolist() == [[2.0, 0.0, -3.0, 0.0, 0.0]]


def test_the_loss_is_grpos_token_mean_and_a_mean_for_each_block() -> None:
    rows = random_rows(2)
    segment = torch.arange(5).expand(8, 5) % 2
    advantage = broadcast(rows.advantages, rows.mask)
    found = loss(rows.logp, rows.old_logp, advantage, segment, rows.mask, 0.2, 0.2)
    plain = grpo_loss(rows.logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, beta=0.0, agg="token_mean").loss
    torch.testing.assert_close(found.token_mean, plain)
    one = loss(rows.logp, rows.old_logp, advantage, torch.zeros_like(segment), rows.mask, 0.2, 0.2)
    torch.testing.assert_close(one.block_mean, plain)
    assert loss(rows.logp, rows.old_logp, advantage, torch.full_like(segment, -1), rows.mask).block_mean == 0


def test_padding_and_tokens_of_no_block_carry_no_gradient() -> None:
    rows = random_rows(4)
    segment = torch.where(torch.arange(5) == 1, -1, torch.arange(5) % 2).expand(8, 5)
    old = rows.old_logp.masked_fill(~rows.mask, float("nan"))
    logp = rows.logp.masked_fill(~rows.mask, -float("inf")).requires_grad_()
    advantage = torch.where(rows.mask & (segment >= 0), rows.advantages[:, None], 0.0)
    for how in range(2):
        value = loss(logp, old, advantage, segment, rows.mask)[how]
        gradient = torch.autograd.grad(value, logp)[0]
        assert torch.isfinite(gradient).all() and gradient[~rows.mask].eq(0).all() and gradient[segment < 0].eq(0).all() and gradient.any()


def test_block_weights_are_one_for_each_block() -> None:
    values, segment = torch.tensor([[1.0, 1.0, 5.0]]), torch.tensor([[0, 0, 1]])
    assert float(block_mean(values, segment, torch.ones(1, 3), (1.0, 0.5))) == 3.5
    assert float(block_mean(values, segment, torch.ones(1, 3), (1.0, 0.5, 9.0))) == 3.5
    with pytest.raises(ValueError, match="one for each"):
        block_mean(values, segment, torch.ones(1, 3), (1.0,))


@pytest.mark.parametrize("option", [{"scale": "row"}, {"fallback": "row"}])
def test_unknown_names_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="fallback one of"):
        advantages(*rows_of(0), **option)


def train_two(method: Method, steps: int = 4) -> Run:
    task = Two()
    return train(Run(method, task.policy(autoregressive=True, scale=0.1), task, steps=steps, seed=0))


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda method: method.name)
def test_the_loop_trains_with_one_reward_and_with_two_blocks(method: Method) -> None:
    assert_trains(method)
    run = train_two(method)
    assert torch.isfinite(run.policy.logits).all() and run.policy.logits.diff(dim=1).any()
    assert all(0 <= record["small_strata"] < 1 for record in run.history)


def test_without_a_prefix_outcome_the_block_before_tells() -> None:
    class Told(Two):
        def continue_from(self, *args, **options):
            batch = super().continue_from(*args, **options)
            right = (batch.action[:, 0] == 1).long()
            batch.signals["prefix_outcome"] = torch.stack([right * 0, right], dim=1)
            return batch

    runs = [train(Run(METHOD, task.policy(autoregressive=True), task, steps=3, seed=0)) for task in (Two(), Told())]
    assert torch.equal(runs[0].policy.logits, runs[1].policy.logits)


def test_several_rewards_without_blocks_are_refused_and_segments_are_blocks() -> None:
    class Bare(Two):
        def continue_from(self, *args, **options):
            batch = super().continue_from(*args, **options)
            del batch.signals["block"]
            return batch

    class Segments(Bare):
        def continue_from(self, *args, **options):
            batch = super().continue_from(*args, **options)
            return batch.but(segment=torch.arange(2).expand(len(batch), 2))

    def run(task: TokenBandit) -> Run:
        return train(Run(METHOD, task.policy(autoregressive=True, scale=0.1), task, steps=4, seed=0))

    with pytest.raises(ValueError, match="signal 'block'"):
        run(Bare())
    assert torch.equal(run(Segments()).policy.logits, train_two(METHOD).policy.logits)


def test_one_reward_trains_as_grpo() -> None:
    same = GRPO.but(select=METHOD.select, objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"), regularize=())
    torch.testing.assert_close(trained(METHOD, 4).policy.logits, trained(same, 4).policy.logits)


def test_parts_go_with_other_parts() -> None:
    assert_trains(METHOD.but(credit=RLOO.credit, objective=BlockSurrogate()))
    assert_trains(GRPO.but(credit=METHOD.credit))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
