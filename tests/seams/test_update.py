"""Minibatches cover everything once; gradients through chunks and recorded signals are exact; a gradient that is not finite stops the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.seams.update import GradientSteps, build_optimizer, clip_gradients, flatten_actions, minibatches


def ragged_batch() -> Batch:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    number = torch.arange(12).view(4, 3)
    return Batch(
        action=number, mask=mask, logp=-number.double(), group=torch.tensor([5, 9, 5, 9]), context=list("abcd"), advantage=number.double(),
        objectives=("a", "b"), reward=torch.arange(8.0).view(4, 2), signals={"prompt_id": torch.arange(4), "entropy": number.float()},
    )  # fmt: skip


@pytest.mark.parametrize("unit", ["group", "row"])
def test_minibatches_cover_every_row_once(unit: str) -> None:
    batch = ragged_batch()
    parts = list(minibatches(batch, 2, unit, torch.Generator().manual_seed(0)))
    assert len(parts) == 2
    assert sorted(i for part in parts for i in part.signals["prompt_id"].tolist()) == [0, 1, 2, 3]
    if unit == "group":
        assert sorted(set(part.group.tolist()) for part in parts) in ([{5}, {9}], [{9}, {5}])
    for part in parts:
        assert part.context == ["abcd"[i] for i in part.signals["prompt_id"].tolist()]


def test_one_part_is_the_batch_itself() -> None:
    batch = ragged_batch()
    assert next(minibatches(batch, 1, "group", torch.Generator())) is batch


def test_single_actions_keep_their_row_and_position() -> None:
    batch = ragged_batch()
    flat = flatten_actions(batch)
    assert flat.action.flatten().tolist() == [0, 1, 2, 3, 6, 7]
    assert flat.mask.all() and flat.mask.shape == (6, 1)
    assert flat.context == list("aaabcc") and flat.signals["prompt_id"].tolist() == [0, 0, 0, 1, 2, 2]
    assert flat.signals["entropy"].flatten().tolist() == [0, 1, 2, 3, 6, 7]
    parts = list(minibatches(batch, 4, "action", torch.Generator().manual_seed(0)))
    assert sorted(x for part in parts for x in part.action.flatten().tolist()) == [0, 1, 2, 3, 6, 7]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="auto, group, row or action"):
        next(minibatches(ragged_batch(), 2, "token", torch.Generator()))
    with pytest.raises(ValueError, match="use one of"):
        build_optimizer(TokenBandit().policy(), "adagrad9", None)


def test_roles_have_learning_rates_of_their_own() -> None:
    policy = TokenBandit().policy()
    optimizer = build_optimizer(policy, "sgd", 0.5, role_rates={"value": 0.1})
    assert [(g["lr"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups] == [
        (0.5, [tuple(policy.logits.shape)]),
        (0.1, [tuple(policy.values.shape)]),
    ]
    assert {g["lr"] for g in build_optimizer(policy, None, None).param_groups} == {policy.learning_rate}


def test_clipping_scales_to_the_norm() -> None:
    policy = TokenBandit().policy()
    assert clip_gradients(policy, 1.0) == 0
    policy.logits.grad = torch.full_like(policy.logits, 3.0)
    before = policy.logits.grad.norm()
    torch.testing.assert_close(clip_gradients(policy, None), before)
    torch.testing.assert_close(policy.logits.grad.norm(), before)
    torch.testing.assert_close(clip_gradients(policy, 0.5), before)
    torch.testing.assert_close(policy.logits.grad.norm(), torch.tensor(0.5, dtype=torch.float64), rtol=1e-4, atol=0)


class ChunkedTokens(TabularTokens):
    """The same table, evaluated three rows at a time."""

    def chunks(self, batch: Batch) -> Iterator[Tensor]:
        yield from torch.arange(len(batch)).split(3)


def gradient_of_step(policy: TabularTokens, recorded: bool) -> Tensor:
    task = TokenBandit(prompts=3)
    run = Run(GRPO, policy, task, steps=1)
    batch = run.collect(GRPO.select(task, run))
    run.prepare_signals(batch, GRPO.needs())
    batch.reward = torch.arange(len(batch), dtype=torch.float64) % 3
    batch.advantage = GRPO.credit(batch, run)
    if not recorded:
        batch.version = batch.version - 1  # the batch now counts as stale, and its log-probs are computed again
    run.backward(batch, run.loss_fn)
    assert policy.logits.grad is not None
    return policy.logits.grad


@pytest.mark.parametrize("kind", [TabularTokens, ChunkedTokens])
@pytest.mark.parametrize("recorded", [False, True])
def test_chunks_and_recorded_signals_leave_the_gradient_exact(kind: type[TabularTokens], recorded: bool) -> None:
    plain = gradient_of_step(TabularTokens(3, 4, 2, scale=0.5), recorded=False)
    assert plain.abs().max() > 0
    torch.testing.assert_close(gradient_of_step(kind(3, 4, 2, scale=0.5), recorded), plain)


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    task = TokenBandit(prompts=2)
    run = Run(GRPO, task.policy(), task, steps=1)
    batch = run.collect(GRPO.select(task, run))
    run.prepare_signals(batch, GRPO.needs())
    batch.advantage = torch.full(batch.mask.shape, float("nan"), dtype=torch.float64)
    before = run.policy.logits.detach().clone()
    with pytest.raises(FloatingPointError, match="not finite"):
        GradientSteps()(batch, run.loss_fn, run)
    assert torch.equal(run.policy.logits, before)


def test_epochs_and_minibatches_count_optimizer_steps() -> None:
    task = TokenBandit(prompts=4)
    run = Run(GRPO, task.policy(), task, steps=1)
    batch = run.collect(GRPO.select(task, run))
    run.prepare_signals(batch, GRPO.needs())
    batch.advantage = torch.randn(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    metrics = GradientSteps(epochs=3, minibatches=2)(batch, run.loss_fn, run)
    assert run.version == 6
    assert {"loss", "grad_norm", "clip_fraction", "approx_kl"} <= metrics.keys()
