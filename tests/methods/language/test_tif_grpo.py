import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.reports import SECTIONS, Unit, matched, sections
from anypo.domains.language.toys import ct_policy, toy_ct
from anypo.domains.language.toys.ct_policy import LEXICON, PROSE, ReportPolicy, cell, report
from anypo.domains.language.toys.toy_ct import ToyCT, demonstrated, make_toy_ct
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.tif_grpo import METHOD, IntegralReward, judged, report_reward, running_error, section_reward, unit_scores
from anypo.run import Run
from tests.helpers import assert_continues, assert_trains

WAYS = [0] * len(PROSE)


@pytest.fixture(autouse=True)
def quick_start(monkeypatch):
    monkeypatch.setattr(toy_ct, "WARM_STEPS", 5)
    monkeypatch.setattr(ct_policy, "EYE_STEPS", 5)
    monkeypatch.setattr(toy_ct, "_WARM", {})


def graded(seed, count):
    return torch.randint(2, (3, count), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(0, 4))
def test_terminal_alone_is_the_mean_score_and_everything_is_bounded(seed, count, fp):
    hit, location, attribute = graded(seed, count)
    score = unit_scores(hit, location, attribute, 0.5)
    alone = section_reward(hit, location, attribute, fp, alpha=0.0, gamma=0.0, terminal_weight=1.0, explore_bonus=0.0)
    torch.testing.assert_close(alone, score.mean())
    error = running_error(hit, location, attribute)
    assert ((error >= 0) & (error <= 1)).all() and 0 <= section_reward(hit, location, attribute, fp) <= 2.25
    if fp == 0:
        ones = torch.ones(count, dtype=torch.int64)
        assert section_reward(ones, ones, ones, 0) == pytest.approx(2.25, abs=1e-12)


def test_one_unit_is_its_squared_error():
    for grades, score in (((1, 1, 1), 1.0), ((1, 0, 1), 0.5), ((1, 0, 0), 0.0), ((0, 1, 1), 0.0)):
        hit, location, attribute = (torch.tensor([g]) for g in grades)
        found = section_reward(hit, location, attribute, 0, gamma=0.0, terminal_weight=0.0, explore_bonus=0.0)
        assert float(found) == 1 - (1 - score) ** 2


def test_effort_and_exploration_need_something_reported():
    none, one = torch.zeros(3, dtype=torch.int64), torch.tensor([1, 0, 0])
    assert section_reward(none, none, none, 0) == 0
    assert section_reward(none, none, none, 2) == pytest.approx(0.05)  # all false: the bonus alone
    assert section_reward(one, none, none, 0) == pytest.approx(1.05)  # a hit in the wrong place earns effort alone
    empty = torch.zeros(0, dtype=torch.int64)
    assert section_reward(empty, empty, empty, 0) == 2 and section_reward(empty, empty, empty, 1) < 1e-6


def test_length_shrinks_everything():
    parts = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert report_reward(parts, True, 1600) == report_reward(parts, True, 0) == pytest.approx(1.6)
    assert report_reward(parts, True, 6600) == pytest.approx(0.8)


def test_units_and_sections():
    found = LEXICON.units("no cyst liver ; possible lesion lung upper faint ; bones are intact . node heart")
    assert [(u.name, u.organ, u.certainty) for u in found] == [
        ("cyst", "liver", "absent"),
        ("mass", "lung", "possible"),
        ("nodule", "heart", "present"),
    ]
    assert found[1].attributes == {"faint"} and found[1].location == "upper" and found[1].evidence == "possible lesion lung upper faint"
    whole = report([Unit("cyst", "lung", "lower", frozenset({"bright"}))], WAYS)
    parts, ordered = sections(whole)
    assert ordered and [len(LEXICON.units(part)) for part in parts] == [1, 1]
    backwards = "<impression> a </impression> <findings> b </findings>"
    assert sections(backwards) == (["b", "a"], False)
    assert sections("<findings> b <impression> a </impression>") == ([None, "a"], False)
    assert sections("") == ([None] * len(SECTIONS), False)


