"""SSOPD: when it is GRPO, pairs against plain loops, where the term acts, what the teacher reads, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith
from anypo.loops.on_policy import train
from anypo.methods.language import grpo
from anypo.methods.language.ssopd import (
    DIVERGENCES,
    METHOD,
    VARIANTS,
    ReferenceInContext,
    WitnessCredit,
    choose,
    distill,
    divergences,
    frontier,
    loss,
)
from anypo.policy import Signals
from anypo.reproductions.language.ssopd import Reader
from anypo.run import Run
from anypo.seams.teachers import AnswerShown, SiblingInContext
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows, trained

WITH_READER = METHOD.but(credit=WitnessCredit(teacher=Reader()))


def distributions(seed: int = 0, groups: int = 4) -> dict[str, Tensor]:
    """Random log-probs [Q,T,V] of student and teacher, a ragged mask and positive weights."""
    g = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, groups, 5, 3, generator=g, dtype=torch.float64).log_softmax(-1)
    mask = torch.arange(5) < torch.randint(1, 6, (groups, 1), generator=g)
    return {"student_logp": student, "teacher_logp": teacher, "mask": mask, "weight": torch.rand(groups, generator=g).double() + 0.1}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000))
def test_pairs_are_the_shortest_right_and_the_longest_wrong(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    correct, length, group = (
        torch.rand(12, generator=g) < 0.5,
        torch.randint(0, 4, (12,), generator=g),
        torch.randint(3, (12,), generator=g) * 7,
    )
    found = choose(correct, length, group)
    for pair, number in zip(found.tolist(), torch.unique(group).tolist(), strict=True):
        rows = [i for i in range(12) if group[i] == number]
        right, wrong = [i for i in rows if correct[i]], [i for i in rows if not correct[i]]
        mixed = bool(right and wrong)
        expected = [min(right, key=lambda i: (length[i], i)), max(wrong, key=lambda i: (length[i], -i))] if mixed else [-1, -1]
        assert pair == expected
    assert torch.equal(frontier(correct, group) > 0, found[:, 0] >= 0)


def test_the_weight_is_one_at_the_frontier_and_zero_for_pure_groups() -> None:
    assert frontier(torch.tensor([1, 0, 1, 1, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 2, 2, 3])).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_without_lam_or_mixed_groups_it_is_grpo(divergence: str) -> None:
    rows, d = random_rows(), distributions()
    logp, student = rows.logp.requires_grad_(), d["student_logp"].requires_grad_()
    plain = grpo.loss(logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, beta=0.0)
    expected = gradient(plain, logp)[0]
    advantages = rows.advantages[:, None] * rows.mask
    none = {"student_logp": torch.zeros(0, 5, 3), "teacher_logp": torch.zeros(0, 5, 3), "mask": torch.zeros(0, 5), "weight": torch.zeros(0)}
    for lam, inputs in ((0.0, d), (0.1, none), (0.1, d | {"weight": torch.zeros(4)})):
        found = loss(logp, rows.old_logp, advantages, rows.mask, **inputs, divergence=divergence, lam=lam)
        torch.testing.assert_close(found.loss.detach(), plain.loss.detach())
        slope = torch.autograd.grad(found.loss, [logp, student], allow_unused=True)
        torch.testing.assert_close(slope[0], expected)
        assert slope[1] is None or slope[1].eq(0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_teacher_that_is_the_student_gives_nothing(divergence: str) -> None:
    d = distributions()
    logits = d["student_logp"].clone().requires_grad_()
    value = distill(logits.log_softmax(-1), d["student_logp"], d["mask"], d["weight"], divergence)
    slope = gradient(value, logits)[0]
    torch.testing.assert_close(value.detach(), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(slope, torch.zeros_like(slope))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), divergence=st.sampled_from(DIVERGENCES))
def test_divergences_are_positive_and_jsd_is_symmetric_and_below_log_2(seed: int, divergence: str) -> None:
    d = distributions(seed)
    found = divergences(d["student_logp"], d["teacher_logp"], d["mask"], divergence)
    assert bool((found[d["mask"]] > 0).all()) and found[~d["mask"]].eq(0).all()
    if divergence == "jsd":
        assert float(found.max()) < 0.6932
        torch.testing.assert_close(found, divergences(d["teacher_logp"], d["student_logp"], d["mask"], divergence))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_padding_may_hold_anything_and_nothing_flows_into_the_teacher(divergence: str) -> None:
    d = distributions()
    outside = ~d["mask"][..., None]
    student = d["student_logp"].masked_fill(outside, -torch.inf).requires_grad_()
    teacher = d["teacher_logp"].masked_fill(outside, torch.nan).requires_grad_()
    value = distill(student, teacher, d["mask"], d["weight"], divergence)
    torch.testing.assert_close(value.detach(), distill(**d, divergence=divergence))
    slope = torch.autograd.grad(value, [student, teacher], allow_unused=True)
    assert slope[1] is None and torch.isfinite(slope[0]).all() and slope[0].masked_select(outside).eq(0).all()


def test_pure_groups_do_not_dilute_the_mean_and_an_empty_row_adds_nothing() -> None:
    d = distributions()
    d["weight"][2:] = 0
    torch.testing.assert_close(distill(**d), distill(**{name: value[:2] for name, value in d.items()}))
    d["mask"][0] = False
    assert torch.isfinite(distill(**d))
    with pytest.raises(ValueError, match="unknown divergence"):
        distill(**d, divergence="k3")


# -- the teacher -----------------------------------------------------------------------------------------------------------------------------


def collected(method=METHOD) -> tuple[Run, Batch]:
    """Four sums with four attempts each; the first attempt is held to be right, the rest wrong, but for the last sum, which is all wrong."""
    task, policy = ToyArith(small=True), GruPolicy(hidden=16)
    run = Run(method, policy, task, steps=2)
    batch = run.collect([p.but(samples=4) for p in task.prompts(4, run.rng)])
    batch.reward = ((torch.arange(16) % 4 == 0) & (batch.group < 3)).float()
    return run, batch


def test_the_teacher_is_the_current_policy_that_reads_the_witness() -> None:
    run, batch = collected()
    run.method.credit(batch, run)
    pairs = [pair for pair in choose(batch.reward > 0, batch.lengths, batch.group).tolist() if pair[0] >= 0]
    assert len(pairs) == 3 and batch.signals["frontier"].count_nonzero() == 3
    for right, wrong in pairs:
        context = torch.cat([batch.context[right], batch.action[right][batch.mask[right]], batch.context[wrong]])
        expected = run.policy.observe(batch[wrong].but(context=[context]), {"logits"}).logits[0]
        torch.testing.assert_close(batch.signals["witness_logits"][wrong], expected)
        assert float(batch.signals["frontier"][wrong]) == pytest.approx(0.75)
    taught = {wrong for _, wrong in pairs}
    assert all((logits is None) == (row not in taught) for row, logits in enumerate(batch.signals["witness_logits"]))


def test_a_witness_that_is_the_reference_solution_is_the_reference_variant() -> None:
    run, batch = collected()
    for row in (0, 4, 8):  # the witnesses, without an end token
        solution = run.policy.encode(batch.signals["columns"][row]["solution"])
        batch.action[row, : len(solution)], batch.mask[row] = solution, torch.arange(batch.horizon) < len(solution)
    rows, demo = torch.tensor([1, 5, 9]), torch.tensor([0, 4, 8])
    own = SiblingInContext(policy=None)(batch, rows, demo, run)
    torch.testing.assert_close(own, ReferenceInContext(answer=AnswerShown("{prompt}{answer}{prompt}"))(batch, rows, demo, run))


def test_pure_groups_get_no_gradient_and_a_taught_row_only_inside_its_mask() -> None:
    run, batch = collected()
    run.method.credit(batch, run)
    logits = run.policy.observe(batch, {"logits"}).logits.requires_grad_()
    term = run.method.regularize[0](batch, Signals(logits=logits), run)
    slope = gradient(term.value, logits)[0].abs().amax(-1)
    assert torch.equal(slope.amax(1) > 0, batch.signals["frontier"] > 0)
    assert slope[~batch.mask].eq(0).all()
    batch.reward = torch.ones(16)
    run.method.credit(batch, run)
    nothing = run.method.regularize[0](batch, Signals(logits=logits), run)
    assert float(nothing.value) == 0 and not nothing.value.requires_grad


def test_a_policy_that_reads_no_text_is_refused_and_a_full_context_is_left_out() -> None:
    with pytest.raises(ValueError, match="ssopd shows a correct response"):
        trained(METHOD, 1)
    run, batch = collected()
    run.policy.context_limit = 6
    run.method.credit(batch, run)
    assert batch.signals["frontier"].eq(0).all()
    with pytest.raises(ValueError, match="regularize.divergence"):
        METHOD.set("regularize.0.divergence", "k3")


# -- in the loop -----------------------------------------------------------------------------------------------------------------------------


class OddSums(ToyArith):
    """What an untrained policy succeeds in: a first token of odd number."""

    def score(self, batch: Batch, run: Run) -> Tensor:
        return (batch.action[:, 0] % 2).float()


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda m: m.name)
def test_the_loop_trains_shared_parameters(method) -> None:
    task, policy = OddSums(small=True), GruPolicy(hidden=16)
    before = policy.output.weight.detach().clone()
    run = train(Run(method.set("select.prompts", 4), policy, task, steps=3))
    assert all(torch.isfinite(p).all() for p in policy.parameters()) and not torch.equal(before, policy.output.weight)
    assert all(record["distillation"] > 0 and record["mixed_groups"] > 0 for record in run.history)


def test_lam_zero_trains_as_grpo_to_the_last_bit() -> None:
    plain = trained(grpo.METHOD.but(regularize=()), 4)
    assert torch.equal(trained(WITH_READER.set("regularize.0.lam", 0.0), 4).policy.logits, plain.policy.logits)
    assert not torch.equal(trained(WITH_READER, 4).policy.logits, plain.policy.logits)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_trains_over_minibatches_and_epochs(divergence: str) -> None:
    method = WITH_READER.set("regularize.0.divergence", divergence).set("update.epochs", 2).set("update.minibatches", 2)
    assert_trains(method, vocabulary=2, horizon=3, eos=0)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(WITH_READER, tmp_path)
