import math

import pytest
import torch

from anypo.domains.tabular.layered import (
    block_mdp,
    every_policy,
    hidden_lock,
    open_loop,
    random_layered,
    sample_episodes,
    sample_trees,
    singletons,
    values,
    visits,
)
from anypo.domains.tabular.mdp import from_start, optimum
from anypo.methods.tabular.agnostic_policy import (
    STUDY,
    coverage,
    emulator,
    importance_values,
    psdp,
    reach_counts,
    spanning_capacity,
    tree_values,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_one_layer_trees_are_full_information():
    problem = random_layered(1, horizon=1, states=3)
    trees = sample_trees(problem, 50, generator())
    policies = every_policy(1, 3)
    found = tree_values(*trees, policies, 2)
    assert torch.equal(found.value, trees.rewards.mean(0)[0][policies[:, 0, 0]])
    assert (found.queried == 2).all()


def test_one_policy_has_capacity_one():
    policy = torch.randint(2, (1, 3, 2), generator=generator())
    assert spanning_capacity(policy, 3, 2, 2).capacity == 1
    assert spanning_capacity(every_policy(1, 2), 1, 2, 2).capacity == 2


@pytest.mark.parametrize("make", [singletons, open_loop, every_policy])
def test_capacity_is_within_its_bounds_and_attained_by_a_process(make):
    policies = make(3, 2)
    capacity = spanning_capacity(policies, 3, 2, 2).capacity
    assert 1 < capacity <= min(len(policies), 2**3, 4)
    moves = torch.randint(2, (40, 3, 2, 2), generator=generator())
    assert int(reach_counts(moves, policies).count.max()) <= capacity
    assert torch.equal(reach_counts(moves[3], policies).count, reach_counts(moves, policies).count[3])


def test_a_capacity_too_large_to_search_is_refused():
    with pytest.raises(ValueError, match="fewer layers or states"):
        spanning_capacity(singletons(6, 4), 6, 4, 2)


def test_normalized_occupancy_of_the_class_attains_the_coverability():
    problem, policies = random_layered(2, 4, 3), singletons(4, 3)
    most = visits(problem.transition, policies, problem.start).amax(0)
    found = coverage(problem.transition, policies, problem.start, most / most.sum((1, 2), keepdim=True))
    assert found.concentrability == pytest.approx(found.coverability)
    uniform = torch.full((4, 3, 2), 1 / 6).double()
    assert coverage(problem.transition, policies, problem.start, uniform).concentrability >= found.coverability - 1e-12


def test_coverage_is_infinite_where_data_miss_and_nothing_is_asked_of_what_is_not_reached():
    problem, policies = random_layered(2, 3, 2), singletons(3, 2)
    mu = torch.full((3, 2, 2), 0.25).double()
    mu[0, 1] = 0.0  # the first state is always 0
    assert math.isfinite(coverage(problem.transition, policies, problem.start, mu).concentrability)
    mu[1, 1, 0] = 0.0
    assert coverage(problem.transition, policies, problem.start, mu).concentrability == math.inf


def test_psdp_with_the_complete_class_is_backward_dynamic_programming():
    for seed in range(5):
        problem = random_layered(seed, 3, 2)
        mu = torch.rand(3, 2, generator=generator(seed)).double() + 0.1
        found = psdp(problem.transition, problem.reward, every_policy(3, 2), mu, problem.start)
        best = optimum(problem.transition, problem.reward)
        assert found.value == pytest.approx(float(from_start(best.v, problem.start)))
        assert torch.equal(found.policy, best.policy.argmax(-1))
        assert found.value == pytest.approx(float(values(problem, found.policy[None])))


def test_psdp_takes_the_first_of_equals():
    problem = random_layered(0, 2, 2)._replace(reward=torch.zeros(2, 2, 2).double())
    assert psdp(problem.transition, problem.reward, singletons(2, 2), torch.full((2, 2), 0.5).double(), problem.start).index.tolist() == [
        0,
        0,
    ]


def test_both_evaluations_are_unbiased():
    problem, policies = random_layered(3, 2, 2), every_policy(2, 2)
    exact = values(problem, policies)
    trees = tree_values(*sample_trees(problem, 20000, generator()), policies, 2).value
    weighted = importance_values(*sample_episodes(problem, 40000, generator()), policies, 2)
    torch.testing.assert_close(trees, exact, atol=0.015, rtol=0)
    torch.testing.assert_close(weighted.value, exact, atol=0.04, rtol=0)
    torch.testing.assert_close(weighted.second_moment, 4 * weighted.value)  # one reward of 0 or 1: R^2 = R, weights 0 or A^H


def test_unused_nodes_do_not_matter():
    trees, policies = sample_trees(random_layered(0, 4, 3), 5, generator()), singletons(4, 3)[:1]
    found = tree_values(*trees, policies, 2)
    rewards = trees.rewards.clone()
    rewards[:, :, 1] = math.nan  # the policy always plays 0
    assert torch.equal(tree_values(trees.states, rewards, policies, 2).value, found.value) and (found.queried == 4).all()


def test_the_generators():
    lock = hidden_lock(3, horizon=4)
    assert sorted(values(lock, open_loop(4, 2)).tolist()) == [0.0] * 15 + [1.0]
    blocks = block_mdp(1, horizon=3, latents=2, emitted=5)
    assert (torch.nn.functional.one_hot(blocks.block, 2).sum(1) == 5).all()
    torch.testing.assert_close(blocks.observed.transition.sum(-1), torch.ones(3, 10, 2).double())
    measurable = every_policy(3, 2)[::7]
    shown = measurable[:, torch.arange(3)[:, None], blocks.block]
    torch.testing.assert_close(values(blocks.observed, shown), values(blocks.latent, measurable))


def test_the_emulator_finds_few_states_and_the_values():
    blocks = block_mdp(5, horizon=3, latents=2, emitted=10)
    policies = torch.randint(2, (6, 3, 20), generator=generator(1))
    kept = torch.arange(20).repeat(3, 1)[:, :8]
    found = emulator(blocks.observed, policies, kept, 2000, 0.08, generator(2))
    torch.testing.assert_close(found.value, values(blocks.observed, policies), atol=0.08, rtol=0)
    assert (found.states <= 4).all()
    alone = emulator(blocks.observed, policies, kept, 200, 0.08, generator(2), cluster=False)
    assert (alone.value < found.value).all() and (alone.states == 8).all()


def test_the_study_runs():
    found = STUDY.run(seed=1, horizon=3, episodes=50)
    assert all(math.isfinite(v) for v in found.values())
    assert found["psdp"] <= 1 and found["queries_per_tree"] <= 14 and found["concentrability"] >= found["coverability"]
