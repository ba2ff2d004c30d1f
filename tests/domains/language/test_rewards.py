"""Reward functions: TRL's convention, and what happens when one misbehaves."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.language import rewards as module
from anypo.domains.language.limits import ChildError, Hang, in_child, limited
from anypo.domains.language.rewards import (
    RewardError,
    Rewards,
    answer_match,
    as_functions,
    exact_match,
    format_reward,
    length_penalty,
    math_equal,
    python_tests,
)

PROMPTS = ["p0", "p1", "p2"]
COMPLETIONS = ["a", "bb", "ccc"]
COLUMNS = [{"answer": "a"}, {"answer": "x", "level": 2}, {"answer": "ccc"}]


def score(function, **settings):
    return Rewards({"f": function}, **settings)(PROMPTS, COMPLETIONS, COLUMNS)


# ---- the convention


def test_functions_receive_lists_by_keyword():
    seen = {}

    def f(**arguments):
        seen.update(arguments)
        return [1, 2.5, True]

    table = Rewards({"f": f})(PROMPTS, COMPLETIONS, COLUMNS, completion_ids=[[1], [2], [3]])
    assert table.values.tolist() == [[1.0], [2.5], [1.0]] and bool(table.applies.all())
    assert seen == {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "answer": ["a", "x", "ccc"],
        "level": [None, 2, None],
        "completion_ids": [[1], [2], [3]],
    }


def test_functions_without_keyword_arguments_receive_what_they_name():
    assert score(lambda completions, answer: [float(c == a) for c, a in zip(completions, answer, strict=True)]).values[:, 0].tolist() == [
        1,
        0,
        1,
    ]


def test_chat_prompts_bring_message_completions():
    prompts = [[{"role": "user", "content": "hi"}], "plain"]
    table = Rewards({"f": lambda completions, **_: [len(c[0]["content"]) if isinstance(c, list) else -1 for c in completions]})(
        prompts, ["four", "four"], [{}, {}]
    )
    assert table.values[:, 0].tolist() == [4, -1]


def test_trl_rewards_run_unchanged():
    trl = pytest.importorskip("trl.rewards")
    prompts = [[{"role": "user", "content": "?"}]] * 2
    table = Rewards({"think": trl.think_format_reward})(prompts, ["<think>hm</think>42", "42"], [{}, {}])
    assert table.values[:, 0].tolist() == [1, 0]


def test_several_functions_make_columns():
    both = Rewards(as_functions([exact_match, length_penalty(2)]))
    assert both.names == ("exact_match", "length")
    assert both(PROMPTS, COMPLETIONS, COLUMNS).values.tolist() == [[1, 0], [0, 0], [1, -0.5]]


def test_none_means_does_not_apply():
    table = score(lambda completions, **_: [None, 1.0, None])
    assert table.values[:, 0].tolist() == [0, 1, 0] and table.applies[:, 0].tolist() == [False, True, False]


@pytest.mark.parametrize("result", [np.array([1.0, 2, 3]), torch.tensor([1.0, 2, 3]), (1, 2, 3), [np.float32(1), torch.tensor(2), 3]])
def test_arrays_and_tensors_are_numbers(result):
    assert score(lambda completions: result).values[:, 0].tolist() == [1, 2, 3]


def test_async_functions_are_awaited():
    async def f(completions, **_):
        return [1.0] * len(completions)

    assert score(f).values.sum() == 3


def test_empty_batches_and_completions():
    assert Rewards({"f": lambda completions: []})([], [], []).values.shape == (0, 1)
    assert Rewards({"f": exact_match})(["p"], [""], [{"answer": "1"}]).values.tolist() == [[0.0]]


# ---- misbehaviour: each has its sentence


def raises(completions, **_):
    if "bb" in completions:
        raise KeyError("no such thing")
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (raises, r"'f' raised KeyError: 'no such thing'; correct it, or count 0 there with reward_errors='zero'"),
        (lambda completions: [1.0], r"'f' returned 1 rewards for 3 completions"),
        (lambda completions: [1.0, math.nan, 0.0], r"'f' returned nan for completion 1, and rewards must be finite \(None means"),
        (lambda completions: [1.0, 0.0, math.inf], r"'f' returned inf for completion 2"),
        (lambda completions: [10**400, 0, 0], r"'f' returned inf for completion 0"),
        (lambda completions: ["1", 0, 0], r"'f' returned str '1' for completion 0, which is no number"),
        (lambda completions: 1.0, r"'f' returned float 1.0 instead of a list with one number per completion"),
        (lambda completions: None, r"'f' returned NoneType None instead of a list"),
        (lambda completions: [torch.ones(2), 0, 0], r"for completion 0, which is no number"),
    ],
)
def test_a_bad_function_stops_with_a_sentence(function, sentence):
    with pytest.raises(RewardError, match=sentence):
        score(function)


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match="'f' asks for the column 'solution'; the task has: answer, level"):
        score(lambda completions, solution: [0.0] * 3)


def test_with_zero_only_the_bad_rows_are_lost(caplog):
    rewards = Rewards({"f": raises, "good": exact_match}, on_error="zero")
    table = rewards(PROMPTS, COMPLETIONS, COLUMNS)
    assert table.values.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert table.applies.tolist() == [[True, True], [False, True], [True, True]]
    assert rewards.failures == {"f": 1}
    assert "'f' raised KeyError" in caplog.text and "completion 1 is the first of 1 that count 0" in caplog.text


def test_zero_covers_nan_and_single_rows():
    assert score(lambda completions: [math.nan if c == "bb" else 1.0 for c in completions], on_error="zero").values[:, 0].tolist() == [
        1,
        0,
        1,
    ]
    assert Rewards({"f": raises}, on_error="zero")(["p"], ["bb"], [{}]).values.tolist() == [[0.0]]


def hangs(completions, **_):
    while "bb" in completions:
        pass
    return [1.0] * len(completions)


def sleeps(completions, **_):
    if "bb" in completions:
        time.sleep(60)
    return [1.0] * len(completions)


def swallows(completions, **_):
    for c in completions:
        try:
            while c == "bb":
                pass
        except Exception:
            return [0.0] * len(completions)
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [hangs, sleeps, swallows])
def test_a_hang_costs_its_own_row_alone(function, caplog):
    started = time.monotonic()
    rewards = Rewards({"f": function, "good": exact_match}, timeout=0.3)
    assert rewards(PROMPTS, COMPLETIONS, COLUMNS).values.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert rewards.failures == {"f": 1} and "took longer than 0.3 seconds" in caplog.text
    assert time.monotonic() - started < 5


def test_a_hang_in_another_thread_is_ended_too():
    tables = []
    thread = threading.Thread(target=lambda: tables.append(score(hangs, timeout=0.3)))
    thread.start()
    thread.join(20)
    assert tables[0].values[:, 0].tolist() == [1, 0, 1]


def test_settings_out_of_range():
    for settings, sentence in (({"timeout": 0}, "above 0 seconds"), ({"on_error": "skip"}, "'stop' or 'zero'")):
        with pytest.raises(ValueError, match=sentence):
            Rewards({"f": raises}, **settings)
    with pytest.raises(ValueError, match="at least one"):
        Rewards({})


# ---- limits


def test_state_survives_a_limit_that_is_not_reached():
    calls = []
    assert limited(lambda: calls.append(1) or 5, 10.0) == 5 and calls == [1]


def test_limits_nest_and_leave_no_alarm():
    def inner():
        with pytest.raises(Hang):
            limited(lambda: time.sleep(5), 0.1)
        time.sleep(5)

    with pytest.raises(Hang):
        limited(inner, 0.4)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_children_answer_fail_and_are_killed():
    assert in_child(lambda: [1.0, None], 20.0) == [1.0, None]
    with pytest.raises(ChildError, match="ZeroDivisionError"):
        in_child(lambda: 1 / 0, 20.0)
    with pytest.raises(Hang):
        in_child(lambda: time.sleep(60), 0.2)


def test_a_child_ends_without_its_parent(tmp_path):
    def call() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(300)

    parent = os.fork()
    if parent == 0:
        try:
            in_child(call, 2.0)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    child = int((tmp_path / "pid").read_text())
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


# ---- ready rewards


def test_names_of_functions():
    assert list(as_functions([lambda c: 0, lambda c: 0, exact_match])) == ["lambda", "lambda_2", "exact_match"]
    assert list(as_functions({"a": exact_match})) == ["a"]
    with pytest.raises(ValueError, match="5 is no function"):
        as_functions(5)


def test_functions_from_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def good(completions, **_):\n    return [1.0] * len(completions)\nnumber = 3\n")
    assert list(as_functions(f"{file}:good, math:sqrt")) == ["good", "sqrt"]
    for spec, sentence in (
        (f"{file}:bad", "cannot load 'bad'.*AttributeError"),
        (f"{tmp_path}/none.py:f", "cannot load 'f'.*FileNotFoundError"),
        (f"{file}:number", "is no function but int"),
        ("nothing", "my_file.py:my_function"),
    ):
        with pytest.raises(ValueError, match=sentence):
            as_functions(spec)


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("42", "42", 1), ("42", " 42.0 ", 1), ("1,000", "1000", 1), ("1/2", "0.5", 1), ("42", "41", 0), ("42", "", 0), ("1/0", "3", 0),
        ("42", "so the answer is 42", 1), ("42", "so the answer is 43", 0), (r"\frac{1}{2}", r"it is $\frac{2}{4}$", 1),
        (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}", 1), (r"\frac{1}{2}", r"$\frac{1}{3}$", 0), ("work #### 18", "18", 1),
        ("Paris", " Paris\n", 1), ("Paris", "paris", 0),
    ],
)  # fmt: skip
def test_answer_match(answer, completion, right):
    pytest.importorskip("math_verify")
    assert answer_match([completion], [answer]) == [right]
    assert answer_match([[{"role": "assistant", "content": completion}]], [answer]) == [right]


def test_math_equal_gives_up_on_endless_comparisons(monkeypatch):
    math_verify = pytest.importorskip("math_verify")
    monkeypatch.setattr(module, "MATH_SECONDS", 0.2)
    monkeypatch.setattr(math_verify, "verify", lambda *a, **k: time.sleep(30))
    assert math_equal(["x^2"], [r"x^3"]) == [0.0]


def test_format_and_length():
    assert format_reward(r"<a>.*</a>")(["<a>x\ny</a>", "<a>x</a>!"]) == [1, 0]
    with pytest.raises(ValueError, match="is no regular expression"):
        format_reward("(")
    assert length_penalty(4)(["", "abcd", "abcdef", "a" * 8, "a" * 100]) == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="above 0"):
        length_penalty(0)


def test_python_tests_runs_code_in_the_sandbox():
    tests = "assert double(2) == 4"
    good = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    bad = "def double(x):\n    return x"
    early = "import sys\nsys.exit(0)"
    assert python_tests([good, bad, early, "not python"], [tests] * 4) == [1, 0, 0, 0]
