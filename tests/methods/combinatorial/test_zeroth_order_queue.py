"""Zeroth-order queue scheduling: what it reduces to, the simulators, common events, bad settings and resuming."""

import numpy as np
import pytest
import torch

from anypo.domains.combinatorial.queues import NETWORKS, average_cost, draw_services, simulate_events
from anypo.domains.combinatorial.setup import build
from anypo.loops.on_policy import step, train
from anypo.methods.combinatorial.zeroth_order_queue import METHOD, VARIANTS, PerturbedRollout, on_the_sphere, zo_gradient
from anypo.run import Run
from tests.helpers import assert_continues, trained_on_cartpole

SMALL = {"copies": 8, "horizon": 40, "test_copies": 2, "test_horizon": 30}


def built(network="criss_cross", **options):
    return build(f"queue:{network}", None, **(SMALL | options))


def random_points(count, size, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 4 * size))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("services", ["exponential", "uniform"])
def test_a_guard_at_0_is_back_pressure_whatever_the_weights_are(network, services):
    _, task = built(network, services=services)
    size = len(task.network.service)
    paths = [task.simulate([1, 2, 3], random_points(3, size, seed), 0.0, 100) for seed in (0, 1)]
    assert (paths[0].queues == paths[1].queues).all() and (paths[0].logp == 0).all()


def test_a_guard_at_0_has_no_slope():
    policy, task = built(threshold=0.0)
    run = train(Run(METHOD, policy, task, steps=3))
    assert torch.equal(policy.theta, torch.zeros_like(policy.theta))
    assert all(record["slope"] == 0 for record in run.history)


def test_a_guard_that_is_never_reached_changes_nothing():
    _, task = built()
    points = random_points(4, 3)
    high, never = (task.simulate([1, 2, 3, 4], points, guard, 200).queues for guard in (150.0, float("inf")))
    assert (high == never).all() and high.sum(2).max() <= 150


def test_orthonormal_directions_on_a_quadratic_give_the_exact_slope():
    g = torch.Generator().manual_seed(0)
    matrix, at = torch.randn(5, 5, generator=g, dtype=torch.float64), torch.randn(5, generator=g, dtype=torch.float64)
    units = torch.linalg.qr(torch.randn(5, 5, generator=g, dtype=torch.float64)).Q

    def cost(x):
        return (x * (x @ matrix)).sum(-1) + x.sum(-1)

    found = zo_gradient(cost(at + 0.7 * units), cost(at - 0.7 * units), units, 0.7).gradient
    torch.testing.assert_close(found, (matrix + matrix.T) @ at + 1)


def test_small_steps_are_finite_differences():
    at, unit = torch.tensor([0.3, -0.2], dtype=torch.float64), torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    cost = [torch.sin(at + s * 1e-6 * unit).sum(-1) for s in (1, -1)]
    torch.testing.assert_close(zo_gradient(*cost, unit, 1e-6).gradient, 2 * (at.cos() @ unit[0]) * unit[0], rtol=1e-7, atol=1e-8)


