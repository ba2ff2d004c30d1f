"""LSPD: reductions, the teacher, replay, checkpoints and training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.lspd import FLOOR, METHOD, TEACHER, VARIANTS, LogProbRegression, ModelTeacher, TeacherMargin, huber, loss
from anypo.methods.language.lspd import tree_gradient as gradients
from anypo.policy import Signals
from anypo.reproductions.common import plain_sgd
from anypo.run import Run

OPD, REPLAY = VARIANTS["opd"], VARIANTS["replay"]


def random_rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, the teacher's, entropies, and a mask with one empty row."""
    generator = torch.Generator().manual_seed(seed)
    logp, teacher = -3 * torch.rand(2, 5, 4, generator=generator, dtype=torch.float64)
    entropy = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 0, 1, 3])[:, None]
    return logp.requires_grad_(), teacher, entropy.requires_grad_(), mask


def make_run(method: Method, steps: int = 4, out: Path | None = None) -> Run:
    task = TokenBandit(4, 3, 2, seed=1)
    return Run(plain_sgd(method, 8.0, epochs=method.update.epochs, group_size=4), task.policy(scale=1.0), task, steps=steps, seed=3, out=out,
               checkpoint_every=2)  # fmt: skip


def test_without_bound_and_entropy_the_gradient_is_the_mean_error() -> None:
    logp, teacher, entropy, mask = random_rows()
    found = torch.autograd.grad(loss(logp, teacher, entropy, mask, delta=math.inf, eta=0.0).loss, logp)[0]
    torch.testing.assert_close(found, (logp - teacher).detach() * mask / mask.sum())


def test_first_update_without_bound_and_entropy_is_the_policy_gradient() -> None:
    ours = METHOD.set("objective.delta", math.inf).set("update.epochs", 1).but(regularize=())
    moved = []
    for method in (ours, OPD):
        run = make_run(method, steps=1)
        start = run.policy.logits.detach().clone()
        train(run)
        moved.append(run.policy.logits.detach() - start)
    assert moved[0].abs().max() > 1e-3
    torch.testing.assert_close(moved[0], moved[1])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 8))
def test_expected_gradient_is_that_of_the_reverse_kl(seed: int, actions: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta, teacher = torch.randn(2, actions, generator=generator, dtype=torch.float64)
    found = gradients(theta, teacher.softmax(0))
    torch.testing.assert_close(found.ls_grad, found.kl_grad, atol=1e-10, rtol=0)


def test_at_the_teacher_only_the_entropy_acts() -> None:
    logp, _, entropy, mask = random_rows()
    value = loss(logp, logp.detach(), entropy, mask, eta=0.05).loss
    by_logp, by_entropy = torch.autograd.grad(value, [logp, entropy])
    assert not by_logp.any()
    torch.testing.assert_close(by_entropy, -0.05 * mask.double() / mask.sum())


def test_large_errors_pull_with_bounded_strength() -> None:
    logp, teacher, entropy, mask = random_rows()
    found = torch.autograd.grad(loss(logp, teacher - 50, entropy, mask, delta=0.7).loss, logp)[0]
    torch.testing.assert_close(found, 0.7 * mask.double() / mask.sum())
    error = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(huber(error, 1.0), torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none"))
    torch.testing.assert_close(huber(error, math.inf), error**2 / 2)


def test_impossible_tokens_are_floored_and_padding_may_hold_anything() -> None:
    logp, teacher, entropy, mask = random_rows()
    teacher = teacher.index_put((torch.tensor(0), torch.tensor(0)), teacher.new_tensor(-math.inf))
    clean = loss(logp, teacher, entropy, mask)
    assert torch.isfinite(clean.loss)
    floored = loss(logp, teacher.clamp(min=FLOOR), entropy, mask).loss
    assert clean.loss == floored
    filled = [x.detach().masked_fill(~mask, fill).requires_grad_() for x, fill in ((logp, -math.inf), (entropy, math.nan))]
    value = loss(filled[0], teacher.masked_fill(~mask, math.nan), filled[1], mask).loss
    found = torch.autograd.grad(value, filled)
    for got, wanted in zip(found, torch.autograd.grad(clean.loss, [logp, entropy]), strict=True):
        torch.testing.assert_close(got, wanted)


def test_token_mean_over_the_batch_and_zero_without_tokens() -> None:
    logp, teacher, entropy, mask = random_rows()
    flat = loss(logp[mask][None], teacher[mask][None], entropy[mask][None], torch.ones(1, int(mask.sum())))
    torch.testing.assert_close(loss(logp, teacher, entropy, mask).loss, flat.loss)
    assert loss(logp, teacher, entropy, torch.zeros_like(mask)).loss == 0


def test_components_together_are_the_loss() -> None:
    """The objective sees the teacher through the advantages alone; with the bonus it is equation 4, also off-policy."""
    run = make_run(METHOD)
    batch = step(run)
    assert batch.advantage is not None
    new = Signals({k: v.clone().requires_grad_() for k, v in run.policy.observe(batch, {"logp", "entropy"}).items()})
    assert not torch.allclose(new.logp, batch.logp)
    found = run.loss_fn(batch, new).value
    wanted = loss(new.logp, batch.signal("teacher_logp"), new.entropy, batch.mask, 1.0, 0.01).loss
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, new.logp)[0], torch.autograd.grad(wanted, new.logp)[0])


