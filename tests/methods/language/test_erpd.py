"""ERPD: what it reduces to, collapsed teachers, the stages and what they hand on, checkpoints and training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.method import Method, Stage
from anypo.methods.language.erpd import (
    DATA,
    METHOD,
    STUDENT,
    TEACHER,
    TRAINED_TEACHER,
    UNLEARNED,
    VARIANTS,
    DistilledSignal,
    ExtremeRegion,
    FastSteps,
    KeptPolicy,
    signal,
    stage1_loss,
    stage2_loss,
)
from anypo.methods.language.grpo import advantages
from anypo.methods.language.lspd import ModelTeacher, TeacherMargin
from anypo.policy import Signals
from anypo.run import Run
from anypo.seams.objective import kl_estimate
from tests.helpers import gradient, random_rows

WEAK, FIXED = VARIANTS["weak"], VARIANTS["fixed"]


def make_run(method: Method = METHOD, steps: int = 4, out: Path | None = None, targets: int = 3) -> Run:
    task = TokenBandit(4, 3, 2, targets=targets, seed=1)
    policy = task.policy(scale=0.5)
    policy.learning_rate = 4.0
    return Run(method, policy, task, steps=steps, seed=3, out=out, checkpoint_every=1)


@pytest.mark.parametrize("filter", ["sign", "none"])
def test_without_room_for_the_signal_nothing_is_learned(filter: str) -> None:
    r = random_rows()
    found = signal(r.old_logp, r.ref_logp, r.mask, r.advantages, clip=0.0, filter=filter, drop_zero=False)
    assert found.eq(0).all()
    logp = r.logp.requires_grad_()
    assert gradient(stage2_loss(logp, r.old_logp, r.ref_logp, found, r.mask, beta=0.0), logp)[0].eq(0).all()


def test_a_teacher_that_is_the_base_leaves_the_student_at_the_base() -> None:
    r = random_rows()
    found = signal(r.ref_logp, r.ref_logp, r.mask, r.advantages)
    logp = r.ref_logp.clone().requires_grad_()
    value = stage2_loss(logp, r.old_logp, r.ref_logp, found, r.mask)
    assert found.eq(0).all() and value.loss == 0 and gradient(value, logp)[0].eq(0).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_unfiltered_it_is_on_policy_distillation_relative_to_the_base(seed: int) -> None:
    """Without clip, beta and filter, on the student's own samples: the gradient of KL(student||teacher) - KL(student||base), by enumeration."""
    g = torch.Generator().manual_seed(seed)
    theta, teacher, base = torch.randn(3, 6, generator=g, dtype=torch.float64)
    theta.requires_grad_()
    logp, teacher, base = theta.log_softmax(0), teacher.log_softmax(0), base.log_softmax(0)
    chance = logp.detach().exp()
    mask = torch.ones(6, 1, dtype=torch.bool)
    found = signal(teacher[:, None], base[:, None], mask, torch.zeros(6), clip=math.inf, filter="none", drop_zero=False)
    # each of the six rows stands for its share of the samples
    value = stage2_loss(
        logp[:, None], logp.detach()[:, None], base[:, None], 6 * chance[:, None] * found, mask, clip_eps=math.inf, beta=0.0
    )
    logp = theta.log_softmax(0)
    exact = (logp.exp() * (logp - teacher)).sum() - (logp.exp() * (logp - base)).sum()
    torch.testing.assert_close(gradient(value.loss, theta)[0], gradient(exact, theta)[0], atol=1e-10, rtol=0)


def test_the_contrast_with_the_base_itself_is_the_strong_signal() -> None:
    strong, weak = make_run(STUDENT, targets=4), make_run(STUDENT.but(credit=DistilledSignal(contrast=KeptPolicy("reference"))), targets=4)
    for run in (strong, weak):
        run.named_policy("reference")
        run.policy.logits.data += torch.randn(run.policy.logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        step(run)  # the first step keeps the moved policy as the teacher and starts at the base
    assert not torch.equal(strong.policy.logits, strong.policies["reference"].logits)
    assert torch.equal(strong.policy.logits, weak.policy.logits)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), filter=st.sampled_from(["sign", "none"]), drop_zero=st.booleans())
def test_the_signal_is_bounded_and_never_against_the_outcome_when_filtered(seed: int, filter: str, drop_zero: bool) -> None:
    r = random_rows(seed, spread=3.0)
    r.advantages[2] = 0.0
    found = signal(r.logp, r.ref_logp, r.mask, r.advantages, 1.5, filter, drop_zero)
    assert (found.abs() <= 1.5).all() and found[~r.mask].eq(0).all()
    assert found[2].eq(0).all() or not drop_zero
    if filter == "sign":
        assert (found * r.advantages[:, None] >= 0).all()


