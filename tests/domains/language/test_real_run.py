"""The built-in model through the public API: it learns, what it saves is evaluated, and bad rewards and prompts get their sentences."""

import json
import time

import pytest

from anypo import api


def test_grpo_raises_held_out_accuracy_of_the_built_in_model(tmp_path):
    result = api.train("grpo", task="arithmetic", steps=25, out=tmp_path, evaluation_prompts=96)
    assert 0.2 < result.before["pass@1"] < 0.5
    assert result.after["pass@1"] > result.before["pass@1"] + 0.15
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert len(samples["before"]) == len(samples["after"]) == 10
    found = api.evaluate(str(tmp_path), k=(1, 4))
    assert found["pass@1"]["low"] < found["pass@1"]["value"] < found["pass@1"]["high"]
    assert found["pass@4"]["value"] >= found["pass@1"]["value"] > result.before["pass@1"] and "maj@4" in found


def test_a_real_run_resumes_to_the_same_numbers(tmp_path):
    whole = api.train("grpo", task="arithmetic", steps=4, seed=1, out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped"):
        api.train("grpo", task="arithmetic", steps=4, seed=1, out=tmp_path / "part", checkpoint_every=2, on_step=Stop(3))
    resumed = api.train("grpo", resume=tmp_path / "part", **api.arguments_of(tmp_path / "part", "grpo"))
    columns = [[(r["reward"], r["loss"], r["grad_norm"]) for r in run.run.history] for run in (whole, resumed)]
    assert columns[0] == columns[1]
    assert resumed.before == whole.before and resumed.after == whole.after


class Stop:
    """Ends a run in the middle of its third step's bookkeeping."""

    def __init__(self, after):
        self.left = after

    def __call__(self, record):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("stopped")


ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 7) for b in range(1, 7)]


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (lambda prompts, completions, **columns: [1.0], "returned 1"),
        (lambda prompts, completions, **columns: [float("nan")] * len(completions), "finite"),
        (lambda prompts, completions, **columns: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_bad_reward_functions_stop_the_run_with_a_sentence(reward, sentence):
    with pytest.raises(ValueError, match=sentence) as found:
        api.train("grpo", task=ROWS, rewards={"mine": reward}, steps=1, max_tokens=4)
    assert "mine" in str(found.value) and "\n" not in str(found.value)


def test_a_hanging_reward_keeps_the_other_rewards():
    def sleepy(prompts, completions, **columns):
        if any(p == "1+1=" for p in prompts):
            time.sleep(30)
        return [1.0] * len(completions)

    result = api.train("grpo", task=ROWS, rewards={"sleepy": sleepy}, reward_timeout=0.3, steps=1, max_tokens=3, evaluation_prompts=2)
    assert 0 < result.run.history[0]["reward"] <= 1


def test_own_rows_rewards_and_a_swapped_seam_train():
    def exact(prompts, completions, answer, **columns):
        return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]

    def short(prompts, completions, **columns):
        return [float(len(c) <= 2) for c in completions]

    result = api.train("gdpo", task=ROWS, rewards={"exact": exact, "short": short}, seams={"objective": "gspo"}, steps=2, max_tokens=4)
    record = result.run.history[-1]
    assert {"reward/exact", "reward/short"} <= set(record)
    assert {"reward/exact", "reward/short"} <= set(result.after)


def test_an_over_long_prompt_is_named():
    with pytest.raises(ValueError, match=r"prompt \d+ .*more than the model's context"):
        api.train("grpo", task=[{"prompt": "1" * 400, "answer": "1"}] * 20, steps=1)
