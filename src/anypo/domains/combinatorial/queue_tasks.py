"""QueueTask and QueuePolicy: scheduling a queueing network as a task of the common loop. A trajectory is a copy of the network over time."""

from __future__ import annotations

import json
from collections.abc import Set
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.combinatorial.queues import (
    FEATURES,
    NETWORKS,
    SERVICES,
    Paths,
    QueueNetwork,
    average_cost,
    draw_streams,
    simulate_chain,
    simulate_events,
)  # fmt: skip
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt

TEST_SEED = 1_000_000  # held-out copies have seeds from here on; training seeds are drawn below it


class QueuePolicy(Policy):
    """Softmax over the non-empty classes of a server, linear in four features of a class, inside the guard; back-pressure beyond it.

    The context of a batch is the jobs [N,T,C], its actions the classes [N,T,S] that servers chose, -1 where they had no choice. Provides `logp` and
    `entropy` [N,T] (0 where the guard decides), and `value` [N,T] when asked for a critic.
    """

    optimizer = "adam"
    learning_rate = 3e-4
    memoryless = True

    def __init__(self, network: QueueNetwork, *, threshold: float = 30.0, value: bool = False, hidden: int = 32, seed: int = 0) -> None:
        """`threshold`: jobs in all beyond which back-pressure takes over (0: always; inf: never). The rule begins as a random choice; the critic's
        weights depend on `seed`."""
        super().__init__()
        self.network, self.threshold, self.hidden = network, float(threshold), hidden
        size = len(network.service)
        self.theta = nn.Parameter(torch.zeros(size, FEATURES))
        self.critic: nn.Module | None = None
        if value:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                layers = (nn.Linear(2 * size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
                self.critic = nn.Sequential(*layers)
        self.allowed = torch.from_numpy(network.allowed)
        self.provides = frozenset({"logp", "entropy"} | ({"value"} if value else set()))
        self.name = f"softmax rule for {network.name}"

    def parameter_groups(self) -> list[dict]:
        critic = [] if self.critic is None else [{"params": list(self.critic.parameters()), "role": "value"}]
        return [{"params": [self.theta], "role": "policy"}, *critic]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        queues, signals = batch.context, Signals()
        if needs & {"logp", "entropy"}:
            logp = self._log_probabilities(queues)
            chosen = batch.action >= 0
            decided = chosen & (queues.sum(-1) <= self.threshold)[..., None]
            taken = torch.where(decided, logp.gather(-1, batch.action.clamp(min=0)[..., None])[..., 0], 0.0)
            spread = torch.where(decided, -(logp.exp() * logp.clamp(min=-1e9)).sum(-1), 0.0)
            signals["logp"], signals["entropy"] = taken.sum(-1), spread.sum(-1)
        if "value" in needs:
            signals["value"] = self.values(queues)
        return Signals({name: value for name, value in signals.items() if name in needs})

    def _log_probabilities(self, queues: Float[Tensor, "... C"]) -> Float[Tensor, "... S C"]:
        """-inf for classes that a server cannot serve; a row of a server without work is uniform over all, and never used."""
        share = queues / (1 + queues.sum(-1, keepdim=True))
        score = self.theta[:, 0] + self.theta[:, 1] * share + self.theta[:, 2] + self.theta[:, 3] * queues.log1p()
        there = (queues > 0)[..., None, :] & self.allowed
        there = there | ~there.any(-1, keepdim=True)
        return score[..., None, :].masked_fill(~there, -torch.inf).log_softmax(-1)

    def values(self, queues: Float[Tensor, "... C"]) -> Tensor:
        assert self.critic is not None
        share = queues / (1 + queues.sum(-1, keepdim=True))
        return self.critic(torch.cat([queues.log1p(), share], dim=-1)).squeeze(-1)

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and settings in a folder, which `load_queue_policy` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        options = {"threshold": self.threshold, "value": self.critic is not None, "hidden": self.hidden}
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "policy.safetensors")
        (folder / "queue.json").write_text(json.dumps({"network": self.network.name, "options": options}, indent=1))


def load_queue_policy(folder: Path) -> QueuePolicy:
    """A saved policy: a run's folder or its model/ folder. Raises ValueError when there is none."""
    folder = folder if (folder / "queue.json").exists() else folder / "model"
    if not (folder / "queue.json").exists():
        raise ValueError(f"{folder} holds no saved queue policy (no queue.json); give the folder of a run or its model/ folder")
    saved = json.loads((folder / "queue.json").read_text())
    policy = QueuePolicy(NETWORKS[saved["network"]], **saved["options"])
    policy.load_state_dict(load_file(folder / "policy.safetensors"))
    return policy


class QueueTask:
    """Copies of a network, begun empty. Rewards are dense [N,T]: minus the cost of a step, weighted so that a row's mean is minus its cost a unit of time.

    A prompt is the seed of everything random in a copy: two policies (or two weights of one) meet the same events under the same prompt.
    """

    objectives: tuple[str, ...] = ("reward",)

    def __init__(
        self, network: QueueNetwork | None = None, *, services: str = "exponential", horizon: int = 2000, copies: int = 64,
        test_horizon: int = 4000, test_copies: int = 32, reward_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """`horizon`: steps of a copy; `copies`: of a step of training. `reward_scale`, > 0: what rewards are multiplied by;
        critics learn faster with 0.01. Raises ValueError for unknown services, counts below 1 and a scale that is not positive."""
        if services not in SERVICES:
            raise ValueError(f"unknown services '{services}'; use {', '.join(SERVICES)}")
        if min(horizon, copies, test_horizon, test_copies) < 1:
            raise ValueError("a queue task needs at least 1 step and 1 copy")
        if reward_scale <= 0:
            raise ValueError(f"reward_scale must be positive, not {reward_scale}")
        self.network = network or NETWORKS["criss_cross"]
        self.name = f"queue:{self.network.name}"
        self.services, self.horizon, self.prompts_per_step = services, horizon, copies
        self.test_horizon, self.test_copies, self.reward_scale = test_horizon, test_copies, reward_scale

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` copies, named by their seeds."""
        return [Prompt(id=int(seed), content=int(seed)) for seed in rng.integers(TEST_SEED, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        owner = [i for i, prompt in enumerate(prompts) for _ in range(prompt.samples)]
        theta = run.policy.theta.detach()
        batch = self.collect_at([prompts[i] for i in owner], theta.reshape(1, -1).expand(len(owner), -1), run)
        batch.group = torch.tensor(owner)
        return batch

    def collect_at(self, prompts: list[Prompt], points: Float[Tensor, "N P"], run: Run) -> Batch:
        """One row a prompt, each under its own weights of the rule (flat); the critic, where there is one, is the run's."""
        policy: QueuePolicy = run.policy  # type: ignore[assignment]
        ids = [prompt.id for prompt in prompts]
        paths = self.simulate(ids, points.detach().double().numpy(), policy.threshold, self.horizon)
        mask = torch.ones(len(ids), self.horizon, dtype=torch.bool)
        ends = torch.zeros_like(mask)
        ends[:, -1] = True
        weight = paths.duration / paths.duration.mean(1, keepdims=True)
        reward = -(paths.queues[:, :-1] @ np.asarray(self.network.cost)) * weight
        run.log(cost=float(-reward.mean()))
        queues = torch.from_numpy(paths.queues).float()
        batch = Batch(
            action=torch.from_numpy(paths.choice), mask=mask, logp=torch.from_numpy(paths.logp).float(), group=torch.arange(len(ids)),
            context=queues[:, :-1], terminated=torch.zeros_like(mask), truncated=ends, version=torch.full((len(ids),), run.version),
            signals={"prompt_id": torch.tensor(ids), "raw_reward": torch.from_numpy(reward).float()},
        )  # fmt: skip
        if policy.critic is not None:
            value = policy.values(queues)
            batch.signals["old_value"], batch.next_value = value[:, :-1], value[:, 1:]
        return batch

    def simulate(self, seeds: list[int], points: Float[NDArray, "B P"], threshold: float, steps: int) -> Paths:
        """Copy i has the seed seeds[i] and the rule points[i]."""
        index = {seed: i for i, seed in enumerate(dict.fromkeys(seeds))}
        drawn = [draw_streams(self.network, self.services, seed, steps) for seed in index]
        streams = [np.stack(parts)[[index[seed] for seed in seeds]] for parts in zip(*drawn, strict=True)]
        theta = points.reshape(len(seeds), -1, FEATURES)
        if self.services == "exponential":
            return simulate_chain(self.network, theta, np.zeros(theta.shape[:2]), streams[0], threshold)
        gaps, work, uniforms = streams
        return simulate_events(self.network, theta, gaps, work, uniforms, threshold)

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T]."""
        return self.reward_scale * batch.signal("raw_reward")

    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean cost a unit of time on held-out copies, beside that of back-pressure."""
        return {"cost": float(self.costs(run.policy).mean()), "back_pressure_cost": self.back_pressure}  # type: ignore[arg-type]

    def costs(self, policy: QueuePolicy) -> Float[Tensor, " B"]:
        """Cost a unit of time of every held-out copy, the same copies for every policy."""
        return torch.from_numpy(self._held_out(policy.theta.detach().double().numpy(), policy.threshold))

    @cached_property
    def back_pressure(self) -> float:
        return float(self._held_out(np.zeros((len(self.network.service), FEATURES)), 0.0).mean())

    def _held_out(self, theta: NDArray, threshold: float) -> NDArray:
        seeds = list(range(TEST_SEED, TEST_SEED + self.test_copies))
        points = np.broadcast_to(theta.reshape(1, -1), (len(seeds), theta.size))
        return average_cost(self.network, self.simulate(seeds, points, threshold, self.test_horizon))
