import itertools

import numpy as np
import pytest
import torch

from anypo.domains.tabular.graphs import (
    blocks_graph,
    correct_moves,
    distances,
    diversity,
    planning_problems,
    random_dag,
    random_path,
    reachable,
    success,
)
from anypo.methods.tabular.planning_pg_q import (
    STUDY,
    Planner,
    diversity_drift,
    expected_pg,
    fine_tune,
    kl_optimum,
    measure,
    q_iteration,
    q_learning,
    q_linear,
    reinforce,
    rewards,
    sft,
)


def line(nodes=3):
    return torch.eye(nodes, dtype=torch.bool).roll(1, 1).triu()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tables(*shape, seed=0):
    return Planner(*torch.randn(2, *shape, generator=generator(seed), dtype=torch.float64))


def test_reach_and_correct_moves_by_hand():
    adjacency = torch.zeros(4, 4, dtype=torch.bool)
    for i, j in ((0, 1), (1, 3), (0, 2)):
        adjacency[i, j] = True
    assert reachable(adjacency).nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 3]]
    assert correct_moves(adjacency)[3].nonzero().tolist() == [[0, 1], [1, 3]]
    assert correct_moves(adjacency)[2].nonzero().tolist() == [[0, 2]]
    assert distances(adjacency)[0].tolist() == [0.0, 1.0, 1.0, 2.0]


def test_success_is_the_sum_over_all_valid_paths():
    adjacency = random_dag(5, 0.6, np.random.default_rng(0), chain=True)
    policy = tables(5, 5).table().softmax(-1)
    found = success(policy, adjacency)
    for start, target in ((0, 4), (1, 3), (3, 4)):
        total = 0.0
        for length in range(4):
            for middle in itertools.permutations(set(range(5)) - {target}, length):
                path = [start, *middle, target]
                if all(adjacency[a, b] for a, b in itertools.pairwise(path)):
                    total += float(torch.stack([policy[target, a, b] for a, b in itertools.pairwise(path)]).prod())
        assert float(found[start, target]) == pytest.approx(total, rel=1e-12)
    assert (found[4] == 0).all()


def test_diversity_looks_at_correct_moves_only():
    adjacency = torch.ones(4, 4, dtype=torch.bool).triu(1)
    pairs = reachable(adjacency)
    correct = correct_moves(adjacency).double()
    uniform = correct / correct.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(diversity(0.1 * uniform + 0.9 / 4 * (1 - correct), adjacency, pairs), torch.ones(()).double())
    certain = torch.nn.functional.one_hot(correct.argmax(-1), 4).double()
    assert diversity(certain, adjacency, pairs) == 0


def test_demonstrations_are_valid_and_pairs_do_not_overlap():
    problems = planning_problems([0, 1])
    assert not (problems.train & problems.test).any()
    assert torch.equal(problems.train | problems.test, reachable(problems.adjacency))
    assert (problems.demos[~correct_moves(problems.adjacency)] == 0).all()
    rng = np.random.default_rng(0)
    path = random_path(correct_moves(line(4))[3], 0, 3, rng)
    assert path == [0, 1, 2, 3]


def test_policy_gradient_is_fine_tuning_on_its_correct_paths():
    """Every path from 0 to 2 on this line that is valid is 0, 1, 2: an episode adds the log-likelihood's gradient on it or nothing."""
    start = tables(1, 3, 3)
    adjacency, prompts = line()[None], torch.zeros(1, 3, 3, dtype=torch.bool)
    prompts[0, 0, 2] = True
    leaves = Planner(*(t.clone().requires_grad_() for t in start))
    logp = leaves.table().log_softmax(-1)[0, 2]
    wanted = torch.autograd.grad(logp[0, 1] + logp[1, 2], leaves)
    seen = set()
    for seed in range(40):
        after = reinforce(start, adjacency, prompts, 1, generator(seed), lr=0.1)
        moved = bool((after.edge != start.edge).any())
        seen.add(moved)
        if moved:
            for new, old, gradient in zip(after, start, wanted, strict=True):
                torch.testing.assert_close(new - old, 0.1 * gradient)
    assert seen == {True, False}


def test_the_kl_term_is_the_gradient_of_the_kl():
    """On 0 -> 1 only node 0 is visited; of two episodes the second one's step has a KL to leave."""
    start = tables(1, 2, 2)
    prompts = torch.tensor([[[False, True], [False, False]]])

    free, held = (reinforce(start, line(2)[None], prompts, 2, generator(6), lr=0.5, beta=beta) for beta in (0.0, 2.0))
    # The first episode's path is the same with and without the KL, which is 0 then.
    once = start.table()[0, 1, 0].log_softmax(-1)
    drawn = generator(6)
    torch.multinomial(prompts.flatten(1).double(), 2, replacement=True, generator=drawn)
    luck = float(torch.rand(2, 12, 1, 1, generator=drawn, dtype=torch.float64)[0, 0, 0, 0])
    assert luck > float(once.exp()[0]), "the first path arrives, so that there is a KL"
    row = start.table()[0, 1, 0] + 2 * 0.5 * (torch.tensor([0.0, 1.0]).double() - once.exp())
    row.requires_grad_()
    kl = (row.softmax(-1) * (row.log_softmax(-1) - once)).sum()
    torch.testing.assert_close(free.edge[0, 0] - held.edge[0, 0], 0.5 * 2.0 * torch.autograd.grad(kl, row)[0])


