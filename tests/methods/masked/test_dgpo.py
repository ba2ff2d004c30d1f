"""DGPO: its exact reductions, its pitfalls, graphs and cells, and training through the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.domains.masked.cells import INPUT, OUTPUT, VALID, CellTask, as_graphs, slot_wiring, valid_graphs
from anypo.domains.masked.graphs import STATE, TIME, Denoiser, GraphPolicy, load_graph_policy, posterior, pretrain, topo_order, transition
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.masked.dgpo import METHOD, advantages, eager_loss
from anypo.run import Run


def run_of(method: Method = METHOD, steps: int = 2, seed: int = 0, out: Path | None = None) -> Run:
    small = method.set("select.group_size", 8)
    if small.prepare:
        small = small.set("prepare.0.steps", 80)  # enough for valid graphs
    task = CellTask(evaluation_samples=16)
    return Run(small, task.policy(steps=6, width=16), task, steps=steps, seed=seed, out=out, checkpoint_every=2)


def weights(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def with_edges(**options) -> GraphPolicy:
    return GraphPolicy(Denoiser(5, 3, width=16, **options), steps=6)


# ---- reductions


def test_advantages_of_one_are_maximum_likelihood_on_own_samples() -> None:
    g = torch.Generator().manual_seed(0)
    logits_x, logits_e = torch.randn(3, 4, 3, generator=g), torch.randn(3, 4, 4, 2, generator=g)
    x, e = torch.randint(3, (3, 4), generator=g), torch.randint(2, (3, 4, 4), generator=g)
    found = eager_loss(logits_x, x, logits_e, e, torch.ones(3, 4), torch.ones(3), 0.0)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits_x.flatten(0, 1), x.flatten()))
    both = eager_loss(logits_x, x, logits_e, e, torch.ones(3, 4), torch.ones(3), 1.0)
    off = ~torch.eye(4, dtype=torch.bool).expand(3, 4, 4)
    torch.testing.assert_close(both - found, torch.nn.functional.cross_entropy(logits_e[off], e[off]))


def test_one_step_of_diffusion_is_reinforce_on_categoricals_from_the_marginals() -> None:
    """With T = 1 the state is noise from the marginals, and the posterior is the denoiser's guess itself."""
    guess = torch.tensor([0.2, 0.5, 0.3]).double()
    marginals = torch.tensor([0.6, 0.3, 0.1]).double()
    for now in range(3):
        torch.testing.assert_close(posterior(now, guess, marginals, 1.0, 1.0, 0.0), guess)
    task = CellTask()
    policy = task.policy(steps=1)
    run = Run(METHOD.but(prepare=()).set("select.group_size", 8).set("update.share", 1.0), policy, task, steps=1)
    batch = run.collect(run.method.select(task, run))
    torch.testing.assert_close(METHOD.update.view(batch, run).logp, batch.logp)


def test_without_positions_the_network_does_not_know_the_order() -> None:
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(5, generator=g)
    x = torch.randint(3, (2, 5), generator=g)
    e = torch.randint(2, (2, 5, 5), generator=g).triu(1)
    e = e + e.transpose(1, 2)
    for positions, same in ((0, True), (8, False)):
        network = Denoiser(5, 3, width=16, positions=positions)
        of_node, of_edge = network(x, e, torch.ones(2))
        node, edge = network(x[:, order], e[:, order][:, :, order], torch.ones(2))
        assert torch.allclose(node, of_node[:, order], atol=1e-5) is same
        assert torch.allclose(edge, of_edge[:, order][:, :, order], atol=1e-5) is same
        torch.testing.assert_close(of_edge, of_edge.transpose(1, 2))


# ---- graphs


def test_the_posterior_is_bayes_and_many_steps_are_one_transition() -> None:
    marginals = torch.tensor([0.5, 0.2, 0.3]).double()
    a, b = transition(0.7, 0.2, marginals), transition(0.7 * 0.8, 0.2, marginals)
    torch.testing.assert_close(a.Qbar @ a.Q, b.Qbar)
    for clean in range(3):
        for now in range(3):
            found = posterior(now, torch.nn.functional.one_hot(torch.tensor(clean), 3).double(), marginals, 0.2, 0.7, 0.56)
            torch.testing.assert_close(found, a.Q[:, now] * a.Qbar[clean] / b.Qbar[clean, now])


def test_a_type_that_never_occurs_gives_no_nan() -> None:
    found = posterior(torch.tensor([2]), torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([0.5, 0.5, 0.0]), 0.2, 1.0, 0.8)
    assert torch.isfinite(found).all()


def test_cycles_are_refused_and_orders_are_triangular() -> None:
    with pytest.raises(ValueError, match="cycle"):
        topo_order(torch.tensor([[0, 1], [1, 0]]))
    found = topo_order(torch.tensor([[0, 0, 0], [1, 0, 1], [1, 0, 0]]))
    assert found.order == [1, 2, 0] and torch.equal(found.upper, found.upper.triu(1))


