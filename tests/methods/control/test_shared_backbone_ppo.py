"""Shared-backbone PPO: messages, what they reduce to, permutations, the swarm, teams as rows, and the method in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.saved import load
from anypo.domains.control.setup import build
from anypo.domains.control.tasks import GymTask
from anypo.domains.control.uav_swarm import SIZE, STEPS, Swarm, UavSwarm, adjacency, preserved_move, reward
from anypo.loops.on_policy import step, train
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.control.shared_backbone_ppo import METHOD, SharedBackbonePolicy, aggregate, attention_weights, by_moment
from anypo.policy import MissingSignal
from anypo.run import Run
from tests.helpers import assert_continues, assert_resumes_on_cartpole

TEAM = 5


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return numbers(2, 4, 3), numbers(3, 3, seed=1), numbers(3, 3, seed=2), numbers(3, seed=3)


def test_without_neighbours_an_agent_is_alone() -> None:
    hidden, w_self, w_neigh, bias = layer()
    found = aggregate(hidden, torch.zeros(2, 4, 4), w_self, w_neigh, bias)
    assert torch.equal(found, torch.relu(hidden @ w_self + bias))
    assert torch.equal(attention_weights(hidden, torch.zeros(2, 4, 4).double(), w_self, w_neigh), torch.zeros(2, 4, 4).double())


def test_in_a_complete_graph_the_message_is_the_mean_of_the_others() -> None:
    hidden, w_self, w_neigh, bias = layer()
    others = (hidden.sum(1, keepdim=True) - hidden) / 3
    expected = torch.relu(hidden @ w_self + others @ w_neigh + bias)
    torch.testing.assert_close(aggregate(hidden, 1 - torch.eye(4).expand(2, 4, 4), w_self, w_neigh, bias), expected)


def test_attention_without_preference_is_the_mean() -> None:
    hidden, w_self, _, _ = layer()
    adj = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]]).double()
    torch.testing.assert_close(
        attention_weights(hidden, adj, torch.zeros_like(w_self), w_self), (adj / adj.sum(1, keepdim=True)).expand(2, 4, 4)
    )


def swarm(envs: int = 2, horizon: int = 6, **options: Any) -> tuple[SharedBackbonePolicy, GymTask]:
    task = GymTask("UavSwarm-v0", envs=envs, horizon=horizon, evaluation_episodes=2)
    return SharedBackbonePolicy(task.spaces, hidden=(16, 16), **options), task


def collected(policy: SharedBackbonePolicy, task: GymTask) -> Batch:
    return step(Run(METHOD.set("update.epochs", 1).set("update.minibatches", 1), policy, task, steps=1))


@pytest.mark.parametrize("aggregation", ["mean", "attention", "none"])
def test_relabelling_the_agents_permutes_the_outputs(aggregation: str) -> None:
    policy, task = swarm(aggregation=aggregation)
    batch = collected(policy, task)
    order = torch.cat([TEAM * i + torch.randperm(TEAM, generator=torch.Generator().manual_seed(i)) for i in range(2)])
    needs = {"logp", "value", "hidden", "logits"}
    plain, permuted = policy.observe(batch, needs), policy.observe(batch[order], needs)
    for name in needs:
        torch.testing.assert_close(permuted[name], plain[name][order], rtol=1e-5, atol=1e-5)


def test_messages_stay_inside_a_team_and_inside_the_reach() -> None:
    policy, task = swarm()
    batch = collected(policy, task)
    plain = policy.observe(batch, {"logits"}).logits
    other = batch.context.clone()
    other[0, :, 5:] += 1  # what the first agent sees, but not where it is
    changed = (policy.observe(batch.but(context=other), {"logits"}).logits != plain).any(-1)
    near = torch.linalg.vector_norm(batch.context[:TEAM, :, :2] - batch.context[:1, :, :2], dim=-1) <= policy.reach
    assert torch.equal(changed[:TEAM], near) and not changed[TEAM:].any()
    policy.reach = 0.0
    alone = (policy.observe(batch.but(context=other), {"logits"}).logits != policy.observe(batch, {"logits"}).logits).any(-1)
    assert not alone[1:].any()


def test_only_a_shared_trunk_is_trained_by_the_critic() -> None:
    for shared in (True, False):
        policy, task = swarm(shared=shared)
        batch = collected(policy, task)
        policy.zero_grad()
        policy.evaluate(batch, {"shared_value"}).shared_value.sum().backward()
        gradient = policy.actor_network.layers[0].weight.grad
        assert (gradient is not None and bool(gradient.any())) == shared
        assert policy.actor_network.layers[-1].weight.grad is None


def test_without_a_value_coefficient_the_actor_alone_trains_the_trunk() -> None:
    weights = []
    for scale in (1.0, 100.0):
        policy, task = swarm()
        with torch.no_grad():
            policy.critic_network.layers[-1].bias += scale  # the old values' offset leaves whitened advantages of complete episodes alone
        method = (
            METHOD.set("regularize.0.coefficient", 0.0).set("credit.lam", 1.0).set("credit.gamma", 1.0).set("update.max_grad_norm", None)
        )
        run = Run(method, policy, task, steps=1)
        batch = run.method.rollout(run.method.select(task, run), run)
        batch.signals["returns"] = torch.full_like(batch.logp, scale)
        batch.advantage = torch.ones_like(batch.logp)
        policy.zero_grad()
        run.backward(by_moment(batch), run.loss_fn)
        weights.append(policy.actor_network.layers[0].weight.grad)
        assert not policy.critic_network.layers[-1].weight.grad.any()
    assert weights[0].any() and torch.equal(*weights)


def test_a_lone_agent_is_single_agent_ppo() -> None:
    policy, _ = build("CartPole-v1", None, needs=METHOD.needs(), seed=3, hidden=(16, 16), aggregation="none", shared=False)
    plain, _ = build("CartPole-v1", None, seed=3, hidden=(16, 16))
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.values(x[:, None])[:, 0], plain.values(x))
    assert np.array_equal(policy.actor()(x.numpy(), None), plain.actor()(x.numpy(), None))
    graph = adjacency([[0.3, 0.4]], 0.0)
    assert graph.connected and graph.components == 1 and graph.lambda2 == 0
    one = reward([[1.0, 1.0]], 0.0, [[1.0, 2.0]], False, 1.5, 1.0, 1.0, 1.0, 0.1, 0.1)
    assert float(one) == 3.0


def test_team_value_is_one_number_for_the_team() -> None:
    policy, task = swarm(team_value=True)
    value = policy.observe(collected(policy, task), {"value"}).value.unflatten(0, (-1, TEAM))
    assert torch.equal(value, value[:, :1].expand_as(value))


def test_a_moment_is_a_whole_team() -> None:
    policy, task = swarm()
    batch = collected(policy, task)
    rows = by_moment(batch)
    assert len(rows) == 2 * TEAM * 6 and (torch.unique_consecutive(rows.group, return_counts=True)[1] == TEAM).all()
    new = policy.observe(rows, {"logp", "value"})
    old = policy.observe(batch, {"logp", "value"})
    for name in ("logp", "value"):
        expected = old[name].unflatten(0, (-1, TEAM)).transpose(1, 2).flatten()
        torch.testing.assert_close(new[name].flatten(), expected)


def test_a_preserved_swarm_never_breaks() -> None:
    rng = np.random.default_rng(0)
    setting = Swarm(preserve=True)
    state = np.stack([setting.reset(rng) for _ in range(6)], axis=1)
    for _ in range(STEPS):
        moved = setting.step(state, rng.integers(0, 9, (6, 5)))
        assert adjacency(setting.places(moved.state)[0], 4.0).connected.all()
        assert setting.places(moved.state)[0].min() >= 0 and setting.places(moved.state)[0].max() <= SIZE
        state = moved.state
    held = preserved_move([[0.0, 0.0], [1.0, 0.0]], [[-1.0, 0.0], [1.0, 0.0]], 1.0, 10.0)
    assert held.tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_one_environment_is_a_row_of_many() -> None:
    one = UavSwarm()
    seen, _ = one.reset(seed=5)
    task = GymTask("UavSwarm-v0", envs=1)
    many = task.environments(TEAM)
    rows = np.stack([many.reset(i, 5) for i in range(TEAM)])
    assert np.array_equal(rows, seen)
    action = np.array([1, 2, 3, 4, 0])
    observation, gained, *_ = one.step(action)
    taken = many.step(action)
    assert np.array_equal(taken.observation, observation) and (taken.reward == gained).all() and len(taken.reward) == TEAM


def test_the_swarm_trains_resumes_and_is_saved(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        policy, task = swarm(horizon=16)
        run = Run(METHOD, policy, task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path, "loss")
    policy, task = swarm()
    policy.save_pretrained(tmp_path / "model")
    x = torch.randn(TEAM, 3, task.spaces.observation_size, generator=torch.Generator().manual_seed(1))
    twin: Any = load(tmp_path / "model")
    assert torch.equal(twin.values(x), policy.values(x)) and twin.spaces.team_size == TEAM


def test_it_runs_on_ordinary_environments_and_ppo_runs_on_the_swarm(tmp_path: Path) -> None:
    for env in ("CartPole-v1", "Pendulum-v1"):
        policy, task = build(env, None, needs=METHOD.needs(), envs=4, horizon=16, hidden=(16, 16))
        assert np.isfinite(train(Run(METHOD, policy, task, steps=2)).history[-1]["loss"])
    plain, task = build("UavSwarm-v0", None, envs=2, horizon=16, hidden=(16, 16), evaluation_episodes=2)
    run = train(Run(PPO, plain, task, steps=2))
    assert np.isfinite(run.history[-1]["loss"]) and task.evaluate(run)["length"] == STEPS
    with pytest.raises(MissingSignal, match="shared_value"):
        Run(METHOD, plain, task, steps=1)
    with pytest.raises(ValueError, match="select.group_size to 1"):
        step(Run(PPO.set("select.group_size", 2), plain, task, steps=1))
    with pytest.raises(ValueError, match="aggregation is one of"):
        swarm(aggregation="sum")
    assert_resumes_on_cartpole(PPO, tmp_path)
