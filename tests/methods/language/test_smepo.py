"""SMEPO: the text operators, truncation, when it is GRPO, the objective's range, and the component on stand-ins and on text."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.copy_or_compute import FAVOUR, CopyOrCompute, read
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language.dapo import DynamicSampling
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import loss as grpo_loss
from anypo.methods.language.smepo import (
    METHOD,
    UNGUIDED,
    VARIANTS,
    ExpertHints,
    loss,
    mask_code,
    mask_entities,
    mask_math,
    prefix_tokens,
    shows,
)
from anypo.run import Run
from anypo.task import Prompt
from tests.helpers import assert_continues, assert_resumes, assert_trains, gradient, random_rows, trained


def on_questions(method: Method, steps: int, seed: int = 0, out: Path | None = None) -> Run:
    task = CopyOrCompute(seed)
    run = Run(method, task.policy(seed), task, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


@pytest.mark.parametrize(("text", "masked"), [
    ("Step 3 of 3 steps", "Step 3 of [NUMBER] steps"), ("LEMMA 2, steps 2", "LEMMA 2, steps [NUMBER]"),
    ("a-12, (-12), 5+3", "a-[NUMBER], ([NUMBER]), [NUMBER]+[NUMBER]"),
    (r"\frac{\sqrt{2}}{3}", r"\frac{[NUMBER]}{[NUMBER]}"), (r"\dfrac{x+1}{2y} \sqrt[3]{8}", "[NUMBER] [NUMBER]"), (r"\sqrt{x}", r"\sqrt{x}"),
    ("1.5e-3, .5, 7.", "[NUMBER], [NUMBER], [NUMBER]."), ("Step 1.5", "Step [NUMBER]"), ("", ""),
])  # fmt: skip
def test_numbers_are_hidden_and_labels_stay(text: str, masked: str) -> None:
    assert mask_math(text) == masked


PIECES = st.sampled_from(
    ["Step 3", "case 12", "12", "-0.5", "x", " ", "\n", "+", "3%", "2/3", r"\frac{1}{2}", r"\sqrt{7}", "4e5", ".", "(", ")", "plan"]
)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(PIECES, max_size=25))
def test_no_digit_is_left_outside_labels_and_no_line_is_lost(pieces: list[str]) -> None:
    text = " ".join(pieces)
    masked = mask_math(text)
    assert not re.search(r"\d", re.sub(r"\b(step|case)[ \t]+\d+\b", "", masked, flags=re.IGNORECASE))
    assert masked.count("\n") == text.count("\n") and masked.count("plan") == text.count("plan")
    assert mask_math(masked) == masked


def test_an_open_code_block_is_hidden_to_its_end() -> None:
    assert mask_code("Then:\n```python\nprint(1)\n") == "Then:\n```python\n[CODE]\n```"
    assert mask_code("no code") == "no code"


def test_entities_without_names_leave_the_text() -> None:
    assert mask_entities("Paris", []) == mask_entities("Paris", [""]) == "Paris"
    assert mask_entities("C++ or C", ["C++"]) == "[ENTITY] or C"


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), max_size=12), ratio=st.floats(0, 1), room=st.integers(-2, 15))
def test_a_prefix_ends_with_a_line_where_it_can(tokens: list[int], ratio: float, room: int) -> None:
    kept = prefix_tokens(tokens, 1, ratio, room)
    most = max(0, min(int(ratio * len(tokens)), room, len(tokens)))
    assert kept == tokens[: len(kept)] and len(kept) <= most
    assert kept[-1:] == [1] if 1 in tokens[:most] else len(kept) == most


def test_usual_bounds_are_grpo_and_low_zero_stops_pushing_down() -> None:
    rows = random_rows(3)
    rows.logp.requires_grad_(True)
    advantage = rows.advantages[:, None] * rows.mask
    usual = grpo_loss(rows.logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, beta=0.0).loss
    torch.testing.assert_close(loss(rows.logp, rows.old_logp, advantage, rows.mask, 0.2, 0.2), usual)
    (slope,) = gradient(loss(rows.logp, rows.old_logp, advantage, rows.mask), rows.logp)
    fallen = (rows.logp < rows.old_logp) & (advantage < 0) & rows.mask
    risen = (rows.logp > rows.old_logp) & (advantage < 0) & rows.mask
    assert fallen.any() and slope[fallen].eq(0).all() and slope[risen].gt(0).all()


def test_padding_may_hold_anything() -> None:
    rows = random_rows(4)
    advantage = rows.advantages[:, None] * rows.mask
    clean = loss(rows.logp, rows.old_logp, advantage, rows.mask)
    dirty = loss(rows.logp.masked_fill(~rows.mask, -torch.inf), rows.old_logp.masked_fill(~rows.mask, torch.nan), advantage, rows.mask)
    assert torch.equal(clean, dirty)


def test_nothing_shown_is_grpo() -> None:
    plain = on_questions(GRPO.but(objective=METHOD.objective, regularize=()), 3)
    for method in (METHOD.set("rollout.ratio", 0.0), UNGUIDED):
        assert torch.equal(on_questions(method, 3).policy.results, plain.policy.results)
    assert not torch.equal(on_questions(METHOD, 3).policy.results, plain.policy.results)
    assert torch.equal(trained(METHOD, 3).policy.logits, trained(UNGUIDED, 3).policy.logits)  # problems without solutions


def hinted(hints: ExpertHints, columns: dict[str, Any], content: Any = "Q", **policy: Any) -> Any:
    told = SimpleNamespace(encode=lambda text: torch.zeros(len(str(text))), **policy)
    run = SimpleNamespace(policy=told, task=SimpleNamespace(max_tokens=10))
    return hints.content(Prompt(0, content, columns), run)  # type: ignore[arg-type]


def test_what_the_policy_reads() -> None:
    hints = ExpertHints(intro="|", tail="$")
    assert hinted(hints, {"solution": "Step 1: add 2\nso 7\n", "answer": 7}) == "Q|Step 1: add [NUMBER]\nso [NUMBER]\n$"
    assert hinted(hints, {}) == hinted(hints, {"solution": ""}) == hinted(hints, {"solution": "42", "answer": 42}) == "Q"
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert hinted(hints, {"trace": "add 2\n"}, chat) == [chat[0], {"role": "user", "content": "Q|add [NUMBER]\n"}]
    assert hinted(ExpertHints(hide="nothing", intro="|", tail=""), {"trace": "add 2\nget 3\n", "answer": 3}) == "Q|add 2\nget 3\n"
    trip = {"trace": "from Rome to Bonn\n", "entities": ["rome"], "answer": "Bonn"}
    assert hinted(ExpertHints(hide="entities", intro="|", tail=""), trip) == "Q|from [ENTITY] to [ENTITY]\n"


def test_masking_comes_before_truncation_and_room_is_kept() -> None:
    text = "add 123456789\nthen add\n"
    assert hinted(ExpertHints(intro="|", tail="", ratio=0.7), {"trace": text}) == "Q|add [NUMBER]\n"
    assert hinted(ExpertHints(intro="|", tail=""), {"trace": text}, context_limit=30) == "Q|add [NUMBER]\n"
    assert hinted(ExpertHints(intro="|", tail="", max_prompt=2), {"trace": text}) == "Q"


def test_a_hint_in_which_the_answer_is_to_be_read_is_not_shown() -> None:
    assert shows("so it is blue", "blue") and shows("so x=7.", "7") and not shows("Step 7: think", 7) and not shows("bluer 71 0.7", "7")
    assert hinted(ExpertHints(), {"trace": "so it is blue\n", "answer": "blue"}) == "Q"


def test_wrong_settings_are_refused() -> None:
    for hints in (ExpertHints(hide="words"), ExpertHints(ratio=1.5)):
        with pytest.raises(ValueError, match="hints hide"):
            on_questions(METHOD.but(rollout=hints), 1)


def test_the_stand_in_reads_what_is_shown_and_evaluates_without() -> None:
    task = CopyOrCompute(1)
    prompt = task.problem(2, 3, 1, 4, 6)
    full, masked = read(f"{prompt.content}\n{prompt.columns['trace']}"), read(f"{prompt.content}\n{mask_math(prompt.columns['trace'])}")
    assert full[:5] == (2, 3, 1, 4, 6) and full[5:8] == tuple(task.plan[2].tolist()) and str(full[10]) == prompt.columns["answer"]
    assert masked[:8] == full[:8] and masked[8:] == (-1, -1, -1) and read(prompt.content)[5:] == (-1,) * 6
    policy, action = task.policy(), torch.zeros(1, 6, dtype=torch.int64)
    shift = policy.action_logits(torch.tensor([masked]), action) - policy.action_logits(torch.tensor([read(prompt.content)]), action)
    assert shift.sum().item() == pytest.approx(3 * FAVOUR) and shift[:, 1::2].eq(0).all()
    with pytest.raises(ValueError, match="no question"):
        policy.encode("7+3=")


def test_expected_success_is_what_samples_show() -> None:
    task = CopyOrCompute(0)
    policy = task.policy()
    run = Run(UNGUIDED, policy, task, steps=1)
    batch = run.collect([p.but(samples=8) for p in task.prompts(500, np.random.default_rng(0))])
    assert float(task.score(batch, run).mean()) == pytest.approx(task.expected_success(policy), abs=0.025)


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=["smepo", *VARIANTS])
def test_the_loop_trains(method: Method) -> None:
    run = on_questions(method, 4)
    assert all(np.isfinite(record["loss"]) for record in run.history)
    assert run.history[0]["hinted"] == 1.0 and ("hinted" in run.history[3]) == (method is not VARIANTS["then_grpo"])
    assert_trains(method)


def test_it_goes_inside_other_rollouts() -> None:
    run = on_questions(METHOD.but(rollout=DynamicSampling(inner=ExpertHints())), 2)
    assert run.history[-1]["prompts_with_contrast"] > 0


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path / "bandit")
    assert_continues(lambda out, upto: on_questions(METHOD, upto, out=out), tmp_path)