def test_graphs_with_edges_are_sampled_and_learned() -> None:
    policy = with_edges()
    graphs = torch.cat([torch.zeros(16, 5, dtype=torch.int64), torch.ones(16, 10, dtype=torch.int64)], 1)
    losses = pretrain(policy, graphs, 60)
    assert losses[-1] < losses[0] / 2
    found = policy.sample(8, torch.Generator().manual_seed(0))
    assert found.graph.shape == (8, 15) and found.states.shape == (8, 6, 15)
    assert (found.graph == graphs[0]).double().mean() > 0.9


def test_cells_are_wired_by_their_slots() -> None:
    graphs = as_graphs(torch.tensor([[0, 1, 2, 3, 0, 1]]))
    assert graphs.tolist() == [[INPUT, 0, 1, 2, 3, 0, 1, OUTPUT]] and valid_graphs(graphs).all()
    assert not valid_graphs(graphs.flip(1)).any()
    full = torch.zeros(8, 8, dtype=torch.int64)
    full[tuple(torch.triu_indices(8, 8, 1))] = slot_wiring()
    assert full[0].nonzero().flatten().tolist() == [1, 2, 4]  # the slots (0,1), (0,2), (0,3)
    assert full[1].nonzero().flatten().tolist() == [3, 5] and full[:, 7].nonzero().flatten().tolist() == [4, 5, 6]


# ---- pitfalls


def test_equal_or_lone_rewards_have_no_advantage_and_outliers_are_bounded() -> None:
    assert advantages([[0.5, 0.5], [0.7]]).adv[0].tolist() == [0.0, 0.0] and advantages([[0.7]]).adv[0].tolist() == [0.0]
    assert advantages([[0.0, 0.01], [100.0, 0.0]], ema=0.001).adv[1].tolist() == [
        5.0,
        -advantages([[0.0, 0.01], [100.0, 0.0]], 0.001).adv[1][1].abs(),
    ]


def test_invalid_graphs_count_nowhere() -> None:
    run = run_of(METHOD.but(prepare=()))
    batch = run.collect(run.method.select(run.task, run))
    batch.signals[VALID][:] = True
    batch.signals[VALID][::2] = False
    batch.reward = torch.where(batch.signals[VALID], torch.linspace(0.1, 0.9, 8).double(), -1.0)
    credit = run.method.credit
    found = credit(batch, run)
    assert not found[::2].any() and not batch.counted[::2].any() and batch.counted[1::2].all()
    assert abs(credit.stats.mean - float(batch.reward[1::2].mean())) < 1e-9
    batch.signals[VALID][:] = False
    before = credit.stats
    assert not credit(batch, run).any() and credit.stats == before


def test_views_are_the_trajectorys_own_states() -> None:
    run = run_of()
    run.begin_step()
    batch = run.collect(run.method.select(run.task, run))
    view = run.method.update.view(batch, run)
    assert len(view) == 8 * 2  # ceil(0.3 * 6)
    row = torch.arange(8).repeat_interleave(2)
    assert torch.equal(view.signals[STATE], batch.signals["states"][row, 6 - view.signals[TIME]])
    assert (view.signals[TIME].view(8, 2)[:, 0] != view.signals[TIME].view(8, 2)[:, 1]).all()
    torch.testing.assert_close(run.score(view, {"logp"}).logp, view.logp)


def test_frozen_layers_stay_and_bad_shares_are_refused() -> None:
    run = run_of(METHOD.set("update.frozen", 0.5), steps=3)
    run.begin_step()  # pre-trains all layers
    first, last = run.policy.network.taken[0].weight.clone(), run.policy.network.taken[1].weight.clone()
    train(run)
    assert torch.equal(first, run.policy.network.taken[0].weight) and not torch.equal(last, run.policy.network.taken[1].weight)
    with pytest.raises(ValueError, match="share of the times"):
        step(run_of(METHOD.set("update.share", 0.0)))


# ---- in the loop


@pytest.mark.parametrize("change", ["", "inverse", "grpo objective", "kl", "minibatches"])
def test_it_trains(change: str) -> None:
    changed = {
        "inverse": METHOD.set("reward.inverse", True),
        "grpo objective": METHOD.but(objective=GRPO.objective),
        "kl": METHOD.but(regularize=GRPO.regularize),
        "minibatches": METHOD.set("update.minibatches", 2).set("update.unit", "row"),
    }.get(change, METHOD)
    run = run_of(changed, steps=3)
    start = weights(run)
    train(run)
    assert torch.isfinite(weights(run)).all() and not torch.equal(start, weights(run))
    for record in run.history:
        assert all(torch.isfinite(torch.tensor(v)) for v in record.values() if isinstance(v, float))


def test_a_stopped_run_continues_identically_and_a_saved_policy_is_the_same(tmp_path: Path) -> None:
    whole = train(run_of(steps=4))
    train(run_of(steps=2, out=tmp_path))
    halves = run_of(steps=4, out=tmp_path)
    assert halves.resume()
    train(halves)
    assert torch.equal(weights(whole), weights(halves)) and whole.method.credit.stats == halves.method.credit.stats
    whole.policy.save_pretrained(tmp_path / "model")
    assert whole.task.measure(load_graph_policy(tmp_path / "model")) == whole.task.measure(whole.policy)
