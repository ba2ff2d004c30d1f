"""CAL: what the spec says it reduces to, the augmented Lagrangian's gradient, which loss reaches which parameters, and the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.domains.control.costly import CostAwareActorCritic
from anypo.domains.control.setup import build, load
from anypo.loops.off_policy import step, train
from anypo.method import Method
from anypo.methods.control import sac
from anypo.methods.control.cal import METHOD, VARIANTS, actor_loss, augmented_lagrangian, cost_target, policy_weight, upper_cost
from anypo.run import Run


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_run(method: Method = METHOD, steps: int = 4, out: Path | None = None, env: str = "PointCircle-v0", **options: object) -> Run:
    method = method.set("rollout.batch_size", 32).set("rollout.warmup", 16).set("rollout.steps", 16)
    policy, task = build(env, None, needs=method.needs(), hidden=(16, 16), **options)
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def loss_of(k: float, c: float, lam: float, limit: float, members: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss with its gradients in the log-probs and in the costs of fresh actions."""
    logp, cost = numbers(6).requires_grad_(), numbers(members, 6, seed=2).requires_grad_()
    loss = actor_loss(logp, numbers(2, 6, seed=1), cost, numbers(members, 6, seed=3), 0.2, k, c, lam, limit)
    return loss, *torch.autograd.grad(loss, (logp, cost))


def test_without_k_and_c_it_is_sac_with_a_multiplier() -> None:
    loss, by_logp, by_cost = loss_of(0.0, 0.0, 0.7, 0.3)
    soft = sac.actor_loss(numbers(2, 6, seed=1), numbers(6), 0.2)
    torch.testing.assert_close(loss, soft + 0.7 * numbers(4, 6, seed=2).mean())
    torch.testing.assert_close(by_cost, torch.full_like(by_cost, 0.7 / 24))
    torch.testing.assert_close(by_logp, torch.full_like(by_logp, 0.2 / 6))


def test_without_c_only_the_cost_is_conservative_and_without_k_only_the_weight_is_augmented() -> None:
    soft, fresh, data = sac.actor_loss(numbers(2, 6, seed=1), numbers(6), 0.2), numbers(4, 6, seed=2), numbers(4, 6, seed=3)
    torch.testing.assert_close(loss_of(0.5, 0.0, 0.7, 0.3)[0], soft + 0.7 * (fresh.mean(0) + 0.5 * fresh.std(0)).mean())
    weight = max(0.0, 0.7 + 10 * (float(data.mean()) + 0.5))
    torch.testing.assert_close(loss_of(0.0, 10.0, 0.7, -0.5)[0], soft + weight * fresh.mean())


def test_far_below_the_limit_it_is_sac_and_the_weight_is_never_negative() -> None:
    loss, _, by_cost = loss_of(0.5, 10.0, 0.7, 1e6)
    assert torch.equal(loss, sac.actor_loss(numbers(2, 6, seed=1), numbers(6), 0.2)) and not by_cost.any()
    for level in (-50.0, -1.0, 0.0, 0.05, 1.0, 50.0):
        found = policy_weight(numbers(4, 6), 0.5, 10.0, 0.7, level)
        assert found.weight >= 0 and found.rect <= 0.7


def test_a_single_member_has_no_spread_and_equal_members_no_undefined_slope() -> None:
    one = numbers(1, 5)
    assert torch.equal(upper_cost(one, 3.0), one[0])
    equal = torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(upper_cost(equal, 0.5), torch.ones(5, dtype=torch.float64), atol=1e-5, rtol=0)
    assert torch.isfinite(torch.autograd.grad(upper_cost(equal, 0.5).sum(), equal)[0]).all()


def test_the_upper_cost_has_a_slope_through_mean_and_spread() -> None:
    cost = numbers(4, 5).requires_grad_()
    slope = torch.autograd.grad(upper_cost(cost, 0.5).sum(), cost)[0]
    away = (cost - cost.mean(0)) / (3 * cost.std(0))
    torch.testing.assert_close(slope, (0.25 + 0.5 * away).detach())


