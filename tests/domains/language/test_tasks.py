"""Text tasks: batches, rewards, evaluation, and every way to name a task, with the sentence for each mistake."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from anypo.domains.language import sources
from anypo.domains.language.problems import PROBLEMS, held_out_problems, is_held_out
from anypo.domains.language.rewards import RewardError
from anypo.domains.language.tasks import TextTask, make_task
from anypo.task import Prompt
from tests.domains.language.text_fakes import ScriptedPolicy, make_run

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(20)]


def right(text: str, draw: float) -> str:
    return str(eval(text.removesuffix("=")))


def sometimes_right(text: str, draw: float) -> str:
    return right(text, draw) if draw < 0.5 else "no"


def write_lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# ---- batches


def test_collect_fills_the_batch():
    task, run = make_task(ROWS), make_run(ScriptedPolicy(right), frozenset({"old_entropy"}))
    prompts = [p.but(samples=n) for p, n in zip(task.prompts(3, np.random.default_rng(0)), (2, 1, 3), strict=True)]
    batch = task.collect(prompts, run)
    assert batch.group.tolist() == [0, 0, 1, 2, 2, 2]
    assert torch.equal(batch.mask, batch.attended) and torch.equal(batch.mask, batch.logp != 0)
    assert [run.policy.decode(c) for c in batch.context] == batch.signals["prompt_text"] == [prompts[i].content for i in batch.group]
    assert batch.signals["completion"] == [p.columns["answer"] for p in (prompts[i] for i in batch.group)]
    assert batch.signals["prompt_id"].tolist() == [prompts[i].id for i in batch.group]
    assert batch.signals["columns"] == [prompts[i].columns for i in batch.group]
    assert bool(batch.terminated.all()) and not bool(batch.truncated.any()) and batch.version.tolist() == [3] * 6
    assert batch.signals["old_entropy"].shape == batch.logp.shape and batch.signals["temperature"].tolist() == [1.0] * 6
    assert len(batch[torch.tensor([5, 0])].signals["completion"]) == 2


def test_entropies_only_where_the_method_looks_at_them():
    assert "old_entropy" not in make_task(ROWS).collect([Prompt(0, "1+1=")], make_run(ScriptedPolicy(right))).signals


def test_prompts_may_have_their_own_temperature_and_limit():
    policy = ScriptedPolicy(lambda text, draw: "123456789")
    task = make_task(ROWS, max_tokens=8, temperature=0.7)
    batch = task.collect([Prompt(0, "a"), Prompt(1, "b", temperature=2.0, max_actions=4)], make_run(policy))
    assert policy.calls[0]["temperature"] == [0.7, 2.0] and policy.calls[0]["max_tokens"] == [8, 4]
    assert batch.lengths.tolist() == [8, 4] and batch.truncated.tolist() == [True, True] and not bool(batch.terminated.any())
    assert batch.signals["temperature"].tolist() == pytest.approx([0.7, 2.0])


def test_without_a_temperature_the_policy_decides():
    policy = ScriptedPolicy(right)
    policy.temperature = 0.4
    make_task(ROWS).collect([Prompt(0, "1+1=")], make_run(policy))
    assert policy.calls[0]["temperature"] == [0.4]


@pytest.mark.parametrize("ends", [True, False])
def test_an_empty_completion_is_the_empty_string(ends):
    task = make_task(ROWS, rewards=[lambda completions, **_: [float(c == "") for c in completions]])
    policy = ScriptedPolicy(lambda text, draw: "", ends=ends)
    batch = task.collect([Prompt(0, "1+1=", {"answer": "2"}, samples=2)], make_run(policy))
    assert batch.signals["completion"] == ["", ""] and batch.lengths.tolist() == [int(ends)] * 2
    assert task.score(batch).tolist() == [1, 1] and not bool(task.correct(batch).any())


def test_over_long_prompts_are_named_with_the_remedy():
    task, run = make_task(ROWS, max_tokens=20), make_run(ScriptedPolicy(right, context_limit=30))
    with pytest.raises(
        ValueError, match=r"prompt 7 \('a{11}'\) has 11 tokens; with 20 for the completion.*context of 30.*max_prompt_tokens=10"
    ):
        task.collect([Prompt(7, "a" * 11)], run)
    with pytest.raises(ValueError, match="set a smaller max_tokens"):
        make_task(ROWS, max_tokens=30).collect([Prompt(7, "a")], run)
    cut = make_task(ROWS, max_tokens=20, max_prompt_tokens=4)
    run.policy.reply = lambda text, draw: text
    assert cut.collect([Prompt(7, "abcdefghijkl")], run).signals["completion"] == ["ijkl"]


def test_the_default_completion_length_gives_way_to_the_prompt_up_to_a_point():
    policy = ScriptedPolicy(lambda text, draw: "x" * 200, context_limit=100)
    task = make_task(ROWS)
    assert task.collect([Prompt(0, "a" * 60)], make_run(policy)).lengths.tolist() == [40]
    with pytest.raises(ValueError, match="with 16 for the completion"):
        task.collect([Prompt(0, "a" * 90)], make_run(policy))


# ---- rewards and evaluation


def test_score_with_one_and_with_several_functions():
    prompts = [Prompt(0, "1+1=", {"answer": "2"}), Prompt(1, "2+2=", {"answer": "5"})]
    run = make_run(ScriptedPolicy(right))
    single = make_task(ROWS)
    batch = single.collect(prompts, run)
    assert single.objectives == ("reward",) and single.score(batch, run).tolist() == [1, 0]
    named = make_task(ROWS, rewards={"short": lambda completions, **_: [None, 0.5], "level": lambda prompt_ids=None, **_: [1, 2]})
    assert named.objectives == ("short", "level")
    assert named.score(batch, run).tolist() == [[0, 1], [0.5, 2]]
    assert batch.signals["reward_applies"].tolist() == [[False, True], [True, True]]
    assert single.correct(batch).tolist() == named.correct(batch).tolist() == [True, False]


def test_a_bad_reward_stops_or_counts_zero():
    def bad(completions, **_):
        raise RuntimeError("broken")

    run = make_run(ScriptedPolicy(right))
    with pytest.raises(RewardError, match="'bad' raised RuntimeError: broken"):
        task = make_task(ROWS, rewards=bad)
        task.score(task.collect([Prompt(0, "1+1=")], run))
    task = make_task(ROWS, rewards=bad, reward_errors="zero", reward_timeout=None)
    assert task.score(task.collect([Prompt(0, "1+1=")], run)).tolist() == [0]


def test_evaluation_repeats_and_leaves_the_run_alone():
    task, run = make_task("arithmetic", evaluation_prompts=40), make_run(ScriptedPolicy(sometimes_right))
    before, state = run.generator.get_state(), run.rng.bit_generator.state
    first = task.evaluate(run)
    assert first == task.evaluate(run) and next(iter(first)) == "pass@1"
    assert 0.2 < first["pass@1"] < 0.8 and first["reward"] == first["pass@1"] and first["finished"] == 1
    assert torch.equal(run.generator.get_state(), before) and run.rng.bit_generator.state == state
    run.policy.reply = right
    assert task.evaluate(run)["pass@1"] == 1


def test_evaluation_names_every_objective_and_its_headline_is_the_answer():
    task = make_task(
        "arithmetic",
        rewards={"a": lambda completions, **_: [0.25] * len(completions), "b": lambda completions, **_: [1] * len(completions)},
    )
    found = task.evaluate(make_run(ScriptedPolicy(right)))
    assert found["pass@1"] == 1 and found["reward"] == 1.25 and found["reward/a"] == 0.25 and found["reward/b"] == 1


def test_sample_completions_are_plain():
    shown = make_task("arithmetic").sample_completions(make_run(ScriptedPolicy(right)), 3)
    assert len(shown) == 3 and all(set(s) == {"prompt", "completion", "reward"} and s["reward"] == 1.0 for s in shown)
    assert json.loads(json.dumps(shown)) == shown


# ---- names


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_generated_kinds(name):
    task = make_task(name)
    assert isinstance(task, TextTask) and task.name == name and task.max_tokens == PROBLEMS[name].max_tokens
    training, held_out = task.prompts(50, np.random.default_rng(1)), task.held_out(50)
    assert not any(is_held_out(p.content) for p in training) and all(is_held_out(p.content) for p in held_out)
    assert not {p.id for p in training} & {p.id for p in held_out}
    assert [p.id for p in training] == [p.id for p in task.prompts(50, np.random.default_rng(1))]
    solutions = {p.prompt: PROBLEMS[name].solve(p) for p in held_out_problems(name, 50)}
    task.evaluation_prompts = 50
    assert task.evaluate(make_run(ScriptedPolicy(lambda text, draw: solutions[text])))["pass@1"] == 1


def test_a_task_is_returned_as_it_is():
    task = make_task("arithmetic")
    assert make_task(task) is task


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("arithmetc", "unknown task 'arithmetc'; did you mean arithmetic"),
        ("jsnl:file", "unknown task 'jsnl:file'; did you mean jsonl"),
        ("zzz", "unknown task 'zzz'; known: arithmetic, "),
        ("jsonl:", "names nothing after the colon; write jsonl:<name>"),
        (3, "a task is a name, a function or a list of dicts, not int"),
        ([], "rows holds no problems"),
        ([{"prompt": "a", "answer": "b"}, {"text": "a"}], r"row 1 of rows has no 'prompt' \(its fields: text\)"),
        (["a"], "row 0 of rows is str"),
        ([{"prompt": 3}], "row 0 of rows has a 'prompt' that is neither text nor"),
        ([{"prompt": [{"role": "user"}]}], "not of messages with 'role' and 'content'"),
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], "problem 1 of rows has no 'answer' to compare with"),
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda: "text", "returned str; it must return a list of dicts"),
    ],
)
def test_mistakes_have_their_sentence(spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_task(spec)


def test_settings_are_checked():
    for settings, sentence in (
        ({"max_token": 3}, "no setting 'max_token'; did you mean max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"prompts_per_step": 0}, "prompts_per_step must be at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_task("arithmetic", **settings)


def test_functions_and_files_with_functions(tmp_path):
    def my_problems():
        return ROWS

    assert make_task(my_problems).name == "my_problems"
    (tmp_path / "mine.py").write_text("def rows():\n    return [{'prompt': 'a', 'answer': 'b'}] * 10\n")
    task = make_task(f"{tmp_path}/mine.py:rows")
    assert [p.content for p in task.held_out()] == ["a"]


# ---- rows


def test_every_tenth_row_is_held_out():
    task = make_task(ROWS)
    assert [p.id for p in task.held_out()] == [9, 19]
    drawn = {p.id for p in task.prompts(18, np.random.default_rng(0))}
    assert drawn == set(range(20)) - {9, 19}
    assert len(task.prompts(50, np.random.default_rng(0))) == 50


def test_few_rows_serve_for_both(caplog):
    task = make_task(ROWS[:3])
    assert len(task.held_out()) == 3 and "fewer than 10 rows" in caplog.text


def test_jsonl(tmp_path):
    file = write_lines(tmp_path / "mine.jsonl", [*ROWS, "", "  "])
    task = make_task(f"jsonl:{file}")
    assert [p.id for p in task.held_out()] == [9, 19] and task.source.training(1, np.random.default_rng(0))[0].columns.keys() == {
        "answer",
        "level",
    }
    assert task.evaluate(make_run(ScriptedPolicy(right)))["pass@1"] == 1
    write_lines(tmp_path / "mine.heldout.jsonl", ROWS[:2])
    task = make_task(f"jsonl:{file}")
    assert [p.id for p in task.held_out()] == [20, 21] and len(task.source.rows) == 20


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (['{"prompt": "a"}', "", '{"prompt": '], "line 3 of .*is not JSON: Expecting value at column 12"),
        (['{"prompt": "a"}', '{"answer": "a"}'], "line 2 of .*has no 'prompt'"),
        (["[1]"], "line 1 of .*is list"),
        (['{"prompt": ""}'], "line 1 of .*has no 'prompt'"),
        ([], "holds no problems"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_task(f"jsonl:{write_lines(tmp_path / 'bad.jsonl', lines)}")


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*No such file"):
        make_task(f"jsonl:{tmp_path}/none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        make_task(f"jsonl:{tmp_path}/bytes.jsonl")


def test_conversations_as_prompts():
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    seen = []

    def reward(prompts, completions, **_):
        seen.append((prompts, completions))
        return [1.0] * len(prompts)

    for key in ("prompt", "messages"):
        task = make_task([{key: messages}] * 10, rewards=reward)
        batch = task.collect(task.held_out(1), make_run(ScriptedPolicy(right)))
        assert task.score(batch).tolist() == [1]
        assert seen.pop() == ([messages[:1]], [[{"role": "assistant", "content": "2"}]])
        assert batch.signals["prompt_text"] == ["user: 1+1="]


# ---- other packages


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    task = make_task("reasoning_gym:chain_sum")
    training, held_out = task.prompts(20, np.random.default_rng(0)), task.held_out(20)
    assert not {p.id for p in training} & {p.id for p in held_out}
    answers = {p.content: p.columns["answer"] for p in held_out}
    run = make_run(ScriptedPolicy(lambda text, draw: f"so <answer>{answers[text]}</answer>", context_limit=2000))
    batch = task.collect(held_out, run)
    assert task.score(batch).tolist() == [1.0] * 20
    run.policy.reply = lambda text, draw: "0"
    assert not bool(task.correct(task.collect(held_out, run)).any())
    with pytest.raises(ValueError, match="no data set 'chain_sun'; did you mean chain_sum"):
        make_task("reasoning_gym:chain_sun")


def test_local_folders_through_datasets(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"question": r["prompt"], "answer": f"work #### {r['answer']}"} for r in ROWS])
    task = make_task(f"hf:{folder}:train")
    assert task.evaluate(make_run(ScriptedPolicy(right)))["pass@1"] == 1
    with pytest.raises(ValueError, match="cannot load the data set"):
        make_task(f"hf:{folder}:nosuchsplit")


@pytest.mark.parametrize(
    ("module", "spec", "sentence"),
    [("reasoning_gym", "reasoning_gym:chain_sum", r"anypo\[reasoning\]"), ("datasets", "hf:owner/name", "anypo.hub")],
)
def test_missing_packages_are_named(monkeypatch, module, spec, sentence):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ValueError, match=sentence):
        make_task(spec)


def test_hub_names_may_carry_a_configuration(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((*a, k["split"])) or ROWS)
    for spec in ("openai/gsm8k/main:test", "openai/gsm8k", "squad:validation"):
        sources.hub_rows(spec)
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", None, "train"), ("squad", None, "validation")]


def test_rows_are_continued_from_any_depth():
    replies = iter(["12345", "ab", "xyz", "7"])
    policy = ScriptedPolicy(lambda text, draw: next(replies))
    task, run = make_task(ROWS, max_tokens=6), make_run(policy, frozenset({"old_entropy"}))
    batch = task.collect([Prompt(0, "p"), Prompt(1, "q", max_actions=4)], run)
    assert batch.signals["completion"] == ["12345", "ab"]
    rows, depth = torch.tensor([1, 0, 0, 1]), torch.tensor([1, 2, 6, 3])
    endings = task.continue_rows(batch, rows, depth, run)
    assert endings.signals["completion"] == ["a7", "12xyz", "12345", "ab"]
    assert endings.parent.tolist() == [1, 0, 0, 1] and endings.branch_at.tolist() == [1, 2, 6, 3]
    assert [policy.decode(c) for c in endings.context] == ["q", "p", "p", "q"] and bool(endings.terminated.all())
    assert policy.calls[-1]["max_tokens"] == [4, 3] and policy.calls[-1]["prompts"] == ["p12", "qa"]
    assert endings.signals["old_entropy"].shape == endings.logp.shape and torch.equal(endings.logp != 0, endings.mask)
