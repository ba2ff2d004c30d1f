"""E2PO: what it reduces to, its pitfalls, and that its perturbed groups train, save and resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.domains.diffusion.ring import Ring
from anypo.domains.diffusion.setup import build, load
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion.e2po import (
    DIRECTIONS,
    METHOD,
    RADIUS,
    RadiusControl,
    advantages,
    anchored_loss,
    directions,
    perturb,
    radius,
    schedule,
    spread_loss,
)
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import advantages as plain_advantages
from anypo.run import Run
from anypo.seams.select import UniformPrompts
from tests.helpers import assert_continues

GROUP = torch.tensor([0, 1, 0, 1, 0, 1, 0, 2])


def ring_run(method=METHOD, steps: int = 4, out: Path | None = None) -> Run:
    policy, task = build("ring", None, evaluation_steps=2, evaluation_samples=8)
    method = method.set("rollout.steps", 3).set("select.prompts", 3)
    return Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


@pytest.mark.parametrize("setting", [("rollout.rho", 0.0), ("rollout.n_anchor", 8)])
def test_without_radius_or_with_anchors_alone_it_is_flow_grpo(setting: tuple[str, float]) -> None:
    """With a radius of 0 the centre must be the group's (mix 0); with anchors alone it is anyway."""
    ours = METHOD.set(*setting).set("control.0.rate", 0.0).set("credit.mix", 0.0 if setting[0] == "rollout.rho" else 0.5)
    theirs = FLOW_GRPO.but(select=UniformPrompts(group_size=8), regularize=METHOD.regularize)
    mine, plain = ring_run(ours), ring_run(theirs)
    for n in range(2):
        first, second = step(mine), step(plain)
        assert n or (torch.equal(first.action, second.action) and torch.equal(first.logp, second.logp))
        torch.testing.assert_close(first.action, second.action, rtol=1e-4, atol=1e-4)  # centres are rounded otherwise
        torch.testing.assert_close(first.advantage, second.advantage, rtol=1e-5, atol=1e-5)
    for a, b in zip(mine.policy.parameters(), plain.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_mix_zero_is_the_group_mean_and_a_group_without_anchors_too() -> None:
    reward = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = plain_advantages(reward, GROUP)
    torch.testing.assert_close(advantages(reward, GROUP, torch.arange(8) < 2, 0.0), plain)
    torch.testing.assert_close(advantages(reward, GROUP, torch.zeros(8), 0.7), plain)
    torch.testing.assert_close(advantages(reward, GROUP, torch.ones(8), 0.7), plain)


def test_groups_without_spread_and_lone_members_have_no_advantage() -> None:
    reward = torch.tensor([0.1, 0.7, 0.1, 0.7, 0.1, 0.7, 0.1, 3.0])
    assert torch.equal(advantages(reward, GROUP, torch.arange(8) < 2, 0.5), torch.zeros(8))


def test_gamma_zero_is_a_constant_perturbation() -> None:
    level = torch.linspace(1, 0, 11)
    assert torch.equal(schedule(level, 0.0, 0.0), torch.ones(11))
    assert torch.equal(schedule(level, 0.0, 1.0), level)
    assert not bool(schedule(level, 0.5, 1.0)[5:].any())


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 3))
def test_directions_are_orthonormal_and_full_sets_cancel(seed: int, K: int, n_anchor: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    U, e = torch.randn(K, 7, generator=generator, dtype=torch.float64), torch.randn(3, 7, generator=generator, dtype=torch.float64)
    Q = directions(U)
    torch.testing.assert_close(Q @ Q.T, torch.eye(K, dtype=torch.float64), atol=1e-9, rtol=0)
    assert bool(((Q * U).sum(1) > 0).all())  # every direction keeps its side
    torch.testing.assert_close(directions(Q), Q)
    delta = perturb(e, Q, n_anchor + 2 * K, n_anchor, 0.3)
    assert not bool(delta[:, :n_anchor].any())
    torch.testing.assert_close(delta.sum(1), torch.zeros_like(e), atol=1e-9, rtol=0)
    torch.testing.assert_close(delta[:, n_anchor:].norm(dim=-1), 0.3 * e.norm(dim=-1)[:, None].expand(-1, 2 * K))


def test_more_anchors_than_members_perturb_nothing() -> None:
    assert torch.equal(perturb(torch.ones(4), torch.eye(2, 4), 3, 9, 0.5), torch.zeros(3, 4))


def test_the_radius_respects_its_limits() -> None:
    assert radius([0.01] * 50, 0.2, 0.5, 0.5, 0.9, 0.05, 0.4)[-1] == 0.4
    assert radius([5.0] * 50, 0.2, 0.5, 0.5, 0.9, 0.05, 0.4)[-1] == 0.05
    assert radius([], 0.2, 0.5, 0.5, 0.9, 0.05, 0.4).shape == (0,)


def test_the_loss_ignores_masked_steps_and_no_gradient_reaches_what_is_stored() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = (torch.randn(4, 3, generator=generator).mul(0.1).requires_grad_() for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
    adv = torch.randn(4, generator=generator)
    value = anchored_loss(new.masked_fill(~mask, -torch.inf), old.detach(), mask, adv, 0.2)
    value.backward()
    assert torch.isfinite(value) and new.grad is not None and not bool(new.grad[~mask].any()) and old.grad is None
    assert float(anchored_loss(new, old, torch.zeros_like(mask), adv, 0.2).detach()) == 0


def test_the_spread_loss_wants_difference_and_little_drift() -> None:
    e, data = torch.ones(1, 4), torch.zeros(1, 2, 3)
    near = perturb(e[0], torch.tensor([[1.0, -1.0, 0.0, 0.0]]) / 2**0.5, 2, 0, 0.1)[None]
    assert float(spread_loss(data, e, near, 1.0, 0.05)) == 0
    apart = torch.stack([torch.zeros(1, 3), torch.ones(1, 3)], dim=1)
    assert float(spread_loss(apart, e, near, 1.0, 0.05)) == -1
    assert float(spread_loss(data, e, 10 * near, 1.0, 0.05)) > 0


def test_members_are_sampled_perturbed_and_scored_clean() -> None:
    run = ring_run()
    batch = METHOD.set("rollout.steps", 3).rollout(METHOD.set("select.prompts", 3).select(run.task, run), run)
    clean = run.task.condition(batch.signal("prompt_id"))
    assert torch.equal(batch.signal("condition"), clean.expand(-1, 3, -1))
    assert batch.signal("anchor").view(3, 8).tolist() == [[True] * 2 + [False] * 6] * 3
    torch.testing.assert_close(run.score(batch, {"logp"}).logp, batch.logp)  # ratios begin at 1
    off = (batch.action[:, 0] - batch.signal("old_mean")[:, 0]) / batch.signal("step")[:, 0, 2:]
    own = ring_run(METHOD.set("rollout.own", True))
    seen = own.method.rollout(own.method.select(own.task, own), own)
    off_own = (seen.action[:, 0] - seen.signal("old_mean")[:, 0]) / seen.signal("step")[:, 0, 2:]
    anchor = batch.signal("anchor")
    torch.testing.assert_close(off[anchor], off_own[anchor])  # the same noise, and the same mean for anchors alone
    assert bool(((off - off_own).abs().sum(1) > 1e-4)[~anchor].all())


def test_directions_are_learned_and_the_radius_reacts() -> None:
    run = ring_run()
    step(run)
    before = run.state[DIRECTIONS].clone()
    step(run)
    moved = (run.state[DIRECTIONS] - before).norm()
    assert 0.01 < float(moved) < 0.03
    torch.testing.assert_close(run.state[DIRECTIONS] @ run.state[DIRECTIONS].T, torch.eye(2), atol=1e-5, rtol=0)
    high = ring_run(METHOD.but(control=(RadiusControl(floor=5.0),)))
    step(high)
    assert high.state[RADIUS] > 0.2


def test_it_trains_and_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = ring_run(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    run = train(ring_run())
    assert all(np.isfinite([r["loss"], r["reward"], r["spread_loss"], r["rho"], r["reward_std"]]).all() for r in run.history)


def test_a_saved_policy_comes_back(tmp_path: Path) -> None:
    policy, task = build("ring", None)
    policy.save_pretrained(tmp_path)
    prompt = torch.arange(4)
    assert torch.equal(task.samples(policy, prompt), task.samples(load(tmp_path), prompt))  # type: ignore[attr-defined, arg-type]


def test_the_shipped_flow_puts_points_at_the_prompts_angle() -> None:
    policy, _ = build("ring", None)
    task = Ring(turn=0.0)
    assert float(task.held_out(policy, 360)["reward"].mean()) > -0.3  # type: ignore[arg-type]


def test_bad_tasks_and_settings_are_refused() -> None:
    policy, task = build("gaussians:0", None)
    with pytest.raises(ValueError, match="take a task such as ring"):
        step(Run(METHOD, policy, task, steps=1))
    with pytest.raises(ValueError, match="rollout.noise"):
        step(ring_run(METHOD.set("rollout.noise", 0.0)))
    with pytest.raises(ValueError, match="rollout.count"):
        step(ring_run(METHOD.set("rollout.count", 9)))
