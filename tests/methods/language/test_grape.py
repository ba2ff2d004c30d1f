import math

import pytest
import torch

from anypo import catalogue
from anypo.domains.language.critique import CritiqueAndRevise
from anypo.domains.language.toys.rubric_sums import ITEMS, judged, make_rubric_sums
from anypo.loops.on_policy import train
from anypo.methods.language.grape import (
    METHOD,
    VARIANTS,
    BestAgainstWorst,
    BestOfGroup,
    CorrectedSurrogate,
    Imitation,
    RubricRelative,
    corrections,
    dpo_loss,
    evolution_advantages,
    grape,
    reinforce_loss,
    rubric_score,
    selected,
    sft_loss,
)
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.grpo import loss as grpo_loss
from anypo.policy import Signals
from anypo.run import Run
from anypo.seams.groups import broadcast
from tests.helpers import assert_continues, assert_trains, gradient, random_rows


def one_item(rows):
    ones, origin = torch.ones(8, 1, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    return grape(
        rows.reward[:, None], ones[0], ones, rows.group, origin, rows.logp, rows.old_logp, rows.old_logp, rows.mask
    )  # fmt: skip


def test_one_trusted_item_without_revisions_is_grpo():
    rows = random_rows()
    found = one_item(rows)
    expected = grpo_advantages(rows.reward, rows.group, eps=1e-8)
    torch.testing.assert_close(found.advantages, expected, rtol=1e-12, atol=0)
    plain = grpo_loss(rows.logp, rows.old_logp, rows.ref_logp, rows.mask, expected, beta=0.0).loss
    torch.testing.assert_close(found.loss, plain)
    assert torch.equal(found.correction, rows.mask.double())


def test_rejection_that_keeps_all_is_sft():
    rows = random_rows(1)
    assert selected(rows.reward, rows.group, keep=8).index.tolist() == list(range(8))
    kept = rows.mask & True
    for reduce in ("token", "sequence"):
        assert torch.equal(
            sft_loss(rows.logp[selected(rows.reward, rows.group, keep=8).index], kept, reduce).loss, sft_loss(rows.logp, kept, reduce).loss
        )


def test_reinforce_has_the_gradient_of_the_unclipped_objective_at_the_old_policy():
    rows = random_rows(2)
    logp = rows.old_logp.clone().requires_grad_()
    for baseline in ("none", "group_mean", "leave_one_out"):
        found = reinforce_loss(logp, rows.mask, rows.reward, rows.group, baseline)
        ratio = torch.where(rows.mask, logp - rows.old_logp, 0).exp()
        unclipped = -(found.advantages[:, None] * ratio * rows.mask).sum() / 8
        torch.testing.assert_close(gradient(found, logp), gradient(unclipped, logp))


def test_ppo_with_the_group_mean_is_grpo_without_std():
    rows = random_rows(3)
    value = reinforce_loss(rows.logp, rows.mask, rows.reward, rows.group, "group_mean").advantages
    torch.testing.assert_close(value, grpo_advantages(rows.reward, rows.group, std=False))


def test_dpo_without_beta_is_log_two_and_its_slopes_are_opposite():
    rows = random_rows(4)
    pairs = torch.tensor([[0, 1], [2, 3], [4, 5]])
    logp = rows.logp.clone().requires_grad_()
    none = dpo_loss(logp, rows.ref_logp, rows.mask, pairs, beta=0.0)
    assert float(none.loss.detach()) == pytest.approx(math.log(2)) and not gradient(none, logp)[0].any()
    found = dpo_loss(logp, rows.ref_logp, rows.mask, pairs, beta=0.3)
    (slope,) = gradient(found, logp)
    for k, (better, worse) in enumerate(pairs.tolist()):
        torch.testing.assert_close(slope[better], found.grad_weight[k] / 3 * rows.mask[better])
        torch.testing.assert_close(slope[worse], -found.grad_weight[k] / 3 * rows.mask[worse])
    assert float(dpo_loss(rows.logp, rows.ref_logp, rows.mask, pairs[:0]).loss) == 0


def test_a_revision_better_than_the_first_answers_is_worth_more_than_nothing():
    group, origin = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 0, 1])
    score = torch.tensor([0.0, 0.5, 0.25, 1.0])
    value = evolution_advantages(score, torch.ones(4), group, origin)
    assert value[3] > 0 and float(value[:3].sum()) == pytest.approx(0, abs=1e-6)
    alone = evolution_advantages(score, torch.ones(4), group, torch.ones_like(group))
    torch.testing.assert_close(alone, grpo_advantages(score, group, eps=1e-8))
    for equal in (0.1, 1 / 3):
        assert not evolution_advantages(torch.full((4,), equal), torch.ones(4), group, origin).any()


