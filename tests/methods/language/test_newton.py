from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.language.toys.physics_scenes import (
    AT,
    FEATURES,
    ROLL,
    Draft,
    PhysicsScenes,
    generate,
    parameter,
    scenes,
    scores,
    simulate,
    tool_keyframe,
)
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.newton import METHOD, FlowSurrogate, advantages, loss, turn_mean
from anypo.run import Run
from tests.helpers import assert_continues, gradient, random_rows

SCENE = {"h0": 2.0, "v0": 1.0, "u": 1.5, "g": 9.8, "e": 0.5}


def test_one_turn_is_grpo_with_the_sequence_mean() -> None:
    rows = random_rows(0)
    one = torch.zeros(8, 5, dtype=torch.int64)
    logp = rows.logp.clone().requires_grad_()
    credit = advantages(rows.reward, rows.group, one, rows.mask)
    mine = loss(logp, rows.old_logp, rows.ref_logp, credit, one, rows.mask, 0.2, 0.04)
    theirs = grpo.loss(logp, rows.old_logp, rows.ref_logp, rows.mask, grpo.advantages(rows.reward, rows.group)).loss
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gradient(mine, logp), gradient(theirs, logp))


def test_one_token_a_turn_is_a_bandit_over_plans() -> None:
    rows = random_rows(1)
    each = torch.arange(5).expand(8, 5)
    torch.testing.assert_close(turn_mean(rows.logp, each, rows.mask), turn_mean(rows.logp, torch.zeros_like(each), rows.mask))


def test_a_long_turn_counts_as_much_as_a_short_one() -> None:
    values, segment = torch.tensor([[1.0, 1, 1, 5, 9]]), torch.tensor([[0, 0, 0, 2, 7]])
    assert float(turn_mean(values, segment, torch.tensor([[1, 1, 1, 1, 0]]))) == 3.0
    assert float(turn_mean(values, segment, torch.tensor([[1, 0, 1, 1, 1]]))) == 5.0


def test_a_row_without_tokens_is_0_and_padding_may_be_anything() -> None:
    rows = random_rows(2)
    mask, segment = rows.mask.clone(), torch.arange(5).expand(8, 5) // 2
    mask[3] = False
    dirty = [torch.where(mask, x, torch.nan) for x in (rows.logp, rows.old_logp, rows.ref_logp)]
    credit = advantages(rows.reward, rows.group, segment, mask)
    padded = torch.where(mask, segment, -1)
    whole = loss(*dirty, credit, padded, mask)
    rest = torch.arange(8) != 3
    part = loss(*(x[rest] for x in (rows.logp, rows.old_logp, rows.ref_logp)), credit[rest], segment[rest], mask[rest])
    torch.testing.assert_close(whole, part * 7 / 8)
    assert float(loss(*dirty, credit, padded, torch.zeros_like(mask))) == 0


def test_every_turn_gets_the_outcome_and_a_group_without_spread_none() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
    found = advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1]), torch.zeros(3, 3), mask)
    assert (found[0] == found[0, 0]).all() and found[0, 0] > 0 and found[1].tolist() == [float(found[1, 0]), 0, float(found[1, 0])]
    assert found[2].eq(0).all()


def test_no_weight_keeps_no_reference() -> None:
    assert "ref_logp" not in FlowSurrogate(beta=0.0).needs and "ref_logp" in FlowSurrogate().needs
    task = TokenBandit(2)
    run = train(Run(METHOD.set("objective.beta", 0.0), task.policy(), task, steps=2))
    assert not run.policies


def test_keyframes_move_the_path_by_interpolated_corrections() -> None:
    bare, at = generate({}, torch.zeros(0)), torch.tensor([5, 10])
    wanted = torch.cat([at.double()[:, None], bare[at] + torch.tensor([[0.0, 1.0], [0.0, 3.0]])], dim=1)
    off = (generate({}, wanted) - bare)[:, 1]
    assert off[:6].tolist() == pytest.approx([1.0] * 6) and off[10:].tolist() == pytest.approx([3.0] * 14)
    torch.testing.assert_close(off[5:11], torch.linspace(1, 3, 6).double())


