"""A person beside a running policy: who sees every observation, may act in the policy's place, and whose takeovers are remembered.

What the policy would have done is kept with every step, so that a takeover can be read as a comparison of two actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from anypo.batch import Batch
from anypo.domains.control.replay import as_batch
from anypo.seams.replay import Replay, ReplayBuffer
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

RATES = "takeover_rates"  # of the run's state: share of steps taken over in the first episodes and in the latest; absent before there are enough


class Watched:
    """Stands for a policy while a task collects: a person sees every observation and may act in the policy's place. All else is the policy's own."""

    def __init__(self, policy: Any, person: Any, rng: np.random.Generator) -> None:
        self.policy, self.person, self.rng = policy, person, rng
        self.proposed: list[NDArray] = []  # of every step, [N,D] each
        self.intervened: list[NDArray] = []  # [N] each

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        propose = self.policy.actor()

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            proposed = propose(observation, noise)
            action, taken = self.person(observation, self.rng)
            self.proposed.append(proposed)
            self.intervened.append(taken)
            return np.where(taken[:, None], self.policy.from_environment(action), proposed)

        return act


@dataclass
class GuidedReplay(Replay):
    """Replay of a policy that a person watches. Takeovers fill a second buffer, which half of each minibatch comes from; it begins with what the
    environment demonstrates, if anything.

    The person is a function (observations [N,O], NumPy generator) -> (actions [N,D] in the environment's units, whether they are taken [N]); it has
    `judge(last rewards of the episodes that ended)`, and `state_dict` and `load_state_dict` when it keeps a state.
    """

    steps: int = 4
    updates_per_action: float = 2.0
    extra: tuple[str, ...] = ("intervened", "proposed")
    window: int = 20  # episodes that a rate of takeovers is measured over, >= 1
    demonstrations: bool = True  # whether the second buffer begins with the environment's demonstrations, which are no preferences
    person: Any = None  # None = the environment's own (its method `person`)
    takeovers: ReplayBuffer | None = field(default=None, init=False, repr=False)
    shares: list[float] = field(default_factory=list, init=False, repr=False)  # of every episode's steps, how many were taken over
    running: list[list[int]] = field(default_factory=list, init=False, repr=False)  # [N]: steps taken over, and steps, of running episodes
    pending: dict[str, Any] | None = field(default=None, init=False, repr=False)  # the person's state in a checkpoint

    def is_fixed(self, run: Run) -> bool:
        if getattr(run.task, "data", None) is not None:
            raise ValueError(
                "this method needs a person beside the running policy and learns from no recorded steps; leave out the option data"
            )
        return False

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.demonstrations and self.takeovers is None:
            self.show(run)
        if self.person is None:
            self.person = environments_person(run)
        if self.pending is not None:
            self.person.load_state_dict(self.pending)
            self.pending = None
        watched, policy = Watched(run.policy, self.person, run.rng), run.policy
        run.policy = watched  # type: ignore[assignment]
        try:
            batch = super().__call__(prompts, run)
        finally:
            run.policy = policy
        batch.signals["proposed"] = torch.from_numpy(np.stack(watched.proposed, axis=1))
        batch.signals["intervened"] = torch.from_numpy(np.stack(watched.intervened, axis=1))
        self.count(batch, run)
        return batch

    def count(self, batch: Batch, run: Run) -> None:
        """The share of takeovers in every episode, and its means over the first and the latest episodes (`RATES` of the run's state)."""
        assert batch.terminated is not None and batch.truncated is not None
        self.running = self.running or [[0, 0] for _ in range(len(batch))]
        ended, taken = (batch.terminated | batch.truncated).T.tolist(), batch.signal("intervened").T.tolist()
        reward, before = batch.signal("raw_reward").T.tolist(), len(self.shares)
        numbers, rewards = list[int](), list[float]()
        for t in range(batch.horizon):
            for row, episode in enumerate(self.running):
                episode[0] += taken[t][row]
                episode[1] += 1
                if ended[t][row]:
                    numbers.append(episode[0])
                    self.shares.append(episode[0] / episode[1])
                    rewards.append(reward[t][row])
                    episode[:] = [0, 0]
        self.person.judge(rewards)
        if numbers:
            run.log(takeovers=sum(numbers) / len(numbers))
        if len(self.shares) > before >= self.window:
            run.state[RATES] = [sum(part) / self.window for part in (self.shares[: self.window], self.shares[-self.window :])]

    def remember(self, batch: Batch) -> None:
        super().remember(batch)
        if bool(batch.signal("intervened").any()):
            self.remember_taken(batch.but(mask=batch.mask & batch.signal("intervened")))

    def remember_taken(self, batch: Batch) -> None:
        """Put every counted action into the second buffer."""
        self.takeovers = ReplayBuffer(self.capacity) if self.takeovers is None else self.takeovers
        everything, self.buffer = self.buffer, self.takeovers
        super().remember(batch)
        self.buffer = everything

    def show(self, run: Run) -> None:
        """The environment's demonstrations into the second buffer."""
        recording = run.task.demonstrations(run.rng)  # type: ignore[attr-defined]
        if recording is not None:
            batch = as_batch(recording, run.policy)  # type: ignore[arg-type]
            batch.signals |= {"proposed": batch.action, "intervened": torch.zeros(batch.mask.shape, dtype=torch.bool)}
            self.remember_taken(batch)

    def draw(self, run: Run) -> Batch:
        """Half of the minibatch from the takeovers, as soon as there are any."""
        assert self.buffer is not None
        half = self.batch_size // 2 if self.takeovers is not None and len(self.takeovers) else 0
        index = torch.randint(len(self.buffer), (self.batch_size - half,), generator=run.generator)
        parts = self.buffer.take(index)
        if half and self.takeovers is not None:
            chosen = self.takeovers.take(torch.randint(len(self.takeovers), (half,), generator=run.generator))
            parts = {name: torch.cat([value, chosen[name]]) for name, value in parts.items()}
        parts = {name: value.unsqueeze(1) for name, value in parts.items()}
        mask = torch.ones(self.batch_size, 1, dtype=torch.bool)
        return Batch(
            action=parts.pop("action"), mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(self.batch_size), context=parts.pop("context"),
            reward=parts.pop("reward"), terminated=parts.pop("terminated"), signals=parts,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        person = self.person.state_dict() if hasattr(self.person, "state_dict") else self.pending
        takeovers = self.takeovers.state_dict() if self.takeovers is not None else None
        return super().state_dict() | {"takeovers": takeovers, "shares": self.shares, "running": self.running, "person": person}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.takeovers, self.shares, self.running, self.pending = None, state["shares"], state["running"], state["person"]
        if state["takeovers"] is not None:
            self.takeovers = ReplayBuffer(self.capacity)
            self.takeovers.load_state_dict(state["takeovers"])


def environments_person(run: Run) -> Any:
    """Who takes over in the run's environment. Raises ValueError when it has nobody."""
    environment = run.task.make().unwrapped  # type: ignore[attr-defined]
    if not hasattr(environment, "person"):
        raise ValueError(f"nobody takes over in {run.task.name}; take Peg-v0, or set rollout.person to a function of your own")  # type: ignore[attr-defined]
    return environment.person()