def test_what_nobody_trusts_has_score_and_advantage_zero():
    scores, trust = torch.rand(3, 2), torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.5, 0.0]])
    found = rubric_score(scores, torch.ones(2), trust)
    assert float(found[1]) == 0 and float(found[2]) == float(scores[2, 0])
    assert float(evolution_advantages(found, trust.mean(1), torch.zeros(3, dtype=torch.int64), torch.zeros(3))[1]) == 0


def test_masked_rows_and_padding_change_nothing_and_only_logp_has_a_gradient():
    rows = random_rows(5)
    mask = rows.mask.clone()
    mask[3] = False
    old, gen = (x.masked_fill(~mask, -torch.inf).requires_grad_() for x in (rows.old_logp, rows.ref_logp))
    logp = rows.logp.masked_fill(~mask, torch.nan).requires_grad_()
    items = torch.rand(8, 3, dtype=torch.float64).requires_grad_()
    ones, origin = torch.ones(8, 1, dtype=torch.float64), torch.arange(8) % 2
    found = grape(items.detach(), ones[:3, 0], ones, rows.group, origin, logp, old.detach(), gen, mask)
    (slope,) = torch.autograd.grad(found.loss, logp)
    assert torch.isfinite(slope).all() and not slope[~mask].any() and not found.correction.requires_grad
    for reduce in ("token", "sequence"):
        assert torch.isfinite(sft_loss(logp.detach().nan_to_num(), mask, reduce).loss)
    assert float(corrections(old.detach(), gen, origin, mask, cap=1.5).max()) <= 1.5


def test_equals_are_taken_in_order():
    reward = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert selected(reward, torch.zeros(5, dtype=torch.int64), keep=2).index.tolist() == [1, 2]
    assert selected(reward, torch.tensor([1, 0, 0, 0, 1]), keep=1, threshold=0.5).index.tolist() == [0, 1]
    assert selected(reward, torch.zeros(5, dtype=torch.int64), threshold=3.0).index.tolist() == []


def rolled(seed=0, **settings):
    policy, task = make_rubric_sums(warm_steps=40)
    run = Run(METHOD, policy, task, steps=1, seed=seed)
    prompts = [p.but(samples=4) for p in task.problems[:6]]
    batch = CritiqueAndRevise(**settings)(prompts, run)
    batch.reward = run.score_rewards(batch)
    batch.objectives = ITEMS
    return run, batch


def test_every_failed_answer_is_revised_under_its_plain_prompt():
    run, batch = rolled()
    origin, plain = batch.signals["origin"], run.policy.observe(batch, {"logp", "entropy"})
    failed = (batch.reward[origin == 0] < 1).any(1)
    assert int(origin.sum()) == int(failed.sum()) > 0 and run.actions == int(batch.mask.sum())
    torch.testing.assert_close(batch.logp, plain.logp, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.signals["old_entropy"], plain.entropy * batch.mask, rtol=1e-4, atol=1e-5)
    rows = (origin == 0).nonzero().flatten()[failed]
    assert torch.equal(batch.signals["prompt_id"][rows], batch.signals["prompt_id"][origin == 1])
    assert torch.equal(batch.group[rows], batch.group[origin == 1])
    assert (batch.signals["gen_logp"] - batch.logp)[origin == 1].abs().max() > 0.1
    for row, revision in zip(rows.tolist(), (origin == 1).nonzero().flatten().tolist(), strict=True):
        letters = "".join(item[0] for item, value in zip(ITEMS, batch.reward[row].tolist(), strict=True) if value < 1)
        asked = run.task.critique(run.task.problems[int(batch.signals["prompt_id"][row])], tuple(i for i in ITEMS if i[0] in letters))
        again = batch.but(context=[run.policy.encode(asked.content)] * len(batch))
        seen = run.policy.observe(again, {"logp"}).logp[revision]
        torch.testing.assert_close(seen, batch.signals["gen_logp"][revision], rtol=1e-4, atol=1e-5)