def test_collapsed_policies_and_padding_give_finite_signals() -> None:
    teacher = torch.tensor([[-math.inf, -math.inf, -0.1, math.nan]])
    reference = torch.tensor([[-0.5, -math.inf, -math.inf, math.nan]])
    found = signal(teacher, reference, torch.tensor([[1, 1, 1, 0]]), torch.ones(1), filter="none")
    assert found.tolist() == [[-2.0, 0.0, 2.0, 0.0]]


def test_several_teachers_count_as_their_mean_and_one_collapse_does_not_decide() -> None:
    r = random_rows()
    both = signal(torch.stack([r.logp, r.old_logp]), r.ref_logp, r.mask, r.advantages, filter="none")
    single = [signal(t, r.ref_logp, r.mask, r.advantages, filter="none") for t in (r.logp, r.old_logp)]
    torch.testing.assert_close(both, (single[0] + single[1]) / 2)
    collapsed = signal(torch.tensor([[[-math.inf]], [[-0.1]], [[-0.1]]]), torch.tensor([[-3.0]]), torch.ones(1, 1), torch.ones(1))
    assert float(collapsed) == pytest.approx((2 + 2 - 2) / 3)


def test_bad_settings_are_refused() -> None:
    r = random_rows()
    with pytest.raises(ValueError, match="sign or none"):
        signal(r.logp, r.ref_logp, r.mask, r.advantages, filter="half")
    with pytest.raises(ValueError, match="at least 0"):
        signal(r.logp, r.ref_logp, r.mask, r.advantages, clip=-1.0)
    with pytest.raises(ValueError, match="ce, mse, rl, unlearn"):
        stage1_loss(r.logp, r.old_logp, r.mask, r.advantages, mode="dpo")


