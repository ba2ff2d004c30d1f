"""BGPO: its exact reductions, its pitfalls, and training through the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.tasks import make_split_sum
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.cispo import METHOD as CISPO
from anypo.methods.masked.bgpo import METHOD, LinearBound, SampleBySample, bgpo, draw_masks, elbo_objective, elbo_term, grad_coeff
from anypo.run import Run
from anypo.seams.regularize import EntropyBonus, KLPenalty
from tests.helpers import assert_continues, gradient


def run_of(method: Method, steps: int = 2, seed: int = 0, out: Path | None = None, **task) -> Run:
    method = method.set("select.prompts", 4).set("update.samples", min(method.update.samples, 3))
    return Run(method, load_policy(), make_split_sum(**task), steps=steps, seed=seed, out=out, checkpoint_every=2)


def weights(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def slopes(run: Run) -> Tensor:
    return torch.cat([p.grad.flatten() for p in run.policy.parameters() if p.grad is not None])


def terms(seed: int, n: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """l_new, l_old [64,n] and advantages [64] of both signs."""
    g = torch.Generator().manual_seed(seed)
    old = -5 * torch.rand(64, n, generator=g, dtype=torch.float64)
    new = old + torch.randn(64, n, generator=g, dtype=torch.float64)
    return new.requires_grad_(True), old, torch.randn(64, generator=g, dtype=torch.float64)


def drawn(run: Run) -> Batch:
    """A collected batch with advantages and masks."""
    batch = run.collect(run.method.select(run.task, run))
    batch.reward = run.method.reward(batch, run)
    batch.advantage = run.method.credit(batch, run)
    return run.method.update.draw(batch, run)


# ---- reductions


def test_one_sample_is_the_tangent_or_the_elbo_objective_itself() -> None:
    new, old, adv = terms(0, 1)
    below = adv < 0
    torch.testing.assert_close(bgpo(new[below], old[below], adv[below]).objective, elbo_objective(new[below], old[below], adv[below]))
    torch.testing.assert_close(bgpo(new, old, adv).terms[~below, 0], (adv * (1 + new - old)[:, 0])[~below])
    found = grad_coeff(new, old, adv)
    torch.testing.assert_close(found.bgpo[below], found.elbo[below])
    torch.testing.assert_close(found.bgpo[~below, 0], adv[~below] / 64)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_on_policy_value_and_gradient_are_the_elbo_objectives(n: int) -> None:
    new, _, adv = terms(1, n)
    old = new.detach().clone()
    for length_norm in (False, True):
        bound, wanted = bgpo(new, old, adv, length_norm, 6).objective, elbo_objective(new, old, adv, length_norm, 6)
        torch.testing.assert_close(bound, wanted)
        torch.testing.assert_close(bound, adv.mean())
        torch.testing.assert_close(gradient(bound, new), gradient(wanted, new))


@given(st.lists(st.floats(-6, 6), min_size=1, max_size=5), st.floats(-3, 3))
def test_it_is_a_lower_bound(drift: list[float], adv: float) -> None:
    new = torch.tensor([drift], dtype=torch.float64)
    arguments = (new, torch.zeros_like(new), torch.tensor([adv], dtype=torch.float64))
    assert float(bgpo(*arguments).objective) <= float(elbo_objective(*arguments)) + 1e-9


def test_all_tokens_masked_are_the_log_prob_of_one_block() -> None:
    logp = -torch.rand(2, 4, dtype=torch.float64)
    torch.testing.assert_close(elbo_term(logp, torch.ones(2, 4)), logp.sum(1))
    run = run_of(METHOD, block=4)
    batch = drawn(run)
    batch.signals["elbo_masked"] = torch.ones_like(batch.signals["elbo_masked"])
    found = run.policy.evaluate(run.method.update.sample(batch, 0), {"logp"}).logp
    torch.testing.assert_close(found, batch.logp, atol=1e-5, rtol=0)


def test_a_sample_is_the_answer_with_its_tokens_masked_and_the_rest_shown() -> None:
    run = run_of(METHOD)
    batch = drawn(run)
    view = run.method.update.sample(batch, 1)
    found = run.policy.evaluate(view, {"logp"}).logp
    for n in range(0, len(batch), 7):
        hidden = batch.signals["elbo_masked"][n, 1]
        ids = torch.cat([batch.context[n], torch.where(hidden, run.policy.mask_id, batch.action[n])])[None]
        logits = run.policy.network(ids, torch.ones_like(ids, dtype=torch.bool))[0, 3:]
        logits[:, run.policy.mask_id] = -torch.inf
        wanted = torch.where(hidden, logits.log_softmax(-1)[torch.arange(4), batch.action[n]], 0.0)
        torch.testing.assert_close(found[n], wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.detach(), view.logp, atol=1e-5, rtol=0)  # the policy has not moved


@pytest.mark.parametrize("weight", ["count", "inv_t"])
def test_the_gradient_summed_sample_by_sample_is_that_of_one_graph(weight: str) -> None:
    run = run_of(METHOD.set("update.weight", weight))
    batch = drawn(run)
    with torch.no_grad():
        for p in run.policy.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
    run.advance_version()
    found = run.method.update.backward(batch, run.loss_fn, run)
    accumulated = slopes(run)
    run.policy.zero_grad()
    new, old = [], []
    for j in range(3):
        view = run.method.update.sample(batch, j)
        logp = run.policy.evaluate(view, {"logp"}).logp
        new.append(view.signals["elbo_weight"] * logp.sum(1))
        old.append(view.signals["elbo_weight"] * view.logp.sum(1))
    bound = bgpo(torch.stack(new, 1), torch.stack(old, 1), batch.advantage[:, 0])
    (-bound.objective).backward()
    torch.testing.assert_close(found.value, -bound.objective.detach())
    torch.testing.assert_close(accumulated, slopes(run), atol=1e-6, rtol=1e-4)


# ---- masks


def test_masks_are_never_empty_and_cover_counts_evenly() -> None:
    counted = torch.arange(5) < torch.tensor([5, 3, 1, 0])[:, None]
    for weight in ("count", "inv_t"):
        masks = draw_masks(counted, 3000, torch.Generator().manual_seed(0), weight)
        sizes = masks.masked.sum(-1)
        assert (sizes[:3] >= 1).all() and (sizes[3] == 0).all() and torch.isfinite(masks.weight).all()
        assert not (masks.masked & ~counted[:, None]).any()
        assert (masks.weight <= counted.sum(1, keepdim=True).clamp(min=1) + 1e-6).all()
    masks = draw_masks(counted, 3000, torch.Generator().manual_seed(0))
    sizes = masks.masked.sum(-1)
    for row, length in ((0, 5), (1, 3)):
        shares = torch.bincount(sizes[row], minlength=length + 1)[1:] / 3000
        assert (shares - 1 / length).abs().max() < 0.04
        assert (masks.masked[row, :, :length].float().mean(0) - (length + 1) / (2 * length)).abs().max() < 0.04
        torch.testing.assert_close(masks.weight[row], length / sizes[row].float())


def test_old_log_probs_of_all_epochs_are_the_rollouts() -> None:
    seen = []

    class Watching(LinearBound):
        def __call__(self, batch, new, run):
            seen.append((run.version, batch))
            return super().__call__(batch, new, run)

    run = run_of(METHOD.but(objective=Watching()).set("update.epochs", 2))
    before = run.policy.snapshot()
    step(run)
    assert [version for version, _ in seen] == [0, 0, 0, 1, 1, 1]
    for _, view in seen:
        torch.testing.assert_close(before.observe(view, {"logp"}).logp, view.logp, atol=1e-5, rtol=0)
    assert not torch.equal(seen[0][1].mask, seen[3][1].mask) and not torch.equal(seen[0][1].mask, seen[1][1].mask)


# ---- pitfalls


def test_positions_that_are_not_masked_may_hold_anything() -> None:
    masked = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    logp = torch.tensor([[-1.0, -torch.inf, -2.0], [torch.nan, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    found = elbo_term(logp, masked)
    assert found.tolist() == [-4.5, 0.0]
    assert torch.isfinite(gradient(found.sum(), logp)[0]).all()
    with pytest.raises(ValueError, match="unknown weight"):
        elbo_term(logp, masked, "square")


def test_exponentials_of_long_answers_stay_finite() -> None:
    new = torch.full((1, 2), 2000.0, dtype=torch.float64, requires_grad=True)
    for adv in (1.0, -1.0):
        value = bgpo(new, torch.zeros_like(new), torch.tensor([adv], dtype=torch.float64)).objective
        assert torch.isfinite(value) and torch.isfinite(gradient(value, new)[0]).all()


def test_advantages_carry_no_gradient_and_equal_rewards_none_at_all() -> None:
    run = run_of(METHOD)
    batch = drawn(run)
    found = run.method.update.backward(batch.but(advantage=torch.zeros_like(batch.advantage)), run.loss_fn, run)
    assert float(found.value) == 0
    assert all(p.grad is None or not p.grad.any() for p in run.policy.parameters())
    assert not batch.advantage.requires_grad


def test_a_batch_without_actions_has_loss_zero() -> None:
    run = run_of(METHOD)
    view = run.method.update.sample(drawn(run), 0)
    empty = view.but(mask=torch.zeros_like(view.mask))
    assert float(LinearBound()(empty, type("New", (), {"logp": view.logp}), run).value) == 0


def test_what_it_cannot_score_is_refused() -> None:
    run = run_of(METHOD)
    batch = run.collect(METHOD.select(run.task, run), "old")
    with pytest.raises(ValueError, match="under the policy that acted"):
        METHOD.update(batch, run.loss_fn, run)
    with pytest.raises(ValueError, match="at least 1"):
        step(run_of(METHOD.set("update.samples", 0)))
    with pytest.raises(ValueError, match="the update of bgpo draws"):
        LinearBound()(batch.but(advantage=batch.logp), type("New", (), {"logp": batch.logp}), run)


# ---- in the loop


@pytest.mark.parametrize("name", ["bgpo", "inv_t", "length_norm", "epochs", "minibatches", "kl", "entropy", "cispo", "threshold"])
def test_it_trains(name: str) -> None:
    changed = {
        "inv_t": METHOD.set("update.weight", "inv_t"),
        "length_norm": METHOD.set("objective.length_norm", True),
        "epochs": METHOD.set("update.epochs", 2),
        "minibatches": METHOD.set("update.minibatches", 2),
        "kl": METHOD.but(regularize=KLPenalty(0.1)),
        "entropy": METHOD.but(regularize=EntropyBonus(0.1)),
        "cispo": METHOD.but(objective=CISPO.objective),
    }.get(name, METHOD)
    run = run_of(changed, steps=2, threshold=0.5 if name == "threshold" else 0.0)
    start = weights(run)
    train(run)
    assert torch.isfinite(weights(run)).all() and not torch.equal(start, weights(run))
    for record in run.history:
        assert all(torch.isfinite(torch.tensor(v)) for v in record.values() if isinstance(v, float))
    assert isinstance(run.method.update, SampleBySample)
    if name == "kl":
        assert run.history[0]["kl"] == 0 and run.history[1]["kl"] > 0


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = run_of(METHOD, steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