def test_every_graph_is_learned_as_if_alone_and_runs_are_repeatable():
    problems = planning_problems([0, 1])
    alone = fine_tune(planning_problems([1]), steps=20)
    torch.testing.assert_close(fine_tune(problems, steps=20).edge[1], alone.edge[0])
    again = [q_linear(problems.adjacency, problems.train, 50, generator(3)).edge for _ in range(2)]
    assert torch.equal(*again)


def test_a_small_beta_makes_the_best_actions_share_by_the_reference():
    reference, reward = torch.tensor([0.2, 0.3, 0.5]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    torch.testing.assert_close(kl_optimum(reference, reward, 1e-3).policy, torch.tensor([0.4, 0.6, 0.0]).double())
    torch.testing.assert_close(kl_optimum(reference, reward, 1e9).policy, reference)


def test_the_expected_gradient_is_that_of_expected_reward():
    theta = torch.randn(5, generator=generator(), dtype=torch.float64).requires_grad_()
    correct = torch.tensor([1, 0, 1, 0, 0])
    wanted = torch.autograd.grad(theta.softmax(-1) @ correct.double(), theta)[0]
    torch.testing.assert_close(expected_pg(theta.detach(), correct).gradient, wanted)
    assert diversity_drift(theta.detach(), torch.ones(5), 0.3, True).drift.abs() < 1e-12


def test_q_learning_over_all_moves_with_full_steps_ends_where_iteration_does():
    adjacency = random_dag(6, 0.5, np.random.default_rng(1), chain=True)
    moves = torch.cartesian_prod(torch.arange(6), torch.arange(6)).repeat(8, 1)
    for kind in ("process", "outcome"):
        found = q_learning(adjacency, moves, torch.arange(6), kind, lr=1.0).q
        for target in range(6):
            torch.testing.assert_close(found[target], q_iteration(adjacency, target, kind, 12).q)
            assert torch.equal(q_learning(adjacency, moves, target, kind, lr=1.0).q, found[target])


def test_the_fixed_points():
    adjacency = random_dag(6, 0.5, np.random.default_rng(2), chain=True)
    process = q_iteration(adjacency, 4, "process").q
    assert (process[correct_moves(adjacency)[4]] == 1).all() and (process[~adjacency] == -1).all()
    assert process[4, 5] == -1  # an edge that leads past the target
    assert (q_iteration(adjacency, 4, "outcome").q == 1).all()


def test_self_loops_are_no_edges_and_arriving_without_an_edge_is_not_rewarded():
    reward, ends = rewards(line(), 2, "process")
    assert reward[1, 2] == 1 and ends[1, 2] and reward[0, 2] == -1 and reward[1, 1] == -1 and ends[1, 1]
    assert reward[0, 1] == 0 and not ends[0, 1]
    with pytest.raises(ValueError, match="process or outcome"):
        rewards(line(), 2, "dense")


def test_counts_ignore_padding_and_the_policy_is_a_distribution():
    found = sft(torch.tensor([[0, 1, -1], [0, 1, 2]]), torch.tensor([[0, 2]]), 3)
    assert found.edge_counts[0, 1] == 2 and found.edge_counts.sum() == 3
    assert found.target_counts[1, 1] == 1 and found.target_counts[2].tolist() == [0, 1, 1]
    torch.testing.assert_close(found.policy.sum(-1), torch.ones(1).double())


def test_blocksworld():
    states, adjacency = blocks_graph(4)
    assert len(states) == 73 and torch.equal(adjacency, adjacency.T) and not adjacency.diagonal().any()
    assert torch.isfinite(distances(adjacency)).all()
    assert blocks_graph(1)[1].tolist() == [[False]]
    with pytest.raises(ValueError, match="at least one block"):
        blocks_graph(0)


def test_the_study_runs():
    found = STUDY.run(seed=1, episodes=20, updates=50)
    assert set(found) == {f"{who}_{what}" for who in ("sft", "pg", "q") for what in ("train", "test", "diversity")}
    assert all(0 <= v <= 1 + 1e-12 for v in found.values())
    problems = planning_problems([1])
    assert float(measure(fine_tune(problems).table().softmax(-1), problems)["train"]) == pytest.approx(found["sft_train"])
