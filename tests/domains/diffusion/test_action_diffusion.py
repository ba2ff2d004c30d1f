"""The diffusion policy for environments: chains can be scored again, the noise has its floor, decisions unfold into denoising steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anypo.batch import Batch
from anypo.domains.control.setup import build, load
from anypo.domains.diffusion.action_diffusion import DiffusionActionPolicy, inner_actions, mean, schedule


def diffusion_policy(**options: Any) -> DiffusionActionPolicy:
    settings = {"hidden": (16, 16), "denoising_steps": 6, "fine_tuned_steps": 3, "action_chunk": 2} | options
    policy, _ = build("Pendulum-v1", None, needs={"denoising_chain"}, **settings)
    assert isinstance(policy, DiffusionActionPolicy)
    for network in (policy.actor_network, policy.pretrained_network):
        torch.nn.init.normal_(network.layers[-1].weight, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    return policy


def decisions(policy: DiffusionActionPolicy, rows: int = 3, horizon: int = 4, seed: int = 0, noisy: bool = True) -> Batch:
    """A batch of decisions at random observations, as a task would have collected it."""
    rng = np.random.default_rng(seed)
    seen = rng.standard_normal((rows * horizon, 3)).astype(np.float32)
    action = policy.actor()(seen, policy.noise(rng, (rows * horizon,)) if noisy else None)
    mask = torch.ones(rows, horizon, dtype=torch.bool)
    ends = torch.zeros(rows, horizon, dtype=torch.bool)
    ends[:, -1] = True
    values = torch.from_numpy(rng.standard_normal((3, rows, horizon)).astype(np.float32))
    return Batch(
        action=torch.from_numpy(action).unflatten(0, (rows, horizon)), mask=mask, logp=torch.zeros(rows, horizon), group=torch.arange(rows),
        context=torch.from_numpy(seen).unflatten(0, (rows, horizon)), terminated=ends, truncated=torch.zeros_like(ends), next_value=values[0],
        signals={"raw_reward": values[1], "old_value": values[2], "prompt_id": torch.arange(rows)},
    )  # fmt: skip


def test_a_stored_chain_is_the_one_the_steps_describe() -> None:
    policy = diffusion_policy(fine_tuned_steps=6)
    seen, noise = np.ones((5, 3), np.float32), policy.noise(np.random.default_rng(0), (5,))
    chain = torch.from_numpy(policy.actor()(seen, noise)).unflatten(1, (7, 2))
    drawn = torch.from_numpy(noise).unflatten(1, (7, 2))
    beta, abar, std = (x.float() for x in schedule(6))
    before = torch.cat([torch.ones(1), abar[:-1]])
    torch.testing.assert_close(chain[:, 0], drawn[:, 0])
    observation = policy.normalize(torch.from_numpy(seen))
    for i in range(6):
        k = 6 - i
        predicted = policy.actor_network.predict(chain[:, i], torch.full((5,), k / 6), observation)
        mu = mean(chain[:, i], predicted, abar[k - 1], before[k - 1], beta[k - 1]).mu
        wanted = mu + std[k - 1].clamp(min=0.1) * drawn[:, i + 1]
        torch.testing.assert_close(chain[:, i + 1], wanted.detach(), rtol=1e-4, atol=1e-5)


def test_without_noise_it_is_the_plain_sampler_and_always_the_same() -> None:
    policy = diffusion_policy()
    first, again = (decisions(policy, noisy=False) for _ in range(2))
    assert torch.equal(first.action, again.action)
    inner = inner_actions(first, 3)
    mu, _ = policy.step_distribution(inner)
    last = inner.signal("denoising_step") == 1
    torch.testing.assert_close(inner.action[last], mu[last].detach(), rtol=1e-4, atol=1e-5)


def test_the_steps_before_the_trained_ones_are_the_frozen_networks() -> None:
    policy = diffusion_policy()
    seen, noise = np.ones((4, 3), np.float32), policy.noise(np.random.default_rng(0), (4,))
    before = torch.from_numpy(policy.actor()(seen, noise)).unflatten(1, (4, 2))
    with torch.no_grad():
        for parameter in policy.actor_network.parameters():
            parameter += 0.5
    after = torch.from_numpy(policy.actor()(seen, noise)).unflatten(1, (4, 2))
    assert torch.equal(before[:, 0], after[:, 0]) and not torch.equal(before[:, -1], after[:, -1])
    trained = [p for g in policy.parameter_groups() for p in g["params"]]
    assert not any(p is q for p in policy.pretrained_network.parameters() for q in trained)


def test_a_decision_is_as_probable_as_its_steps_together() -> None:
    policy = diffusion_policy()
    batch = decisions(policy)
    inner = inner_actions(batch, 3)
    steps = policy.observe(inner, {"logp"}).logp
    torch.testing.assert_close(policy.observe(batch, {"logp"}).logp, steps.unflatten(1, (4, 3)).sum(-1))
    chain = policy.observe(batch, {"denoising_chain"}).denoising_chain
    assert torch.equal(chain[:, :, 1:].flatten(1, 2), inner.action) and torch.equal(
        chain[:, :, :-1].flatten(1, 2), inner.signals["noisy_action"]
    )


def test_rewards_and_ends_belong_to_the_last_step_and_the_inner_return_is_the_outer_one() -> None:
    policy = diffusion_policy()
    batch = decisions(policy)
    inner = inner_actions(batch, 3)
    assert inner.mask.shape == (3, 12) and torch.equal(inner.signals["denoising_step"][0], torch.tensor([3, 2, 1] * 4))
    torch.testing.assert_close(inner.signals["raw_reward"].sum(1), batch.signals["raw_reward"].sum(1))
    assert torch.equal(inner.signals["raw_reward"][:, 2::3], batch.signals["raw_reward"])
    assert inner.terminated is not None and inner.next_value is not None and inner.segment is not None
    assert inner.terminated.sum() == 3 and bool(inner.terminated[:, -1].all())
    assert batch.next_value is not None and torch.equal(inner.next_value[:, 2::3], batch.next_value)
    assert torch.equal(inner.next_value[:, ::3], batch.signals["old_value"])
    assert torch.equal(inner.signals["prompt_id"], batch.signals["prompt_id"]) and torch.equal(inner.segment[0, ::3], torch.arange(4))
    assert torch.equal(inner.context[:, ::3], batch.context)


def test_decisions_that_were_not_taken_count_nowhere() -> None:
    policy = diffusion_policy()
    batch = decisions(policy)
    batch.mask[1, 2:] = False
    inner = inner_actions(batch, 3)
    found = policy.observe(inner, {"logp"}).logp
    assert not inner.mask[1, 6:].any() and bool(inner.mask[1, :6].all()) and bool((found[~inner.mask] == 0).all())


def test_the_critic_does_not_see_the_denoising_step() -> None:
    policy = diffusion_policy()
    value = policy.observe(inner_actions(decisions(policy), 3), {"value"}).value.unflatten(1, (4, 3))
    assert torch.equal(value[..., 0], value[..., 1]) and torch.equal(value[..., 0], value[..., 2])


def test_cloning_learns_two_modes_and_freezes_a_copy() -> None:
    policy: Any = build("Pendulum-v1", None, needs={"denoising_chain"}, hidden=(32, 32))[0]
    g = torch.Generator().manual_seed(0)
    action = torch.where(torch.rand(256, 1, generator=g) < 0.5, 0.7, -0.7)
    error = policy.clone(torch.zeros(256, 3), action, g, steps=1500, batch_size=128)
    assert error < 0.5 and policy.pretrained
    for mine, frozen in zip(policy.actor_network.parameters(), policy.pretrained_network.parameters(), strict=True):
        assert torch.equal(mine, frozen)
    drawn = policy.actor()(np.zeros((400, 3), np.float32), None)[:, -1]
    assert np.median(np.abs(np.abs(drawn) - 0.7)) < 0.1 and (np.abs(drawn) < 0.3).mean() < 0.1  # a Gaussian of that width: 0.33
    assert 0.3 < (drawn > 0).mean() < 0.7


def test_a_pretrained_network_keeps_the_scale_of_its_demonstrations() -> None:
    policy = diffusion_policy()
    assert policy.moments is not None
    policy.clone(torch.randn(64, 3), torch.zeros(64, 2), torch.Generator().manual_seed(0), steps=1)
    before = policy.moments.mean.clone()
    policy.end_collection(np.full((10, 3), 5.0, np.float32))
    policy.begin_collection()
    assert torch.equal(policy.moments.mean, before)


def test_a_saved_policy_acts_as_before_and_knows_its_chunk(tmp_path: Path) -> None:
    policy = diffusion_policy()
    policy.save_pretrained(tmp_path)
    twin = load(tmp_path)
    assert isinstance(twin, DiffusionActionPolicy) and twin.spaces.chunk == 2
    seen, noise = np.ones((3, 3), np.float32), policy.noise(np.random.default_rng(0), (3,))
    np.testing.assert_array_equal(twin.actor()(seen, noise), policy.actor()(seen, noise))
    assert policy.for_environment(policy.actor()(seen, noise)).shape == (3, 2)


@pytest.mark.parametrize("options", [{"fine_tuned_steps": 7}, {"fine_tuned_steps": 0}, {"exploration_noise": 0.0}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fine_tuned_steps|above 0"):
        diffusion_policy(**options)
