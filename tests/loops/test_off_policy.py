"""The off-policy loop and its buffer: what goes in comes out, exact resume, a fixed buffer, clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo import catalogue
from anypo.domains.control.replay import Recording, as_batch, read, record_episodes, write
from anypo.domains.control.setup import build
from anypo.loops.off_policy import step, train
from anypo.run import Run
from anypo.seams.replay import ReplayBuffer

SAC = catalogue.get("sac").set("rollout.batch_size", 16).set("rollout.warmup", 20).set("rollout.steps", 10)


def small(seed: int = 0, out: Path | None = None, steps: int = 6, method: object = SAC, **options: object) -> Run:
    policy, task = build("Pendulum-v1", None, needs={"q_new"}, seed=seed, hidden=(16, 16), evaluation_episodes=2, **options)
    return Run(method, policy, task, steps=steps, seed=seed, out=out, checkpoint_every=3)


def records(run: Run) -> list[dict]:
    return [{k: v for k, v in record.items() if k != "time"} for record in run.history]


def test_a_buffer_gives_back_what_went_in_and_forgets_the_oldest() -> None:
    buffer = ReplayBuffer(5)
    for start in (0, 3, 6):
        rows = torch.arange(start, start + 3)
        buffer.add({"context": rows[:, None] * torch.ones(1, 2), "action": rows, "terminated": rows % 2 == 0})
    assert len(buffer) == 5
    found = buffer.take(torch.arange(5))
    assert sorted(found["action"].tolist()) == [4, 5, 6, 7, 8]
    assert found["action"].dtype == torch.int64 and found["terminated"].dtype == torch.bool
    assert torch.equal(found["context"][:, 1].long(), found["action"])
    assert torch.equal(found["terminated"], found["action"] % 2 == 0)


def test_more_rows_than_fit_at_once_leave_the_newest() -> None:
    buffer = ReplayBuffer(4)
    buffer.add({"action": torch.arange(10)})
    assert sorted(buffer.take(torch.arange(4))["action"].tolist()) == [6, 7, 8, 9]


def test_updates_follow_the_collected_actions_after_the_warm_up() -> None:
    run = small(steps=5)
    seen = []
    while not run.finished:
        step(run)
        seen.append((run.actions, run.version))
    assert seen == [(10, 0), (20, 10), (30, 20), (40, 30), (50, 40)]
    assert all(np.isfinite(v) for v in records(run)[-1].values())


def test_a_resumed_run_equals_one_never_stopped(tmp_path: Path) -> None:
    whole = train(small(out=tmp_path / "whole"))
    stopped = small(out=tmp_path / "stopped")
    for _ in range(4):  # one iteration further than the checkpoint
        step(stopped)
    resumed = small(seed=0, out=tmp_path / "stopped")
    assert resumed.resume() and resumed.step == 3
    train(resumed)
    assert records(resumed) == records(whole)
    for ours, theirs in zip(resumed.policy.state_dict().values(), whole.policy.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_fixed_buffer_is_learned_from_without_collecting(tmp_path: Path) -> None:
    collector = small()
    recording = record_episodes(collector.policy, collector.task.environments(2), [0, 1], np.random.default_rng(0))
    assert len(recording.reward) == 400 and recording.truncated.sum() == 2
    write(tmp_path / "steps.npz", recording)
    run = small(steps=3, method=SAC.set("rollout.warmup", 100_000), data=str(tmp_path / "steps.npz"))  # recordings need no warm-up
    train(run)
    assert run.actions == 0 and run.version == 30 and len(run.method.rollout.buffer) == 400
    batch = as_batch(read(str(tmp_path / "steps.npz"), run.task.spaces), run.policy)
    np.testing.assert_allclose(run.policy.for_environment(batch.action[:, 0].numpy()), recording.action, atol=1e-6)


def test_recordings_that_do_not_fit_are_said(tmp_path: Path) -> None:
    _, task = build("CartPole-v1", None)
    with pytest.raises(ValueError, match="there is no recording"):
        read(str(tmp_path / "none.npz"), task.spaces)
    zeros = np.zeros(3, np.float32)
    write(
        tmp_path / "other.npz",
        Recording(np.zeros((3, 9), np.float32), zeros[:, None], zeros, np.zeros((3, 9), np.float32), zeros > 0, zeros > 0),
    )
    with pytest.raises(ValueError, match="do not fit CartPole-v1"):
        read(str(tmp_path / "other.npz"), task.spaces)
    np.savez(tmp_path / "odd.npz", reward=zeros)
    with pytest.raises(ValueError, match="lacks observation"):
        read(str(tmp_path / "odd.npz"), task.spaces)


def test_a_minari_dataset_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("pyarrow")
    import gymnasium

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    environment, buffers, rewards = gymnasium.make("Pendulum-v1"), [], []
    for seed in range(2):
        seen, actions, gained, ended = [environment.reset(seed=seed)[0]], [], [], []
        for _ in range(200):
            action = np.array([0.5], np.float32)
            observation, reward, _, truncated, _ = environment.step(action)
            seen.append(observation), actions.append(action), gained.append(float(reward)), ended.append(truncated)
        rewards += gained
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                id=seed,
                observations=np.stack(seen),
                actions=np.stack(actions),
                rewards=gained,
                terminations=[False] * 200,
                truncations=ended,
                infos={},
            )
        )
    said = {"algorithm_name": "constant", "code_permalink": "none", "author": "none", "author_email": "none"}
    minari.create_dataset_from_buffers("test/pendulum-v0", buffer=buffers, env=environment, data_format="arrow", **said)
    _, task = build("Pendulum-v1", None)
    for source in (str(tmp_path / "test" / "pendulum-v0"), "minari:test/pendulum-v0"):
        recording = read(source, task.spaces)
        np.testing.assert_allclose(recording.reward, rewards, rtol=1e-6)
        assert recording.truncated.sum() == 2 and recording.next_observation.shape == (400, 3)
        np.testing.assert_array_equal(recording.observation[1], recording.next_observation[0])
    with pytest.raises(ValueError, match="there is no recording minari:"):
        read("minari:test/absent-v0", task.spaces)


def test_a_method_without_a_replay_buffer_is_refused() -> None:
    method = catalogue.get("ppo", "control").but(loop="off_policy")
    policy, task = build("CartPole-v1", None)
    with pytest.raises(ValueError, match="needs a rollout with a replay buffer"):
        train(Run(method, policy, task, steps=1))
