"""GymTask: segments, groups of episodes, termination apart from truncation, exact resume, failures, evaluation."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from anypo import api, catalogue
from anypo.domains.control.envs import EnvironmentFailed
from anypo.domains.control.setup import build, owns
from anypo.domains.control.tasks import GymTask
from anypo.loops.on_policy import step, train
from anypo.run import Run

PPO = catalogue.get("ppo", "control").set("update.minibatches", 2).set("update.epochs", 1)


class Clock(gymnasium.Env):
    """Observes the time; ends by itself at 4 when `ends`, else a limit of 6 cuts it short. Raises once at `fault` in its life."""

    broken = False

    def __init__(self, ends: bool = True, fault: int | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(-10, 10, (1,))
        self.action_space = gymnasium.spaces.Discrete(2)
        self.ends, self.fault, self.time = ends, fault, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple:
        self.time += 1
        if self.time == self.fault and not Clock.broken:
            Clock.broken = True
            raise RuntimeError("no more")
        return np.full(1, self.time, np.float32), 1.0, self.ends and self.time == 4, not self.ends and self.time == 6, {}


def run_of(task: GymTask, out: Path | None = None, steps: int = 4, method: object = PPO, **options: object) -> Run:
    policy, _ = build(task, None, **options)
    return Run(method, policy, task, steps=steps, seed=0, out=out)


@pytest.mark.parametrize("ends", [True, False])
def test_ends_are_told_apart_and_the_true_next_observation_is_kept(ends: bool) -> None:
    task = GymTask(lambda: Clock(ends), envs=2, horizon=10)
    run = run_of(task)
    batch = run.collect(task.prompts(2, run.rng))
    length = 4 if ends else 6
    times = batch.context[0, :, 0].tolist()
    assert times == [float(t % length) for t in range(10)]
    at_end = torch.tensor([t % length == length - 1 for t in range(10)])
    assert torch.equal(batch.terminated[0], at_end if ends else torch.zeros(10, dtype=torch.bool))
    assert torch.equal(batch.truncated[0], torch.zeros(10, dtype=torch.bool) if ends else at_end)
    true_next = torch.tensor([[float(t % length + 1)] for t in range(10)])  # `length`, never the 0 of the next episode
    torch.testing.assert_close(batch.next_value[0], run.policy.values(true_next).detach(), atol=1e-6, rtol=0)
    following = run.collect(task.prompts(2, run.rng))  # the environments run on
    assert following.context[0, 0, 0] == 10 % length


def test_groups_are_whole_episodes_from_one_start_state() -> None:
    policy, task = build("CartPole-v1", None)
    run = Run(catalogue.get("grpo", "control"), policy, task, steps=1, seed=0)
    prompts = [p.but(samples=4) for p in task.prompts(3, run.rng)]
    batch = run.collect(prompts)
    assert batch.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for g in range(3):
        starts = batch.context[batch.group == g, 0]
        assert torch.equal(starts, starts[:1].expand_as(starts))
    assert len(torch.unique(batch.context[:, 0], dim=0)) == 3
    ended = (batch.terminated | batch.truncated) & batch.mask
    assert (ended.sum(1) == 1).all() and ended[torch.arange(12), batch.lengths - 1].all()
    reward = run.score_rewards(batch)
    torch.testing.assert_close(reward.sum(1), batch.lengths.float())
    assert len(set(batch.lengths.tolist())) > 1


def test_training_is_repeatable_and_evaluation_disturbs_nothing() -> None:
    histories = []
    for watch in (False, True):
        policy, task = build("CartPole-v1", None, envs=4, horizon=32)
        run = Run(PPO, policy, task, steps=3, seed=5)
        while not run.finished:
            if watch:
                task.evaluate(run)
            step(run)
        histories.append([{k: v for k, v in record.items() if k != "time"} for record in run.history])
    assert histories[0] == histories[1]


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "InvertedPendulum-v5"])
def test_a_resumed_run_equals_one_never_stopped(name: str, tmp_path: Path) -> None:
    def make(folder: str) -> Run:
        policy, task = build(name, None, envs=2, horizon=20)
        return Run(PPO, policy, task, steps=4, seed=0, out=tmp_path / folder, checkpoint_every=2)

    whole = train(make("whole"))
    stopped = make("stopped")
    for _ in range(3):  # one step further than the checkpoint
        step(stopped)
    resumed = make("stopped")
    assert resumed.resume() and resumed.step == 2
    train(resumed)
    for ours, theirs in zip(resumed.history, whole.history, strict=True):
        assert {k: v for k, v in ours.items() if k != "time"} == {k: v for k, v in theirs.items() if k != "time"}
    for a, b in zip(resumed.policy.state_dict().values(), whole.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_failing_environment_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    Clock.broken = True
    task = GymTask(lambda: Clock(ends=False, fault=3), envs=2, horizon=5)
    run = run_of(task, tmp_path)
    step(run)
    Clock.broken = False
    with pytest.raises(EnvironmentFailed, match="on_env_error=restart"):
        train(run)
    Clock.broken = True
    again = run_of(GymTask(lambda: Clock(ends=False), envs=2, horizon=5), tmp_path)
    assert again.resume() and again.step == 1
    assert train(again).step == 4


class KeptClock(Clock):
    """A clock whose episodes can be brought back."""

    def get_state(self) -> dict:
        return {"time": self.time}

    def restore_state(self, state: dict) -> None:
        self.time = state["time"]


@pytest.mark.parametrize("samples", [1, 2])
def test_a_run_stopped_by_an_environment_goes_on_as_if_nothing_had_failed(samples: int, tmp_path: Path) -> None:
    method = PPO if samples == 1 else catalogue.get("grpo", "control").set("select.group_size", samples)

    def make(folder: str) -> Run:
        return run_of(GymTask(lambda: KeptClock(ends=False, fault=3), envs=2, horizon=5), tmp_path / folder, method=method)

    Clock.broken = True  # no fault
    whole = train(make("whole"))
    stopped = make("stopped")
    step(stopped)
    Clock.broken = False
    with pytest.raises(EnvironmentFailed):
        train(stopped)
    resumed = make("stopped")
    assert resumed.resume() and resumed.step == 1
    train(resumed)
    for ours, theirs in zip(resumed.history, whole.history, strict=True):
        assert {k: v for k, v in ours.items() if k != "time"} == {k: v for k, v in theirs.items() if k != "time"}
    for a, b in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_failing_environment_is_made_anew_when_asked() -> None:
    Clock.broken = False
    task = GymTask(lambda: Clock(ends=False, fault=3), envs=2, horizon=8, on_env_error="restart")
    run = run_of(task)
    batch = step(run)
    assert batch.mask.sum() == 15 and not batch.mask[0, 2]
    assert batch.truncated[0, 2] and torch.isfinite(batch.advantage).all()
    assert batch.context[0, 3, 0] == 0
    assert run.history[0]["environment_failures"] == 1
    train(run)


def test_rewards_are_scaled_by_the_spread_of_returns() -> None:
    policy, task = build("Pendulum-v1", None, envs=2, horizon=200, reward_gamma=0.9)
    run = Run(PPO, policy, task, steps=1, seed=0)
    batch = step(run)
    raw = batch.signals["raw_reward"].double()
    discounted, running = [], torch.zeros(2, dtype=torch.float64)
    for t in range(200):
        running = 0.9 * running + raw[:, t]
        discounted.append(running)
    torch.testing.assert_close(batch.reward.double() * torch.stack(discounted).std(correction=0), raw, rtol=1e-4, atol=1e-6)
    assert run.history[0]["reward"] == pytest.approx(float(raw.sum(1).mean()), rel=1e-4)  # the log speaks of true returns


def test_observations_that_are_discrete_become_one_hot() -> None:
    policy, task = build("FrozenLake-v1", None, envs=2, horizon=8)
    batch = step(Run(PPO, policy, task, steps=1, seed=0))
    assert batch.context.shape == (2, 8, 16) and (batch.context.sum(-1) == 1).all()


def test_a_video_is_written_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    path = tmp_path / "films" / "pole.gif"
    api.train("ppo", env="CartPole-v1", steps=1, envs=2, horizon=16, evaluation_episodes=1, video=str(path), settings={"update.epochs": 1})
    assert path.read_bytes()[:4] == b"GIF8"


def test_a_saved_policy_is_evaluated_with_intervals(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = api.train("ppo", env="CartPole-v1", steps=2, envs=4, horizon=64, out=out)
    found = api.evaluate(str(out))
    assert found["return"]["low"] <= found["return"]["value"] <= found["return"]["high"]
    assert result.after["return"] > 0 and (out / "report.html").exists()
    with pytest.raises(ValueError, match="does not fit the spaces of Acrobot-v1"):
        api.evaluate(str(out), task="Acrobot-v1")


def test_bad_options_are_said_in_one_sentence() -> None:
    assert owns("CartPole-v1") and owns("gym:anything") and not owns("arithmetic")
    with pytest.raises(ValueError, match="did you mean"):
        api.train("ppo", env="CartPole-v11", steps=1)
    with pytest.raises(ValueError, match="control knows no option 'envz'"):
        api.train("ppo", env="CartPole-v1", steps=1, envz=3)
    with pytest.raises(ValueError, match="on_env_error is stop or restart"):
        api.train("ppo", env="CartPole-v1", steps=1, on_env_error="maybe")
    with pytest.raises(ValueError, match="discrete actions"):
        api.train("sac", env="CartPole-v1", steps=1)
    with pytest.raises(ValueError, match="at least 1"):
        api.train("ppo", env="CartPole-v1", steps=1, envs=0)