@pytest.mark.parametrize("at", [[10, 5], [5, 5], [-1, 3], [3, 24]])
def test_keyframes_outside_the_video_or_out_of_order_are_refused(at: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending frames between 0 and 23"):
        generate({}, torch.tensor([[k, 0.0, 0.0] for k in at], dtype=torch.float64))


def test_missing_parameters_come_from_the_prior() -> None:
    known = {"h0": torch.tensor([2.0, torch.nan])}
    assert parameter(known, "h0").tolist() == [2, 1] and float(parameter({}, "g")) == 3
    torch.testing.assert_close(tool_keyframe(SCENE, torch.tensor(AT))[:, 1:], simulate(**SCENE)[list(AT)])
    torch.testing.assert_close(generate(SCENE | {"g": 1.0, "e": 0.0}, torch.zeros(0)), generate(SCENE, torch.zeros(0)))  # it reads neither


def test_the_verifier_needs_both() -> None:
    truth = simulate(**SCENE)
    exact = scores(truth, truth, torch.tensor([1, 1, 1, 1]), torch.ones(4))
    assert [float(x) for x in exact] == [0, 5, 5, 1]
    assert int(scores(truth + 5, truth, torch.ones(4), torch.ones(4)).joint) == 0
    assert int(scores(truth, truth, torch.tensor([1, 1, 0, 0]), torch.ones(4)).joint) == 0


def test_rolls_need_no_keyframes_and_a_scene_is_its_number() -> None:
    found = scenes(list(range(300)))
    rolls = found.kind == ROLL
    draft = Draft(found)
    draft.turn(torch.tensor([True, False, True]).expand(300, 3), torch.ones(300, dtype=torch.bool))
    assert draft.joint[rolls].eq(1).all() and draft.joint[~rolls].double().mean() < 0.3
    assert torch.equal(scenes([7, 3]).true[1], found.true[3])
    untouched = Draft(found)
    untouched.turn(torch.ones(300, 3, dtype=torch.bool), torch.zeros(300, dtype=torch.bool))
    assert untouched.joint.eq(0).all() and untouched.score.eq(0).all() and not untouched.used.any()


def test_a_draft_is_what_the_generator_makes_of_what_is_known() -> None:
    found = scenes(list(range(50)))
    draft = Draft(found)
    draft.turn(torch.tensor([True, True, False]).expand(50, 3), torch.ones(50, dtype=torch.bool))
    for i in range(50):
        known = dict(zip(SCENE, found.true[i], strict=True))
        path = generate(known, tool_keyframe(known, torch.tensor(AT)), gravity=0.0 if found.kind[i] == ROLL else 3.0)
        assert float(scores(path, draft.truth[i], found.filled[i], torch.ones(4)).pc) == pytest.approx(float(draft.score[i, 0]))


def test_attempts_stop_and_pay_for_calls() -> None:
    task = PhysicsScenes()
    run = Run(METHOD, task.policy(), task, steps=1)
    batch = step(run)
    assert (
        batch.context.shape == (64, 11, FEATURES) and batch.segment is not None and batch.segment[0].tolist() == [0] * 4 + [1] * 4 + [2] * 3
    )
    stops = batch.action[:, 3] == 1
    assert batch.mask[stops].sum(1).eq(4).all() and batch.mask[~stops].sum(1).ge(8).all() and stops.any() and not stops.all()
    tool = torch.tensor([1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    made = (batch.action * batch.mask * tool).sum(1)
    torch.testing.assert_close(task.score(batch), batch.signals["joint"].float() - 0.03 * made)
    known = Run(METHOD, task.policy(), task, steps=1).policy.evaluate(batch, {"logp"})["logp"]
    torch.testing.assert_close(known.detach(), batch.logp)


def test_tools_may_fail() -> None:
    task = PhysicsScenes(turns=1, fail=0.5)
    all_tools = task.judge(lambda seen, place: torch.tensor([0.0, 50.0]).expand(len(seen), 2))
    share = float(all_tools.signal("joint").double().mean())
    assert 0.1 < share < 0.6 and all_tools.signal("calls").eq(1).all()
    with pytest.raises(ValueError, match="turns of at least 1"):
        PhysicsScenes(turns=0)


def test_prompts_come_from_the_given_stream_alone() -> None:
    task = PhysicsScenes()
    first, second = (task.prompts(4, np.random.default_rng(0)) for _ in range(2))
    assert [p.id for p in first] == [p.id for p in second]


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        task = PhysicsScenes(prompts_per_step=2)
        run = Run(METHOD, task.policy(), task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)
