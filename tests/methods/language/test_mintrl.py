"""MInTRL: what it reduces to, splices and reviews in the loop, anchors and baselines, tasks of text, and where it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.models import load_policy
from anypo.domains.language.tasks import make_task
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import step, train
from anypo.methods.language.mintrl import (
    METHOD,
    VARIANTS,
    AnchoredRegression,
    CompareWithSolution,
    Interventions,
    Revision,
    advantages,
    control_rows,
    loss,
    rollout_trace,
    splice,
)  # fmt: skip
from anypo.run import Run
from anypo.seams.groups import group_mean
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows


class Script:
    """Says the same of every row: verdict number n at the n-th review."""

    def __init__(self, *verdicts: list[int]) -> None:
        self.verdicts, self.seen, self.asked = verdicts, list[list[int]](), 0

    def __call__(self, batch: Batch, rows: Tensor, written: list[Tensor], run: Run) -> list[Revision | None]:
        error_at, *correction = self.verdicts[self.asked]
        self.asked += 1
        self.seen.append([len(text) for text in written])
        return [Revision(error_at, torch.tensor(correction)) if error_at >= 0 else None for _ in rows]


class BanditChecker(CompareWithSolution):
    def target(self, batch: Batch, row: int, run: Run) -> Tensor:
        return run.task.targets[int(batch.signals["prompt_id"][row]), 0]  # type: ignore[attr-defined]


def bandit_batch(rollout: Interventions, horizon: int = 12) -> tuple[Run, Batch]:
    task = TokenBandit(3, 10, horizon)
    run = Run(METHOD.but(rollout=rollout), task.policy(scale=0.5), task, steps=1)
    prompts = [p.but(samples=4) for p in task.prompts(3, run.rng)]
    return run, rollout(prompts, run)


def random_loss(anchor: str = "const", kappa: float | Tensor = 0.5, same: bool = False) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    rows = random_rows(2)
    logp = (rows.old_logp if same else rows.logp).clone().requires_grad_(True)
    source = (torch.arange(5) % 2).expand(8, 5)
    control = torch.arange(8) % 3 == 0
    found = loss(logp, rows.old_logp, source, rows.mask, rows.reward, rows.group, control, 0.1, anchor, kappa)
    return found.loss, logp, (found.S, found.advantage, rows.mask, rows.old_logp)


def test_at_the_old_policy_the_gradient_is_reinforce_with_the_control_baseline() -> None:
    value, logp, (log_ratio, advantage, mask, _) = random_loss("proxy", same=True)
    assert torch.equal(log_ratio, torch.zeros_like(log_ratio))
    torch.testing.assert_close(gradient(value, logp)[0], -2 * 0.1 * advantage[:, None] * mask / len(mask))


def test_const_anchors_at_the_old_probabilities_are_proxies() -> None:
    rows = random_rows(2)
    const, proxy = random_loss("const", rows.old_logp.exp()), random_loss("proxy")
    torch.testing.assert_close(const[0], proxy[0])
    assert random_loss("const", 0.5)[0] != proxy[0]


def test_without_reviews_it_is_on_policy_advantage_regression() -> None:
    _, batch = bandit_batch(Interventions(max_reviews=0, chunk=1))
    assert batch.signals["source"].eq(0).all()
    task = TokenBandit(3, 10, 12)
    run = Run(METHOD, task.policy(scale=0.5), task, steps=1)
    plain = run.collect([p.but(samples=4) for p in task.prompts(3, run.rng)])
    assert torch.equal(plain.action, batch.action) and torch.equal(plain.logp, batch.logp)


def test_a_judge_that_writes_everything_gives_expert_data() -> None:
    whole = [*range(9, -1, -1), 3, 3]
    _, batch = bandit_batch(Interventions(12, 1, 12, 0.0, judge=Script([0, *whole])))
    assert batch.action.tolist() == [whole] * 12 and batch.signals["source"].eq(1).all()


def test_baseline_without_control_rows_is_the_groups_mean() -> None:
    rows = random_rows(4)
    assert torch.equal(advantages(rows.reward, rows.group, torch.zeros(8)), rows.reward - group_mean(rows.reward, rows.group))
    control = torch.tensor([1, 0, 0, 0])
    found = advantages(torch.tensor([0.25, 1.0, 0.0, 1.0]), torch.tensor([5, 5, 2, 2]), control)
    assert found.tolist() == [0.0, 0.75, -0.5, 0.5]


def test_splice_drops_the_suffix_and_its_source() -> None:
    found = splice(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1]), torch.tensor([7, 8, 9]), 1, 2)
    assert found.tokens.tolist() == [1, 7, 8] and found.source.tolist() == [0, 1, 1]


def test_the_component_follows_the_trace() -> None:
    """Sources and reviews are those of the pure function, for any tokens of the policy."""
    verdicts = ([-1], [3, 11 % 10, 2, 5], [6, 3])
    script = Script(*verdicts)
    _, batch = bandit_batch(Interventions(4, 3, 2, 0.0, judge=script))
    trace = rollout_trace(torch.zeros(40, dtype=torch.int64), verdicts, 4, 3, 2, 12)
    assert script.seen == [[4] * 12, [8] * 12, [9] * 12]
    assert batch.signals["source"].tolist() == [trace.source.tolist()] * 12
    assert batch.action[:, 3:5].tolist() == [[1, 2]] * 12 and batch.action[:, 6].tolist() == [3] * 12


def test_control_rows_and_the_second_part_stay_untouched() -> None:
    rollout = Interventions(2, 2, 1, 0.5, judge=BanditChecker())
    run, batch = bandit_batch(rollout)
    control, source = batch.signals["control"], batch.signals["source"]
    assert control.view(3, 4).tolist() == [[True, True, False, False]] * 3
    assert source[control].eq(0).all() and source[~control].sum(1).gt(0).any()
    run.step = 1
    later = rollout([p.but(samples=4) for p in run.task.prompts(3, run.rng)], run)
    assert later.signals["control"].all() and later.signals["source"].eq(0).all()


def test_log_probs_are_those_of_the_final_text() -> None:
    run, batch = bandit_batch(Interventions(2, 3, 1, 0.0, judge=BanditChecker()))
    seen = run.score(batch.but(logp=torch.zeros_like(batch.logp)), {"logp", "entropy"})
    assert torch.equal(batch.logp, seen.logp) and torch.equal(batch.signals["old_entropy"], seen.entropy)
    assert batch.mask.all() and batch.parent is not None and batch.parent.eq(-1).all()


def test_control_rows_are_counted_by_group() -> None:
    assert control_rows(torch.tensor([4, 1, 4, 1, 4, 9]), 0.5).tolist() == [True, True, True, False, False, True]
    assert not control_rows(torch.tensor([0, 0]), 0.0).any()


def test_an_end_token_in_a_correction_ends_the_response() -> None:
    policy, task = make_toy_arith()
    judge = CompareWithSolution()
    rollout = Interventions(1, 6, 5, 0.0, judge=judge)
    run = Run(METHOD.but(rollout=rollout), policy, task, steps=1)
    batch = rollout([p.but(samples=8) for p in task.prompts(8, run.rng)], run)
    assert task.score(batch, run).mean() == 1 and batch.terminated is not None and batch.terminated.all()
    assert batch.signals["source"][~batch.mask].eq(0).all() and batch.signals["source"].sum() > 0
    torch.testing.assert_close(batch.logp, run.score(batch, {"logp"}).logp)


def test_the_checker_on_a_task_of_text() -> None:
    method = VARIANTS["checker"].set("rollout.chunk", 1).set("rollout.control_share", 0.0).set("select.prompts", 4)
    run = Run(method, load_policy("builtin"), make_task("arithmetic"), steps=1)
    batch = step(run)
    assert batch.reward is not None and batch.signals["source"].sum() > 0 and run.history[0]["intensity"] > 0
    assert len(batch.signals["completion"]) == len(batch)


def test_the_policy_judges_itself() -> None:
    run = Run(METHOD.set("rollout.chunk", 2).set("select.prompts", 2), load_policy("builtin"), make_task("arithmetic"), steps=2)
    train(run)
    assert all(0 <= record["intensity"] <= 1 for record in run.history)


def test_padding_and_rows_without_actions() -> None:
    rows = random_rows(1)
    mask = rows.mask.clone()
    mask[2] = False
    logp = torch.where(mask, rows.logp, torch.full_like(rows.logp, float("-inf"))).requires_grad_(True)
    old = torch.where(mask, rows.old_logp, torch.full_like(rows.logp, float("nan")))
    found = loss(logp, old, torch.zeros(8, 5, dtype=torch.int64), mask, rows.reward, rows.group, torch.ones(8))
    assert torch.isfinite(found.loss) and torch.isfinite(gradient(found, logp)[0]).all() and found.S[2] == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="const or proxy"):
        random_loss("both")
    with pytest.raises(ValueError, match="known response"):
        bandit_batch(Interventions(2, 1, 1, 0.0, judge=CompareWithSolution()))
    assert AnchoredRegression().needs == {"logp"}


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    method = METHOD.but(rollout=Interventions(1, 1, 1, judge=BanditChecker()))
    assert_trains(method)
    assert_resumes(method.set("rollout.until", 1.0), tmp_path)  # the schedule goes by the run's planned length
    assert_trains(METHOD)
    policy, task = make_key_chain(3, 4)
    train(Run(METHOD, policy, task, steps=2))


def test_a_correction_may_be_longer_than_the_batch() -> None:
    """The padded length of a batch of text is that of its longest response, which a correction can exceed."""
    run = Run(METHOD, load_policy("builtin"), make_task("arithmetic"), steps=1)
    judge = Script([1, *run.policy.encode("1234567").tolist()[-7:]])
    rollout = Interventions(1, 1, 7, 0.0, judge=judge)
    batch = rollout([p.but(samples=2) for p in run.task.prompts(3, run.rng)], run)
    assert batch.signals["source"].shape == batch.action.shape and batch.signals["source"].sum() > 6 * 3
    torch.testing.assert_close(batch.logp, run.score(batch, {"logp"}).logp, atol=1e-4, rtol=0)
