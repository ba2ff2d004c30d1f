"""CAPO: predictions against autograd and true divergences, when nothing is rejected, thresholds, padding, and the component in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.toy_arith import ToyArith
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.capo_curvature import METHOD, CurvatureSteps, accept, adaptive_step, state_before, subset_scores, token_scores
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.update import build_optimizer
from tests.helpers import assert_resumes, assert_trains, trained

V, D = 5, 3
BASE = GRPO.but(objective=METHOD.objective)


def tokens(seed: int, count: int = 10) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Weights [V,D] of a last layer, and (prob, action, hidden, advantages) of tokens that it wrote."""
    g = torch.Generator().manual_seed(seed)
    weight, hidden = torch.randn(V, D, generator=g, dtype=torch.float64), torch.randn(count, D, generator=g, dtype=torch.float64)
    prob = (hidden @ weight.T).softmax(-1)
    action = torch.multinomial(prob, 1, generator=g)[:, 0]
    return weight, (prob, action, hidden, torch.randn(count, generator=g, dtype=torch.float64))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), scope=st.sampled_from(["self", "batch"]), adaptive=st.booleans())
def test_a_subsets_predictions_are_the_derivatives_of_objective_and_kl(seed: int, scope: str, adaptive: bool) -> None:
    weight, (prob, action, hidden, advantages) = tokens(seed)
    subset, lr = torch.arange(10) % 3, 0.7
    scale = torch.rand(V, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5 if adaptive else None
    found = subset_scores(prob, action, hidden, advantages, subset, lr, scope, scale)

    def parts(s: Tensor, rows: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = (hidden[rows] @ (weight + s * change).T).log_softmax(-1)
        ratio = (log_probs - prob[rows].log()).gather(1, action[rows, None])[:, 0].exp()
        return (advantages[rows] * ratio).mean(), (prob[rows] * (prob[rows].log() - log_probs)).sum(1).mean()

    for b in range(3):
        own = (subset == b).nonzero().flatten()
        wanted = weight.clone().requires_grad_()
        chosen = (hidden[own] @ wanted.T).log_softmax(-1).gather(1, action[own, None])[:, 0]
        change = lr * torch.autograd.grad((advantages[own] * chosen).mean(), wanted)[0] * (1.0 if scale is None else scale)
        rows, s = own if scope == "self" else torch.arange(10), torch.zeros((), dtype=torch.float64, requires_grad=True)
        for number, names in ((0, ("lin", "hess")), (1, (None, "fisher"))):
            value = parts(s, rows, change)[number]
            first = torch.autograd.grad(value, s, create_graph=True)[0]
            second = torch.autograd.grad(first, s)[0]
            for name, derivative in zip(names, (first, second), strict=True):
                if name:
                    torch.testing.assert_close(getattr(found, name)[b], derivative.detach())
    torch.testing.assert_close(found.m_h, found.lin + found.hess / 2)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), lr=st.floats(0.01, 5), adaptive=st.booleans())
