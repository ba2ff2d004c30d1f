import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import train
from anypo.methods.language import grpo
from anypo.methods.language.srpo_routed import METHOD, SDPO, SampleRouted, SiblingInContext, distill, loss, routes, sibling
from anypo.run import Run
from tests.helpers import gradient, random_rows


def logits(seed=0, rows=8, horizon=5, symbols=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, horizon, symbols, generator=generator, dtype=torch.float64)


def outcomes(rows=8):
    return torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0]).double()[:rows], torch.tensor([0, 0, 0, 1, 1, 0, 2, 2])[:rows]


def test_all_successes_are_grpo():
    rows, (student, teacher) = random_rows(), logits()
    reward = torch.ones(8).double()
    found = loss(student, teacher, rows.logp, rows.old_logp, rows.mask, reward, rows.group)
    assert float(found.loss) == 0
    reward = 1 + rows.reward.abs()  # all above the threshold, and not all alike
    found = loss(student, teacher, rows.logp, rows.old_logp, rows.mask, reward, rows.group)
    advantage = grpo.advantages(reward, rows.group)
    plain = grpo.loss(rows.logp, rows.old_logp, rows.old_logp, rows.mask, advantage, 0.2, 0.28, beta=0.0, agg="token_mean").loss
    torch.testing.assert_close(found.loss, plain)


def test_lambda_zero_is_grpo_on_the_rows_that_are_not_distilled():
    rows, (student, teacher) = random_rows(), logits()
    reward, group = outcomes()
    logp = rows.logp.requires_grad_(True)
    mine = loss(student, teacher, logp, rows.old_logp, rows.mask, reward, group, lam=0.0)
    advantage = torch.where(routes(reward, group).distill.bool(), 0.0, grpo.advantages(reward, group))
    plain = grpo.loss(logp, rows.old_logp, rows.old_logp, rows.mask, advantage, 0.2, 0.28, beta=0.0, agg="token_mean")
    torch.testing.assert_close(mine.loss, plain.loss)
    torch.testing.assert_close(gradient(mine, logp), gradient(plain, logp))


def test_beta_zero_weighs_all_tokens_alike_and_weights_have_mean_one():
    rows, (student, teacher) = random_rows(), logits()
    chosen = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0])
    inside = rows.mask & chosen.bool()[:, None]
    assert torch.equal(distill(student, teacher, rows.mask, chosen, 0.5, 0.0).weight, inside.double())
    weight = distill(student, teacher, rows.mask, chosen, 0.5, 2.0).weight
    torch.testing.assert_close(weight[inside].mean(), torch.tensor(1.0).double())
    entropy = torch.distributions.Categorical(logits=teacher).entropy()[inside]
    assert torch.equal(weight[inside].argsort(descending=True), entropy.argsort())


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0])
def test_a_teacher_equal_to_the_student_teaches_nothing(kappa):
    rows, (student, _) = random_rows(), logits()
    student.requires_grad_(True)
    found = distill(student, student.detach(), rows.mask, torch.ones(8).long(), kappa)
    torch.testing.assert_close(found.kl.detach(), torch.zeros(8, 5).double(), atol=1e-15, rtol=0)
    torch.testing.assert_close(gradient((found.weight * found.kl).sum(), student)[0], torch.zeros_like(student), atol=1e-15, rtol=0)


def test_nothing_flows_into_the_teacher_and_padding_may_hold_anything():
    rows, (student, teacher) = random_rows(), logits()
    reward, group = outcomes()
    student.requires_grad_(True)
    teacher.requires_grad_(True)
    found = distill(student, teacher, rows.mask, routes(reward, group).distill)
    assert torch.autograd.grad((found.weight * found.kl).sum(), teacher, allow_unused=True, retain_graph=True)[0] is None
    before = gradient((found.weight * found.kl).sum(), student)[0]
    spoiled = torch.where(rows.mask[..., None], teacher.detach(), torch.nan)
    again = distill(torch.where(rows.mask[..., None], student, torch.nan), spoiled, rows.mask, routes(reward, group).distill)
    torch.testing.assert_close(again.kl, found.kl)
    torch.testing.assert_close(gradient((again.weight * again.kl).sum(), student)[0], before)


def test_a_response_never_learns_from_itself():
    reward, group = outcomes()
    assert sibling(reward, group).tolist() == [5, 0, 0, -1, 3, 0, -1, -1]
    assert routes(reward, group).demo.tolist() == [-1, 0, 0, -1, 3, -1, -1, -1]


def run_of(method, steps, folder=None):
    policy, task = make_toy_arith(small=True)
    run = Run(method.set("select.prompts", 4), policy, task, steps=steps, out=folder, checkpoint_every=2)
    if folder is not None:
        run.resume()
    return train(run)


@pytest.mark.parametrize("method", [METHOD, SDPO, METHOD.set("credit.fallback", "drop")])
def test_it_trains_through_the_loop(method):
    run = run_of(method, 3)
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in run.history)
    assert any(r["distilled"] > 0 and r["distillation"] > 0 for r in run.history)


def test_four_steps_equal_two_and_two_more(tmp_path):
    whole = run_of(METHOD, 4, tmp_path / "whole")
    run_of(METHOD, 2, tmp_path / "halves")
    halves = run_of(METHOD, 4, tmp_path / "halves")
    for mine, other in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_teacher_reads_prompt_response_prompt_and_positions_align():
    policy, task = make_toy_arith(small=True)
    run = Run(METHOD, policy, task, steps=1)
    batch = task.collect([p.but(samples=4) for p in task.prompts(2, run.rng)], run)
    rows, demo = torch.tensor([1, 6]), torch.tensor([0, 4])
    taught = SiblingInContext()(batch, rows, demo, run)
    right = batch.action[0][batch.mask[0]]
    text = torch.cat([batch.context[0], right, batch.context[1]])
    alone = batch[[1]].but(context=[text])
    torch.testing.assert_close(taught[0], policy.observe(alone, {"logits"}).logits[0])


def test_policies_that_read_no_text_are_refused_in_a_sentence():
    task = TokenBandit(2, 2, 1)
    with pytest.raises(ValueError, match="TabularTokens cannot read"):
        train(Run(METHOD, task.policy(), task, steps=3))
    with pytest.raises(ValueError, match="grpo or drop"):
        SampleRouted(fallback="skip")
