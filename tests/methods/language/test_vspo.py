"""VSPO: what it reduces to, what the vector touches, and the components in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.vspo import (
    METHOD,
    VECTOR,
    advantages,
    expected_update,
    instructed,
    intensities,
    loss,
    mean_hidden,
    steering_vector,
)
from anypo.policy import MissingSignal
from anypo.run import Run
from tests.helpers import assert_resumes, assert_trains, random_rows


def accuracy_and_first(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    """A target and a behaviour: token 1 first."""
    return torch.stack([(action[:, 1] == prompt % 3).double(), (action[:, 0] == 1).double()], dim=1)


TWO = {"reward": accuracy_and_first, "objectives": ("accuracy", "behaviour"), "vocabulary": 3}


def bandit(method: Method, steps: int = 3, vector: Tensor | None = None, seed: int = 0) -> Run:
    """A run on token_bandit with two rewards; with `vector` nothing is extracted."""
    task = TokenBandit(4, **TWO)  # type: ignore[arg-type]
    if vector is not None:
        method = method.but(prepare=())
    run = Run(method, task.policy(scale=0.3), task, steps=steps, seed=seed)
    if vector is not None:
        run.state[VECTOR] = vector
    return run


def same_weights(first: Run, second: Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True))


SHAPED = grpo.METHOD.but(reward=METHOD.reward, regularize=())


def test_a_grid_of_zero_is_reward_shaped_grpo() -> None:
    mine, theirs = bandit(METHOD.set("rollout.grid", (0.0,)), vector=torch.randn(3)), bandit(SHAPED)
    assert same_weights(train(mine), train(theirs)) and mine.history[-1]["reward"] == theirs.history[-1]["reward"]


def test_a_zero_vector_is_grpo() -> None:
    """The members come from one sampling call an intensity, which draw one after another what GRPO draws at once."""
    batches = []
    for vector in (torch.zeros(3), torch.ones(3) * 5):  # equal logits added are no steering either
        run = bandit(METHOD, vector=vector)
        batches.append(METHOD.rollout(METHOD.select(run.task, run), run))
    assert torch.equal(batches[0].action, batches[1].action)
    torch.testing.assert_close(batches[0].logp, batches[1].logp)
    run = bandit(METHOD, vector=torch.zeros(3))
    seen = run.policy.observe(batches[0], {"logp"}).logp
    torch.testing.assert_close(batches[0].logp, seen)


def test_without_weight_the_behaviour_does_not_count() -> None:
    rows = random_rows(1)
    accuracy, behaviour = rows.reward.abs(), rows.advantages
    assert torch.equal(advantages(accuracy, behaviour, rows.group, lam=0.0), grpo.advantages(accuracy, rows.group))
    assert torch.equal(advantages(accuracy, behaviour, rows.group, lam=0.0, gated=True), grpo.advantages(accuracy, rows.group))
    gated = advantages(torch.zeros(8), behaviour, rows.group, gated=True)
    assert gated.eq(0).all()  # no accuracy, no reward


def test_the_loss_is_grpos_without_a_penalty() -> None:
    rows = random_rows(2)
    dirty = torch.where(rows.mask, rows.logp, -torch.inf).requires_grad_()
    clean = rows.logp.clone().requires_grad_()
    mine = loss(dirty, torch.where(rows.mask, rows.old_logp, torch.nan), rows.advantages, rows.mask)
    theirs = grpo.loss(clean, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, beta=0.0).loss
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.autograd.grad(mine, dirty), torch.autograd.grad(theirs, clean))


def test_the_bandit_without_steering_is_the_policy_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    logits, reward = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    value = logits.softmax(0) @ reward
    (slope,) = torch.autograd.grad(value, logits)
    for score in (torch.randn(5, generator=g, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)):
        found = expected_update(logits, score, reward, [0.0] if score.any() else [0.0, 1.0, 2.0], 0.7)
        torch.testing.assert_close(found.new_logits, logits + 0.7 * slope)
        torch.testing.assert_close(found.expected_reward, value)


def test_the_vector_and_the_grid() -> None:
    assert torch.equal(steering_vector(torch.ones(2, 3), torch.ones(4, 3)), torch.zeros(3))  # no difference, no direction
    assert intensities(0, [0.0, 1.0]).tolist() == [] and intensities(3, [0.0, 1.0]).tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="empty"):
        intensities(3, [])


def rollout(method: Method, vector: Tensor, seed: int = 0) -> tuple[Run, Batch]:
    run = bandit(method, vector=vector, seed=seed)
    return run, method.rollout(method.select(run.task, run), run)


def test_every_group_has_every_intensity() -> None:
    _, batch = rollout(METHOD.set("select.group_size", 6), torch.tensor([0.0, 2.0, 0.0]))
    for number in range(4):
        found = batch.signals["intensity"][batch.group == number]
        assert torch.equal(found.sort().values, intensities(6, METHOD.rollout.grid).sort().values)  # type: ignore[attr-defined]
    assert batch.group.tolist() == sorted(batch.group.tolist()) and torch.equal(batch.group, batch.signals["prompt_id"])


def test_steering_moves_samples_and_not_the_recorded_log_probs() -> None:
    run, batch = rollout(METHOD.set("rollout.grid", (0.0, 50.0)), torch.tensor([0.0, 1.0, 0.0]))
    steered = batch.signals["intensity"] > 0
    assert (batch.action[steered] == 1).all() and not (batch.action[~steered] == 1).all()
    seen = run.policy.observe(batch, {"logp", "entropy"})
    torch.testing.assert_close(batch.logp, seen.logp)
    torch.testing.assert_close(batch.signals["old_entropy"], seen.entropy)
    assert run.policy.push is None


def test_the_loss_does_not_know_the_vector() -> None:
    """The push is off in the update: the same batch has the same loss and gradient whatever the vector is now."""
    run, batch = rollout(METHOD, torch.tensor([0.0, 2.0, 0.0]))
    batch.reward = METHOD.reward(batch, run)
    batch.advantage = METHOD.credit(batch, run)
    slopes = []
    for factor in (1, 2):
        run.state[VECTOR] = run.state[VECTOR] * factor
        run.policy.zero_grad()
        slopes.append((run.backward(batch, run.loss_fn).value, run.policy.logits.grad.clone()))
    assert torch.equal(slopes[0][0], slopes[1][0]) and torch.equal(slopes[0][1], slopes[1][1])


def test_corrected_ratios_start_away_from_one() -> None:
    method = METHOD.set("rollout.corrected", True).set("rollout.grid", (0.0, 2.0))
    run, batch = rollout(method, torch.tensor([0.0, 1.0, 0.0]))
    difference = (run.policy.observe(batch, {"logp"}).logp - batch.logp).abs().amax(1)
    steered = batch.signals["intensity"] > 0
    assert (difference[steered] > 0.1).any() and difference[~steered].max() < 1e-12
    run = train(bandit(method, 2, torch.tensor([0.0, 1.0, 0.0])))
    assert run.history[0]["clip_fraction"] > 0
    assert train(bandit(METHOD, 2, torch.tensor([0.0, 1.0, 0.0]))).history[0]["clip_fraction"] == 0


def test_the_vector_is_the_behaviours() -> None:
    run = bandit(METHOD)
    METHOD.prepare[0](run)
    vector = run.state[VECTOR]
    assert vector.shape == (3,) and torch.isfinite(vector).all() and vector.norm() > 0 and not vector.requires_grad


def test_a_recurrent_policy_is_steered_in_its_samples_alone() -> None:
    policy, task = make_toy_arith()
    run = Run(METHOD, policy, task, steps=1)
    prompts = METHOD.select(task, run)[:4]
    push = 100 * policy.output.weight[policy.encode("7")[0]].detach()
    with policy.steered(push):
        batch = run.collect(prompts)
        assert torch.equal(policy.evaluate(batch, {"logp"}).logp, policy.observe(batch, {"logp"}).logp)
    assert (batch.action[batch.mask] == policy.encode("7")[0]).all()
    hidden, exists = mean_hidden(batch, run)
    assert hidden.shape == (len(batch), 64) and exists.all()
    run.state[VECTOR] = torch.zeros(64)
    assert torch.isfinite(METHOD.rollout(prompts, run).logp).all()


def test_a_language_model_is_steered_in_its_samples_alone() -> None:
    from anypo.domains.language.models import load_policy

    policy = load_policy("builtin")
    prompt, weight = policy.encode("1+1="), policy.network.head.weight.detach()
    push = 1e3 * weight[40]
    token = int((weight @ push).argmax())

    def draw() -> Tensor:
        return policy.sample([prompt], 3, max_tokens=4, generator=torch.Generator().manual_seed(0)).tokens

    before = draw()
    with policy.steered(push):
        assert (draw() == token).all()
        policy.hidden_layer = 1
        with pytest.raises(ValueError, match="last hidden states alone"):
            draw()
        policy.hidden_layer = None
    assert torch.equal(draw(), before)


def test_instructions_go_before_the_problem() -> None:
    assert instructed("2+2", "Explain.") == "Explain.\n2+2" and instructed(3, "") == 3
    assert instructed([{"role": "user", "content": "2+2"}], "Explain.")[0] == {"role": "system", "content": "Explain."}
    with pytest.raises(ValueError, match="problems that are text"):
        instructed(3, "Explain.")


def test_refusals() -> None:
    policy, task = make_key_chain(2, 3)
    with pytest.raises(MissingSignal):
        Run(METHOD, policy, task, steps=1)
    with pytest.raises(ValueError, match="no steering vector"):
        train(bandit(METHOD.but(prepare=())))


def test_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD, **TWO)
    assert_resumes(METHOD, tmp_path, **TWO)
    assert_trains(METHOD)  # one reward
