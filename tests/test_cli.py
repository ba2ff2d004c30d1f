import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "grpoo"], "unknown method 'grpoo'; did you mean grpo"),
        (["show", "gsppo"], "unknown method 'gsppo'; did you mean gspo"),
        (["train", "grpo", "--task", "arithmetics"], "unknown task 'arithmetics'; did you mean"),
        (["train", "grpo", "--model", "no/such-model", "--steps", "1"], "no/such-model"),
        (["train", "grpo", "--task", "token_bandit", "--set", "objective.clip=1"], "objective (ClippedSurrogate) has no field 'clip'"),
        (["train", "grpo", "--task", "token_bandit", "--set", "objective.clip_low=abc"], "takes float, not 'abc'"),
        (["train", "grpo", "--task", "token_bandit", "--set", "clip"], "--set takes NAME=VALUE"),
        (["train", "grpo", "--task", "token_bandit", "--set", "select.group_size=1"], "set select.group_size to 2 or more"),
        (["train", "grpo", "--task", "token_bandit", "--credit", "nothing"], "unknown method 'nothing'"),
        (["train", "grpo", "--task", "token_bandit", "--steps", "0"], "steps must be at least 1"),
        (["train", "grpo", "--task", "token_bandit", "--engine", "mpi"], "engine 'mpi' is not available"),
        (["train", "grpo", "--task", "token_bandit", "--set", "update.optimizer=adamm", "--steps", "1"], "unknown optimizer 'adamm'"),
        (["compare", "grpo", "--budget", "hours"], "a budget is tokens, steps"),
        (["list", "--domain", "cooking"], "no domain 'cooking'; there are"),
        (["reproduce"], "name the rows to reproduce, or give --all"),
        (["report", "/nonexistent"], "holds no metrics"),
        (["eval", "/nonexistent/run"], "/nonexistent/run"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(anypo, arguments, sentence):
    found = anypo(*arguments)
    assert found.returncode == 2, found.stderr
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr and len(found.stderr.strip().splitlines()) == 1


def test_debug_shows_the_traceback():
    command = [sys.executable, "-m", "anypo.cli", "show", "grpoo"]
    assert "Traceback" in subprocess.run([*command, "--debug"], capture_output=True, text=True).stderr
    plain = subprocess.run(command, capture_output=True, text=True)
    assert plain.returncode == 2 and "Traceback" not in plain.stderr


def test_list_json_is_the_contract(anypo):
    rows = json.loads(anypo("list", "--json").stdout)
    assert {"slug", "name", "domain", "kind", "seams", "paper", "status"} == set(rows[0])
    assert "grpo" in [r["slug"] for r in rows]
    credits = json.loads(anypo("list", "--seam", "credit", "--domain", "language", "--json").stdout)
    assert credits and all("credit" in r["seams"] for r in credits)


def test_show_names_base_equations_and_source(anypo):
    text = anypo("show", "gspo").stdout
    for part in ("2507.18071", "CHANGES AGAINST GRPO", "SequenceClip", "loss_token(", "src/anypo/methods/language/gspo.py"):
        assert part in text


def test_train_json_with_swapped_seams(anypo, tmp_path):
    out = tmp_path / "run"
    found = anypo(
        "train", "grpo", "--task", "token_bandit", "--steps", 8, "--credit", "gdpo", "--objective", "gspo", "--out", out, "--json"
    )
    result = json.loads(found.stdout)
    assert {"slug", "task", "model", "steps", "before", "after", "seconds", "tokens_per_second", "out"} <= set(result)
    assert result["steps"] == 8 and set(result["before"]) == {"pass@1"}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines] == list(range(8)) and all("reward" in r and "time" in r for r in lines)
    for name in ("config.json", "checkpoints", "model", "report.html"):
        assert (out / name).exists()
    config = json.loads((out / "config.json").read_text())
    assert "--credit gdpo" in config["command"] and "SequenceClip" in config["describe"]


def test_compare_writes_page_and_resumes_finished_runs(anypo, tmp_path):
    arguments = ["compare", "grpo", "rloo", "--task", "token_bandit", "--seeds", 2, "--budget", "steps=5", "--out", tmp_path, "--json"]
    first = json.loads(anypo(*arguments).stdout)
    assert {m["slug"] for m in first["methods"]} == {"grpo", "rloo"}
    for method in first["methods"]:
        assert method["final"]["low"] <= method["final"]["iqm"] <= method["final"]["high"] and len(method["final"]["per_seed"]) == 2
    assert "<html" in (tmp_path / "report.html").read_text()
    assert json.loads(anypo(*arguments).stdout) == first


def test_reproduce_exit_code_and_json(anypo):
    found = anypo("reproduce", "gspo", "--quick", "--json")
    rows = json.loads(found.stdout)
    assert rows[0]["slug"] == "gspo" and found.returncode == (0 if rows[0]["holds"] else 1)


@pytest.mark.parametrize(("slug", "credit"), [("ppo", "grpo"), ("grpo", "ppo")])
def test_a_swapped_credit_takes_its_critic_along(anypo, slug, credit):
    found = anypo("train", slug, "--task", "token_bandit", "--steps", 2, "--credit", credit, "--json")
    assert found.returncode == 0, found.stderr
