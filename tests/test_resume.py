"""A run killed at any moment resumes to the same numbers as one never stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from anypo import api
from anypo.report.store import read

STEPS = 24


def arguments(task, out=None, resume=None):
    where = ["--resume", str(resume)] if resume else ["--out", str(out)]
    return [
        sys.executable,
        "-m",
        "anypo.cli",
        "train",
        "grpo",
        "--task",
        task,
        "--steps",
        str(STEPS),
        "--checkpoint-every",
        "4",
        "--seed",
        "3",
        *where,
    ]


def columns(folder):
    return [(r["step"], r["reward"], r["loss"], r["actions"], r.get("kl")) for r in read(folder / "metrics.jsonl")]


@pytest.mark.parametrize("kill_after", [1, 13])
def test_sigkill_and_resume_equal_an_uninterrupted_run(tmp_path, kill_after):
    whole = tmp_path / "whole"
    api.train("grpo", task="token_bandit", steps=STEPS, seed=3, checkpoint_every=4, out=whole)
    killed = tmp_path / "killed"
    process = subprocess.Popen(arguments("token_bandit", out=killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = killed / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > kill_after):
        time.sleep(0.002)
    time.sleep(random.Random(kill_after).uniform(0, 0.01))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (killed / "config.json").exists()
    api.train("grpo", resume=killed, **api.arguments_of(killed, "grpo"))
    assert columns(killed) == columns(whole)
    assert (killed / "report.html").exists()


def test_resume_after_the_end_changes_nothing(tmp_path):
    first = api.train("grpo", task="token_bandit", steps=6, out=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = api.train("grpo", resume=tmp_path, **api.arguments_of(tmp_path, "grpo"))
    assert again.after == first.after and (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_uses_the_checkpoint_before_a_damaged_one(tmp_path):
    whole = tmp_path / "whole"
    api.train("dapo", task="token_bandit", steps=12, checkpoint_every=4, out=whole)
    broken = tmp_path / "broken"
    api.train("dapo", task="token_bandit", steps=12, checkpoint_every=4, out=broken)
    newest = sorted((broken / "checkpoints").glob("step-*"))[-1]
    os.truncate(newest / "tensors.safetensors", 10)
    api.train("dapo", resume=broken, **api.arguments_of(broken, "dapo"))
    assert columns(broken) == columns(whole)


def test_bad_resumes_get_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="holds no run to resume"):
        api.train("grpo", task="token_bandit", resume=tmp_path)
    api.train("grpo", task="token_bandit", steps=1, out=tmp_path)
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        api.train("grpo", task="token_bandit", steps=1, out=tmp_path)
    with pytest.raises(ValueError, match="holds a run of grpo, not of gspo"):
        api.arguments_of(tmp_path, "gspo")


def test_checkpoints_hold_no_pickle(tmp_path):
    api.train("grpo", task="token_bandit", steps=4, checkpoint_every=2, out=tmp_path)
    names = {p.suffix for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()}
    assert names == {".json", ".safetensors"}
    assert json.loads((tmp_path / "summary.json").read_text())["slug"] == "grpo"
