"""SEPO: its exact reductions, its pitfalls, and training through the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.network import Bidirectional
from anypo.domains.masked.policy import Characters, MaskedPolicy
from anypo.domains.masked.tasks import make_split_sum
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.cispo import METHOD as CISPO
from anypo.methods.masked.sepo import (
    METHOD,
    VARIANTS,
    Corrected,
    DenoiserKL,
    ScoreEntropy,
    corrector_rates,
    group_advantages,
    identity,
    loss,
    loss_code,
    mdlm_scores,
    move,
    neighbour_probs,
    site_log_probs,
    sites,
    weights,
)
from anypo.run import Run
from anypo.seams.groups import standardize
from tests.helpers import assert_continues, gradient


def run_of(method: Method, steps: int = 2, seed: int = 0, out: Path | None = None, **task) -> Run:
    method = method.set("select.prompts", 4).set("update.epochs", 2)
    return Run(method, load_policy(), make_split_sum(**task), steps=steps, seed=seed, out=out, checkpoint_every=2)


def parameters(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def collected(run: Run, samples: int = 8, **prompt) -> Batch:
    batch = run.collect([p.but(samples=samples, **prompt) for p in run.task.prompts(3, run.rng)])
    batch.reward = torch.randn(len(batch), generator=torch.Generator().manual_seed(1))
    return batch.but(advantage=run.method.credit(batch, run))


def acting(batch: Batch, run: Run, corrupted: float = 0.5) -> Batch:
    """The batch with what the update notes before its first step."""
    hidden = torch.rand(len(batch), 2, batch.horizon, generator=torch.Generator().manual_seed(2)) < corrupted
    batch = batch.but(signals=batch.signals | {"corrupted": hidden})
    noted = {"acting_site_logp": site_log_probs(batch, run), "acting_neighbour_probs": neighbour_probs(batch, run)}
    return batch.but(signals=batch.signals | noted)


def tables(seed: int = 0) -> list[Tensor]:
    """pi_new, pi_old, s_new, s_old [6,4]."""
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(6, 4, generator=g, dtype=torch.float64) + 0.1 for _ in range(4)]


# ---- reductions


def test_the_identity_is_the_score_function_of_a_softmax() -> None:
    for seed in range(5):
        logits = torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = identity(logits, seed)
        torch.testing.assert_close(found.pi_x, logits.softmax(0)[seed])
        torch.testing.assert_close(found.score_function, torch.eye(7, dtype=torch.float64)[seed] - logits.softmax(0))


def test_answers_of_one_token_have_the_exact_policy_gradient() -> None:
    run = run_of(METHOD.but(regularize=()))
    batch = acting(collected(run, max_actions=1), run)
    assert batch.horizon == 1
    run.method.update.backward(batch, run.loss_fn, run)
    found = torch.cat([p.grad.flatten() for p in run.policy.parameters() if p.grad is not None])
    run.policy.zero_grad()
    (-(batch.advantage * run.policy.evaluate(batch, {"logp"}).logp).mean()).backward()
    wanted = torch.cat([p.grad.flatten() for p in run.policy.parameters() if p.grad is not None])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
    assert wanted.abs().max() > 1e-3


def test_on_policy_both_sums_and_both_forms_agree() -> None:
    pi, _, s, _ = tables()
    adv = torch.linspace(-1, 1, 6, dtype=torch.float64)
    s.requires_grad_(True)
    code, plain = loss_code(adv, pi, pi, s, s.detach()), loss(adv, pi, pi, s, s.detach())
    torch.testing.assert_close(code.U, code.C)
    torch.testing.assert_close(code.loss, plain)
    torch.testing.assert_close(gradient(code.loss, s), gradient(plain, s))
    run = run_of(METHOD)
    batch = acting(collected(run), run)
    values = []
    for form in ("one_sided", "code"):
        run.method = METHOD.but(regularize=()).set("objective.form", form)
        values.append(run.method.update.backward(batch, run.loss_fn, run).value)
    torch.testing.assert_close(values[0], values[1])


def test_the_component_is_the_function() -> None:
    """After the policy has moved, in both forms, from scores and neighbours of every answer in one table."""
    run = run_of(METHOD.but(regularize=()))
    batch = acting(collected(run), run)
    with torch.no_grad():
        run.policy.network.output.weight.add_(0.1 * torch.randn(run.policy.network.output.weight.shape))
    run.advance_version()
    pi_new, pi_old = neighbour_probs(batch, run), batch.signals["acting_neighbour_probs"]
    scores = [mdlm_scores(t.exp(), batch.action) for t in (site_log_probs(batch, run), batch.signals["acting_site_logp"])]
    real = pi_old.flatten(1) > 0
    tables = [torch.where(real, t.flatten(1), 1.0).double() for t in (pi_new, pi_old, *scores)]
    tables[0] = tables[0] * real  # a pair that is none weighs nothing
    for form, function in (("one_sided", loss), ("code", lambda *a: loss_code(*a).loss)):
        run.method = run.method.set("objective.form", form)
        found = run.method.update.backward(batch, run.loss_fn, run).value
        torch.testing.assert_close(found.double(), function(batch.advantage[:, 0].double(), *tables, 0.2), atol=1e-5, rtol=1e-4)


def test_scores_of_a_consistent_model_are_ratios_of_its_table() -> None:
    joint = torch.rand(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.tensor([1, 2])
    probs = torch.stack([joint[:, 2] / joint[:, 2].sum(), joint[1] / joint[1].sum()])
    found = mdlm_scores(probs, x)
    torch.testing.assert_close(found, torch.stack([joint[:, 2], joint[1]]) / joint[1, 2])


def test_without_corruption_neighbours_have_probabilities_in_ratio_of_their_scores() -> None:
    run = run_of(METHOD)
    batch = acting(collected(run), run, corrupted=0.0)
    scores = mdlm_scores(site_log_probs(batch, run).exp(), batch.action)
    found = batch.signals["acting_neighbour_probs"]
    allowed = found > 0
    assert (allowed.sum((1, 2)) == 4 * 11).all()  # twelve characters but the one that stands there, no mask token
    total = 1 + torch.where(allowed, scores, 0.0).sum((1, 2), keepdim=True)
    torch.testing.assert_close(found, torch.where(allowed, scores / total, 0.0))


def test_with_all_masked_neighbours_are_compared_by_the_products_of_one_state() -> None:
    run = run_of(METHOD, block=4)
    batch = acting(collected(run), run, corrupted=1.0)
    state = batch.but(mask=torch.ones_like(batch.mask))
    probs = run.policy.observe(state, {"logits"}).logits.softmax(-1)
    odds = mdlm_scores(probs, batch.action)
    found = batch.signals["acting_neighbour_probs"]
    total = 1 + torch.where(found > 0, odds, 0.0).sum((1, 2), keepdim=True)
    torch.testing.assert_close(found, torch.where(found > 0, odds / total, 0.0))


def test_groups_are_compared_as_the_seam_does() -> None:
    reward = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reward[:, 1] = 0.7
    wanted = standardize(reward.T.flatten(), torch.arange(3).repeat_interleave(8), ddof=1, eps=1e-8)
    torch.testing.assert_close(group_advantages(reward).T.flatten(), wanted)


# ---- pitfalls


def test_no_advantage_no_gradient() -> None:
    pi_new, pi_old, s_new, s_old = tables()
    s_new.requires_grad_(True)
    found = loss(torch.zeros(6, dtype=torch.float64), pi_new, pi_old, s_new, s_old)
    assert found == 0 and not gradient(found, s_new)[0].any()
    run = run_of(METHOD.but(regularize=()))
    batch = acting(collected(run), run)
    value = run.method.update.backward(batch.but(advantage=torch.zeros_like(batch.advantage)), run.loss_fn, run).value
    assert value == 0 and all(p.grad is None or not p.grad.any() for p in run.policy.parameters())


def test_only_the_scores_carry_a_gradient() -> None:
    inputs = [t.requires_grad_(True) for t in tables()]
    adv = torch.ones(6, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(loss(adv.detach(), *inputs), inputs, allow_unused=True)
    assert found[0] is None and found[1] is None and found[3] is None
    assert (found[2] > 0).all()  # a good sample pulls the scores of its neighbours down


def test_weights_are_clipped_on_the_side_the_advantage_pushes_to() -> None:
    rho, adv = torch.tensor([0.5, 1.5, 0.5, 1.5, 9.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    torch.testing.assert_close(weights(adv, rho, 0.2), torch.tensor([0.5, 1.2, 0.8, 1.5, 9.0]))


def ended() -> tuple[Run, Batch]:
    """Answers of a model whose token "." ends a text: of 1 to 4 tokens, padding that holds anything."""
    torch.manual_seed(0)
    policy = MaskedPolicy(Bidirectional(6, width=16, layers=1, heads=2, positions=8), Characters("abcd.", "."))
    run = run_of(METHOD)
    run.policy = policy
    action = torch.tensor([[0, 1, 2, 3], [1, 4, 0, 0], [4, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    batch = Batch(action, mask, torch.full(mask.shape, torch.nan), torch.zeros(3, dtype=torch.int64), [torch.tensor([0])] * 3,
                  advantage=torch.where(mask, 1.0, torch.nan), version=torch.zeros(3, dtype=torch.int64))  # fmt: skip
    return run, batch


def test_end_tokens_and_padding_have_no_neighbours() -> None:
    run, batch = ended()
    batch = acting(batch, run)
    assert sites(batch, run).row.tolist() == [0, 0, 0, 0, 1]
    allowed = batch.signals["acting_neighbour_probs"] > 0
    assert allowed.sum((1, 2)).tolist() == [12, 3, 0]
    assert not allowed[..., 4:].any()
    value = run.method.update.backward(batch, run.loss_fn, run).value
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in run.policy.parameters() if p.grad is not None)


def test_a_move_changes_one_token_at_most() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(4, (500, 3), generator=g)
    scores = torch.rand(500, 3, 4, generator=g).scatter(2, x[..., None], 0.0)
    scores[:100] = 0
    moved = move(x, scores, 0.2, g)
    changed = (moved != x).sum(1)
    assert (changed[:100] == 0).all() and (changed <= 1).all()
    wanted = 1 - (-0.2 * scores.sum((1, 2))).exp()
    assert abs(float(changed[100:].float().mean() - wanted[100:].mean())) < 0.07
    assert torch.equal(move(x, scores, 0.0, g), x)


def test_the_correctors_rates_leave_the_distribution_as_it_is() -> None:
    pi = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pi /= pi.sum()
    flow = torch.zeros_like(pi)
    for x in torch.cartesian_prod(torch.arange(2), torch.arange(3)):
        for y in torch.cartesian_prod(torch.arange(2), torch.arange(3)):
            if int((x != y).sum()) == 1:
                rate = corrector_rates(pi[tuple(y)] / pi[tuple(x)], torch.tensor(True))
                flow[tuple(x)] -= pi[tuple(x)] * rate
                flow[tuple(y)] += pi[tuple(x)] * rate
    torch.testing.assert_close(flow, torch.zeros_like(flow))
    assert corrector_rates(torch.ones(1), torch.tensor([False])) == 0


def test_corrected_answers_are_those_of_their_tokens() -> None:
    run = run_of(VARIANTS["gf"])
    prompts = METHOD.select(run.task, run)
    state = run.generator.get_state()
    plain = run.collect(prompts)
    run.generator.set_state(state)
    batch = Corrected(moves=5)(prompts, run)
    assert not torch.equal(batch.action, plain.action) and torch.equal(batch.mask, plain.mask)
    assert batch.signals["completion"] == [run.policy.decode(a) for a in batch.action]
    torch.testing.assert_close(batch.logp, run.policy.observe(batch, {"logp"}).logp)
    assert "reveal_logp" not in batch.signals
    run.generator.set_state(state)
    assert torch.equal(Corrected(moves=0)(prompts, run).action, plain.action)


def test_what_it_cannot_score_is_refused() -> None:
    run = run_of(METHOD)
    batch = run.collect(METHOD.select(run.task, run), "old")
    with pytest.raises(ValueError, match="under the policy that acted"):
        METHOD.update(batch, run.loss_fn, run)
    with pytest.raises(ValueError, match="at least 1"):
        step(run_of(METHOD.set("update.corruptions", 0)))
    with pytest.raises(ValueError, match="unknown form"):
        step(run_of(METHOD.set("objective.form", "mean")))
    for component in (ScoreEntropy(), DenoiserKL()):
        with pytest.raises(ValueError, match="the update of sepo"):
            component(batch.but(advantage=batch.logp), type("New", (), {}), run)


# ---- in the loop


@pytest.mark.parametrize("name", ["sepo", "gf", "code", "cispo", "minibatches", "threshold"])
def test_it_trains(name: str) -> None:
    changed = {
        "gf": VARIANTS["gf"].set("rollout.moves", 2),
        "code": METHOD.set("objective.form", "code"),
        "cispo": METHOD.but(objective=CISPO.objective),
        "minibatches": METHOD.set("update.minibatches", 2),
    }.get(name, METHOD)
    run = run_of(changed, steps=2, threshold=0.5 if name == "threshold" else 0.0)
    start = parameters(run)
    train(run)
    assert torch.isfinite(parameters(run)).all() and not torch.equal(start, parameters(run))
    for record in run.history:
        assert all(torch.isfinite(torch.tensor(v)) for v in record.values() if isinstance(v, float))
    assert run.history[0]["kl"] >= 0


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = run_of(VARIANTS["gf"].set("rollout.moves", 2), steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
