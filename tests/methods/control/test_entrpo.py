"""EnTRPO: exactly TRPO at its limits, the entropies' sum and its ends, the region around the policy of the moment, the buffer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from anypo.loops.on_policy import step, train
from anypo.methods.control import trpo
from anypo.methods.control.entrpo import (
    METHOD,
    categorical_entropy,
    entropy_advantages,
    normalized,
    replay_indices,
    replay_surrogate,
)
from anypo.policy import MissingSignal
from anypo.run import Run
from anypo.seams.credit import gae
from anypo.seams.natural import BatchGeometry, split_loss
from tests.helpers import assert_resumes_on_cartpole, gradient, random_rows, trained_on_cartpole


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ends(rows: int, horizon: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """No termination, no truncation, a full mask."""
    none = torch.zeros(rows, horizon, dtype=torch.bool)
    return none, none.clone(), ~none


def test_without_entropy_and_with_one_batch_it_is_trpo_exactly() -> None:
    method = METHOD.set("credit.beta", 0.0).set("update.capacity", 1)
    mine, theirs = trained_on_cartpole(method, 3), trained_on_cartpole(trpo.METHOD, 3)
    assert all(torch.equal(a, b) for a, b in zip(mine.policy.parameters(), theirs.policy.parameters(), strict=True))
    assert [r["kl"] for r in mine.history] == [r["kl"] for r in theirs.history]
    other = trained_on_cartpole(METHOD.set("credit.beta", 0.0), 3)
    assert other.history[0]["kl"] == theirs.history[0]["kl"] and other.history[1]["kl"] != theirs.history[1]["kl"]


def test_the_entropies_are_summed_like_rewards() -> None:
    reward, value, following = (numbers(3, 6, seed=i) for i in range(3))
    entropy = numbers(3, 6, seed=3).abs()
    terminated, truncated, mask = ends(3, 6)
    terminated[0, 2] = truncated[1, 3] = True
    mask[2, 4:] = False
    found = entropy_advantages(reward, value, following, terminated, truncated, mask, entropy, 0.9, 0.8, 0.3)
    plain = gae(reward, value, terminated, truncated, mask, 0.9, 0.8, following).advantages
    zero = torch.zeros_like(value)
    added = gae(entropy, zero, terminated, truncated, mask, 0.9, 0.8, zero).advantages
    torch.testing.assert_close(found, plain + 0.3 * added)
    assert torch.equal(entropy_advantages(reward, value, following, terminated, truncated, mask, entropy, 0.9, 0.8, 0.0), plain)
    later = entropy_advantages(reward, value, following, terminated, truncated, mask, entropy, 0.9, 0.8, 0.3, first_entropy=False)
    torch.testing.assert_close(found - later, 0.3 * entropy * mask)
    changed = entropy.clone()
    changed[0, 3:], changed[1, 4:], changed[2, 4:] = 9.0, 9.0, float("nan")
    again = entropy_advantages(reward, value, following, terminated, truncated, mask, changed, 0.9, 0.8, 0.3)
    assert torch.equal(again[0, :3], found[0, :3]) and torch.equal(again[1, :4], found[1, :4]) and torch.equal(again[2], found[2])


def test_a_constant_entropy_adds_a_geometric_sum() -> None:
    reward, value, following = (numbers(2, 5, seed=i) for i in range(3))
    flags = ends(2, 5)
    entropy = torch.full((2, 5), 0.7, dtype=torch.float64)
    found = entropy_advantages(reward, value, following, *flags, entropy, 0.9, 0.8, 0.5)
    plain = gae(reward, value, *flags, 0.9, 0.8, following).advantages
    left = torch.arange(5, 0, -1, dtype=torch.float64)
    torch.testing.assert_close(found - plain, (0.5 * 0.7 * (1 - 0.72**left) / (1 - 0.72)).expand(2, 5))


def test_advantages_without_spread_are_zero_and_a_shift_changes_nothing() -> None:
    a, mask = numbers(4, 5), torch.ones(4, 5, dtype=torch.bool)
    mask[0] = False
    torch.testing.assert_close(normalized(a + 3.0, mask), normalized(a, mask))
    torch.testing.assert_close(normalized(a, mask)[mask].std(correction=0), torch.ones((), dtype=torch.float64))
    assert normalized(torch.full((4, 5), 0.1), mask).eq(0).all() and normalized(a, torch.zeros_like(mask)).eq(0).all()


def test_without_a_cap_it_is_trpos_surrogate_and_at_ratio_one_its_gradient() -> None:
    rows, a = random_rows(0, spread=1.0), numbers(8, 5)
    torch.testing.assert_close(
        replay_surrogate(rows.logp, rows.old_logp, a, rows.mask, math.inf).surrogate, trpo.surrogate(rows.logp, rows.old_logp, a, rows.mask)
    )
    logp = rows.old_logp.clone().requires_grad_()
    (found,) = gradient(replay_surrogate(logp, rows.old_logp, a, rows.mask), logp)
    torch.testing.assert_close(found, -a * rows.mask / rows.mask.sum())


def test_no_gradient_beyond_the_cap_and_none_from_the_padding() -> None:
    rows, a = random_rows(1, spread=1.5), numbers(8, 5)
    logp = torch.where(rows.mask, rows.logp, float("-inf")).requires_grad_()
    result = replay_surrogate(logp, rows.old_logp.masked_fill(~rows.mask, float("nan")), a.masked_fill(~rows.mask, float("nan")), rows.mask)
    (found,) = gradient(result, logp)
    ratio = (rows.logp - rows.old_logp).exp()
    free = rows.mask & (ratio < 2)
    assert (rows.mask & ~free).any() and torch.isfinite(result.loss)
    torch.testing.assert_close(found, torch.where(free, -ratio * a / rows.mask.sum(), torch.zeros_like(a)))
    nothing = torch.zeros_like(rows.mask)
    assert replay_surrogate(rows.logp, rows.old_logp, a, nothing).loss == 0


def test_entropy_is_largest_for_equal_logits() -> None:
    torch.testing.assert_close(categorical_entropy(torch.zeros(1, 5)), torch.tensor([math.log(5)]))
    assert categorical_entropy(torch.tensor([[0.0, 1000.0]])).eq(0).all()


def test_the_region_is_drawn_around_the_policy_of_the_moment() -> None:
    """Old actions keep the log-probs of the policy that acted, and their KL is measured from the policy of this moment: 0 before the step."""
    run = trained_on_cartpole(METHOD, 3)
    batch = step(Run(METHOD.set("update.capacity", 1), run.policy, run.task, steps=1))
    newest = batch.but(signals=dict(batch.signals))
    run.prepare_signals(newest, {"old_logits"})
    newest.signals["old_logits"] = run.score(newest, {"logits"}).logits
    used = run.method.update.with_replay(newest, run)
    assert len(used) == 2 * newest.mask.sum() and len(run.method.update.kept) == 4
    geometry = BatchGeometry(used, split_loss(run.loss_fn)[0], run)
    assert geometry.measure().kl < 1e-9
    older = used[len(newest.mask.flatten()) :]
    assert (run.score(older, {"logp"}).logp - older.logp).abs().max() > 1e-3
    torch.testing.assert_close(used.advantage[used.mask].mean(), torch.zeros(()), atol=1e-5, rtol=0)


def test_steps_stay_inside_the_region_and_the_buffer_is_first_in_first_out() -> None:
    run = trained_on_cartpole(METHOD.set("update.capacity", 3), 5)
    assert all(0 < r["kl"] <= 0.01 and r["gain"] > 0 for r in run.history if r["line_search"] >= 0)
    assert len(run.method.update.kept) == 3 and sum(r["line_search"] >= 0 for r in run.history) >= 4
    versions = [int(b.version[0]) for b in run.method.update.kept]
    assert versions == sorted(set(versions)) and versions[0] > 0
    assert replay_indices(3, 5) == [2, 3, 4]


def test_bad_settings_and_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="update.capacity"):
        trained_on_cartpole(METHOD.set("update.capacity", 0), 1)
    from tests.helpers import trained

    with pytest.raises(MissingSignal, match="entrpo needs the signal"):
        trained(METHOD, 1)


def test_continuous_actions() -> None:
    from anypo.domains.control.setup import build

    policy, task = build("Pendulum-v1", None, seed=0, envs=4, horizon=32, hidden=(16, 16))
    run = train(Run(METHOD, policy, task, steps=3))
    assert all(0 <= record["kl"] <= 0.01 for record in run.history) and all(torch.isfinite(p).all() for p in policy.parameters())


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes_on_cartpole(METHOD, tmp_path)
