"""The samplers' mathematics: schedules against the papers' steps, limits, and probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.diffusion import denoise
from anypo.domains.diffusion.network import VelocityNetwork

RNG = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.7])
def test_the_schedule_is_the_sde_step(a):
    levels = denoise.uniform_levels(7)
    schedule = denoise.sde_schedule(levels, a)
    x, v, noise = draw(5, 3), draw(5, 3), draw(5, 3)
    for k in range(7):
        step = denoise.sde_step(x, v, noise, float(levels[k]), float(levels[k + 1]), float(levels[1]), a)
        torch.testing.assert_close(schedule.keep[k] * x + schedule.pull[k] * v, step.mean)
        torch.testing.assert_close(schedule.std[k], step.std)
        torch.testing.assert_close(step.mean + schedule.std[k] * noise, step.x_next)


def test_without_noise_the_sde_step_is_the_ode_step():
    x, v, noise = draw(5, 3), draw(5, 3), draw(5, 3)
    for s, s_next in ((1.0, 0.75), (0.5, 0.3), (0.1, 0.0)):
        step = denoise.sde_step(x, v, noise, s, s_next, 0.75, 0.0)
        assert float(step.std) == 0
        torch.testing.assert_close(step.x_next, denoise.ode_step(x, v, s, s_next), rtol=0, atol=1e-15)


def test_all_constants_are_finite_from_pure_noise_to_data():
    for schedule in (denoise.sde_schedule(denoise.uniform_levels(10), 0.7), denoise.ddim_schedule(denoise.uniform_levels(10), 1.0)):
        assert all(bool(part.isfinite().all()) for part in schedule)
    assert bool((denoise.sde_schedule(denoise.uniform_levels(10), 0.7).std > 0.05).all())


@settings(deadline=None, max_examples=40)
@given(s=st.floats(0.05, 0.99), share=st.floats(0.05, 0.95), eta=st.floats(0.0, 1.0), seed=st.integers(0, 99))
def test_the_ddim_schedule_is_ddim_in_other_coordinates(s, share, eta, seed):
    """The flow's x over sqrt((1-s)^2 + s^2) is the variance-preserving x, and its predicted noise that of the velocity."""
    s_next = s * share
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    schedule = denoise.ddim_schedule(torch.tensor([s, s_next], dtype=torch.float64), eta)
    here, there = (math.hypot(1 - level, level) for level in (s, s_next))
    abar_t, abar_p = denoise.cumulative_alpha(s), denoise.cumulative_alpha(s_next)
    std = denoise.ddim_std(abar_t, abar_p, eta)
    mean = denoise.ddim_mean(x / here, denoise.predicted_noise(x, v, s), abar_t, abar_p, std)
    torch.testing.assert_close((schedule.keep[0] * x + schedule.pull[0] * v) / there, mean, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(schedule.std[0] / there, std)


def test_ddim_without_noise_is_the_euler_step_of_the_flow():
    levels = denoise.uniform_levels(8)
    ddim, ode = denoise.ddim_schedule(levels, 0.0), denoise.ode_schedule(levels)
    for name in ("keep", "pull", "std"):
        torch.testing.assert_close(getattr(ddim, name), getattr(ode, name), rtol=0, atol=1e-14)


def test_ddim_at_eta_one_is_the_ancestral_step():
    """Mean and variance of q(x_p | x_t, x_data) of DDPM (arXiv:2006.11239, equations 6 and 7)."""
    abar_t, abar_p = 0.35, 0.6
    x, eps = draw(4, 3), draw(4, 3)
    data = (x - math.sqrt(1 - abar_t) * eps) / math.sqrt(abar_t)
    alpha = abar_t / abar_p
    mean = math.sqrt(abar_p) * (1 - alpha) / (1 - abar_t) * data + math.sqrt(alpha) * (1 - abar_p) / (1 - abar_t) * x
    variance = (1 - abar_p) / (1 - abar_t) * (1 - alpha)
    std = denoise.ddim_std(abar_t, abar_p, 1.0)
    torch.testing.assert_close(float(std) ** 2, variance)
    torch.testing.assert_close(denoise.ddim_mean(x, eps, abar_t, abar_p, std), mean)


def test_log_density_is_that_of_a_normal_distribution_and_pulls_on_the_mean_alone():
    x = draw(4, 3).requires_grad_()
    mean = draw(4, 3).requires_grad_()
    found = denoise.gaussian_logp(x, mean, 0.4)
    torch.testing.assert_close(found, torch.distributions.Normal(mean, 0.4).log_prob(x).sum(-1))
    torch.testing.assert_close(denoise.gaussian_logp(x, mean, 0.4, "mean"), found / 3)
    found.sum().backward()
    assert x.grad is None
    torch.testing.assert_close(mean.grad, ((x - mean) / 0.16).detach())


def test_both_forms_of_the_kl_agree():
    x, v, reference = draw(4, 6, 3), draw(4, 5, 3), draw(4, 5, 3)
    levels = denoise.uniform_levels(5)
    s, following = levels[:-1], levels[1:]
    g = denoise.noise_scale(s, levels[1], 0.7)
    factor = (s - following) / 2 * (g * (1 - s) / (2 * s) + 1 / g) ** 2
    expected = (factor[:, None] * (v - reference) ** 2).sum(-1)
    torch.testing.assert_close(denoise.kl(x, v, reference, levels, 0.7, "sum"), expected)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least 1 step"):
        denoise.uniform_levels(0)
    with pytest.raises(ValueError, match="use sum or mean"):
        denoise.reduced(torch.zeros(2, 2), "max")
    with pytest.raises(ValueError, match="condition of 3"):
        VelocityNetwork(2, condition=3)(torch.zeros(1, 2), torch.zeros(1))


def test_the_network_treats_rows_alone_and_depends_on_its_seed_alone():
    torch.manual_seed(1)
    first = VelocityNetwork(3, condition=2, hidden=(8,), seed=5)
    torch.manual_seed(2)
    second = VelocityNetwork(3, condition=2, hidden=(8,), seed=5)
    x, level, condition = torch.randn(4, 6, 3), torch.rand(4, 6), torch.randn(4, 1, 2)
    out = first(x, level, condition)
    torch.testing.assert_close(out, second(x, level, condition), rtol=0, atol=0)
    torch.testing.assert_close(out[2, 3], first(x[2, 3], level[2, 3], condition[2, 0]))
