"""CRPO: what it reduces to (GSPO with GRPO's advantages), anchors, the roles' statistics and coefficients, and the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from anypo.domains.language.toys.toy_roles import RoleTokens, ToyRoles
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.crpo import (
    METHOD,
    ROLE_KL,
    AdaptRoleKL,
    CharacterCredit,
    GenericAnchors,
    RoleKL,
    SequenceRatioClip,
    advantages,
    identity_weight,
    kl_controller,
    loss,
    role_scaler,
    roles_of,
)
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.gspo import METHOD as GSPO
from anypo.methods.language.gspo import SequenceClip
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast
from anypo.seams.regularize import KLPenalty
from anypo.seams.select import UniformPrompts
from tests.helpers import assert_continues, assert_trains, gradient, random_rows, trained


def run_on(method: Method, steps: int, out: Path | None = None) -> Run:
    task = ToyRoles(roles=3, scenes=2, vocabulary=8, horizon=4)
    run = Run(method, task.policy(scale=0.3), task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def test_without_anchors_style_and_role_coefficients_it_is_gspo() -> None:
    penalty = KLPenalty(beta=0.01, aggregation="token_mean")
    ours = METHOD.but(
        rollout=GenericAnchors(anchor_n=0), credit=CharacterCredit(b_task=1.0, b_style=0.0, kappa=0.0), regularize=(penalty,), control=()
    ).set("update.epochs", 3)
    theirs = GSPO.but(
        select=UniformPrompts(group_size=7), credit=GroupRelative(ddof=1, eps=1e-6), objective=SequenceClip(0.2, 0.3), regularize=(penalty,)
    ).set("update.epochs", 3)
    torch.testing.assert_close(trained(ours, 4).policy.logits, trained(theirs, 4).policy.logits)


def test_a_single_stream_is_grpo() -> None:
    rows = random_rows(1)
    zero = torch.zeros_like(rows.reward)
    expected = grpo_advantages(rows.reward, rows.group, ddof=1)
    torch.testing.assert_close(advantages(rows.reward, zero, rows.group, 1.0, 0.0), expected)
    torch.testing.assert_close(advantages(zero, rows.reward, rows.group, 0.0, 1.0), expected)
    run = trained(METHOD, 0)
    batch = run.collect([p.but(samples=4) for p in run.task.prompts(4, run.rng)])
    batch.reward = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = broadcast(grpo_advantages(batch.reward, batch.group, ddof=1), batch.mask)
    torch.testing.assert_close(CharacterCredit()(batch, run), plain)


def test_one_coefficient_for_all_roles_is_a_kl_penalty() -> None:
    run = run_on(METHOD, 0)
    batch = run.method.rollout(run.method.select(run.task, run), run)
    rows = torch.randn(batch.logp.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch.signals["ref_logp"] = batch.logp + 0.3 * rows
    new = run.policy.evaluate(batch, {"logp"})
    expected = KLPenalty(beta=0.05, aggregation="token_mean")(batch, new, run).value
    torch.testing.assert_close(RoleKL(initial=0.05)(batch, new, run).value, expected)


def test_the_loss_ignores_padding_and_lone_members_have_no_advantage() -> None:
    rows = random_rows(2)
    spoiled = torch.where(rows.mask, rows.logp, -math.inf).requires_grad_()
    clean = rows.logp.clone().requires_grad_()
    token_advantages = broadcast(rows.advantages, rows.mask)
    found, expected = (loss(x, rows.old_logp, rows.mask, token_advantages) for x in (spoiled, clean))
    torch.testing.assert_close(found.loss, expected.loss)
    (slope,), (right,) = gradient(found, spoiled), gradient(expected, clean)
    torch.testing.assert_close(slope[rows.mask], right[rows.mask])
    assert slope[~rows.mask].eq(0).all()
    assert loss(clean, rows.old_logp, torch.zeros_like(rows.mask), token_advantages).loss == 0
    alone = torch.tensor([3, 5])
    assert advantages(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 1.0]), alone).eq(0).all()


def test_dual_clip_bounds_negative_advantages() -> None:
    old, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    far = torch.full((1, 2), 3.0, dtype=torch.float64, requires_grad=True)
    found = loss(far, old, mask, -torch.ones(1, 2, dtype=torch.float64))
    assert found.loss == 3.0 and gradient(found, far)[0].eq(0).all()


def test_identity_weight_is_finite_detached_and_smallest_where_the_replies_are_alike() -> None:
    role = torch.tensor([-1.0, -900.0, 0.0], dtype=torch.float64, requires_grad=True)
    found = identity_weight(role, torch.tensor([-1.0, 0.0, -900.0], dtype=torch.float64))
    assert not found.requires_grad
    assert found.tolist() == pytest.approx([1 - 0.02 * math.log(2), 1.0, 1.0])


def test_roles_keep_statistics_of_their_own() -> None:
    style = torch.tensor([[1.0], [3.0], [10.0]], dtype=torch.float64)
    found = role_scaler(style[None], torch.tensor([[0, 0, 2]]), gamma=0.5)
    assert found.mean.flatten().tolist() == [1.0, 0.0, 5.0] and found.var.flatten().tolist() == [1.0, 1.0, 0.5]
    credit = CharacterCredit(gamma=0.5)
    for _ in range(3):
        scaled = credit.scaled(style, ["a", "b"], torch.tensor([0, 0, 1]))
    again = role_scaler(style.expand(3, 3, 1), torch.tensor([0, 0, 1]).expand(3, 3), gamma=0.5)
    torch.testing.assert_close(scaled, again.scaled)
    credit.scaled(style, ["b"], torch.tensor([0, 0, 0]))
    assert set(credit.statistics) == {"a", "b"}


def test_anchors_join_the_groups_of_their_prompts() -> None:
    run = run_on(METHOD.but(rollout=GenericAnchors(anchor_n=2)), 0)
    batch = step(run)
    anchor, task = batch.signals["is_anchor"], run.task
    assert torch.equal(torch.bincount(batch.group), torch.full((6,), 9)) and int(anchor.sum()) == 12
    assert bool((batch.context[anchor] >= task.count).all()) and bool((batch.context[~anchor] < task.count).all())
    assert torch.equal(batch.signals["role"], batch.signals["prompt_id"] // task.scenes)
    assert torch.equal(batch.context[anchor] % task.scenes, batch.signals["prompt_id"][anchor] % task.scenes)
    out = step(run_on(METHOD.but(rollout=GenericAnchors(in_loss=False)), 0))
    assert not out.counted[out.signals["is_anchor"]].any() and out.counted[~out.signals["is_anchor"]].all()
    assert out.advantage is not None and out.advantage[out.signals["is_anchor"]].abs().sum() > 0


def test_the_controllers_two_signs_and_its_memory() -> None:
    role, kl, entropy = torch.tensor([0, 0]), torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0])
    down, up = (kl_controller(role, kl, entropy, sign=sign).coef[0] for sign in (-1, 1))
    assert down < 0.01 < up
    assert down == pytest.approx(0.01 * (1 - 0.2 * 64 / 5000) ** 2)
    smaller, larger = (kl_controller(torch.tensor([0, 1]), kl, torch.tensor([0.5, 2.0]), exponent=e).factor[1] for e in (1.5, -1.5))
    assert smaller < 1 < larger
    run = run_on(METHOD.but(control=AdaptRoleKL(sign=1)), 3)
    assert set(run.state[ROLE_KL]["coef"]) == {"0", "1", "2"} and run.history[-1]["role_kl"] != 0.01


def test_roles_may_be_names_in_a_column() -> None:
    run = trained(METHOD, 0)
    rows = run.collect([p.but(samples=2) for p in run.task.prompts(4, run.rng)][:2])
    assert roles_of(rows)[0] == [""] and roles_of(rows)[1].tolist() == [0, 0, 0, 0]
    rows.signals["columns"] = [{"role": "Miranda"}, {"role": "Ariel"}, {}, {"role": "Ariel"}]
    names, number = roles_of(rows)
    assert names == ["", "Ariel", "Miranda"] and number.tolist() == [2, 1, 0, 1]


def test_weights_must_match_the_rewards() -> None:
    with pytest.raises(ValueError, match="3 weights for 2 rewards"):
        run_on(METHOD.but(credit=CharacterCredit(weights=(1.0, 1.0, 1.0))), 1)


def test_the_loop_trains_with_and_without_roles_and_continues_after_a_stop(tmp_path: Path) -> None:
    assert_trains(METHOD)
    assert_trains(METHOD.but(objective=SequenceRatioClip(dual_clip=None)).set("update.epochs", 2))

    def run_to(out: Path, upto: int) -> Run:
        return run_on(METHOD.set("update.minibatches", 2), upto, out)

    assert_continues(run_to, tmp_path)


def test_toy_quantities_are_exact() -> None:
    task = ToyRoles(roles=3, scenes=2, vocabulary=8, horizon=4)
    policy: RoleTokens = task.policy(scale=1.0)
    strings = policy.all_strings()
    chances = torch.stack([policy.string_logp(p, strings).exp() for p in range(task.count)]).detach()
    hit = torch.stack([(strings == p % task.scenes).any(1).double() for p in range(task.count)])
    own = torch.stack([task.lexicon[p // task.scenes][strings].double().mean(1) for p in range(task.count)])
    assert task.expected_success(policy) == pytest.approx(float((chances * hit).sum(1).mean()))
    assert task.expected_style(policy) == pytest.approx(float((chances * own).sum(1).mean()))
    assert task.distinctiveness(task.policy()) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="vocabulary"):
        ToyRoles(roles=6, scenes=4, vocabulary=8)