def test_first_stages_learn_from_the_side_they_are_for() -> None:
    r = random_rows()
    logp = r.logp.requires_grad_()
    for mode, sign in (("ce", 1), ("unlearn", -1)):
        slope = gradient(stage1_loss(logp, r.old_logp, r.mask, r.advantages, mode), logp)[0]
        torch.testing.assert_close(slope, -(sign * r.advantages).clamp(min=0)[:, None] * r.mask / r.mask.sum())
    at_target = torch.where(r.mask, r.old_logp + r.advantages[:, None] / 2, torch.nan)
    assert float(stage1_loss(at_target, r.old_logp, r.mask, r.advantages, "mse", tau=2.0)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("mode", ["ce", "mse", "rl", "unlearn"])
def test_empty_rows_and_padding_do_not_matter(mode: str) -> None:
    r = random_rows()
    clean = stage1_loss(r.logp, r.old_logp, r.mask, r.advantages, mode)
    logp = torch.cat([r.logp.masked_fill(~r.mask, -math.inf), torch.full((1, 5), math.nan)]).requires_grad_()
    old, mask = torch.cat([r.old_logp, r.old_logp[:1]]), torch.cat([r.mask, torch.zeros(1, 5, dtype=torch.bool)])
    padded = stage1_loss(logp, old, mask, torch.cat([r.advantages, torch.ones(1)]), mode)
    torch.testing.assert_close(padded, clean)
    assert torch.isfinite(gradient(padded, logp)[0]).all()
    assert stage1_loss(r.logp, r.old_logp, torch.zeros_like(r.mask), r.advantages, mode) == 0


def test_the_extreme_region_sees_the_base_as_the_policy_that_acted() -> None:
    run = make_run(TRAINED_TEACHER.but(objective=ExtremeRegion("mse", tau=0.7)))
    batch = step(run)
    assert batch.advantage is not None
    new = run.policy.observe(batch, {"logp"})
    wanted = stage1_loss(new.logp, batch.logp, batch.mask, advantages(batch.reward, batch.group), "mse", 0.7)  # type: ignore[arg-type]
    torch.testing.assert_close(run.method.objective(batch, new, run).value, wanted)
    torch.testing.assert_close(batch.logp, run.score(batch, {"logp"}, "reference").logp)


def test_fixed_data_comes_from_the_base_once() -> None:
    run = make_run(TRAINED_TEACHER)
    first, second = step(run), step(run)
    assert len(first) == 8 * 4 * 8 and run.actions == first.mask.sum()
    assert torch.equal(first.action, second.action) and torch.equal(first.reward, second.reward)
    assert not torch.equal(run.policy.logits, run.policies["reference"].logits)


def test_fast_steps_are_five_times_the_usual_ones() -> None:
    run = make_run()
    assert FastSteps().build(run.policy).param_groups[0]["lr"] == pytest.approx(20.0)
    assert FastSteps(learning_rate=0.1, speed=2.0).build(run.policy).param_groups[0]["lr"] == pytest.approx(0.2)


def test_the_student_starts_at_the_base_with_the_teacher_frozen() -> None:
    run = make_run(steps=4)
    base = run.policy.logits.detach().clone()
    step(run)
    step(run)
    extreme = run.policy.logits.detach().clone()
    batch = step(run)
    assert run.method.name == "erpd_student" and torch.equal(run.policies["reference"].logits, base)
    assert torch.equal(run.policies[TEACHER].logits, extreme)
    torch.testing.assert_close(batch.logp, run.score(batch, {"logp"}, "reference").logp)
    assert (run.policy.logits - base).abs().max() < (extreme - base).abs().max()
    step(run)
    assert torch.equal(run.policies[TEACHER].logits, extreme)


def test_components_of_the_student_are_equation_8() -> None:
    run = make_run(steps=4)
    for _ in range(3):
        batch = step(run)
    new = Signals({k: v.clone().requires_grad_() for k, v in run.policy.observe(batch, {"logp"}).items()})
    teacher, base = (run.score(batch, {"logp"}, name).logp for name in (TEACHER, "reference"))
    taught = signal(teacher, base, batch.mask, advantages(batch.reward, batch.group))  # type: ignore[arg-type]
    assert batch.advantage is not None and taught.any()
    torch.testing.assert_close(batch.advantage, taught)
    wanted = stage2_loss(new.logp, batch.logp, base, taught, batch.mask)
    assert float(wanted.kl.detach()) == pytest.approx(float(kl_estimate(new.logp.detach(), base, batch.mask).mean()))
    found = run.loss_fn(batch, new).value
    torch.testing.assert_close(found, wanted.loss)
    torch.testing.assert_close(gradient(found, new.logp)[0], gradient(wanted.loss, new.logp)[0])


def test_the_weak_variant_trains_a_policy_of_the_failures_from_the_base() -> None:
    run = make_run(WEAK, steps=4)
    step(run)
    step(run)
    failures = run.policy.logits.detach().clone()
    step(run)
    teacher, base = run.policies[TEACHER].logits, run.policies["reference"].logits
    assert torch.equal(run.policies[UNLEARNED].logits, failures) and not torch.equal(teacher, base)
    task = run.task
    assert task.expected_success(run.policies[UNLEARNED]) < task.expected_success(run.policies["reference"])  # type: ignore[attr-defined]


def test_the_credit_takes_teachers_of_lspd_and_refuses_one_that_was_not_trained() -> None:
    run = make_run(
        STUDENT.but(prepare=(), credit=DistilledSignal(teachers=(ModelTeacher(temperature=0.5),), filter="none", drop_zero=False))
    )
    batch = step(run)
    margin = TeacherMargin(ModelTeacher(temperature=0.5))(batch, run)
    assert batch.advantage is not None
    torch.testing.assert_close(batch.advantage, margin.clamp(-2, 2))
    with pytest.raises(ValueError, match="no earlier stage has trained"):
        step(make_run(STUDENT.but(prepare=())))


@pytest.mark.parametrize("method", [METHOD, WEAK, FIXED.but(stages=(Stage(FIXED.stages[0].method, 0.5), Stage(FIXED.stages[1].method, 0.5)))],
                         ids=lambda m: m.name)  # fmt: skip
@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_resume_continues_identically(method: Method, interrupted: int, tmp_path: Path) -> None:
    whole = train(make_run(method))
    first = make_run(method, out=tmp_path)
    for _ in range(interrupted):
        step(first)
    continued = make_run(method, out=tmp_path)
    assert continued.resume() and continued.step == interrupted and DATA in continued.state
    train(continued)
    assert torch.equal(continued.policy.logits, whole.policy.logits)
    assert all(math.isfinite(v) for record in whole.history for v in record.values() if isinstance(v, float))


def test_the_student_of_a_teacher_trained_on_fixed_data_succeeds_more_often() -> None:
    run = make_run(steps=20, targets=1)
    before = run.task.expected_success(run.policy)  # type: ignore[attr-defined]
    train(run)
    assert run.task.expected_success(run.policy) > 2 * before  # type: ignore[attr-defined]