def test_a_token_is_a_subset_of_one(seed: int, lr: float, adaptive: bool) -> None:
    _, given_tokens = tokens(seed)
    scale = torch.rand(V, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) if adaptive else None
    alone = token_scores(*given_tokens, lr, scale)
    for one, other in zip(alone, subset_scores(*given_tokens, torch.arange(10), lr, "self", scale), strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_small_steps_always_gain_and_tokens_without_advantage_ask_for_nothing(seed: int) -> None:
    _, (prob, action, hidden, advantages) = tokens(seed)
    advantages[3] = 0.0
    small = token_scores(prob, action, hidden, advantages, 1e-6)
    norm = ((torch.eye(V, dtype=torch.float64)[action] - prob) ** 2).sum(1) * (hidden**2).sum(1)
    torch.testing.assert_close(small.m_h / 1e-6, advantages**2 * norm, rtol=1e-3, atol=1e-12)
    assert (small.m_h >= 0).all() and (small.m_f < 1e-6).all() and all(part[3] == 0 for part in small)
    assert accept(small.m_h, small.m_f, 0.0, 1e-3).all()


def test_thresholds_are_inclusive() -> None:
    m_h, m_f = torch.tensor([0.0, -0.1, 1.0]), torch.tensor([0.5, 0.1, 0.6])
    assert accept(m_h, m_f, 0.0, 0.5).tolist() == [True, False, False]
    assert accept(m_h, m_f, -math.inf, math.inf).all()


def test_scores_are_detached_and_scopes_named() -> None:
    weight, (prob, action, hidden, advantages) = tokens(0)
    prob.requires_grad_()
    assert not any(part.requires_grad for part in token_scores(prob, action, hidden, advantages, 1.0))
    with pytest.raises(ValueError, match="self or batch"):
        subset_scores(prob, action, hidden, advantages, torch.zeros(10), 1.0, "all")
    assert subset_scores(prob[:0], action[:0], hidden[:0], advantages[:0], action[:0], 1.0).m_f.shape == (0,)


@pytest.mark.parametrize(
    "method",
    [METHOD.set("update.delta_f", math.inf), METHOD.set("update.warm_up", 99).set("update.quantile", 1.0)],
    ids=["infinite", "quantile 1"],
)
def test_rejecting_nothing_is_the_base(method: Method) -> None:
    assert torch.equal(trained(method, 4).policy.logits, trained(BASE, 4).policy.logits)


def test_rejecting_everything_that_moves_skips_the_step() -> None:
    run = trained(METHOD.set("update.delta_f", -1.0), 3)
    assert run.version == 0 and all(r["skipped"] == 1 and r["rejected"] == 1 for r in run.history)
    assert torch.equal(run.policy.logits, run.task.policy(scale=0.1).logits)


def test_the_limit_is_the_quantile_of_the_warm_up_and_stays() -> None:
    steps = CurvatureSteps(quantile=0.75, warm_up=2)
    assert steps.bound == math.inf
    steps.watch(torch.zeros(0))  # groups without a signal decide nothing
    assert steps.bound == math.inf
    steps = CurvatureSteps(quantile=0.75, warm_up=2)
    steps.watch(torch.tensor([4.0, 1.0]))
    assert steps.bound == 4.0
    steps.watch(torch.tensor([3.0, 2.0]))
    assert steps.bound == 3.0 and steps.seen == []


def test_few_tokens_are_rejected_and_the_limit_is_fixed_after_the_warm_up() -> None:
    method = METHOD.set("update.warm_up", 2).set("update.quantile", 0.5)
    run = assert_trains(method, 5)
    assert 0 < max(r["rejected"] for r in run.history) < 1
    assert run.method.update.limit == trained(method, 2).method.update.limit != trained(method, 1).method.update.limit


def arithmetic(method: Method, optimizer: str = "sgd", steps: int = 3) -> Run:
    return Run(method.set("update.optimizer", optimizer), GruPolicy(), ToyArith(small=True), steps=steps, seed=0)


def test_the_state_before_an_action_gives_its_logits() -> None:
    run = arithmetic(METHOD)
    batch = run.collect(run.method.select(run.task, run))
    run.prepare_signals(batch, METHOD.needs("update"))
    logits = run.policy.output(state_before(batch, "row"))
    torch.testing.assert_close(logits[batch.mask], batch.signals["old_logits"][batch.mask])
    batch.signals["temperature"] = torch.full((len(batch),), 2.0)
    torch.testing.assert_close(
        state_before(batch, "row") * 2, state_before(batch.but(signals={**batch.signals, "temperature": None}), "row")
    )


@pytest.mark.parametrize(("subset", "scope"), [("token", "self"), ("row", "self"), ("row", "batch")])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_tokens_and_rows_of_a_network_with_either_optimizer(subset: str, scope: str, optimizer: str) -> None:
    method = METHOD.set("update.subset", subset).set("update.scope", scope).set("update.warm_up", 1).set("update.quantile", 0.5)
    method = method.set("update.learning_rate", 5e-3 if optimizer == "adamw" else 0.5).but(credit=DAPO.credit)
    run = train(arithmetic(method, optimizer))
    assert all(torch.isfinite(p).all() for p in run.policy.parameters())
    assert 0 < max(r["rejected"] for r in run.history) < 1
    if subset == "row":
        batch = step(run)
        accepted, _, _ = run.method.update.judge(batch, run)
        rows = batch.counted.nonzero()[:, 0]
        assert all(len(accepted[rows == i].unique()) == 1 for i in rows.unique())


def test_adams_step_is_predicted_from_its_second_moment() -> None:
    policy = GruPolicy()
    shape = tuple(policy.output.weight.shape)
    optimizer = build_optimizer(policy, "adam", 0.01)
    assert adaptive_step(optimizer, shape) is None and adaptive_step(build_optimizer(policy, "sgd", 0.01), shape) is None
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    before = policy.output.weight.detach().clone()
    optimizer.step()
    found = adaptive_step(optimizer, shape)
    torch.testing.assert_close(before - policy.output.weight, 0.01 * found * 2.0)
    assert adaptive_step(optimizer, (7, 7)) is None


def test_before_adams_first_step_nothing_is_rejected_and_a_table_is_scored_after_it() -> None:
    method = METHOD.set("update.warm_up", 1).set("update.quantile", 0.5).set("update.optimizer", "adam")
    run = trained(method, 4)
    assert run.history[0]["rejected"] == 0 < run.history[1]["rejected"]


@pytest.mark.parametrize(("subset", "message"), [("row", "table of logits"), ("word", "token or row")])
def test_rows_of_a_table_and_unknown_subsets_are_refused(subset: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(METHOD.set("update.subset", subset), 1)


def test_it_goes_with_other_parts() -> None:
    assert_trains(DAPO.but(update=METHOD.update), eos=0)
    assert_trains(METHOD.but(objective=ClippedSurrogate(aggregation="seq_mean")), eos=0)
    assert_trains(METHOD.set("update.minibatches", 2).set("update.epochs", 2).set("update.warm_up", 1))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD.set("update.warm_up", 3).set("update.quantile", 0.5), tmp_path)
    assert_resumes(METHOD.set("update.warm_up", 1).set("update.quantile", 0.5), tmp_path / "after")
