"""OHP-RL: limits of its losses, what reaches which part, the person and the two buffers, the schedule, and runs on the peg."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anypo.domains.control.peg import NAME, Peg, Person, peg_step
from anypo.domains.control.setup import build
from anypo.loops.off_policy import train
from anypo.method import Method
from anypo.methods.control.ohp_rl import METHOD, GuidedActor, actor_loss, eta_schedule, gate, guided, preference_loss
from anypo.methods.control.sac import SoftActor
from anypo.methods.control.sac import actor_loss as sac_actor_loss
from anypo.run import Run


def quick(method: Method = METHOD, **person: Any) -> Method:
    method = method.set("rollout.steps", 8).set("rollout.warmup", 16).set("rollout.batch_size", 32).set("rollout.updates_per_action", 0.25)
    rollout: Any = replace(method.rollout, person=Person(**person))  # type: ignore[type-var]
    return method.but(rollout=rollout)


def small_run(method: Method, steps: int = 4, out: Path | None = None, task: Any = NAME) -> Run:
    policy, built = build(task, None, needs=method.needs(), seed=0, hidden=(16, 16))
    run = Run(method, policy, built, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs() -> dict[str, torch.Tensor]:
    return {
        "logp": numbers(6), "q_new": numbers(2, 6, seed=1), "q_h": numbers(2, 6, seed=2), "logp_h": numbers(6, seed=3),
        "logp_pol": numbers(6, seed=4), "intervened": torch.tensor([1.0, 0, 1, 1, 0, 1]), "distance": torch.tensor([0.4, 0.4, 0.01, 0.3, 0.2, 0.1]),
    }  # fmt: skip


def test_without_weight_or_takeovers_the_actor_is_sacs() -> None:
    given = inputs()
    wanted = sac_actor_loss(given["q_new"], given["logp"], 0.2)
    torch.testing.assert_close(actor_loss(**given, eta=0.0), wanted, rtol=0, atol=0)
    torch.testing.assert_close(actor_loss(**given | {"intervened": torch.zeros(6)}, eta=0.7), wanted, rtol=0, atol=0)
    torch.testing.assert_close(actor_loss(**given | {"intervened": torch.zeros(6)}, eta=0.7, convex=True), wanted)


def test_a_constant_gate_is_ungated_guidance_and_a_flat_preference_is_log_2() -> None:
    given = inputs()
    preferred = preference_loss(given["logp_h"], given["logp_pol"], given["intervened"], given["distance"])
    free = numbers(6)
    torch.testing.assert_close(guided(free, preferred, torch.full((6,), 0.5), 0.8), free.mean() + 0.4 * preferred.loss)
    logp_h = given["logp_h"].requires_grad_()
    flat = preference_loss(logp_h, given["logp_pol"], given["intervened"], given["distance"], kappa=0.0)
    flat.loss.backward()
    assert float(flat.loss.detach()) == pytest.approx(math.log(2)) and bool((logp_h.grad == 0).all())


def test_a_pair_without_the_policys_action_is_gated_cloning() -> None:
    given = inputs()
    found = preference_loss(given["logp_h"], torch.zeros(6), given["intervened"], given["distance"])
    torch.testing.assert_close(found.per_sample, -torch.nn.functional.logsigmoid(given["logp_h"]) * found.pairs)
    assert found.pairs.tolist() == [1, 0, 0, 1, 0, 1]  # free steps and equal actions are none


def test_the_gate_has_no_gradient_and_both_likelihoods_have() -> None:
    given = {name: value.clone().requires_grad_(name not in ("intervened", "distance")) for name, value in inputs().items()}
    actor_loss(**given).backward()  # type: ignore[arg-type]
    assert given["q_h"].grad is None
    assert given["logp_h"].grad is not None and torch.equal(given["logp_h"].grad, -given["logp_pol"].grad)
    counts = torch.zeros_like(given["q_new"]).scatter_(0, given["q_new"].argmin(0, keepdim=True), -1 / 6)
    torch.testing.assert_close(given["q_new"].grad, counts)


def test_extreme_numbers_stay_finite() -> None:
    huge = torch.tensor([-1e6, 1e6]).requires_grad_()
    loss = preference_loss(huge, -huge.detach(), torch.ones(2), torch.ones(2)).loss
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(huge.grad).all()
    assert bool((gate(torch.zeros(2, 3), torch.zeros(2, 3)).gate == 0.5).all())


def test_in_the_convex_form_an_open_gate_leaves_the_preference_alone() -> None:
    given = inputs()
    preferred = preference_loss(given["logp_h"], given["logp_pol"], torch.ones(6), torch.ones(6))
    torch.testing.assert_close(guided(numbers(6), preferred, torch.ones(6), 0.5, convex=True), 0.5 * preferred.loss)
    torch.testing.assert_close(guided(numbers(6), preferred, torch.zeros(6), 0.5, convex=True), numbers(6).mean())


def test_guidance_fades_with_the_need_and_stays_where_nobody_took_over() -> None:
    assert eta_schedule([0.2, 0.1, 0.4], 0.5, 0.2) == [0.5, 0.25, 0.5]
    assert eta_schedule([0.0], 0.5, 0.0) == [0.5]


def test_the_person_brings_the_peg_in_and_takes_over_where_it_is_needed() -> None:
    recording = Peg().demonstrate(np.random.default_rng(0))
    assert recording.reward.sum() >= 7 and recording.terminated.sum() == 10  # an unsteady hand jams it now and then
    person, rng = Person(chance=1.0, duration=2), np.random.default_rng(0)
    low, high = np.array([[0.5, -0.5]]), np.array([[0.5, 0.5]])
    assert [bool(person(x, rng)[1][0]) for x in (high, low, low, high, high)] == [False, True, True, False, False]
    assert bool(person(low, rng)[1][0]) and not bool(person(high, rng)[1][0])  # a new attempt ends a takeover
    person.judge([0.0, 1.0, 1.0, 1.0])
    assert not person(low, rng)[1][0]
    person.judge([0.0])
    assert person(low, rng)[1][0]


def test_a_jam_is_an_end_and_arrays_step_as_one_peg() -> None:
    environment = Peg()
    environment.reset(seed=0)
    environment.restore_state({"state": np.array([0.3, -0.58])})
    seen, reward, terminated, truncated, _ = environment.step(np.array([0.0, -1.0]))
    alone = peg_step(torch.tensor([0.3, -0.58]), torch.tensor([0.0, -1.0]))
    assert terminated and not truncated and reward == 0 and alone.terminated
    np.testing.assert_allclose(seen, alone.next, rtol=1e-6)


def test_takeovers_are_stored_with_what_the_policy_proposed_and_make_half_of_each_minibatch() -> None:
    run = train(small_run(quick(chance=1.0).set("rollout.demonstrations", False), steps=40))
    rollout: Any = run.method.rollout
    assert 0 < len(rollout.takeovers) < len(rollout.buffer) == run.actions
    rows = rollout.buffer.take(torch.arange(len(rollout.buffer)))
    apart = (rows["action"] != rows["proposed"]).any(1)
    assert torch.equal(apart, rows["intervened"]) and int(apart.sum()) == len(rollout.takeovers)
    assert int(rollout.draw(run).signal("intervened").sum()) >= 16
    assert len(rollout.shares) == int(sum(record["episodes"] for record in run.history))
    assert {"gate", "eta", "preference_loss", "critic_loss"} <= run.history[-1].keys()


def test_with_nobody_and_no_demonstrations_a_run_is_sacs() -> None:
    method = quick(chance=0.0).set("rollout.demonstrations", False)
    mine, sac = train(small_run(method)), train(small_run(method.but(objective=SoftActor())))
    for a, b in zip(mine.policy.parameters(), sac.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    method = quick(chance=1.0).set("rollout.window", 2)
    whole = train(small_run(method, 24, tmp_path / "whole"))
    train(small_run(method, 12, tmp_path / "halves"))
    halves = train(small_run(quick(chance=1.0).set("rollout.window", 2), 24, tmp_path / "halves"))
    for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.method.rollout.shares == halves.method.rollout.shares


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(ValueError, match="nobody takes over in Pendulum"):
        train(small_run(METHOD, task="Pendulum-v1"))
    policy, task = build(NAME, None, needs=METHOD.needs(), data="steps.npz")
    with pytest.raises(ValueError, match="leave out the option data"):
        train(Run(METHOD, policy, task, steps=1))


def test_the_objective_asks_for_what_it_needs() -> None:
    assert {"q", "mean", "log_std"} <= GuidedActor.needs <= METHOD.needs()
