"""Drift maintenance: measures and what they reduce to, the detector's fits against autograd, the environment's order of events, and the method in the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.control import malware as m
from anypo.domains.control.maintenance import DECISIONS, Maintenance, MalwareMaintenance
from anypo.domains.control.setup import build
from anypo.domains.control.tasks import GymTask
from anypo.loops.on_policy import step, train
from anypo.methods.control.drift_maintenance import METHOD, always, at_random, deploy, summary, when_drifting
from anypo.run import Run
from tests.helpers import assert_continues, assert_resumes_on_cartpole

RNG = np.random.default_rng(0)


def weights(rows: int, seed: int = 0) -> np.ndarray:
    return 0.3 * np.random.default_rng(seed).standard_normal((rows, m.WEIGHTS))


def test_without_the_second_layer_the_adapter_is_a_plain_head() -> None:
    found = weights(2)
    parts, z = m.unpack(found), RNG.standard_normal((2, 7, m.LATENTS))
    parts["W2"][:] = 0
    parts["b2"][:] = 0
    plain = m.sigmoid((z @ parts["w"][..., None])[..., 0] + parts["c"][:, None])
    np.testing.assert_array_equal(m.adapter(z, **parts), plain)


def test_a_sample_has_not_drifted_from_itself() -> None:
    z = RNG.standard_normal((9, 4))
    same = m.drift(z, z, 1.3)
    assert same.shift == 0 and same.mmd2 == pytest.approx(0, abs=1e-12)
    z[:, 0] = 1.0  # a latent without spread
    moved = m.drift(z, z + 1, 1.3)
    assert np.isfinite(moved.shift) and moved.mmd2 > 0


def test_f1_without_malware_or_without_calls_is_0() -> None:
    nothing, all_ = np.zeros(4), np.ones(4)
    assert m.f1(nothing, nothing) == m.f1(nothing, all_) == m.f1(all_, nothing) == 0 and m.f1(all_, all_) == 1


def test_without_other_weights_the_reward_is_the_next_utility() -> None:
    utility = RNG.random(5)
    np.testing.assert_array_equal(m.reward(utility, RNG.random(5), np.arange(5), 1.0, 0.0, 0.0), utility)


def test_a_single_period_is_its_utility() -> None:
    found = summary(torch.tensor([0.7]), torch.tensor([0.9]), torch.tensor([2]))
    assert found.aut == pytest.approx(0.7) and found.forgetting == 0 and found.cost == 0.3


def test_the_slope_is_that_of_autograd() -> None:
    found, z, y = weights(3), RNG.standard_normal((3, 20, m.LATENTS)), (RNG.random((3, 20)) < 0.3).astype(float)
    leaf = torch.tensor(found, requires_grad=True)
    at, parts = 0, {}
    for name, size in m.SIZES.items():
        count = int(np.prod(size))
        parts[name], at = leaf[:, at : at + count].reshape(3, *size), at + count
    latents = torch.tensor(z)
    middle = torch.relu(torch.einsum("enm,ehm->enh", latents, parts["W1"]) + parts["b1"][:, None])
    logit = torch.einsum("enm,em->en", latents + middle @ parts["W2"].transpose(1, 2) + parts["b2"][:, None], parts["w"])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logit + parts["c"][:, None], torch.tensor(y), pos_weight=torch.tensor(m.POSITIVE)
    )
    (3 * loss).backward()  # one mean for each of three detectors
    np.testing.assert_allclose(m.slope(found, z, y, True), leaf.grad.numpy(), atol=1e-12)  # type: ignore[union-attr]
    head = m.slope(found, z, y, False)
    np.testing.assert_allclose(head[:, m.ADAPTED :], leaf.grad.numpy()[:, m.ADAPTED :], atol=1e-12)  # type: ignore[union-attr]
    assert not head[:, : m.ADAPTED].any()


def start(rows: int = 2, seed: int = 0) -> np.ndarray:
    return np.stack([Maintenance().reset(np.random.default_rng(seed + i)) for i in range(rows)], axis=1)


def test_observations_and_rewards_follow_the_equations_in_causal_order() -> None:
    dynamics, now = Maintenance(), start()
    latents, labels = dynamics.path(now)
    known = m.world(0)
    actions = np.array([1, 0, 2, 3, 0, 4, 1, 0, 0, 2, 0])
    seen, gains = [dynamics.observe(now)[1]], []
    for t, action in enumerate(actions, 1):
        moved = dynamics.step(now, np.array([0, action]))
        after, now = moved.state[: m.WEIGHTS, 1], moved.state
        expected = m.f1(labels[1, t], m.adapter(latents[1, t], **{k: v[0] for k, v in m.unpack(after[None]).items()}) > 0.5)
        assert now[m.WEIGHTS + 1, 1] == expected  # as deployed before any update with the next period
        gains.append(moved.reward[1])
        seen.append(dynamics.observe(now)[1])
        assert moved.terminated.all() == (t == DECISIONS)
    rows = np.array(seen, dtype=np.float64)
    measures = [m.drift(known.reference, z, known.bandwidth) for z in latents[1]]
    whole = m.state(rows[:, 0], rows[:, 2], [d.shift for d in measures], [d.mmd2 for d in measures], np.append(actions, 0))
    np.testing.assert_allclose(rows, whole, atol=1e-6)
    np.testing.assert_allclose(gains, m.reward(rows[1:, 0], rows[1:, 2], actions, 1.0, 0.5, 0.3), atol=1e-6)


def test_actions_change_what_they_may_and_a_row_is_as_if_alone() -> None:
    dynamics, now = Maintenance(), start(5)
    moved = dynamics.step(now, np.arange(5)).state
    changed = moved[: m.WEIGHTS] != now[: m.WEIGHTS]
    assert not changed[:, m.KEEP].any() and not changed[: m.ADAPTED, m.HEAD].any() and changed[m.ADAPTED :, m.HEAD].any()
    assert all(changed[: m.ADAPTED, a].any() for a in (m.ADAPTER, m.REPLAY, m.REFIT))
    for a in range(5):
        alone = dynamics.step(now[:, a : a + 1], np.array([a])).state
        np.testing.assert_allclose(alone[:, 0], moved[:, a], atol=1e-5)


def test_an_environment_is_a_row_of_many_and_comes_back() -> None:
    one, many = MalwareMaintenance(), GymTask("MalwareMaintenance-v0").environments(2)
    first, _ = one.reset(seed=3)
    rows = np.stack([many.reset(i, 3 + i) for i in range(2)])
    np.testing.assert_array_equal(first, rows[0])
    kept = one.get_state()
    seen = one.step(1)
    np.testing.assert_allclose(many.step(np.array([1, 0])).observation[0], seen[0], atol=1e-6)
    one.restore_state(kept)
    again = one.step(1)
    np.testing.assert_array_equal(again[0], seen[0])
    assert again[1] == seen[1]


def test_policies_without_learning_share_one_path() -> None:
    task = GymTask("MalwareMaintenance-v0")
    kept = deploy(task, always(m.KEEP), [5, 6])
    assert kept.utility.shape == (2, m.PERIODS) and kept.action.shape == (2, DECISIONS)
    np.testing.assert_array_equal(kept.summary.cost, 0)
    np.testing.assert_array_equal(kept.summary.forgetting, 0)
    never = deploy(task, when_drifting(np.inf, m.REFIT), [5, 6])
    np.testing.assert_array_equal(never.score, kept.score)
    np.testing.assert_array_equal(deploy(task, when_drifting(-1.0, m.HEAD), [5, 6]).score, deploy(task, always(m.HEAD), [5, 6]).score)
    assert len(np.unique(deploy(task, at_random(0), [5, 6]).action)) > 2


def test_a_batch_is_whole_deployments_and_the_encoder_stands_still() -> None:
    known = m.world(0)
    before = [p.detach().clone() for p in known.encoder.network.parameters()], known.latents.copy(), known.weights.copy()
    policy, task = build("MalwareMaintenance-v0", None, hidden=(8, 8))
    run = Run(METHOD.set("select.prompts", 3), policy, task, steps=2)
    for _ in range(2):
        batch = step(run)
        assert batch.mask.shape == (3, DECISIONS) and batch.terminated[:, -1].all() and not batch.terminated[:, :-1].any()
        assert np.isfinite(run.history[-1]["loss"])
    after = [*known.encoder.network.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(before[0], after, strict=True))
    assert np.array_equal(before[1], known.latents) and np.array_equal(before[2], known.weights)


def test_it_resumes_here_and_on_cartpole(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        policy, task = build("MalwareMaintenance-v0", None, hidden=(8, 8))
        run = Run(METHOD.set("select.prompts", 2).set("select.actions", 4), policy, task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path / "here", "loss")
    assert_resumes_on_cartpole(METHOD, tmp_path / "cartpole")
