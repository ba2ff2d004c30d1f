"""T2PO: what it reduces to, where it cuts and draws again, what is trained of a steered reply, and the component in agent tasks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.agents import make_agent_task
from anypo.domains.language.models import load_policy
from anypo.domains.language.steering import SteeredPolicy
from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.methods.language.hgpo import depth_advantages, returns
from anypo.methods.language.t2po import (
    METHOD,
    EpisodeAndTurns,
    SteeredTurns,
    entropy_and_confidence,
    first_flat,
    intervene_at,
    mixed,
    resample_trace,
    too_close,
    turn_signal,
    uncertainty,
)  # fmt: skip
from anypo.reproductions.language.t2po import ALPHABET, FILL, OFF, STOP, TURNS, HesitantDoors, tiny
from anypo.run import Run
from anypo.seams.groups import group_mean
from anypo.seams.rollout import OnPolicy
from tests.helpers import assert_continues

NEVER: dict[str, Any] = {"eps": 0.0, "longest": math.inf}


def doors(method: Any, steps: int = 1, seed: int = 0, out: Path | None = None) -> Run:
    """An untrained policy that likes full stops, so that thinking is long and mostly alike."""
    policy = GruPolicy(hidden=16, alphabet=ALPHABET, seed=seed)
    with torch.no_grad():
        policy.output.bias[FILL] += 4
        policy.output.bias[STOP] += 2
    run = Run(method, policy, HesitantDoors(seed), steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def collected(method: Any) -> tuple[Run, Batch]:
    run = doors(method)
    return run, method.rollout(method.select(run.task, run), run)


def probabilities(rows: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).softmax(-1)


def test_everything_off_is_exactly_the_base() -> None:
    run, steered = collected(tiny(**OFF))
    _, plain = collected(tiny().but(rollout=OnPolicy()))
    assert torch.equal(steered.action, plain.action) and torch.equal(steered.logp, plain.logp) and torch.equal(steered.mask, plain.mask)
    assert run.actions == int(plain.mask.sum())
    tried = collected(tiny(eps=0.0, longest=math.inf, max_try=0))[1]
    assert torch.equal(tried.action, plain.action)


def test_alpha_one_is_the_normalized_entropy_and_M_lies_in_the_unit_interval() -> None:
    prob = probabilities()
    entropy = entropy_and_confidence(prob.log())[0]
    torch.testing.assert_close(uncertainty(prob, 1.0, 3, "full"), (entropy - entropy.min()) / (entropy.max() - entropy.min()))
    for mode in ("full", "running"):
        M = uncertainty(prob, 0.5, 20, mode)
        assert M.min() >= 0 and M.max() <= 1


def test_the_online_form_looks_back_only() -> None:
    prob = probabilities()
    torch.testing.assert_close(uncertainty(prob)[:7], uncertainty(prob[:7]))


def test_forced_tokens_and_padding_count_in_nothing() -> None:
    entropy, confidence = entropy_and_confidence(probabilities().log()[None])
    own = torch.ones(1, 12, dtype=torch.bool)
    own[0, 4], own[0, 9:] = False, False
    spoiled = torch.where(own, entropy, torch.tensor(99.0, dtype=torch.float64))
    M, clean = mixed(spoiled, confidence, own), mixed(entropy, confidence, own)
    assert torch.equal(M[own], clean[own])
    torch.testing.assert_close(turn_signal(M, own), turn_signal(M[own][None]))


def test_certain_distributions_and_zeros_stay_finite() -> None:
    M = uncertainty(torch.eye(4, dtype=torch.float64))
    assert torch.isfinite(M).all()
    assert turn_signal(torch.tensor([0.0, 1.0])) == pytest.approx(1e-4)


def test_a_turn_shorter_than_the_window_knows_the_cap_alone() -> None:
    flat = torch.full((6,), 0.5)
    assert intervene_at(flat, N=8, eps=1.0, L_min=1, L_max=99) == -1
    assert intervene_at(flat, N=8, eps=1.0, L_min=1, L_max=5) == 5
    assert intervene_at(flat, N=4, eps=1.0, L_min=1, L_max=99) == 6
    assert intervene_at(flat[:0]) == -1


def test_only_the_thinking_counts() -> None:
    flat = torch.full((2, 9), 0.5)
    assert first_flat(flat, torch.tensor([9, 4]), 2, 0.1, 6, math.inf).tolist() == [6, -1]


def test_first_turns_are_never_drawn_again_and_equal_scores_only_in_the_papers_form() -> None:
    phi, last = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([float("nan"), 0.5, 0.4])
    assert too_close(phi, last, 0.3).tolist() == [False, False, True]
    assert too_close(phi, last, 0.3, require_positive=False).tolist() == [False, True, True]
    draws = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    for never in ({"eta": 0.0}, {"max_try": 0}):
        found = resample_trace(draws, **never)  # type: ignore[arg-type]
        assert torch.equal(found.kept, draws[:, 0]) and found.tries.eq(0).all()


def test_flat_thinking_is_cut_and_the_forced_token_is_context() -> None:
    run, batch = collected(tiny(eta=0.0, eps=1.0, shortest=4))
    thinking, happened = batch.signals["thinking"], batch.signals["state_id"] >= 0
    assert thinking[happened].max() == 4 and (thinking[happened] == 4).any()
    forced = batch.attended & ~batch.mask & (batch.action == STOP)
    assert forced.any() and batch.logp[forced].eq(0).all()
    for row in range(len(batch)):
        for place in forced[row].nonzero().flatten().tolist():
            assert batch.mask[row, place - 4 : place].all() and batch.action[row, place - 4 : place].ne(STOP).all()
    seen = run.policy.evaluate(batch, {"logp"}).logp
    torch.testing.assert_close(batch.logp, seen)
    assert run.actions > int(batch.mask.sum())


def test_turns_as_uncertain_as_before_are_drawn_again_before_the_environment_sees_them() -> None:
    class Counted(HesitantDoors):
        replies = 0

        def play(self, policy: Any, question: Any, group: Any, write: Any) -> Batch:
            def counted(starts: Any, rows: Any) -> Any:
                self.replies += len(rows)
                return write(starts, rows)

            return super().play(policy, question, group, counted)

    method = tiny(eta=0.9, **NEVER)
    run = doors(method)
    run.task = task = Counted(0)
    batch = method.rollout(method.select(task, run), run)
    run.finish_step(batch, {})
    assert task.replies == int((batch.signals["state_id"] >= 0).sum())
    record = run.history[0]
    assert 0 < record["resampled"] <= 2 * (TURNS - 1) / TURNS + 1e-9 and record["discarded"] > 0
    torch.testing.assert_close(batch.logp, run.policy.observe(batch, {"logp"}).logp)


def test_the_kept_draws_signal_is_what_the_next_turn_is_compared_with() -> None:
    """Every kept turn is either far enough from the kept turn before, or its tries were used up."""
    run = doors(tiny())
    steered = SteeredPolicy(
        run.policy, SteeredTurns(eta=0.2, eps=0.0, longest=math.inf, opening="", closing=";", action_tag=""), ("", ";", ""), 50
    )
    starts = [run.policy.encode(f"{q}0") for q in range(8)]
    kinds = {"max_tokens": 12, "temperature": 1.0, "generator": torch.Generator().manual_seed(0)}
    one = steered.sample(starts, [1] * 8, **kinds)
    first = [turn.turn for turn in steered.turns]
    going = [i for i in range(8) if i != 2]
    again = [torch.cat([starts[i], one.tokens[i][one.valid[i]], run.policy.encode("00")]) for i in going]
    steered.sample(again, [1] * 7, **kinds)
    assert [turn.row for turn in steered.turns] == going and len(steered.newest) == 8
    distance = torch.tensor([turn.turn - first[turn.row] for turn in steered.turns]).abs()
    assert ((distance >= 0.2) | (distance == 0)).all() and steered.resampled > 0


def test_credit_is_the_episode_plus_the_turns_of_the_same_state() -> None:
    run, batch = collected(tiny())
    batch.reward = run.task.score(batch, run)
    found = EpisodeAndTurns(invalid_penalty=0.0)(batch, run)
    episode = batch.reward - group_mean(batch.reward, batch.group)
    without = EpisodeAndTurns(turn_weight=0.0, invalid_penalty=0.0)(batch, run)
    torch.testing.assert_close(without, (episode[:, None] * batch.mask).to(without))
    traj, turn = (batch.signals["state_id"] >= 0).nonzero(as_tuple=True)
    gain = returns(batch.signals["turn_reward"].double()[traj, turn], traj, 0.95)
    own = depth_advantages(gain, batch.group[traj], traj, batch.signals["state_id"][traj, turn], 0, "mean_norm").A[:, 0]
    first = (turn == 0).nonzero().flatten()
    torch.testing.assert_close((found - without)[:, 0], own[first].float())
    assert found[~batch.mask].eq(0).all()


def test_an_agent_task_of_text() -> None:
    policy, task = load_policy("builtin"), make_agent_task("calculator", max_turns=2, max_tokens=12)
    method = (
        METHOD.set("select.prompts", 2)
        .set("select.group_size", 2)
        .set("rollout.opening", "")
        .set("rollout.closing", ")")
        .set("rollout.action_tag", "-")
    )
    method = method.set("rollout.longest", 3.0).set("rollout.eta", 0.9)
    run = Run(method, policy, task, steps=1)
    batch = step(run)
    assert run.history[0]["interventions"] > 0 and (batch.attended & ~batch.mask).any()
    train(Run(METHOD.set("select.prompts", 2), policy, task, steps=1))


def test_refusals() -> None:
    task = TokenBandit(2)
    with pytest.raises(ValueError, match="t2po steers replies"):
        step(Run(METHOD, task.policy(), task, steps=1))
    with pytest.raises(ValueError, match="full or running"):
        uncertainty(probabilities(), normalize="none")


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    run = train(doors(tiny(), 3))
    assert all(math.isfinite(v) for record in run.history for v in record.values() if isinstance(v, float))

    def run_to(out: Path, upto: int) -> Run:
        run = doors(tiny(), 4, out=out)
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)
