"""FBOS-RL: its limits, what the feedback may and may not touch, the two copies of a guided attempt, and runs on lock and on text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.batch import Batch
from anypo.domains.language.toys.lock import Lock, LockPolicy, make_lock
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.fbos_rl import METHOD, FeedbackGuided, TwoObjectives, ecc_advantages, epa_advantages, loss, pick_feedback
from anypo.policy import Signals
from anypo.run import Run
from tests.helpers import assert_continues, gradient, random_rows

SMALL = {"classes": 4, "length": 3, "symbols": 3, "prompts_per_step": 3}


def run_on_lock(method: Method = METHOD, steps: int = 1, seed: int = 0, out: Path | None = None) -> Run:
    policy, task = make_lock(seed=seed, **SMALL)
    return Run(method, policy, task, steps=steps, seed=seed, out=out, checkpoint_every=2)


def collected(method: Method = METHOD, seed: int = 0) -> tuple[Run, Batch]:
    run = run_on_lock(method, seed=seed)
    return run, method.rollout(method.select(run.task, run), run)


def test_without_guided_rows_the_loss_is_grpos() -> None:
    rows = random_rows(1)
    reward = (rows.reward > 0).double()
    logp = rows.logp.requires_grad_()
    none = torch.zeros(len(reward), dtype=torch.bool)
    mine = loss(logp, rows.old_logp, logp, rows.old_logp, reward, rows.group, none, rows.mask)
    advantages = grpo.advantages(reward, rows.group)
    theirs = grpo.loss(logp, rows.old_logp, rows.ref_logp, rows.mask, advantages, beta=0.0)
    torch.testing.assert_close(mine.loss, theirs.loss)
    torch.testing.assert_close(gradient(mine.loss, logp), gradient(theirs, logp))
    assert float(mine.ecc.detach()) == 0 and torch.equal(mine.loss, mine.epa)


def test_lam_zero_leaves_epa_alone() -> None:
    rows = random_rows(2)
    guided = torch.arange(len(rows.reward)) % 2 == 1
    told = rows.logp.clone().requires_grad_()
    found = loss(rows.logp, rows.old_logp, told, rows.old_logp, rows.reward, rows.group, guided, rows.mask, lam=0.0)
    assert torch.equal(found.loss, found.epa)
    assert not gradient(found.loss, told)[0].any()


def test_a_run_without_guided_attempts_is_grpo() -> None:
    plain = METHOD.set("rollout.plain", 8)
    mine = train(run_on_lock(plain, steps=3))
    theirs = train(run_on_lock(grpo.METHOD.but(regularize=()), steps=3))
    assert torch.equal(mine.policy.table, theirs.policy.table)


def test_equal_rewards_teach_nothing() -> None:
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    guided = torch.tensor([0, 1, 1, 0, 0, 1])
    for value in (0.0, 1.0):
        reward = torch.full((6,), value, dtype=torch.float64)
        assert not epa_advantages(reward, group).any() and not ecc_advantages(reward, group, guided).any()


def test_a_lone_guided_attempt_has_no_ecc_advantage() -> None:
    reward = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    found = ecc_advantages(reward, torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 0, 1, 1]))
    assert not found[:4].any() and float(found[5]) == pytest.approx(1.0, abs=1e-5)


def test_the_attempt_to_comment_on_has_failed() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        group = torch.randperm(12, generator=g) % 4
        reward = torch.randint(2, (12,), generator=g).double()
        u = torch.rand(4, generator=g, dtype=torch.float64)
        for name, row in enumerate(pick_feedback(reward, group, u).tolist()):
            failed = ((group == name) & (reward < 1)).nonzero().flatten().tolist()
            assert row == (failed[min(int(u[name] * len(failed)), len(failed) - 1)] if failed else -1)
    assert pick_feedback(torch.zeros(2), torch.tensor([0, 0]), torch.ones(1)).tolist() == [1]


def test_the_usual_credit_gives_both_advantages() -> None:
    _, batch = collected()
    refining = batch.signals["refining"]
    batch.reward = batch.signals["task_reward"]
    credit = METHOD.credit(batch, None)[:, 0]  # type: ignore[arg-type]
    prompts = int(batch.group[~refining].max()) + 1
    guided = torch.tensor([bool((c[1:] >= 0).any()) for c in batch.context])
    assert guided.sum() == refining.sum() > 0  # only the refining copies see the feedback
    torch.testing.assert_close(credit[~refining], epa_advantages(batch.reward, batch.group)[~refining])
    told = ecc_advantages(batch.reward, batch.group % prompts, refining)
    torch.testing.assert_close(credit[refining], told[refining])


def test_each_copy_keeps_its_own_log_probs() -> None:
    run, batch = collected()
    refining, guided = batch.signals["refining"], int(batch.signals["refining"].sum())
    twin = slice(int((~refining).sum()) - guided, int((~refining).sum()))
    assert torch.equal(batch.action[refining], batch.action[twin])
    assert not torch.allclose(batch.logp[refining], batch.logp[twin])
    torch.testing.assert_close(run.score(batch, {"logp"}).logp, batch.logp)  # ratio 1 at the first step, in both contexts


def test_guided_behaviour_keeps_the_log_probs_it_was_drawn_with() -> None:
    method = METHOD.set("rollout.behaviour", "guided")
    run, batch = collected(method)
    refining = batch.signals["refining"]
    total, guided = int((~refining).sum()), int(refining.sum())
    assert torch.equal(batch.logp[refining], batch.logp[total - guided : total])
    assert "sampled_elsewhere" in batch.signals  # so that the ratio is computed, not taken to be 1
    step(run)


class Misleading(Lock):
    """Says the opposite."""

    def commented(self, prompt, batch, row):  # type: ignore[no-untyped-def]
        told = super().commented(prompt, batch, row)
        return told.but(content=told.content.translate(str.maketrans("+-", "-+")))


def test_feedback_never_reaches_epa() -> None:
    batches = []
    for kind in (Lock, Misleading):
        task = kind(**SMALL | {"length": 2})
        policy = LockPolicy(task.codes, task.symbols)
        torch.nn.init.zeros_(policy.scaled_trust)  # so that both draw the same attempts
        run = Run(METHOD, policy, task, steps=1)
        batch = METHOD.rollout(METHOD.select(task, run), run)
        batch.reward = batch.signals["task_reward"]
        batch.advantage = METHOD.credit(batch, run)
        with torch.no_grad():
            policy.scaled_trust.fill_(7.0)
        new = policy.evaluate(batch, {"logp"})
        batches.append([METHOD.objective(batch, new, run).metrics[name] for name in ("epa", "ecc")])
    assert batches[0][0] == batches[1][0] and batches[0][1] != batches[1][1]


def test_masked_places_may_hold_anything() -> None:
    rows = random_rows(3)
    batch = Batch(action=torch.zeros(rows.mask.shape).long(), mask=rows.mask.clone(), logp=rows.old_logp, group=rows.group)
    batch.mask[2] = False
    batch.advantage = torch.where(batch.mask, rows.advantages[:, None], 0.0)
    batch.signals["refining"] = torch.arange(len(batch)) % 2 == 1
    logp = rows.logp.masked_fill(~batch.mask, -torch.inf).requires_grad_()
    value = TwoObjectives()(batch, Signals(logp=logp), None).value  # type: ignore[arg-type]
    assert torch.isfinite(value) and torch.isfinite(gradient(value, logp)[0]).all()


def test_solved_prompts_get_more_plain_attempts() -> None:
    run = run_on_lock()
    with torch.no_grad():
        run.policy.table.copy_(20.0 * torch.nn.functional.one_hot(run.task.codes, 3))
    batch = METHOD.rollout(METHOD.select(run.task, run), run)
    assert len(batch) == 3 * 8 and not batch.signals["refining"].any()
    assert torch.bincount(batch.group).tolist() == [8, 8, 8]


def test_it_trains_resumes_and_counts_every_attempt_once(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = run_on_lock(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    run = train(run_on_lock(steps=2))
    assert run.actions == 2 * 3 * 8 * 3  # steps, prompts, attempts, symbols
    assert run.policy.trust.tolist() != [0.5, 0.5]


def test_plain_text_tasks_say_that_the_attempt_was_wrong() -> None:
    policy, task = make_toy_arith()
    method = METHOD.but(rollout=FeedbackGuided(template="{prompt}{attempt};{prompt}"))
    run = Run(method, policy, task, steps=2)
    batch = step(run)
    told = [policy.decode(batch.context[i]) for i in batch.signals["refining"].nonzero().flatten().tolist()]
    assert told and all(t.count("=") >= 2 and ";" in t for t in told)
    assert step(run) is not None


def test_tasks_without_feedback_are_refused() -> None:
    task = TokenBandit(prompts=2)
    with pytest.raises(ValueError, match="fbos_rl shows the policy feedback"):
        step(Run(METHOD, task.policy(), task, steps=1))
    with pytest.raises(ValueError, match="rollout.plain must be at least 1"):
        step(Run(METHOD.set("rollout.plain", 0), task.policy(), task, steps=1))
