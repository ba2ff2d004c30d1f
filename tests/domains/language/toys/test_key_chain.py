"""key_chain: exact success, restorable states, counted steps, and GRPO learns on it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo import checkpoint
from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import ChainPolicy, KeyChain, make_key_chain
from anypo.loops.on_policy import train
from anypo.method import Method, Paper
from anypo.policy import Loss, MissingSignal
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

torch.set_num_threads(1)


def grpo(**update) -> Method:
    return Method(
        name="plain_grpo",
        paper=Paper("test"),
        domain="language",
        select=UniformPrompts(group_size=4),
        rollout=OnPolicy(),
        reward=TaskReward(),
        credit=GroupRelative(ddof=1),
        objective=ClippedSurrogate(),
        update=GradientSteps(**update),
    )


def rollouts(policy, task, samples=4, seed=0, **prompt):
    run = Run(grpo(), policy, task, steps=1, seed=seed)
    return run.collect([p.but(samples=samples, **prompt) for p in task.prompts(task.count, np.random.default_rng(0))]), run


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_sampled_log_probs_are_those_of_evaluate(temperature):
    policy, task = make_key_chain()
    batch, _ = rollouts(policy, task, temperature=temperature)
    seen = policy.observe(batch, {"logp", "entropy", "logits"})
    assert torch.allclose(seen.logp, batch.logp) and torch.allclose(seen.entropy, batch.signals["old_entropy"])
    assert seen.logits.shape == (64, 4, 4)
    assert torch.allclose(policy.observe(batch.but(signals={}), {"logp"}).logp, batch.logp) == (temperature is None)
    assert torch.equal(batch.segment, torch.arange(4).expand(64, 4))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_actions_follow_the_tempered_probabilities(temperature):
    policy, task = make_key_chain(prompts=1, steps=2)
    batch, _ = rollouts(policy, task, samples=20000, temperature=temperature)
    shares = torch.stack([(batch.action == a).double().mean(0) for a in range(4)], dim=-1)
    assert torch.allclose(shares, (policy.logits[0].detach() / temperature).softmax(-1), atol=0.015)


@pytest.mark.parametrize("steps", [1, 4])
def test_expected_success_agrees_with_sampling(steps):
    policy, task = make_key_chain(steps=steps)
    batch, run = rollouts(policy, task, samples=1500)
    assert abs(float(run.score_rewards(batch).mean()) - task.expected_success(policy)) < 0.012
    assert task.evaluate(run) == {"pass@1": task.expected_success(policy)}
    assert batch.terminated.all() and not batch.truncated.any()


def test_expected_success_is_differentiable_and_ignores_values():
    policy, task = make_key_chain(value=True)
    task.success_probabilities(policy).sum().backward()
    assert (policy.logits.grad[task.right] > 0).all() and policy.values.grad is None


def test_environment_pays_what_the_task_scores():
    policy, task = make_key_chain(steps=2)
    batch, run = rollouts(policy, task, samples=20)
    environment = task.environment()
    environment.reset(batch.context)
    paid = torch.zeros(len(batch), dtype=torch.float64)
    for t in range(2):
        reward, done = environment.step(batch.action[:, t])
        assert done.all() == (t == 1)
        paid += reward
    assert torch.equal(paid, run.score_rewards(batch)) and 0 < paid.sum() < len(batch)
    assert environment.steps_taken == batch.mask.sum()
    environment.step(batch.action[:, 0])
    assert environment.steps_taken == batch.mask.sum(), "finished episodes take no step"


def test_a_restored_state_plays_on_as_if_never_left():
    task = KeyChain(prompts=3, steps=3)
    prompt, right = torch.arange(3), task.right.double().argmax(-1)
    environment = task.environment()
    environment.reset(prompt)
    environment.step(right[:, 0])
    saved = environment.save()
    environment.step((right[:, 1] + 1) % 4)
    assert not environment.state.intact.any()
    assert environment.step(right[:, 2])[0].sum() == 0
    environment.restore(saved)
    environment.step(right[:, 1])
    assert environment.step(right[:, 2])[0].tolist() == [1.0, 1.0, 1.0]
    environment.restore(saved)
    assert environment.save().step.tolist() == [1, 1, 1] and environment.steps_taken == 15


@given(depth=st.lists(st.integers(0, 4), min_size=6, max_size=6), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_trajectories_continue_from_any_node_and_cost_only_what_is_new(depth, seed):
    policy, task = make_key_chain(prompts=6)
    batch, run = rollouts(policy, task, samples=1, seed=seed)
    before = task.environment_steps
    cut = torch.tensor(depth)
    more = task.continue_from(batch.context, batch.group, run, batch.action, cut, parent=torch.arange(6))
    assert task.environment_steps - before == int((4 - cut).sum())
    shared = torch.arange(4) < cut[:, None]
    assert torch.equal(more.action[shared], batch.action[shared])
    assert torch.allclose(more.logp[shared], batch.logp[shared])
    assert torch.allclose(policy.observe(more, {"logp"}).logp, more.logp)
    assert torch.equal(more.branch_at, cut) and torch.equal(more.parent, torch.arange(6))
    roots = batch.but(parent=torch.full((6,), -1), branch_at=torch.zeros(6, dtype=torch.int64))
    assert len(Batch.concat([roots, more])) == 12


def test_success_after_a_right_prefix_is_the_product_of_what_is_left():
    policy, task = make_key_chain(prompts=1, steps=3)
    _, run = rollouts(policy, task)
    right = task.right.double().argmax(-1)
    many = torch.zeros(4000, dtype=torch.int64)
    batch = task.continue_from(many, many, run, right[many][:, :1])
    left = (policy.logits.softmax(-1) * task.right).sum(-1)[0, 1:].prod()
    assert abs(float(task.score(batch, run).mean()) - float(left.detach())) < 0.03
    assert (batch.branch_at == 1).all() and (batch.parent == -1).all()


def test_depth_outside_the_prefix_is_refused():
    policy, task = make_key_chain(prompts=2)
    batch, run = rollouts(policy, task, samples=1)
    for depth in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="depth must lie between 0 and 2"):
            task.continue_from(batch.context, batch.group, run, batch.action[:, :2], torch.tensor(depth))


def test_a_step_may_accept_several_actions():
    right = torch.ones(5, 3, 4, dtype=torch.bool)
    right[:, 1, 2:] = False  # one deciding step, two of its four actions right
    task = KeyChain(right=right)
    policy = task.policy(bias=0.0, scale=0.0)
    assert task.expected_success(policy) == pytest.approx(0.5)
    batch, run = rollouts(policy, task, samples=400)
    assert torch.equal(run.score_rewards(batch) == 1, batch.action[:, 1] < 2)
    with pytest.raises(ValueError, match="at least one right action"):
        KeyChain(right=right & False)


def test_policy_provides_values_only_when_asked_for_them():
    policy, task = make_key_chain(value=True)
    batch, _ = rollouts(policy, task)
    assert policy.evaluate(batch, {"value"}).value.shape == (64, 4)
    assert [g["role"] for g in policy.parameter_groups()] == ["policy", "value"]
    with pytest.raises(MissingSignal, match="value"):
        make_key_chain()[0].check({"value"}, "test")


def test_gradient_reaches_the_visited_logits_alone():
    policy, task = make_key_chain()
    batch, _ = rollouts(policy, task)
    kept = batch[batch.context < 8]
    policy.backward(kept, frozenset({"logp"}), lambda b, new: Loss(new.logp.sum()))
    assert (policy.logits.grad[:8] != 0).all() and (policy.logits.grad[8:] == 0).all()


def test_same_seed_same_rollouts_and_other_seed_other_rollouts():
    first, again, other = (rollouts(*make_key_chain(seed=2), seed=s)[0] for s in (4, 4, 5))
    assert torch.equal(first.action, again.action) and not torch.equal(first.action, other.action)
    assert not torch.equal(KeyChain(seed=0).right, KeyChain(seed=1).right)
    assert not torch.equal(ChainPolicy(KeyChain().right, seed=0).logits, ChainPolicy(KeyChain().right, seed=1).logits)


def test_grpo_learns_the_chain():
    policy, task = make_key_chain()
    assert task.expected_success(policy) < 0.08
    train(Run(grpo(), policy, task, steps=40))
    assert task.expected_success(policy) > 0.75
    assert task.environment_steps == 40 * 16 * 4 * 4


def test_a_run_resumed_from_its_state_continues_to_the_same_numbers():
    def fresh() -> Run:
        return Run(grpo(epochs=2, minibatches=2, optimizer="adamw", learning_rate=0.1), *make_key_chain(value=True), steps=6, seed=7)

    whole = train(fresh())
    half = fresh()
    half.total_steps = 3
    tensors: dict = {}
    packed = checkpoint.pack(copy.deepcopy(train(half).state_dict()), tensors)
    resumed = fresh()
    resumed.load_state_dict(checkpoint.unpack(packed, tensors))
    train(resumed)
    assert [r["reward"] for r in resumed.history] == [r["reward"] for r in whole.history[3:]]
    assert torch.equal(whole.policy.logits, resumed.policy.logits)
    assert resumed.task.environment_steps == whole.task.environment_steps
