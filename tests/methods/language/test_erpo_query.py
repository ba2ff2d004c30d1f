"""ERPO (Query-KL): reductions, what carries a gradient, query log-probs of both policies, the table of the reference, and the component in the loop."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.models import load_policy
from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import ToyArith, forced_batch
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.language.erpo_query import METHOD, TABLE, VARIANTS, QueryKL, QueryTable, QueryWeighted, advantages, qkl, query_weights
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, MissingSignal, Signals
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import aggregate, kl_estimate
from tests.helpers import assert_continues, random_rows

FREE = GRPO.but(regularize=(), credit=GroupRelative(ddof=1))


def queries(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q_logp (a leaf), q_ref_logp, mask and group of 9 rows, three a query."""
    g = torch.Generator().manual_seed(seed)
    group = torch.arange(3).repeat(3)
    logp, reference = (-2 * torch.rand(3, 6, generator=g, dtype=torch.float64) for _ in range(2))
    mask = (torch.arange(6) > 0) & (torch.arange(6) < torch.tensor([[6], [3], [2]]))
    return logp[group].requires_grad_(), reference[group], mask[group], group


def short_run(method: Method, steps: int, out: Path | None = None, seed: int = 0, value_head: bool = False) -> Run:
    """A run on sums below 10 of an untrained GRU of width 8, in which an answer earns 1 when its first token is one of four."""
    task = ToyArith(small=True)
    task.score = lambda batch, run: (batch.action[:, 0] % 4 == 0).float()  # type: ignore[method-assign]
    policy = GruPolicy(hidden=8, seed=1, value_head=value_head)
    run = Run(method.set("select.prompts", 6), policy, task, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def weights_of(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in train(run).policy.parameters()])


@pytest.mark.parametrize("estimator", ["k3", "seq_k2"])
def test_nothing_at_the_reference(estimator: str) -> None:
    _, reference, mask, group = queries()
    logp = reference.clone().requires_grad_()
    value = qkl(logp, reference, mask, group, estimator)
    assert value == 0 and torch.autograd.grad(value, logp)[0].eq(0).all()


def test_on_responses_it_is_the_policy_kl() -> None:
    r = random_rows(3)
    lone = torch.arange(len(r.mask))
    expected = aggregate(kl_estimate(r.logp, r.ref_logp, r.mask), r.mask, "seq_mean")
    torch.testing.assert_close(qkl(r.logp, r.ref_logp, r.mask, lone), expected, rtol=0, atol=0)


def test_squared_log_ratio_has_the_gradient_of_equation_1() -> None:
    logp, reference, mask, group = queries()
    found = torch.autograd.grad(qkl(logp, reference, mask, group, "seq_k2"), logp)[0]
    gap = ((logp.detach() - reference) * mask).sum(1)
    expected = gap[:, None] * mask / 3
    torch.testing.assert_close(found[:3], expected[:3])
    assert found[3:].eq(0).all()  # a group's query counts once


@pytest.mark.parametrize("junk", [float("nan"), -math.inf])
def test_padding_may_hold_anything(junk: float) -> None:
    logp, reference, mask, group = queries()
    for estimator in ("k3", "seq_k2"):
        dirty = logp.detach().masked_fill(~mask, junk).requires_grad_()
        value = qkl(dirty, reference.masked_fill(~mask, junk), mask, group, estimator)
        torch.testing.assert_close(value, qkl(logp, reference, mask, group, estimator))
        assert torch.isfinite(torch.autograd.grad(value, dirty)[0]).all()
    torch.testing.assert_close(query_weights(reference.masked_fill(~mask, junk), mask), query_weights(reference, mask))


