"""bq_nco: what the reduced processes and the policies reduce to, exact solvers, demonstrations, and training."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo import catalogue
from anypo.domains.combinatorial.setup import build
from anypo.domains.combinatorial.tour_policy import TourPolicy
from anypo.domains.combinatorial.tour_tasks import closed, gaps, held_out
from anypo.domains.combinatorial.tours import distances, held_karp, nearest_neighbour, optimal_tour, optimal_tours, tour_length
from anypo.loops.on_policy import step, train
from anypo.methods.combinatorial.bq_nco import (
    METHOD,
    OptimalPaths,
    cvrp_rollout,
    imitation_loss,
    kp_rollout,
    op_rollout,
    path_value,
    tsp_rollout,
)
from anypo.run import Run
from tests.helpers import assert_continues

SMALL = {"cities": 6, "labelled": 30, "batch": 8, "evaluation_instances": 3, "layers": 2, "width": 16}


def cities(count, seed=0):
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return points, torch.cdist(points, points)


@given(st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_held_karp_is_the_best_of_all_orders_of_any_costs(count, seed):
    rng = np.random.default_rng(seed)
    start, between, end = rng.random((3, count)), rng.random((3, count, count)), rng.random((3, count))
    found = held_karp(start, between, end)
    for b in range(3):
        costs = {
            p: start[b, p[0]] + sum(between[b, i, j] for i, j in zip(p[:-1], p[1:], strict=True)) + end[b, p[-1]]
            for p in permutations(range(count))
        }
        assert found.value[b] == pytest.approx(min(costs.values()))
        assert costs[tuple(found.order[b].tolist())] == pytest.approx(found.value[b])


def test_both_solvers_agree_and_beat_the_nearest_neighbour():
    distance = distances(np.random.default_rng(0).random((10, 9, 2)))
    exact = tour_length(distance, optimal_tours(distance))
    by_cuts = tour_length(distance, np.array([optimal_tour(d) for d in distance]))
    np.testing.assert_allclose(by_cuts, exact)
    assert (tour_length(distance, nearest_neighbour(distance)) >= exact - 1e-9).all()
    with pytest.raises(ValueError, match="symmetric"):
        optimal_tour(np.random.default_rng(0).random((5, 5)))
    with pytest.raises(ValueError, match="1 to 14 cities"):
        held_karp(np.zeros((1, 15)), np.zeros((1, 15, 15)), np.zeros((1, 15)))


def test_forced_moves():
    _, distance = cities(4)
    assert path_value(distance, 1, 2, torch.tensor([3])) == pytest.approx(float(distance[1, 3] + distance[3, 2]))
    assert path_value(distance, 1, 2, torch.tensor([])) == float(distance[1, 2])
    order = TourPolicy(layers=1, width=8).construct(torch.rand(5, 3, 2))
    assert order.tolist() == [[0]] * 5


def test_reversing_and_moving_a_tour_changes_nothing():
    points, distance = cities(7)
    tour = torch.tensor([0, 4, 2, 6, 1, 3, 5])
    total = tsp_rollout(distance, tour).total
    back = torch.cat([tour[:1], tour[1:].flip(0)])
    torch.testing.assert_close(tsp_rollout(distance, back).total, total)
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    moved = points @ turn + 3.0
    torch.testing.assert_close(tsp_rollout(torch.cdist(moved, moved), tour).total, total)


def test_routes_of_an_unlimited_vehicle_are_tours():
    _, distance = cities(6)
    order = torch.tensor([3, 1, 5, 2, 4])
    actions = torch.stack([order, torch.zeros_like(order)], dim=1)
    routed = cvrp_rollout(distance, torch.ones(6, dtype=torch.float64), 1e9, actions)
    toured = tsp_rollout(distance, torch.cat([torch.zeros(1, dtype=torch.int64), order]))
    torch.testing.assert_close(routed.rewards, toured.rewards)


def test_an_unlimited_length_collects_all_and_infeasible_actions_are_refused():
    _, distance = cities(5)
    prize = torch.rand(5, dtype=torch.float64)
    found = op_rollout(distance, prize, 1e9, torch.tensor([1, 2, 3, 4]))
    assert found.feasible_after.sum(1).tolist() == [3, 2, 1, 0]
    torch.testing.assert_close(found.rewards.sum(), prize[1:].sum())
    exactly = float(2 * distance[0, 3])
    assert not op_rollout(distance, prize, exactly, torch.tensor([3])).feasible_after.any()
    for call in (
        lambda: op_rollout(distance, prize, exactly - 1e-6, torch.tensor([3])),
        lambda: cvrp_rollout(distance, torch.ones(5), 1.5, torch.tensor([[1, 1], [2, 0]])),
        lambda: kp_rollout(torch.tensor([2.0, 3.0]), torch.ones(2), 4.0, torch.tensor([0, 1])),
    ):
        with pytest.raises(ValueError, match="left"):
            call()


def test_imitation_is_cross_entropy_for_one_target_and_ignores_what_is_infeasible():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    action = torch.tensor([0, 1, 2, 3, 0])
    target = torch.nn.functional.one_hot(action, 4)
    everything = torch.ones(5, 4, dtype=torch.bool)
    torch.testing.assert_close(imitation_loss(logits, everything, target), torch.nn.functional.cross_entropy(logits, action))
    wild = logits.clone()
    wild[:, 1] = torch.nan
    wild[1] = logits[1]
    feasible = everything.clone()
    feasible[:, 1] = torch.tensor([False, True, False, False, False])
    assert torch.isfinite(imitation_loss(wild, feasible, target))


@pytest.mark.parametrize("state", ["reduced", "direct"])
def test_renaming_the_cities_renames_the_logits(state):
    policy = TourPolicy(state=state, layers=2, width=16)
    torch.nn.init.ones_(policy.body[0].weight)
    points = torch.rand(3, 7, 2, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([3, 0, 4, 2, 1])
    renamed = torch.cat([points[:, :2], points[:, 2:][:, order]], dim=1)
    everything = torch.ones(3, 5, dtype=torch.bool)
    at, left = torch.zeros(3, 1, dtype=torch.int64), everything[:, None]

    def logits(x):
        return policy.scores(x, everything) if state == "reduced" else policy.point(policy.encode(x, everything), at, left)[:, 0]

    torch.testing.assert_close(logits(renamed), logits(points)[:, order])


@pytest.mark.parametrize("state", ["reduced", "direct"])
def test_shrinking_problems_are_masked_problems(state):
    """A policy that builds a path has the log-probs that `evaluate` finds for it; the greedy one has the likeliest of each step."""
    policy, task = build("tsp:random", None, **SMALL, state=state)
    for layer in policy.body:
        torch.nn.init.ones_(layer.weight)
    run = Run(METHOD, policy, task, steps=1)
    batch = run.collect(task.prompts(6, run.rng))
    points = closed(torch.from_numpy(task.solved.points[batch.signals["prompt_id"]]).float())
    greedy = batch.but(action=policy.construct(points))
    logits = policy.observe(greedy, {"logits"}).logits
    assert torch.equal(logits.argmax(-1), greedy.action)
    assert torch.isinf(logits).sum(-1).tolist() == [[0, 1, 2, 3, 4]] * 6
    assert torch.isfinite(batch.logp).all() and (batch.signals["old_entropy"][:, -1] == 0).all()
    length = tour_length(distances(points[:, 1:].numpy()), np.pad(batch.action.numpy() + 1, ((0, 0), (1, 0))))
    np.testing.assert_allclose(-task.score(batch, run).sum(1), length, rtol=1e-5)


def test_gone_cities_leave_no_trace_in_a_reduced_state():
    policy = TourPolicy(layers=2, width=16)
    torch.nn.init.ones_(policy.body[0].weight)
    points = torch.rand(1, 6, 2)
    left = torch.tensor([[True, False, True, True]])
    moved = points.clone()
    moved[:, 3] = torch.rand(2)
    assert torch.equal(policy.scores(points, left), policy.scores(moved, left))


@pytest.mark.parametrize("steps", [1, None])
def test_demonstrations_are_optimal_paths_of_every_length(steps):
    policy, task = build("tsp:random", None, **(SMALL | {"batch": 200}))
    run = Run(METHOD, policy, task, steps=1)
    batch = OptimalPaths(steps=None)(task.prompts(200, run.rng), run)
    assert sorted(set(batch.signals["size"].tolist())) == [2, 3, 4, 5]
    assert torch.equal(batch.mask.sum(1), batch.signals["size"])
    cost = -task.score(batch, run).sum(1)
    for b in range(0, 200, 5):
        distance = distances(batch.context[b].double().numpy())
        remaining = 2 + np.arange(int(batch.signals["size"][b]))
        assert float(cost[b]) == pytest.approx(path_value(distance, 0, 1, remaining), rel=1e-5)
    short = OptimalPaths(steps=steps)(task.prompts(9, run.rng), run)
    assert short.horizon == (steps or 5)


def test_only_whole_tours_when_asked_and_mistakes_are_named():
    policy, task = build("tsp:random", None, **SMALL)
    run = Run(METHOD, policy, task, steps=1)
    whole = OptimalPaths(smallest=5)(task.prompts(9, run.rng), run)
    assert torch.equal(whole.context[:, 0], whole.context[:, 1]) and (whole.signals["size"] == 5).all()
    with pytest.raises(ValueError, match="smallest"):
        OptimalPaths(smallest=6)(task.prompts(2, run.rng), run)
    other, blocking = build("blocking:random", None, instances=2, evaluation_instances=1)
    with pytest.raises(ValueError, match="take tsp:random"):
        OptimalPaths()([], Run(catalogue.get("ppo"), other, blocking, steps=1))
    for options, sentence in (
        ({"state": "full"}, "unknown state"),
        ({"cities": 40}, "4 to 11"),
        ({"jobs": 3}, "know no option"),
        ({"width": 9}, "multiple"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build("tsp:random", None, **options)


@pytest.mark.parametrize("slug", ["bq_nco", "reinforce_pp", "grpo"])
def test_it_and_methods_that_roll_out_train_on_tours(slug):
    method = catalogue.get(slug, "combinatorial")
    policy, task = build("tsp:random", None, needs=method.needs(), **SMALL)
    before = [p.clone() for p in policy.parameters()]
    run = train(Run(method, policy, task, steps=3))
    assert all(np.isfinite(v) for r in run.history for v in r.values() if isinstance(v, float))
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_it_resumes_to_the_same_numbers(tmp_path):
    def run_to(out, upto):
        policy, task = build("tsp:random", None, needs=METHOD.needs(), **SMALL)
        run = Run(METHOD, policy, task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path, column="loss")


def test_a_saved_policy_comes_back(tmp_path):
    policy, _ = build("tsp:random", None, **SMALL)
    policy.save_pretrained(tmp_path)
    again, _ = build("tsp:random", str(tmp_path), **SMALL)
    solved = held_out(6, 4)
    assert (gaps(again, solved) == gaps(policy, solved)).all() and (gaps(policy, solved) >= -1e-9).all()
