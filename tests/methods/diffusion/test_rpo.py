"""RPO: what it reduces to, its pitfalls, and that its routed pairs train, save and resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.domains.diffusion.patch_flow import BLOCKS
from anypo.domains.diffusion.setup import build, load
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import score_function_loss
from anypo.methods.diffusion.rpo import METHOD, block_mass, logp, loss, pair_advantages, route, routed_attention
from anypo.run import Run
from tests.helpers import assert_continues


def patches_run(method=METHOD, steps: int = 4, out: Path | None = None) -> Run:
    policy, task = build("patches:classifier", None, evaluation_steps=2, evaluation_samples=8)
    method = method.set("rollout.steps", 4).set("select.prompts", 5)
    return Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def routed_batch(run: Run) -> Batch:
    return run.method.rollout(run.method.select(run.task, run), run)


@pytest.mark.parametrize("setting", [("rollout.keep", 4), ("rollout.p_dense", 1.0)])
def test_routes_that_keep_all_change_nothing(setting: tuple[str, float]) -> None:
    """Equal pairs, which are the ODE's samples, no advantage and no gradient."""
    run = patches_run(METHOD.set(*setting))
    before = [p.clone() for p in run.policy.parameters()]
    batch = step(run)
    assert torch.equal(batch.action[0::2], batch.action[1::2])
    assert run.history[0]["route_deviation"] == 0 and run.history[0]["grad_norm"] == 0 and not bool(batch.advantage.any())
    assert all(torch.equal(a, b) for a, b in zip(before, run.policy.parameters(), strict=True))


def test_even_masses_give_even_routes() -> None:
    generator = torch.Generator().manual_seed(0)
    keep = route(torch.full((9000, 4, 4), 0.25), torch.rand(9000, 4, 4, generator=generator), torch.ones(9000, 4), 3, 0.0)
    off = ~torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(keep.mean(0)[off], torch.full((12,), 2 / 3), atol=0.03, rtol=0)


def test_one_epoch_is_reinforce_with_the_pair_as_baseline() -> None:
    generator = torch.Generator().manual_seed(0)
    routed, moved = torch.rand(6, 5, generator=generator) < 0.4, torch.randn(6, 5, 3, generator=generator)
    dense = torch.randn(6, 5, 3, generator=generator, dtype=torch.float32).requires_grad_()
    adv = pair_advantages(torch.randn(3, 2, generator=generator), norm=False).flatten()
    found = logp(moved, dense, routed, 0.5)
    (ours,) = torch.autograd.grad(loss(found, found.detach(), routed, adv, 0.2), dense, retain_graph=True)
    (plain,) = torch.autograd.grad(score_function_loss(found, routed, adv), dense)
    torch.testing.assert_close(ours, plain)
    closed = -adv[:, None, None] * (moved - dense.detach()) / (0.25 * 3) / routed.sum() * routed[..., None]
    torch.testing.assert_close(ours, closed)


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_routes_keep_the_own_block_once_and_as_many_as_asked(seed: int, K: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    M = torch.rand(3, 5, 5, generator=generator) * (torch.rand(3, 5, 5, generator=generator) < 0.5)  # many masses of 0
    u = torch.rand(3, 5, 5, generator=generator).round(decimals=1)  # with numbers of exactly 0 and 1, and ties
    keep = route(M, u, torch.tensor([0.1, 0.9, 0.9, 0.9, 0.9]).expand(3, 5), K, 0.25)
    assert bool((keep.diagonal(dim1=-2, dim2=-1) == 1).all())
    assert bool((keep[:, 0] == 1).all()) and bool((keep[:, 1:].sum(-1) == K).all())


def test_masses_are_those_of_the_dense_pass_and_sum_to_one() -> None:
    policy, task = build("patches:classifier", None)
    x, condition = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), task.condition(torch.arange(3))[:, 0]
    level, dense, routed = torch.full((3,), 0.9), [], []
    keep = torch.eye(4).expand(3, 4, 4, 4)
    plain = policy(x, level, condition, seen=dense)
    assert torch.equal(policy(x, level, condition), plain) and torch.equal(policy(x, level, condition, torch.ones(3, 4, 4, 4)), plain)
    moved = policy(x, level, condition, keep=keep, seen=routed)
    assert bool(((moved - plain).abs().amax(1) > 0.01).all())
    assert torch.equal(routed[0], dense[0])  # the mass of a routed layer is still that of all keys
    for mass in dense:
        torch.testing.assert_close(mass.sum(-1), torch.ones(3, 4))


def test_attention_by_blocks_is_attention_over_the_kept_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, value = torch.randn(2, 16, 16, generator=generator), torch.randn(2, 16, 3, generator=generator)
    out = routed_attention(scores, value, torch.eye(4).expand(2, 4, 4), BLOCKS)
    inside = [i for i, block in enumerate(BLOCKS) if block == 2]
    torch.testing.assert_close(out[:, inside], scores[:, inside][:, :, inside].softmax(-1) @ value[:, inside])
    torch.testing.assert_close(block_mass(torch.full((16, 16), 1 / 16), BLOCKS), torch.full((4, 4), 0.25))