def test_the_default_teacher_is_the_sharpened_start() -> None:
    run = make_run(METHOD)
    start = run.policy.logits.detach().clone()
    step(run)
    batch = step(run)
    assert torch.equal(run.policies[TEACHER].logits, start)
    wanted = (start[batch.context] / 0.5).log_softmax(-1).gather(-1, batch.action[..., None])[..., 0]
    torch.testing.assert_close(batch.signal("teacher_logp"), wanted)
    assert not batch.signal("teacher_logp").requires_grad and "temperature" not in batch.signals
    with pytest.raises(ValueError, match="above 0"):
        ModelTeacher(temperature=0.0)
    with pytest.raises(ValueError, match="above 0"):
        LogProbRegression(delta=0.0)


def test_a_teacher_with_other_tokens_is_refused() -> None:
    run = make_run(METHOD.but(credit=TeacherMargin(ModelTeacher(model="builtin"))))
    with pytest.raises(ValueError, match="same tokenizer"):
        step(run)


def test_replay_stops_sampling_and_deals_earlier_rows() -> None:
    run = make_run(REPLAY.set("rollout.sampling", 0.5), steps=6)
    scored = []

    class Counting:
        def __call__(self, batch, run):  # type: ignore[no-untyped-def]
            scored.append(len(batch))
            return ModelTeacher()(batch, run)

    run.method.credit.teacher = Counting()
    versions, generated = [], []
    for _ in range(6):
        batch = step(run)
        assert len(batch) == 4 * 16
        versions.append(set(batch.version.tolist()))
        generated.append(run.actions)
    assert generated == [32, 64, 96, 96, 96, 96]
    assert versions[0] == {0} and versions[-1] == {0, 4, 8}
    assert scored == [16, 16, 16], "the teacher scores every trajectory once"
    groups = [set(b.group.tolist()) for b in run.method.rollout.batches]
    assert not groups[0] & groups[1] and not groups[1] & groups[2]


def test_replayed_rows_aim_at_the_teacher() -> None:
    run = make_run(REPLAY, steps=8)
    for _ in range(5):
        batch = step(run)
    assert batch.advantage is not None
    torch.testing.assert_close(batch.logp + batch.advantage, batch.signal("teacher_logp"))


@pytest.mark.parametrize("method", [METHOD, REPLAY.set("rollout.sampling", 0.75)], ids=["fresh", "replay"])
def test_resume_continues_identically(method: Method, tmp_path: Path) -> None:
    whole = train(make_run(method))
    first = make_run(method, out=tmp_path)
    step(first)
    step(first)
    continued = make_run(method, out=tmp_path)
    assert continued.resume() and continued.step == 2
    train(continued)
    torch.testing.assert_close(continued.policy.logits, whole.policy.logits, rtol=0, atol=0)
    torch.testing.assert_close(continued.policies[TEACHER].logits, whole.policies[TEACHER].logits, rtol=0, atol=0)


@pytest.mark.parametrize("method", [METHOD, REPLAY, OPD], ids=lambda m: m.name)
def test_trains_towards_the_teacher(method: Method) -> None:
    run = make_run(method, steps=8)
    wanted = (run.policy.logits.detach() / 0.5).log_softmax(-1)

    def distance(policy: TabularTokens) -> float:
        own = policy.logits.detach().log_softmax(-1)
        return float((own.exp() * (own - wanted)).sum(-1).mean())

    before = distance(run.policy)
    train(run)
    assert distance(run.policy) < before
    assert all(math.isfinite(v) for record in run.history for v in record.values() if isinstance(v, float))