def test_the_weight_is_the_slope_of_the_augmented_lagrangian() -> None:
    for g in (-2.0, -0.05, 0.0, 0.4):
        near = [augmented_lagrangian(0.0, g + e, 0.7, 10.0).value for e in (-1e-5, 1e-5)]
        found = augmented_lagrangian(0.0, g, 0.7, 10.0).multiplier
        assert (near[1] - near[0]) / 2e-5 == pytest.approx(found, abs=1e-4)
        cost = torch.full((1, 3), g + 1.0, dtype=torch.float64)  # with a limit of 1
        assert float(policy_weight(cost, 0.5, 10.0, 0.7, 1.0).weight) == pytest.approx(found, abs=1e-12)
    assert augmented_lagrangian(1.0, 2.0, 0.7, 0.0) == (2.4, 0.7)


def test_the_target_ends_with_the_problem_and_may_take_the_largest_member() -> None:
    cost, following = numbers(5).abs(), numbers(4, 5, seed=1)
    assert torch.equal(cost_target(cost, torch.ones(5), following), cost.expand(4, 5))
    largest = cost_target(cost, torch.zeros(5), following, 0.9, range(4))
    torch.testing.assert_close(largest, (cost + 0.9 * following.amax(0)).expand(4, 5))


def test_each_part_gets_only_its_own_gradient() -> None:
    run = small_run()
    step(run)
    policy, part = run.policy, run.method.rollout.draw(run)
    part.advantage = run.method.credit(part, run)
    owners = {"ConservativeActor": {"actor_network", "log_multiplier"}, "TwinCritics": {"critic"}, "CostCritics": {"cost_critic"}}
    for component in run.loss_fn.parts:
        policy.zero_grad()
        component(part, policy.evaluate(part, component.needs), run).value.backward()
        moved = {n.split(".")[0] for n, p in policy.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
        assert moved == owners.get(type(component).__name__, {"log_temperature"})


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("limit", [0.0, 5.0])
def test_the_gradient_by_hand_is_that_of_autograd(members: int, limit: float) -> None:
    run = small_run(METHOD.set("credit.limit", limit), cost_critics=members)
    step(run)
    policy, part, loss_fn = run.policy, run.method.rollout.draw(run), run.loss_fn
    part.advantage = run.method.credit(part, run)
    assert loss_fn.has_gradient
    results = []
    for by_hand in (True, False):
        loss_fn.has_gradient = by_hand
        policy.zero_grad()
        loss = policy.backward(part, loss_fn.needs, loss_fn)
        results.append((float(loss.value), loss.metrics, [p.grad.clone() for p in policy.parameters() if p.requires_grad]))
    (value, metrics, ours), (theirs_value, theirs_metrics, theirs) = results
    assert value == pytest.approx(theirs_value, rel=1e-4) and metrics == pytest.approx(theirs_metrics, rel=1e-4, abs=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_the_multiplier_rises_above_the_limit_and_falls_below() -> None:
    for limit, rises in ((0.0, True), (1e4, False)):
        run = train(small_run(METHOD.set("credit.limit", limit).set("objective.k", 3.0)))
        assert (run.history[-1]["multiplier"] > 0.6931) == rises and (run.history[-1]["cost_weight"] > 0.6931) == rises


def test_targets_follow_at_every_second_step() -> None:
    run = small_run()
    step(run)
    for expected in (False, True, False, True) if run.version % 2 == 0 else (True, False, True, False):
        before = {n: v.clone() for n, v in run.policy.state_dict().items() if n.startswith("target")}
        part = run.method.rollout.draw(run)
        part.advantage = run.method.credit(part, run)
        run.method.update(part, run.loss_fn, run)
        assert all(torch.equal(v, run.policy.state_dict()[n]) != expected for n, v in before.items())


@pytest.mark.parametrize("method", [METHOD, VARIANTS["sac_lagrangian"], METHOD.set("credit.max_of", 2)])
def test_a_stopped_run_continues_identically(method: Method, tmp_path: Path) -> None:
    whole = train(small_run(method, 4, tmp_path / "whole"))
    train(small_run(method, 2, tmp_path / "halves"))
    halves = train(small_run(method, 4, tmp_path / "halves"))
    for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(a, b) and torch.isfinite(a).all()


def test_what_cannot_work_is_said_and_a_saved_policy_comes_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the task gives none"):
        step(small_run(env="Pendulum-v1"))
    with pytest.raises(ValueError, match="at least 1"):
        build("PointCircle-v0", None, needs=METHOD.needs(), cost_critics=0)
    run = train(small_run())
    run.policy.save_pretrained(tmp_path / "model")
    twin = load(tmp_path / "model")
    assert isinstance(twin, CostAwareActorCritic)
    assert all(torch.equal(a, b) for a, b in zip(run.policy.parameters(), twin.parameters(), strict=True))