def test_the_automatic_deviation_is_a_constant_and_nothing_moved_is_no_problem() -> None:
    dense = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    routed = torch.tensor([[1, 0, 1], [0, 0, 0]])
    moved = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    (automatic,) = torch.autograd.grad(logp(moved, dense, routed).sum(), dense)
    sig = float((moved - dense)[routed.bool()].square().mean().sqrt().detach())
    (fixed,) = torch.autograd.grad(logp(moved, dense, routed, sig).sum(), dense)
    torch.testing.assert_close(automatic, fixed)
    assert not bool(automatic[1].any()) and not bool(automatic[0, 1].any())
    assert not bool(logp(dense.detach(), dense, routed).any()) and not bool(logp(moved, dense, torch.zeros(2, 3)).any())


def test_ties_contribute_nothing_and_the_members_mirror_one_another() -> None:
    found = pair_advantages(torch.tensor([[0.3, 0.3], [1.0, 0.0], [0.0, 0.5]]), norm=True)
    assert torch.equal(found[:, 0], -found[:, 1]) and not bool(found[0].any())
    assert torch.equal(pair_advantages(torch.ones(4, 2), norm=True), torch.zeros(4, 2))


def test_pairs_share_all_but_their_routes_and_ratios_begin_at_one() -> None:
    run = patches_run()
    batch = routed_batch(run)
    assert torch.equal(batch.context[0::2, 0], batch.context[1::2, 0]) and torch.equal(batch.mask[0::2], batch.mask[1::2])
    assert batch.mask.sum(1).tolist() == [2] * 10 and not bool(batch.mask[:, 2:].any())  # two of the first half
    assert bool((batch.action[0::2, -1] != batch.action[1::2, -1]).any())
    scored = run.score(batch, {"logp", "velocity"})
    torch.testing.assert_close(scored.logp, batch.logp, rtol=1e-4, atol=1e-3)
    moved = (batch.action - batch.context) / batch.signal("step")[..., 1:2]
    exact = logp(moved, scored.velocity, batch.mask)  # what the policy calls log-probability, less what is constant
    std = batch.signal("step")[..., 2].clamp(min=1e-12)
    constant = torch.where(batch.mask, -std.log() - 0.5 * np.log(2 * np.pi), torch.zeros_like(std))
    torch.testing.assert_close(scored.logp / 64 - constant, exact, rtol=1e-3, atol=1e-3)


def test_anchors_are_never_routed() -> None:
    keep = METHOD.rollout.routes(torch.full((5, 4, 4, 4), 0.25), 4, torch.Generator().manual_seed(0))
    assert bool((keep[:, [0, 3]] == 1).all()) and not bool((keep[:, [1, 2]] == 1).all())


def test_the_order_of_rows_does_not_matter_to_the_credit() -> None:
    run = patches_run()
    batch = routed_batch(run)
    batch.reward = torch.randn(10, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([0, 2, 1, 3, 4, 6, 8, 5, 7, 9])
    torch.testing.assert_close(METHOD.credit(batch[order], run), METHOD.credit(batch, run)[order])


def test_it_trains_and_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = patches_run(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    run = train(patches_run(METHOD.set("update.epochs", 2).set("regularize.0.beta", 0.1), steps=2))
    assert all(np.isfinite([r["loss"], r["reward"], r["kl"], r["route_deviation"]]).all() for r in run.history)


def test_flow_grpo_trains_the_transformer_too() -> None:
    run = train(patches_run(FLOW_GRPO.set("select.group_size", 2), steps=2))
    assert all(np.isfinite(r["loss"]) for r in run.history)


def test_a_saved_policy_comes_back(tmp_path: Path) -> None:
    policy, task = build("patches:ink", None, evaluation_steps=3)
    policy.save_pretrained(tmp_path)
    prompt = torch.arange(4)
    assert torch.equal(task.samples(policy, prompt), task.samples(load(tmp_path), prompt))  # type: ignore[attr-defined, arg-type]


def test_bad_tasks_and_settings_are_refused() -> None:
    policy, task = build("digits:ink", None)
    with pytest.raises(ValueError, match="take --task patches"):
        step(Run(METHOD, policy, task, steps=1))
    for setting, message in (
        (("select.group_size", 3), "even number"),
        (("rollout.routed", 3), "rollout.routed"),
        (("rollout.keep", 5), "rollout.keep"),
    ):
        with pytest.raises(ValueError, match=message):
            step(patches_run(METHOD.set(*setting)))
    with pytest.raises(ValueError, match="members of a pair"):
        step(patches_run(FLOW_GRPO.but(credit=METHOD.credit)))
