"""ControlPolicy: evaluated log-probs are those of collection, gradients by hand are autograd's, exact KL, statistics, saving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo import catalogue
from anypo.batch import Batch
from anypo.domains.control.perceptron import Moments
from anypo.domains.control.policy import ControlPolicy, EnvironmentPolicy
from anypo.domains.control.saved import load
from anypo.domains.control.setup import build
from anypo.loops.on_policy import step
from anypo.policy import Loss, Policy, Signals
from anypo.run import Run
from anypo.seams.rollout import LaggedRollout


def collected(name: str, samples: int = 1, **options: object) -> tuple[ControlPolicy, Batch, Run]:
    policy, task = build(name, None, envs=3, horizon=40, **options)
    run = Run(catalogue.get("ppo", "control"), policy, task, steps=5, seed=1)
    for _ in range(2):  # the second batch is normalized with the statistics of the first
        prompts = [p.but(samples=samples) for p in task.prompts(3, run.rng)]
        batch = run.collect(prompts)
    return policy, batch, run


@pytest.mark.parametrize(("name", "samples"), [("CartPole-v1", 1), ("CartPole-v1", 3), ("Pendulum-v1", 1), ("Pendulum-v1", 2)])
def test_the_batch_carries_what_evaluate_finds(name: str, samples: int) -> None:
    policy, batch, _ = collected(name, samples)
    found = policy.observe(batch, {"logp", "entropy", "value", "kl_old"})
    torch.testing.assert_close(found.logp, batch.logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy, batch.signals["old_entropy"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.value, batch.signals["old_value"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.kl_old, torch.zeros_like(found.logp), atol=1e-6, rtol=0)
    assert (batch.logp[~batch.mask] == 0).all()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_sampled_actions_follow_the_evaluated_distribution(name: str) -> None:
    policy, batch, _ = collected(name)
    observation = batch.context[:1, :1].repeat(1, 20000, 1)
    noise = policy.noise(np.random.default_rng(0), (20000,))
    action = policy.actor()(observation[0].numpy(), noise)
    if name == "CartPole-v1":
        probability = policy.observe(batch[:1], {"logits"}).logits[0, 0].softmax(-1)
        assert np.mean(action) == pytest.approx(float(probability[1]), abs=0.02)
    else:
        found = policy.observe(batch[:1], {"mean", "log_std"})
        assert action.mean() == pytest.approx(float(found["mean"][0, 0, 0].detach()), abs=0.03)
        assert action.std() == pytest.approx(float(found["log_std"][0, 0, 0].detach().exp()), rel=0.03)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_the_gradient_by_hand_is_that_of_autograd(name: str) -> None:
    policy, batch, _ = collected(name)
    weight = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    needs = {"logp", "entropy", "value", "kl_old"}

    def loss_fn(part: Batch, new: Signals) -> Loss:
        return Loss((weight * new.logp.exp() + 0.1 * new.entropy + 0.5 * (new.value - 1) ** 2 + 3 * new.kl_old * new.logp).mean())

    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.06 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    gradients = []
    for backward in (ControlPolicy.backward, Policy.backward):
        policy.zero_grad()
        loss = backward(policy, batch, needs, loss_fn)
        backward(policy, batch, needs, loss_fn)  # gradients add up
        gradients.append((float(loss.value), [p.grad.clone() for p in policy.parameters()]))
    assert gradients[0][0] == pytest.approx(gradients[1][0], abs=1e-6)
    for ours, autograd in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(ours, autograd, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(
    ("slug", "share"), [("ppo", "clip_fraction"), ("bpo_bounded", "clip_fraction"), ("spo_simple", "fraction_outside")]
)
def test_a_closed_form_is_what_autograd_finds(slug: str, share: str, name: str) -> None:
    policy, batch, run = collected(name)
    run.method = catalogue.get(slug, "control")
    with torch.no_grad():  # far enough for many ratios to leave the band
        for p in policy.parameters():
            p.add_(0.06 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    batch.advantage = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(2))
    batch.signals["returns"] = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(3))
    loss_fn = run.loss_fn
    assert loss_fn.has_gradient
    results = []
    for closed in (True, False):
        loss_fn.has_gradient = closed
        policy.zero_grad()
        loss = policy.backward(batch, loss_fn.needs, loss_fn)
        results.append((float(loss.value), loss.metrics, [p.grad.clone() for p in policy.parameters()]))
    (value, metrics, ours), (theirs_value, theirs_metrics, theirs) = results
    assert value == pytest.approx(theirs_value, rel=1e-5) and 0.1 < metrics[share] < 0.9
    assert metrics == pytest.approx(theirs_metrics, rel=1e-4)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_a_component_that_changes_the_loss_alone_is_left_to_autograd() -> None:
    _, _, run = collected("CartPole-v1")

    class Twice(type(run.method.regularize[0])):  # type: ignore[misc]
        def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
            loss = super().__call__(batch, new, run)
            return Loss(2 * loss.value, loss.metrics)

    run.method = run.method.but(regularize=Twice())
    assert not run.loss_fn.has_gradient


def test_the_exact_kl_is_that_of_torch() -> None:
    policy, batch, _ = collected("Pendulum-v1")
    with torch.no_grad():
        for p in policy.actor_network.parameters():
            p.mul_(1.5)
        policy.log_std.add_(0.3)
    new = policy.observe(batch, {"kl_old", "mean", "log_std"})
    normal = torch.distributions.Normal
    old = normal(batch.signals["old_mean"], batch.signals["old_log_std"].exp())
    exact = torch.distributions.kl_divergence(old, normal(new["mean"], new["log_std"].exp())).sum(-1)
    torch.testing.assert_close(new["kl_old"], exact, atol=1e-5, rtol=1e-4)
    policy, batch, _ = collected("CartPole-v1")
    with torch.no_grad():
        policy.actor_network.layers[-1].bias.add_(torch.tensor([0.5, -0.5]))
    new = policy.observe(batch, {"kl_old", "logits"})
    categorical = torch.distributions.Categorical
    exact = torch.distributions.kl_divergence(categorical(logits=batch.signals["old_logits"]), categorical(logits=new["logits"]))
    torch.testing.assert_close(new["kl_old"], exact, atol=1e-5, rtol=1e-4)


def test_running_moments_are_those_of_all_observations() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, (n, 2)) for n in (5, 40, 7)]
    moments = Moments(2)
    for part in parts:
        before = moments.mean.clone()
        moments.note(part)
        assert torch.equal(moments.mean, before)  # noted, not yet in force
        moments.absorb()
    everything = np.concatenate(parts)
    np.testing.assert_allclose(moments.mean, everything.mean(0))
    np.testing.assert_allclose(moments.variance, everything.var(0))


@pytest.mark.parametrize(("name", "needs"), [("CartPole-v1", set()), ("Pendulum-v1", set()), ("Pendulum-v1", {"q_new"})])
def test_a_saved_policy_acts_the_same(name: str, needs: set[str], tmp_path: Path) -> None:
    policy, task = build(name, None, needs=needs, seed=3, hidden=(16, 16))
    policy.save_pretrained(tmp_path / "model")
    again = load(tmp_path / "model")
    observation = np.random.default_rng(0).normal(size=(5, task.spaces.observation_size)).astype(np.float32)
    np.testing.assert_array_equal(policy.actor()(observation, None), again.actor()(observation, None))
    assert type(again) is type(policy) and again.configuration == policy.configuration


def test_a_policy_that_cannot_act_is_refused_when_it_is_made() -> None:
    class Mute(EnvironmentPolicy):
        pass

    with pytest.raises(TypeError, match="abstract.*actor"):
        Mute()


def test_a_folder_without_a_policy_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no saved control policy"):
        load(tmp_path)


def test_a_lagging_actor_teaches_the_learner_its_statistics() -> None:
    policy, task = build("Pendulum-v1", None, envs=3, horizon=40)
    method = catalogue.get("ppo", "control").but(rollout=LaggedRollout(lag=2))
    run = Run(method, policy, task, steps=4, seed=1)
    for _ in range(3):
        step(run)
    moments = run.named_policy("behaviour").moments
    assert policy.moments is not None and moments is not None and float(moments.count) > 0
    assert torch.equal(policy.moments.mean, moments.mean) and torch.equal(policy.moments.count, moments.count)
