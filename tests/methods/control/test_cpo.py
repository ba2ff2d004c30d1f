"""CPO: the local problem's solution and its limits, episode costs, refusals, and the method in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.control.point_circle import PointCircle
from anypo.domains.control.setup import build
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.control.cpo import METHOD, accept, cpo_step, return_bound
from anypo.methods.control.trpo import full_step
from anypo.run import Run

SMALL = METHOD.set("update.epochs", 1).set("update.minibatches", 2).set("credit.epochs", 5)


def local_problem(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    g, b = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return g, b, root @ root.T + 0.3 * torch.eye(size, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.floats(-1.2, 1.2), st.integers(0, 10**6))
def test_the_step_is_optimal(size: int, violation: float, seed: int) -> None:
    """`violation` in units of the largest cost change inside the region; beyond 1 there is no feasible point."""
    g, b, matrix = local_problem(size, seed)
    delta = 0.02
    reach = math.sqrt(2 * delta * float(b @ torch.linalg.solve(matrix, b)))
    found = cpo_step(g, b, matrix, violation * reach, delta)
    assert 0.5 * found.step @ matrix @ found.step <= delta * (1 + 1e-8)
    assert found.case == ("recovery" if violation > 1 else "trust_region" if violation < -1 else "dual")
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(4000, size, generator=generator, dtype=torch.float64)
    points *= (2 * delta / torch.einsum("np,pq,nq->n", points, matrix, points)).sqrt()[:, None]
    points *= torch.rand(4000, 1, generator=generator, dtype=torch.float64) ** (1 / size)
    if found.case == "recovery":
        assert (points @ b >= b @ found.step - 1e-9).all()
        return
    assert violation * reach + b @ found.step <= 1e-8
    feasible = points[violation * reach + points @ b <= 0]
    assert (feasible @ g <= g @ found.step + 1e-9).all()


def test_without_an_active_constraint_it_is_trpo() -> None:
    g, b, matrix = local_problem(4, 0)
    torch.testing.assert_close(cpo_step(g, b, matrix, -1e3, 0.01).step, full_step(matrix, g, 0.01).step)


def test_a_parallel_constraint_at_the_limit_leaves_no_progress() -> None:
    g, _, matrix = local_problem(4, 1)
    found = cpo_step(g, 2 * g, matrix, 0.0, 0.01)
    assert abs(float(g @ found.step)) < 1e-8


def test_a_violated_but_feasible_constraint_holds_with_equality() -> None:
    g, b, matrix = local_problem(5, 2)
    b = b * torch.sign(g @ torch.linalg.solve(matrix, b))  # the reward pulls towards the cost; else the step may end further inside
    c = 0.5 * math.sqrt(0.02 * float(b @ torch.linalg.solve(matrix, b)))
    found = cpo_step(g, b, matrix, c, 0.01)
    torch.testing.assert_close(c + b @ found.step, torch.zeros((), dtype=torch.float64), atol=1e-10, rtol=0)


def test_no_gradients_make_no_step() -> None:
    _, b, matrix = local_problem(3, 3)
    nothing = torch.zeros(3, dtype=torch.float64)
    assert cpo_step(nothing, nothing, matrix, 1.0, 0.01).step.abs().max() == 0
    c = 0.1 * math.sqrt(0.02 * float(b @ torch.linalg.solve(matrix, b)))
    torch.testing.assert_close(c + b @ cpo_step(nothing, b, matrix, c, 0.01).step, torch.zeros((), dtype=torch.float64), atol=1e-8, rtol=0)


def test_bounds_meet_at_the_old_policy_and_none_is_accepted_outside() -> None:
    policy = torch.tensor([[0.3, 0.7], [0.6, 0.4]], dtype=torch.float64)
    advantages = torch.tensor([[0.7, -0.3], [-0.4, 0.6]], dtype=torch.float64)
    found = return_bound(advantages, policy, policy, torch.tensor([0.5, 0.5], dtype=torch.float64), 0.9)
    assert abs(float(found.lower)) < 1e-12 and abs(float(found.upper)) < 1e-12
    assert accept(torch.tensor([0.02]), torch.tensor([-1.0]), torch.tensor([1.0]), 0.0, 0.01, True) == -1


def small_run(method: Method = SMALL, steps: int = 3, out: Path | None = None, env: object = PointCircle, horizon: int = 70) -> Run:
    policy, task = build(env, None, seed=0, envs=4, horizon=horizon, hidden=(16, 16))
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def test_the_environment_pays_for_circling_and_charges_outside_the_corridor() -> None:
    environment = PointCircle()
    environment.reset(seed=0)
    environment.state = np.array([0.0, 1.5, -2.0, 0.0])
    _, reward, terminated, truncated, info = environment.step(np.array([-5.0, 0.0]))
    assert reward == pytest.approx(3.0, rel=0.02) and not terminated and not truncated and info["cost"] == 0
    kept = environment.get_state()
    costs = [environment.step(np.array([-1.0, 0.0]))[4]["cost"] for _ in range(59)]
    assert costs[0] == 0 and costs[-1] == 1 and environment.step(np.zeros(2))[3]
    environment.restore_state(kept)
    assert [environment.step(np.array([-1.0, 0.0]))[4]["cost"] for _ in range(59)] == costs


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_costs_of_episodes_are_carried_across_batches(gamma: float) -> None:
    """Segments of 70 steps, episodes of 60: the cost that is compared with the limit is that of whole episodes."""
    run = small_run(SMALL.set("credit.cost_gamma", gamma), steps=3)
    costs = []
    for _ in range(3):
        batch = step(run)
        costs.append(batch.signals["cost"])
        joined = torch.cat(costs, dim=1)
        whole = [joined[:, 60 * e : 60 * e + 60] for e in range(joined.shape[1] // 60)]
        powers = gamma ** torch.arange(60)
        torch.testing.assert_close(batch.signals["cost_of_episode"][0], (whole[-1] * powers).sum(1).mean(), rtol=1e-5, atol=1e-6)
        effective = 60.0 if gamma == 1 else (1 - gamma**60) / (1 - gamma)
        torch.testing.assert_close(batch.signals["cost_scale"][0], torch.tensor(effective))


def test_with_a_high_limit_it_steps_as_trpo() -> None:
    free, plain = small_run(SMALL.set("update.limit", 1e9)), small_run(SMALL.set("update.limit", 1e9))
    from anypo.methods.control.trpo import TrustRegionStep

    update = free.method.update
    object.__setattr__(
        plain, "method", plain.method.but(update=TrustRegionStep(**{n: getattr(update, n) for n in TrustRegionStep.__dataclass_fields__}))
    )
    step(free), step(plain)
    for a, b in zip(free.policy.parameters(), plain.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(ValueError, match=r"info\['cost'\]"):
        train(small_run(env="CartPole-v1"))
    with pytest.raises(ValueError, match="raise the option horizon"):
        train(small_run(horizon=10))


def test_a_limit_that_no_policy_meets_is_said_and_not_looped_over() -> None:
    run = small_run(SMALL.set("update.limit", -1.0).set("update.patience", 3), steps=10_000)
    with pytest.raises(ValueError, match="no policy seems to meet the cost limit of -1"):
        train(run)
    assert run.step < 200


def test_a_limit_that_was_met_once_is_never_called_impossible() -> None:
    run = small_run(SMALL.set("update.patience", 3))
    for violation in (2.0, -0.5, *[1.0] * 20):
        run.method.update.refuse_impossible(violation, run)
    run.state["cpo"] = {"lowest": 2.0, "stuck": 2}
    with pytest.raises(ValueError, match="has not fallen below 7 for 3 steps"):
        run.method.update.refuse_impossible(3.0, run)


def test_the_cost_critic_knows_the_time_of_the_episode() -> None:
    run = small_run(steps=2)
    run.begin_step()
    batch = run.collect(run.task.prompts(run.task.prompts_per_step, run.rng))
    elapsed = run.method.credit.note_episodes(batch)
    assert elapsed[0, :, 0].tolist() == [float(t % 60) for t in range(batch.horizon)]
    later = run.method.credit.note_episodes(run.collect(run.task.prompts(run.task.prompts_per_step, run.rng)))
    assert later[0, 0, 0] == batch.horizon % 60


def test_a_policy_beyond_the_limit_may_give_up_reward() -> None:
    kl, cost, gain = torch.tensor([0.005]), torch.tensor([1.0]), torch.tensor([-0.1])
    assert accept(kl, cost, gain, 2.0, 0.01, feasible=False) == 0 and accept(kl, cost, gain, 2.0, 0.01, feasible=True) == -1


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    whole = train(small_run(steps=4, out=tmp_path / "whole"))
    train(small_run(steps=2, out=tmp_path / "halves"))
    halves = train(small_run(steps=4, out=tmp_path / "halves"))
    for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [r["episode_cost"] for r in whole.history] == [r["episode_cost"] for r in halves.history]