def test_matching_is_one_to_one_and_prefers_agreement():
    true = LEXICON.units("nodule liver upper bright ; nodule lung lower faint")
    swapped = matched(LEXICON.units("node lung lower faint ; nodule liver upper bright"), true)
    assert swapped.hit.tolist() == swapped.location.tolist() == swapped.attribute.tolist() == [1, 1] and swapped.fp == 0
    partly = matched(LEXICON.units("nodule liver lower bright ; cyst heart ; no mass"), true)
    assert (partly.hit.tolist(), partly.location.tolist(), partly.attribute.tolist(), partly.fp) == ([1, 0], [0, 0], [1, 0], 1)
    doubled = matched([true[0]] * 3, true[:1])
    assert doubled.hit.tolist() == [1] and doubled.fp == 2
    assert matched([], []).hit.shape == (0,) and matched([], LEXICON.units("no cyst")).hit.shape == (0,)
    similar = (Unit("cyst", attributes=frozenset("ab")), Unit("cyst", attributes=frozenset("a")), Unit("cyst"))
    assert matched(similar[:1], similar[1:2]).attribute == 1 and matched(similar[:1], similar[2:]).attribute == 0
    assert matched(similar[2:], similar[2:]).location == 1


def test_scans_and_reports():
    task = ToyCT(abnormal=0.5)
    problems = task.prompts(30, np.random.default_rng(0))
    policy = ReportPolicy()
    for p in problems:
        assert p.content.shape == (4, 10, 10) and policy.decode(policy.encode(p.columns["report"])) == p.columns["report"]
        assert len(LEXICON.units(sections(p.columns["report"])[0][0])) == len(p.columns["units"])
    assert 40 < sum(len(p.columns["units"]) for p in problems) < 80
    drawn = cell(torch.ones(8, 8), 1, 1, 2)
    assert drawn[2:, 2:].eq(0.4).all() and drawn.sum() == pytest.approx(0.4 * 64)
    assert not any(task.demonstrations(5, np.random.default_rng(0), 0.0)[i][1].count("nodule") for i in range(5))
    with pytest.raises(ValueError, match="'hello' is no word"):
        policy.encode("hello")


def test_the_policy_samples_what_it_evaluates():
    policy, task = make_toy_ct()
    prompts = [p.but(samples=3) for p in task.held_out()[:3]]
    with torch.no_grad():
        batch = task.attempt(policy, prompts, torch.Generator().manual_seed(0), entropy=True)
        new = policy.evaluate(batch, {"logp", "entropy", "hidden"})
    torch.testing.assert_close(new.logp, batch.logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(new.entropy[batch.mask], batch.signals["old_entropy"][batch.mask], atol=1e-5, rtol=0)
    assert new.hidden.shape[:2] == batch.mask.shape and 0 <= task.measure(policy)["recall"] <= 1
    shown = demonstrated(policy, task.demonstrations(4, np.random.default_rng(0), 1.0))
    assert torch.isfinite(policy.evaluate(shown, {"logp"}).logp).all()


def judge(texts, truth, task=None):
    policy, made = make_toy_ct(prompts_per_step=1)
    run = Run(METHOD, policy, task or made, steps=1)
    batch = made.collect([p.but(samples=len(texts)) for p in made.prompts(1, run.rng)], run)
    batch.signals["completion"], batch.signals["columns"] = texts, [{"report": truth}] * len(texts)
    return batch, run


def test_the_reward_of_texts():
    units = [Unit("cyst", "lung", "lower", frozenset({"bright"}))]
    truth = report(units, WAYS)
    texts = [truth, report([], WAYS), truth.replace("</findings>", ""), ""]
    batch, run = judge(texts, truth)
    rewards = METHOD.reward(batch, run).tolist()
    assert rewards == pytest.approx([2.35, 0.1, 2.25 / 2, 0.0])
    assert judged(batch, run)[3][0] == [None, None]
    assert IntegralReward(length_threshold=0.0, length_scale=100.0)(batch, run)[0] < 2.35
    normal, run = judge(texts[:2], report([], WAYS))
    assert METHOD.reward(normal, run).tolist() == pytest.approx([0.1, 2.1])


def test_a_judge_that_cannot_read_gives_0_and_a_task_without_one_is_refused():
    class Blind(ToyCT):
        @staticmethod
        def units(text):
            raise ValueError("unreadable")

    truth = report([], WAYS)
    batch, run = judge([truth], truth, Blind())
    assert METHOD.reward(batch, run).tolist() == pytest.approx([0.1])
    with pytest.raises(ValueError, match="tif_grpo grades reports by their units"):
        assert_trains(METHOD)
    assert METHOD.credit == grpo.METHOD.credit and METHOD.objective == grpo.METHOD.objective


def test_trains_and_resumes(tmp_path):
    def run_to(out, upto):
        policy, task = make_toy_ct(prompts_per_step=2)
        run = Run(METHOD, policy, task, steps=upto, seed=0, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    policy, task = make_toy_ct(prompts_per_step=2)
    run = Run(METHOD, policy, task, steps=1)
    batch = step(run)
    assert torch.isfinite(batch.advantage).all() and 0 <= run.history[-1]["unit_recall"] <= 1
    assert not any(p.requires_grad for p in policy.eye.parameters())
