"""LightningRL: its exact reductions, its pitfalls, and training through the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.domains.masked.models import load_policy
from anypo.domains.masked.states import VIEW_ORDER, with_hidden
from anypo.domains.masked.tasks import make_split_sum
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.masked.lightningrl import (
    METHOD,
    advantages,
    aup,
    combined,
    is_correct,
    keep_prompts,
    loss,
    nll,
    reward,
    speed,
    tokens_per_forward,
)
from anypo.run import Run
from anypo.seams.groups import standardize
from anypo.seams.objective import ClippedSurrogate
from tests.helpers import gradient, random_rows


def run_of(method: Method = METHOD, steps: int = 2, seed: int = 0, out: Path | None = None, tail: str = "drop", **task) -> Run:
    small = method.set("select.prompts", 4).set("select.group_size", 8)
    built = make_split_sum(**{"block": 4, "threshold": 0.3} | task)
    return Run(small, load_policy(tail=tail), built, steps=steps, seed=seed, out=out, checkpoint_every=2)


def weights(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


# ---- reductions


def test_equal_speeds_leave_accuracy_alone_and_equal_accuracies_speed() -> None:
    g = torch.Generator().manual_seed(0)
    group = torch.arange(12) // 4
    correct, tpf = (torch.rand(12, generator=g) < 0.5).double(), 1 + torch.rand(12, generator=g, dtype=torch.float64)
    assert torch.equal(combined(correct, torch.full((12,), 2.0), group), standardize(correct, group, 0, 0.0))
    assert torch.equal(combined(torch.ones(12), tpf, group, w_speed=1.0), standardize(tpf, group, 0, 0.0))


def test_prompt_groups_of_accuracy_alone_are_grpo() -> None:
    correct, group = torch.tensor([1.0, 0, 0, 1, 1, 1]).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    only = combined(correct, torch.ones(6), group)
    torch.testing.assert_close(advantages(only, group, "prompt_group"), standardize(correct, group, 1, 1e-8), atol=1e-7, rtol=0)


def test_the_joint_baseline_normalizes_the_sum() -> None:
    correct, tpf, group = torch.tensor([1.0, 1, 0, 0]), torch.tensor([9.0, 1, 9, 1]), torch.zeros(4, dtype=torch.int64)
    joint = combined(correct, tpf, group, decoupled=False)
    torch.testing.assert_close(joint, standardize((correct + tpf).double(), group, 0, 0.0))
    assert joint[2] > joint[1]


def test_without_anchor_and_kl_the_loss_is_the_clipped_surrogate() -> None:
    rows = random_rows(1)
    found = loss(rows.logp, rows.old_logp, rows.old_logp, rows.mask, rows.advantages, torch.zeros(8), w_nll=0.0, kl_beta=0.0)
    run = run_of()
    batch = run.collect(METHOD.select(run.task, run))[:8].but(
        mask=rows.mask, keep=None, logp=rows.old_logp, advantage=rows.advantages[:, None] * rows.mask
    )
    wanted = ClippedSurrogate()(batch, type("New", (), {"logp": rows.logp}), run).value
    torch.testing.assert_close(found.total, wanted)


def test_the_components_add_up_to_the_loss() -> None:
    run = run_of()
    batch = METHOD.rollout(METHOD.select(run.task, run), run)
    run.prepare_signals(batch, METHOD.needs())
    batch.reward = METHOD.reward(batch, run)
    batch.advantage = METHOD.credit(batch, run)
    new = type("New", (), {"logp": batch.logp + 0.1 * torch.randn(batch.logp.shape, generator=run.generator)})
    wanted = loss(new.logp, batch.logp, batch.signals["ref_logp"], batch.counted, batch.advantage[:, 0], is_correct(batch, run)).total
    found = sum(part(batch, new, run).value for part in (METHOD.objective, *METHOD.regularize))
    torch.testing.assert_close(found, wanted)


# ---- log-probs in the states of the reveal


@pytest.mark.parametrize("tail", ["drop", "mask"])
@pytest.mark.parametrize("block", [2, 4])
def test_the_policy_reads_every_token_in_the_state_in_which_it_was_revealed(tail: str, block: int) -> None:
    run = run_of(tail=tail, block=block, threshold=0.25)
    batch = METHOD.rollout(METHOD.select(run.task, run), run)
    assert len(torch.unique(batch.signals["passes"])) > 1
    torch.testing.assert_close(run.score(batch, {"logp"}).logp, batch.signals["reveal_logp"], atol=1e-5, rtol=0)
    assert torch.equal(batch.logp, batch.signals["reveal_logp"]) and "old_entropy" not in batch.signals


def test_one_pass_a_block_is_the_prefix_block_state_and_hidden_tokens_have_no_order() -> None:
    run = run_of(block=2, threshold=0.0)
    batch = run.collect(METHOD.select(run.task, run))
    seen = batch.but(signals=batch.signals | {VIEW_ORDER: torch.zeros_like(batch.action)})
    assert torch.equal(run.score(seen, {"logp"}).logp, run.score(batch, {"logp"}).logp)
    assert VIEW_ORDER not in with_hidden(seen, batch.mask).signals


# ---- pitfalls


def test_lone_responses_and_equal_ones_have_no_advantage() -> None:
    one, group = torch.tensor([3.0]), torch.zeros(1, dtype=torch.int64)
    for mode in ("batch", "prompt_group", "prompt_group_center"):
        assert advantages(one, group, mode).tolist() == [0.0]
        assert torch.equal(advantages(torch.full((4,), 0.3), torch.arange(4) // 2, mode), torch.zeros(4))
    assert torch.equal(combined(torch.ones(4), torch.full((4,), 2.0), torch.zeros(4, dtype=torch.int64)), torch.zeros(4).double())
    with pytest.raises(ValueError, match="unknown mode"):
        advantages(one, group, "row")
    with pytest.raises(ValueError, match="unknown tpf_mode"):
        combined(one, one, group, "rank")


def test_no_calls_is_no_speed_and_the_filter_keeps_whole_prompts() -> None:
    assert tokens_per_forward(torch.tensor([4, 4]), torch.tensor([0, 2])).tolist() == [0.0, 2.0]
    found = reward(torch.tensor([1, 0]), torch.tensor([0, 4]), torch.tensor([0, 4]), torch.tensor([0, 0]))
    assert torch.isfinite(found.reward).all()
    kept = keep_prompts(torch.tensor([1, 0, 0, 0]), torch.tensor([1.0, 2, 1, 2]), torch.tensor([7, 7, 3, 3]))
    assert kept.tolist() == [True, True, False, False]


def test_only_correct_rows_are_anchored_and_padding_may_hold_anything() -> None:
    rows = random_rows(2)
    correct = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0])
    logp = torch.where(rows.mask, rows.logp, -torch.inf).requires_grad_(True)
    found = loss(logp, rows.old_logp, rows.old_logp, rows.mask, rows.advantages, correct)
    assert all(torch.isfinite(value) for value in found)
    (slope,) = gradient(nll(logp, rows.mask, correct), logp)
    assert ((slope != 0) == (rows.mask & (correct > 0)[:, None])).all() and (slope <= 0).all()
    assert nll(logp, rows.mask, torch.zeros(8)) == 0


def test_the_area_of_a_single_point_is_its_rectangle() -> None:
    torch.testing.assert_close(aup(torch.tensor([2.0]), torch.tensor([0.5]), best=0.8), torch.tensor(1.0).double())


def test_nothing_is_trained_when_the_filter_leaves_nothing() -> None:
    run = run_of(METHOD.set("update.optimizer", "sgd"), threshold=0.0)  # one pass a block: all equally fast
    before = weights(run)
    batch = step(run)
    assert not batch.counted.any() and run.history[0]["loss"] == 0
    assert torch.equal(before, weights(run))


def test_other_tasks_and_rewards_are_refused() -> None:
    run = run_of()
    batch = run.collect(METHOD.select(run.task, run))
    batch.reward = run.score_rewards(batch)
    with pytest.raises(ValueError, match="--reward lightningrl"):
        METHOD.credit(batch, run)
    del batch.signals["passes"]
    with pytest.raises(ValueError, match="counts the network's calls"):
        speed(batch, run)


# ---- in the loop


@pytest.mark.parametrize("change", ["", "minmax", "none", "prompt_group", "joint", "minibatches"])
def test_it_trains(change: str) -> None:
    changed = {
        "minmax": METHOD.set("credit.tpf_mode", "minmax"),
        "none": METHOD.set("credit.tpf_mode", "none").set("credit.acc_norm", False),
        "prompt_group": METHOD.set("credit.mode", "prompt_group"),
        "joint": METHOD.set("credit.decoupled", False),
        "minibatches": METHOD.set("update.minibatches", 2),
    }.get(change, METHOD)
    run = run_of(changed)
    start = weights(run)
    train(run)
    assert torch.isfinite(weights(run)).all() and not torch.equal(start, weights(run))
    for record in run.history:
        assert {"reward/correct", "reward/tpf", "nll", "kl", "prompts_with_contrast"} <= set(record)
        assert all(torch.isfinite(torch.tensor(v)) for v in record.values() if isinstance(v, float))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    whole = train(run_of(steps=4))
    train(run_of(steps=2, out=tmp_path))
    halves = run_of(steps=4, out=tmp_path)
    assert halves.resume()
    train(halves)
    assert torch.equal(weights(whole), weights(halves))