def test_components_are_the_functions():
    run, batch = rolled()
    batch.advantage = RubricRelative(weights=(1.0, 2.0, 0.5), confidence=0.7)(batch, run)
    new = Signals(logp=batch.logp + 0.3 * torch.randn(batch.logp.shape, generator=run.generator))
    expected = grape(
        batch.reward, torch.tensor([1.0, 2.0, 0.5]), torch.full_like(batch.reward, 0.7), batch.group, batch.signals["origin"],
        new.logp, batch.logp, batch.signals["gen_logp"], batch.mask,
    )  # fmt: skip
    torch.testing.assert_close(batch.advantage, broadcast(expected.advantages, batch.mask))
    torch.testing.assert_close(CorrectedSurrogate()(batch, new, run).value, expected.loss)


def test_best_against_worst_is_dpo_on_those_rows():
    run, batch = rolled(revise=False)
    group = batch.group
    value = torch.rand(len(batch), generator=run.generator)
    value[group == 0] = 0.5  # no difference, no pair
    batch.advantage = broadcast(value, batch.mask)
    batch.signals["ref_logp"] = batch.logp - 0.2 * batch.mask
    new = Signals(logp=batch.logp + torch.randn(batch.logp.shape, generator=run.generator) * batch.mask)
    rows = [(group == g).nonzero().flatten() for g in range(1, 6)]
    pairs = torch.stack([torch.stack([r[value[r].argmax()], r[value[r].argmin()]]) for r in rows])
    expected = dpo_loss(new.logp, batch.signals["ref_logp"], batch.mask, pairs).loss
    torch.testing.assert_close(BestAgainstWorst()(batch, new, run).value, expected)


def test_rejection_is_sft_on_the_best():
    run, batch = rolled(revise=False)
    batch.advantage = BestOfGroup(keep=1, threshold=2.0)(batch, run)
    chosen = selected(batch.reward.sum(1), batch.group, 1, 2.0).index
    expected = sft_loss(batch.logp[chosen], batch.mask[chosen]).loss
    torch.testing.assert_close(Imitation()(batch, Signals(logp=batch.logp), run).value, expected)


def test_settings_that_do_not_exist_are_refused():
    run, batch = rolled(revise=False)
    rows = random_rows()
    with pytest.raises(ValueError, match=r"credit\.weights has 2 numbers, but the task has 3"):
        RubricRelative(weights=(1.0, 1.0))(batch, run)
    with pytest.raises(ValueError, match="unknown baseline 'mean'"):
        reinforce_loss(rows.logp, rows.mask, rows.reward, rows.group, "mean")
    with pytest.raises(ValueError, match="reduce is token or sequence"):
        sft_loss(rows.logp, rows.mask, "row")


def test_prompts_of_text_and_messages_get_a_sentence_others_none():
    run, _ = rolled()
    run.task = object()
    prompt, rollout = make_rubric_sums(warm_steps=40)[1].problems[0], CritiqueAndRevise()
    assert (
        rollout.critiqued(prompt.but(content="1+1="), ("format", "answer"), run).content
        == "1+1=\nAn earlier answer failed on: format, answer.\n"
    )
    chat = rollout.critiqued(prompt.but(content=[{"role": "user", "content": "1+1="}]), ("answer",), run)
    assert chat.content[-1] == {"role": "user", "content": "An earlier answer failed on: answer."}
    assert rollout.critiqued(prompt.but(content=3), ("answer",), run) is None


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda m: m.name)
def test_it_trains_and_resumes(method, tmp_path):
    assert_trains(method, prompts=4, vocabulary=2)

    def run_to(out, upto):
        policy, task = make_rubric_sums(warm_steps=40)
        run = Run(method.set("select.prompts", 4), policy, task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)


def test_rubric_items():
    assert judged("+07", 7) == (1, 1, 1) and judged("7", 7) == (0, 0, 1) and judged("+12", 7) == (1, 1, 0)
    assert judged("+007", 7) == (1, 0, 1) and judged("", 7) == (0, 0, 0) and judged("++7", 7) == (1, 0, 0)


def test_variants_are_found_by_name():
    assert {name: catalogue.get(f"grape.{name}") for name in VARIANTS} == VARIANTS
