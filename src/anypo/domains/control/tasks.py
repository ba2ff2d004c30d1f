"""GymTask: a Gymnasium environment as a task of the common loop.

How prompts are attempted follows from what the method asks. One attempt each: the prompts are parallel environments, and a batch is a segment of
`horizon` steps from each, carried on from step to step. Several attempts each (group methods): a prompt is a start seed, and a batch holds whole
episodes from the same start state, one row each. Rewards are dense [N,T]; a group method compares their sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control import video as films
from anypo.domains.control.chunks import Chunked, chunked_spaces, windows
from anypo.domains.control.collect import Beginning, Finished, Stream, Trajectories, episodes
from anypo.domains.control.envs import EnvironmentFailed, Environments, Maker, describe, make_environments, maker
from anypo.domains.control.policy import EnvironmentPolicy
from anypo.domains.control.replay import Recording, as_batch, read
from anypo.domains.control.teams import Teams
from anypo.run import Run
from anypo.task import Prompt

EVALUATION_SEED = 1_000_000  # held-out episodes begin from this seed on; training seeds are drawn below it
ON_ENV_ERROR = ("stop", "restart")


class GymTask:
    """A Gymnasium environment by id, or by a function that makes one."""

    objectives: tuple[str, ...] = ("reward",)

    def __init__(
        self, environment: str | Maker, *, envs: int = 8, horizon: int = 256, normalize_rewards: bool | None = None, reward_gamma: float = 0.99,
        evaluation_episodes: int = 20, on_env_error: str = "stop", video: str | bool | None = None, data: str | None = None, action_chunk: int = 1,
    ) -> None:  # fmt: skip
        """`envs`: parallel environments (prompts a step). `horizon`: steps of each in a segment. `normalize_rewards`: divide rewards by the running
        standard deviation of the discounted return (segments only; None = for continuous actions on-policy), with discount `reward_gamma`. `on_env_error`:
        what an environment that raises does to the run, stop (after writing a checkpoint when there is a folder) or restart its episode. `video`:
        a GIF of one episode, written when training ends: the name of the file, or true for one in the run's folder. `data`: a file of recorded steps;
        methods with a replay buffer then learn from it alone. `action_chunk`: environment steps a decision of the policy takes; then all else counts
        decisions.

        Raises ValueError for an unknown environment, unsupported spaces or an option out of range.
        """
        if min(envs, horizon, evaluation_episodes, action_chunk) < 1:
            given = f"{envs}, {horizon}, {evaluation_episodes} and {action_chunk}"
            raise ValueError(f"envs, horizon, evaluation_episodes and action_chunk must be at least 1, not {given}")
        if on_env_error not in ON_ENV_ERROR:
            raise ValueError(f"on_env_error is {' or '.join(ON_ENV_ERROR)}, not '{on_env_error}'")
        self.make = maker(environment)
        self.spaces = describe(self.make)
        if action_chunk > 1:
            self.spaces = chunked_spaces(self.spaces, action_chunk)
        self.name = self.spaces.name
        self.prompts_per_step, self.horizon = envs * self.spaces.team_size, horizon
        self.normalize_rewards = normalize_rewards
        self.reward_gamma, self.evaluation_episodes, self.on_env_error = reward_gamma, evaluation_episodes, on_env_error
        self.data, self.video = data, video
        if films.wanted(video, self.name) is not None:
            films.check(self.make, self.name)
        self.scale = RewardScale()
        self.last_return: float | None = None
        self._stream: Stream | None = None
        self._episode_environments: Environments | None = None
        self._pending: dict[str, Any] | None = None
        self._limit: int | None = None  # of the episodes of the step's groups
        self._before_prompts: Mapping[str, Any] | None = None  # state of the random stream that the step's prompts were drawn from

    def environments(self, count: int) -> Environments:
        """`count` fresh environments of this task's kind; with several agents each, rows, of which a team has several."""
        team = self.spaces.team_size
        made = make_environments(self.make, self.spaces, -(-count // team), self.on_env_error == "restart")
        if team > 1:
            return Teams(made, team)
        return Chunked(made, self.spaces.chunk) if self.spaces.chunk > 1 else made

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` start seeds, one for all agents of a team. Environments that already run are not reset by them."""
        self._before_prompts = rng.bit_generator.state
        team = self.spaces.team_size
        return [Prompt(id=int(seed), content=int(seed)) for seed in rng.integers(EVALUATION_SEED, size=-(-count // team)).repeat(team)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: EnvironmentPolicy = run.policy  # type: ignore[assignment]
        policy.begin_collection()
        start = self._pending if self._stream is None or run.out is None else self._stream.state_dict()
        try:
            batch, seen = self._segment(prompts, run) if all(p.samples == 1 for p in prompts) else self._groups(prompts, run)
        except EnvironmentFailed:
            if run.out is not None:
                self._save_beginning(start, run)
            raise
        policy.end_collection(seen.observation[seen.mask])
        return batch

    def _save_beginning(self, stream: dict[str, Any] | None, run: Run) -> None:
        """A checkpoint of the beginning of this step, so that a resumed run repeats it."""
        self._stream, self._pending = None, stream
        if self._before_prompts is not None:
            run.rng.bit_generator.state = self._before_prompts
        run.save()

    def _segment(self, prompts: list[Prompt], run: Run) -> tuple[Batch, Trajectories]:
        stream, finished = self._running(prompts), Finished()
        horizon = prompts[0].max_actions or self.horizon
        policy: EnvironmentPolicy = run.policy  # type: ignore[assignment]
        seen = stream.collect(policy.actor(), policy.for_environment, policy.noise(run.rng, (horizon, len(prompts))), finished)
        self._log(finished.returns, finished.lengths, run)
        continuous_on_policy = self.spaces.actions is None and run.method.loop == "on_policy"
        if continuous_on_policy if self.normalize_rewards is None else self.normalize_rewards:
            self.scale.update(seen.reward, seen.terminated | seen.truncated, self.reward_gamma)
        rows = torch.arange(len(prompts))
        return self._batch(seen, rows // self.spaces.team_size, rows, run, critic=True), seen

    def _groups(self, prompts: list[Prompt], run: Run) -> tuple[Batch, Trajectories]:
        if self.spaces.team_size > 1:
            raise ValueError(f"{self.name} has teams of {self.spaces.team_size}, which attempt each start once; set select.group_size to 1")
        seeds = [p.content for p in prompts for _ in range(p.samples)]
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        self._limit = prompts[0].max_actions
        seen = self._episodes(seeds, run)
        self._log(seen.reward.sum(1).tolist(), seen.mask.sum(1).tolist(), run)
        prompt_id = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        return self._batch(seen, group, prompt_id, run, critic="old_value" in run.method.needs()), seen

    def _episodes(self, seeds: list[int], run: Run, beginning: Beginning | None = None) -> Trajectories:
        """Whole episodes from these seeds under the run's policy."""
        policy: EnvironmentPolicy = run.policy  # type: ignore[assignment]
        if self._episode_environments is None or self._episode_environments.count < len(seeds):
            self._episode_environments = self.environments(len(seeds))
        draw = lambda n: policy.noise(run.rng, (n,))  # noqa: E731
        return episodes(self._episode_environments, seeds, policy.actor(), policy.for_environment, draw, self._limit, beginning)

    def continue_rows(self, batch: Batch, rows: Tensor, depth: Tensor, run: Run) -> Batch:
        """New endings of episodes after their first `depth` [M] actions; see `anypo.task.Resumable`. Each is taken again from its start seed, so that
        the environment's own randomness, if any, goes on as it did in the row.

        Raises ValueError for segments, whose beginning has no seed, and for an environment that does not repeat itself.
        """
        seeds = batch.signal("prompt_id")[rows].tolist()
        given = Beginning(batch.action[rows].numpy(), depth.numpy())
        seen = self._episodes(seeds, run, given)
        steps = min(seen.observation.shape[1], batch.horizon)
        shared = (torch.arange(steps) <= depth[:, None]) & batch.mask[rows, :steps]
        if not torch.equal(torch.from_numpy(seen.observation)[:, :steps][shared], batch.context[rows, :steps][shared]):
            raise ValueError(
                f"{self.name} did not come back to the states of its episodes; continuing them takes whole episodes (select.group_size 2 or more) of an "
                "environment that repeats itself from a seed"
            )
        critic = "old_value" in run.method.needs()
        endings = self._batch(seen, batch.group[rows], batch.signal("prompt_id")[rows], run, critic)
        return endings.but(parent=rows, branch_at=depth)

    def _running(self, prompts: list[Prompt]) -> Stream:
        """The environments that carry on; made, and reset to the prompts' seeds, when there are none or another number is wanted."""
        if self._stream is None or len(self._stream.seeds) != len(prompts):
            self._stream = Stream(self.environments(len(prompts)), [p.content for p in prompts])
            if self._pending is not None and len(self._pending["seeds"]) == len(prompts):
                self._stream.load_state_dict(self._pending)
            self._pending = None
        return self._stream

    def _batch(self, seen: Trajectories, group: Tensor, prompt_id: Tensor, run: Run, critic: bool) -> Batch:
        observation, mask = torch.from_numpy(seen.observation), torch.from_numpy(seen.mask)
        signals: dict[str, Any] = {"prompt_id": prompt_id, "raw_reward": torch.from_numpy(seen.reward)}
        if seen.cost is not None:
            signals["cost"] = torch.from_numpy(seen.cost)
        needs = run.method.needs()
        if "batch_next_context" in needs:
            signals["next_context"] = torch.from_numpy(seen.following)
        batch = Batch(
            action=torch.from_numpy(seen.action), mask=mask, logp=torch.zeros(mask.shape), group=group, context=observation,
            terminated=torch.from_numpy(seen.terminated), truncated=torch.from_numpy(seen.truncated),
            version=torch.full((len(group),), run.version), signals=signals,
        )  # fmt: skip
        provided = run.policy.provides
        wanted = {"logp", "entropy", "logits", "mean", "log_std"} & provided | ({"value"} & provided if critic else set())
        found = run.policy.observe(batch, wanted)
        batch.logp = found.pop("logp", batch.logp)  # policies without a likelihood leave it at 0
        signals.update({f"old_{name}": value for name, value in found.items()})
        if "old_value" in signals:
            batch.next_value = self._next_value(seen, signals["old_value"], run)
        return batch

    def _next_value(self, seen: Trajectories, value: Tensor, run: Run) -> Tensor:
        """[N,T]: the critic at the true next observations. Inside an episode that is the next value; only ends are evaluated again."""
        if not run.policy.memoryless:  # a value may depend on other rows
            return run.policy.values(torch.from_numpy(seen.following))  # type: ignore[operator]
        following = torch.cat([value[:, 1:], value.new_zeros(len(value), 1)], dim=1)
        again = torch.from_numpy(seen.terminated | seen.truncated)
        again[:, -1] = True
        following[again] = run.policy.values(torch.from_numpy(seen.following[again.numpy()]))  # type: ignore[operator]
        return following

    def _log(self, returns: list[float], lengths: list[int], run: Run) -> None:
        """Episodes that ended in this step. The record's `reward` is their mean return too (the last known one when none ended)."""
        if returns:
            self.last_return = float(np.mean(returns))
            run.log(episode_return=self.last_return, episode_length=float(np.mean(lengths)))
        run.log(episodes=len(returns) // self.spaces.team_size, **({} if self.last_return is None else {"reward": self.last_return}))
        environments = self._stream.environments if self._stream else self._episode_environments
        if environments is not None and environments.failures:
            run.log(environment_failures=environments.failures)

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T], in the scale of this step when rewards are normalized; the environment's own are the signal `raw_reward`."""
        return batch.signal("raw_reward") / self.scale.divisor

    def dataset(self, run: Run) -> Batch | None:
        """The recorded steps that the option `data` names, in the units of the run's policy; None without one."""
        if self.data is None:
            return None
        return as_batch(windows(read(self.data, self.spaces), self.spaces.chunk), run.policy)  # type: ignore[arg-type]

    def demonstrations(self, rng: np.random.Generator) -> Recording | None:
        """What may be imitated: the recorded steps that the option `data` names, else what the environment itself shows (its method `demonstrate`),
        else None."""
        if self.data is not None:
            return windows(read(self.data, self.spaces), self.spaces.chunk)
        environment = self.make().unwrapped
        return windows(environment.demonstrate(rng), self.spaces.chunk) if hasattr(environment, "demonstrate") else None

    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean undiscounted return and length over held-out start seeds, acting by the likeliest action."""
        returns, lengths = self.held_out(run.policy, self.evaluation_episodes)  # type: ignore[arg-type]
        film = films.wanted(self.video, self.name, run.out) if run.finished else None
        if film is not None:
            films.record(run.policy, self.make, film, EVALUATION_SEED)  # type: ignore[arg-type]
        return {"return": float(returns.mean()), "length": float(lengths.mean())}

    def held_out(self, policy: EnvironmentPolicy, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths [count] of episodes from held-out start seeds."""
        first = EVALUATION_SEED * (1 + seed)
        team = self.spaces.team_size
        seeds = [seed for seed in range(first, first + count) for _ in range(team)]
        seen = episodes(self.environments(count * team), seeds, policy.actor(), policy.for_environment, None)
        return seen.reward[::team].sum(1, dtype=np.float64), seen.mask[::team].sum(1)

    def state_dict(self) -> dict[str, Any]:
        stream = self._stream.state_dict() if self._stream else self._pending
        return {"stream": stream, "scale": self.scale.state_dict(), "last_return": self.last_return}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Episodes in progress go on exactly where the environments can be restored; elsewhere they begin anew."""
        self.scale.load_state_dict(state["scale"])
        self.last_return = state["last_return"]
        self._stream, self._pending = None, state["stream"]


class RewardScale:
    """Running standard deviation of the discounted return; rewards are divided by it."""

    def __init__(self) -> None:
        self.running: np.ndarray | None = None  # [N] discounted returns so far
        self.count, self.mean, self.square = 0.0, 0.0, 0.0
        self.divisor = 1.0

    def update(self, reward: np.ndarray, ended: np.ndarray, gamma: float) -> None:
        """Take in rewards [N,T]; `divisor` then stands until the next call."""
        if self.running is None or len(self.running) != len(reward):
            self.running = np.zeros(len(reward))
        returns = np.empty(reward.shape)
        for t in range(reward.shape[1]):
            self.running = self.running * gamma + reward[:, t]
            returns[:, t] = self.running
            self.running = self.running * ~ended[:, t]
        total = self.count + returns.size
        shift = returns.mean() - self.mean
        self.square += returns.var() * returns.size + shift**2 * self.count * returns.size / total
        self.mean += shift * returns.size / total
        self.count = total
        self.divisor = float(np.sqrt(self.square / total + 1e-8))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
