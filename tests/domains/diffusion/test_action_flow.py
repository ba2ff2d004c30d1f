"""The flow policy for environments: its two forms agree, its samplers follow the field, and it is saved, resumed and refused as it should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.batch import Batch
from anypo.domains.control.setup import build, load
from anypo.domains.diffusion.action_flow import FlowActionPolicy
from anypo.domains.diffusion.action_network import ActionNetwork
from anypo.domains.diffusion.denoise import uniform_levels


def flow_policy(**options: object) -> FlowActionPolicy:
    policy, _ = build("Pendulum-v1", None, needs={"flow_velocity"}, hidden=(16, 16), **options)
    assert isinstance(policy, FlowActionPolicy)
    torch.nn.init.normal_(policy.actor_network.layers[-1].weight, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    return policy


def test_the_network_in_numpy_is_the_one_in_torch() -> None:
    torch.manual_seed(0)
    network = ActionNetwork(2, 3, (8, 8))
    levels = uniform_levels(4)
    action, observation = torch.randn(5, 2), torch.randn(5, 3)
    predict = network.at_levels(levels)(observation.numpy())
    for k, level in enumerate(levels):
        wanted = network.predict(action, torch.full((5,), float(level)), observation)
        np.testing.assert_allclose(predict(k, action.numpy()), wanted.detach().numpy(), atol=1e-6)


def test_an_action_is_the_end_of_euler_steps_along_the_velocity() -> None:
    policy = flow_policy(sampling_steps=3)
    seen, noise = torch.randn(4, 3), torch.randn(4, 1)
    x, observation = noise, policy.normalize(seen)
    for level in (1.0, 2 / 3, 1 / 3):
        x = x - policy.actor_network.predict(x, torch.full((4,), level), observation).detach() / 3
    np.testing.assert_allclose(policy.actor()(seen.numpy(), noise.numpy()), x.numpy(), atol=1e-5)


@pytest.mark.parametrize(("integrator", "order", "steps"), [("euler", 1, 64), ("heun", 2, 8)])
def test_samplers_converge_at_their_order(integrator: str, order: int, steps: int) -> None:
    policy = flow_policy(integrator=integrator)
    torch.nn.init.normal_(policy.actor_network.layers[0].weight, std=0.05, generator=torch.Generator().manual_seed(2))  # type: ignore[arg-type]
    seen, noise = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32), np.linspace(-2, 2, 64, dtype=np.float32)[:, None]
    found = {}
    for count in (steps, 2 * steps, 4096):
        policy.sampling_steps = count
        found[count] = policy.actor()(seen, noise).astype(np.float64)
    coarse, fine = (np.abs(found[n] - found[4096]).mean() for n in (steps, 2 * steps))
    assert coarse / fine > 2**order * 0.8


def test_velocities_are_those_at_the_points_between_action_and_noise() -> None:
    policy = flow_policy()
    g = torch.Generator().manual_seed(0)
    action, level, noise = torch.randn(2, 3, 1, generator=g), torch.rand(2, 3, 4, generator=g), torch.randn(2, 3, 4, 1, generator=g)
    context, mask = torch.randn(2, 3, 3, generator=g), torch.ones(2, 3, dtype=torch.bool)
    signals = {"flow_level": level, "flow_noise": noise}
    batch = Batch(action=action, mask=mask, logp=torch.zeros(2, 3), group=torch.arange(2), context=context, signals=signals)
    found = policy.evaluate(batch, {"flow_velocity", "value"})
    assert set(found) == {"flow_velocity", "value"} and found.flow_velocity.shape == (2, 3, 4, 1)
    s = level[1, 2, 3]
    point = (1 - s) * action[1, 2] + s * noise[1, 2, 3]
    torch.testing.assert_close(found.flow_velocity[1, 2, 3], policy.actor_network.predict(point, s, policy.normalize(context[1, 2])))
    torch.testing.assert_close(found.value, policy.values(context))


def test_actions_stay_within_the_bounds_and_come_back() -> None:
    policy = flow_policy()
    stored = np.linspace(-3, 3, 7, dtype=np.float32)[:, None]
    taken = policy.for_environment(stored)
    assert (np.abs(taken) <= 2).all()
    np.testing.assert_allclose(policy.from_environment(taken), stored, atol=1e-4)
    assert np.isfinite(policy.from_environment(np.array([[2.0], [-2.0]]))).all()


def test_a_saved_policy_acts_as_before(tmp_path: Path) -> None:
    policy = flow_policy(sampling_steps=4, integrator="heun")
    policy.save_pretrained(tmp_path)
    twin = load(tmp_path)
    assert isinstance(twin, FlowActionPolicy) and twin.sampling_steps == 4
    seen, noise = np.ones((3, 3), np.float32), np.ones((3, 1), np.float32)
    np.testing.assert_array_equal(twin.actor()(seen, noise), policy.actor()(seen, noise))
    np.testing.assert_array_equal(policy.actor()(seen, None), policy.actor()(seen, np.zeros((3, 1), np.float32)))


def test_what_it_cannot_act_in_is_refused() -> None:
    with pytest.raises(ValueError, match="discrete actions"):
        build("CartPole-v1", None, needs={"flow_velocity"})
    with pytest.raises(ValueError, match="euler, heun, midpoint"):
        build("Pendulum-v1", None, needs={"flow_velocity"}, integrator="leapfrog")