def test_unit_directions_and_unknown_kinds():
    units = on_the_sphere(7, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(units.norm(dim=1), torch.ones(7, dtype=torch.float64))
    with pytest.raises(ValueError, match="three_point"):
        zo_gradient(units[:, 0], units[:, 0], units, 0.1, "three_point")


@pytest.mark.parametrize("services", ["exponential", "hyperexponential"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_policy_scores_what_the_simulator_chose(network, services):
    policy, task = built(network, services=services, threshold=6.0)
    with torch.no_grad():
        policy.theta.copy_(torch.from_numpy(random_points(1, len(task.network.service))).view_as(policy.theta))
    run = Run(METHOD, policy, task, steps=1)
    batch = run.collect(task.prompts(4, run.rng))
    found = policy.evaluate(batch, {"logp", "entropy"})
    torch.testing.assert_close(found.logp, batch.logp, atol=2e-5, rtol=1e-5)
    assert (batch.logp < 0).any() and torch.isfinite(found.entropy).all() and (found.entropy >= 0).all()
    found.logp.sum().backward()
    assert torch.isfinite(policy.theta.grad).all() and (policy.theta.grad != 0).any()


def test_jobs_are_neither_lost_nor_made():
    _, task = built("rybko_stolyar", services="uniform")
    change = np.diff(task.simulate([1, 2], random_points(2, 4), 5.0, 300).queues, axis=1)
    allowed = {(1, 0, 0, 0), (0, 0, 1, 0), (-1, 1, 0, 0), (0, -1, 0, 0), (0, 0, -1, 1), (0, 0, 0, -1)}
    assert {tuple(x) for x in change.reshape(-1, 4).astype(int).tolist()} <= allowed


def test_one_server_event_by_event():
    """Arrivals at 1, 2, ..., services of 1.5: completions at 2.5 and 4; where an arrival and a completion coincide, the arrival comes first."""
    network = NETWORKS["n_model"]
    lonely = type(network)("lonely", (1.0,), (1.0,), ((0,),), (-1,), (1.0,))
    one = np.ones((1, 1, 8))
    paths = simulate_events(lonely, np.zeros((1, 1, 4)), one, 1.5 * one, np.full((1, 8, 1), 0.5), 100.0)
    assert paths.queues[0, :7, 0].tolist() == [0, 1, 2, 1, 2, 3, 2]
    assert paths.duration[0, :6].tolist() == [1, 1, 0.5, 0.5, 1, 0]
    assert average_cost(lonely, paths)[0] == pytest.approx((paths.queues[0, :-1, 0] * paths.duration[0]).sum() / paths.duration[0].sum())


@pytest.mark.parametrize(("services", "squared_variation"), [("exponential", 1.0), ("hyperexponential", 4.0), ("uniform", 1 / 3)])
def test_service_times_have_mean_1(services, squared_variation):
    times = draw_services(services, (400_000,), np.random.default_rng(0))
    assert times.mean() == pytest.approx(1, abs=0.02)
    assert times.var() == pytest.approx(squared_variation, rel=0.05)


def test_pairs_meet_the_same_events_and_independent_ones_do_not():
    for common in (True, False):
        policy, task = built()
        rollout = PerturbedRollout(directions=2, common=common)
        run = Run(METHOD.but(rollout=rollout), policy, task, steps=1)
        batch = rollout(task.prompts(8, run.rng), run)
        ids = batch.signals["prompt_id"]
        assert len(batch) == 16 and (ids[:8] == ids[8:]).all() == common
        assert batch.group.tolist() == [0, 1] * 8 and batch.signals["sign"].tolist() == [1.0] * 8 + [-1.0] * 8
        assert torch.equal(policy.theta, torch.zeros_like(policy.theta))


def test_the_gradient_of_the_loss_is_the_estimate():
    policy, task = built()
    run = Run(METHOD.set("update.max_grad_norm", None).set("update.learning_rate", 1.0), policy, task, steps=1)
    batch = step(run)
    sign, arm, cost = batch.signals["sign"], batch.group, -batch.reward
    plus, minus = (torch.stack([cost[(sign == s) & (arm == m)].mean() for m in (0, 1)]) for s in (1, -1))
    expected = zo_gradient(plus, minus, batch.signals["direction"][:2], 0.5).gradient
    torch.testing.assert_close(-policy.theta.detach().flatten(), expected)
    torch.testing.assert_close(cost, -batch.signals["raw_reward"].mean(1))


def test_steps_are_no_longer_than_the_learning_rate():
    policy, task = built()
    train(Run(METHOD, policy, task, steps=1))
    assert float(policy.theta.detach().norm()) <= 0.3 + 1e-6


def test_a_task_without_weights_by_row_is_run_point_by_point():
    run = trained_on_cartpole(METHOD.set("rollout.directions", 1).set("select.prompts", 2), 2)
    assert all(np.isfinite(record["slope"]) for record in run.history)


def test_bad_settings_are_refused():
    policy, task = built()
    for path, value, words in (
        ("rollout.kind", "three", "three"), ("rollout.delta", 0.0, "above 0"), ("rollout.directions", 9, "9 directions")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            train(Run(METHOD.set(path, value), policy, task, steps=1))
    for options in ({"services": "constant"}, {"copies": 0}, {"reward_scale": 0.0}, {"speed": 1}):
        with pytest.raises(ValueError):
            built(**options)
    with pytest.raises(ValueError, match="criss_cross"):
        built("star")


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda m: m.name)
def test_four_steps_are_two_and_two_more(method, tmp_path):
    def run_to(out, upto):
        policy, task = built()
        run = Run(method, policy, task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path, "cost")


def test_a_saved_rule_costs_the_same(tmp_path):
    policy, task = built("tandem")
    train(Run(METHOD, policy, task, steps=1))
    policy.save_pretrained(tmp_path)
    again, _ = build("queue:tandem", str(tmp_path), **SMALL)
    assert torch.equal(task.costs(policy), task.costs(again))
    with pytest.raises(ValueError, match="tandem"):
        build("queue:n_model", str(tmp_path), **SMALL)