def test_extremes_stay_finite() -> None:
    mask, lone = torch.ones(2, 3, dtype=torch.bool), torch.arange(2)
    far = torch.full((2, 3), -500.0, requires_grad=True)
    assert torch.isfinite(qkl(far, torch.zeros(2, 3), mask, lone))
    assert query_weights(torch.tensor([[0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]), mask).tolist() == [2.0, 0.5]
    assert query_weights(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [1.0, 1.0]
    assert qkl(far, torch.zeros(2, 3), torch.zeros(2, 3), lone) == 0
    with pytest.raises(ValueError, match="k3 or seq_k2"):
        qkl(far, far, mask, lone, "k1")


def test_typical_queries_weigh_more_and_equal_ones_the_same() -> None:
    logp, mask = torch.tensor([[-1.0, 0.0], [-2.0, 0.0], [-3.0, 0.0]]).requires_grad_(), torch.ones(3, 2)
    found = query_weights(logp, mask)
    assert found.tolist() == [2.0, 1.0, pytest.approx(2 / 3)] and not found.requires_grad
    r = random_rows(0)
    ones = torch.ones(len(r.group), dtype=torch.float64)
    base = GroupRelative(ddof=1)(Batch(r.reward, r.mask, r.old_logp, r.group, reward=r.reward), None)  # type: ignore[arg-type]
    torch.testing.assert_close(advantages(r.reward, r.group, r.mask, ones), base, rtol=0, atol=0)
    torch.testing.assert_close(advantages(r.reward, r.group, r.mask, 2 * ones), 2 * base)


def test_prompt_log_probs_of_the_gru_are_those_of_a_forced_completion() -> None:
    policy = GruPolicy(hidden=8, seed=1)
    batch = forced_batch(policy, [("3+4=", "7"), ("13+14=", "27"), ("9", "1")])
    batch.signals["temperature"] = torch.full((3,), 0.5)
    found = policy.evaluate(batch, {"prompt_logp"})
    assert set(found) == {"prompt_logp", "prompt_mask"} and found.prompt_mask.sum(1).tolist() == [3, 5, 0]
    forced = policy.evaluate(forced_batch(policy, [("3", "+4="), ("1", "3+14=")]), {"logp"}).logp
    torch.testing.assert_close(found.prompt_logp[0, 1:4], forced[0, :3])
    torch.testing.assert_close(found.prompt_logp[1, 1:6], forced[1, :5])
    assert found.prompt_logp[~found.prompt_mask].eq(0).all()


@cache
def model(**options: Any) -> Any:
    return load_policy("builtin", **options)


def text_batch(policy: Any) -> Batch:
    texts = ["Two plus two is", "What is 3 + 4? The answer", "Two plus two is"]
    context = [policy.encode(t) for t in texts]
    action = torch.tensor([[5, 6], [7, 8], [9, 10]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    return Batch(action=action, mask=mask, logp=torch.zeros(3, 2), group=torch.tensor([0, 1, 0]), context=context)


def test_prompt_log_probs_of_a_language_model_and_their_gradient_in_pieces() -> None:
    whole, pieces = model(), model(token_budget=8)
    batch = text_batch(whole)
    found = whole.observe(batch, {"logp", "prompt_logp"})
    for row, prompt in enumerate(batch.context):
        lone = Batch(
            prompt[None, 1:],
            torch.ones(1, len(prompt) - 1, dtype=torch.bool),
            torch.zeros(1, len(prompt) - 1),
            torch.tensor([0]),
            [prompt[:1]],
        )
        torch.testing.assert_close(found.prompt_logp[row][found.prompt_mask[row]], whole.observe(lone, {"logp"}).logp[0], atol=1e-4, rtol=0)
    assert len(list(pieces.chunks(batch))) > 1
    torch.testing.assert_close(pieces.observe(batch, {"prompt_logp"}).prompt_logp, found.prompt_logp, atol=1e-4, rtol=0)

    def loss(batch: Batch, new: Signals) -> Loss:
        return Loss(qkl(new.prompt_logp, 0.5 * found.prompt_logp, new.prompt_mask, batch.group) + new.logp.mean())

    gradients = []
    for policy in (whole, pieces):
        policy.zero_grad(set_to_none=True)
        policy.backward(batch, frozenset({"logp", "prompt_logp"}), loss)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
        policy.zero_grad(set_to_none=True)
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-3)


def test_off_it_is_the_base_without_kl() -> None:
    off = METHOD.but(regularize=(QueryKL(alpha=0.0),), credit=GroupRelative(ddof=1))
    run = short_run(off, 4)
    assert torch.equal(weights_of(run), weights_of(short_run(FREE, 4)))
    assert TABLE not in run.state and not run.policies


def test_both_mechanisms_change_the_training() -> None:
    plain = weights_of(short_run(FREE, 4))
    assert not torch.equal(weights_of(short_run(METHOD.but(credit=GroupRelative(ddof=1)), 4)), plain)
    assert not torch.equal(weights_of(short_run(METHOD.but(regularize=()), 4)), plain)


def test_the_table_is_made_once_and_equals_scoring_every_step() -> None:
    run = short_run(METHOD, 3)
    scored = run.score
    asked: list[int] = []
    run.score = lambda batch, *rest: (asked.append(len(batch)), scored(batch, *rest))[1]  # type: ignore[method-assign, func-returns-value]
    tabled = weights_of(run)
    assert sum(asked) == len(run.state[TABLE]) <= 18  # every query once
    torch.testing.assert_close(weights_of(short_run(METHOD.but(rollout=FREE.rollout), 3)), tabled, atol=1e-5, rtol=1e-4)
    assert isinstance(METHOD.rollout, QueryTable)


@pytest.mark.parametrize(
    "method",
    [METHOD, VARIANTS["code"], METHOD.set("update.minibatches", 3).set("update.epochs", 2).set("regularize.0.estimator", "seq_k2")],
)
def test_it_trains(method: Method) -> None:
    run = short_run(method, 3)
    start = torch.cat([p.detach().flatten() for p in GruPolicy(hidden=8, seed=1).parameters()])
    found = weights_of(run)
    assert torch.isfinite(found).all() and not torch.equal(found, start)
    assert all(math.isfinite(r["qkl"]) and math.isfinite(r["query_drift"]) and r["query_weight_min"] >= 0 for r in run.history)


def test_it_weights_another_credit() -> None:
    method = PPO.but(rollout=QueryTable(), credit=QueryWeighted(PPO.credit), regularize=(*PPO.regularize, QueryKL()))
    assert not method.credit.compares_group and METHOD.credit.compares_group
    assert torch.isfinite(weights_of(short_run(method, 2, value_head=True))).all()


def test_it_says_what_it_lacks() -> None:
    task = TokenBandit()
    with pytest.raises(MissingSignal, match="prompt_logp"):
        Run(METHOD, task.policy(), task, steps=1)
    with pytest.raises(ValueError, match="reference or current"):
        QueryWeighted(source="both")


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        return train(short_run(METHOD, upto, out))

    assert_continues(run_to, tmp_path)
