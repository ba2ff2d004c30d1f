"""A policy for the blocking job shop: a network that passes messages between the operations still to be done, and scores the jobs that may move.

It takes shops of any size. Nodes are operations, numbered job by job; those that do not exist, and those that are done, take no part.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.combinatorial.blocking_shop import BlockingShop
from anypo.policy import Policy, Signals

FEATURES = 10


class View(NamedTuple):
    """What is seen of shops when a job must be chosen, each with leading dimensions of its own ([N,T], or [B])."""

    features: Any  # [...,V,F] of every operation, 0 for those that are done or do not exist
    alive: Any  # [...,V] bool: operations that are not done
    following: Any  # [...,J] the node of each job's next operation (0 where there is none)
    candidate: Any  # [...,J] bool: jobs that may move


class Observer:
    """Looks at one shop as a graph of `jobs` times `operations` nodes; `scale` is the mean duration of an operation."""

    def __init__(self, shop: BlockingShop, jobs: int, operations: int, scale: float) -> None:
        """Raises ValueError for a shop that is larger than that."""
        if len(shop.machine) > jobs or max(len(route) for route in shop.machine) > operations:
            raise ValueError(f"the shop has more than {jobs} jobs or more than {operations} operations in a job")
        self.shop, self.scale = shop, scale
        self.machine = np.full((jobs, operations), -1)
        self.duration = np.zeros((jobs, operations))
        for j, route in enumerate(shop.machine):
            self.machine[j, : len(route)] = route
            self.duration[j, : len(route)] = shop.duration[j]
        self.order = np.arange(operations)
        self.first = np.arange(jobs) * operations

    def look(self, candidates: list[int]) -> View:
        """Equation 2 of arXiv:2302.02506: status (not ready, waiting, blocking, processing), duration, what is left of it, the job's work not yet
        started, how long it waits, whether its machine is down and whether it is held. All times over `scale`."""
        shop, (jobs, operations) = self.shop, self.machine.shape
        missing = [0] * (jobs - len(shop.machine))
        current, left, work, ready = (np.array(x + missing)[:, None] for x in (shop.current, shop.left, shop.work, shop.ready))  # [J,1]
        done = current + (left == 0)
        alive = (self.machine >= 0) & (self.order >= done)
        waiting = alive & (self.order == done) & (left == 0)
        running = alive & (self.order == current) & (left > 0)
        down = np.array([*(shop.down(m) for m in range(shop.machines)), False])
        held = np.array([*(h >= 0 for h in shop.holder), False])
        parts = (
            ~waiting & ~running, waiting & (current < 0), waiting & (current >= 0), running, self.duration / self.scale,
            running * left / self.scale, work / self.scale, waiting * (shop.time - ready) / self.scale, down[self.machine], held[self.machine],
        )  # fmt: skip
        features = np.stack(np.broadcast_arrays(*parts), axis=-1).astype(np.float32) * alive[..., None]
        may = np.zeros(jobs, dtype=bool)
        may[candidates] = True
        following = self.first + np.minimum(done[:, 0], operations - 1)
        return View(features.reshape(-1, FEATURES), alive.reshape(-1), following, may)


def adjacency_of(machine: Int[Tensor, "N J O"]) -> Float[Tensor, "N 3 V V"]:
    """Which nodes send to which (row: receiver): the operation before in the job, the one after, the others on the same machine; -1: no operation."""
    count, jobs, operations = machine.shape
    flat = machine.reshape(count, -1)
    exists = (flat >= 0)[:, None, :] & (flat >= 0)[:, :, None]
    node = torch.arange(jobs * operations)
    same_job = node[:, None] // operations == node // operations
    before = same_job & (node[:, None] == node + 1)
    rivals = (flat[:, :, None] == flat[:, None, :]) & (node[:, None] != node)
    stacked = torch.stack([before.expand_as(rivals), before.T.expand_as(rivals), rivals], dim=1)
    return (stacked & exists[:, None]).float()


def gathered(h: Float[Tensor, "N T V d"], adjacency: Float[Tensor, "N 3 V V"], alive: Float[Tensor, "N T V"]) -> Float[Tensor, "N T V 5*d"]:
    """Equation 3: beside each node the mean of its senders of each kind that are alive, and of all that are alive; 0 where there is none."""
    count, horizon, nodes, size = h.shape
    h = h * alive[..., None]
    flat = adjacency.reshape(count, 3 * nodes, nodes)
    sums = (flat @ h.transpose(1, 2).reshape(count, nodes, horizon * size)).view(count, 3, nodes, horizon, size)
    number = (flat @ alive.transpose(1, 2)).view(count, 3, nodes, horizon, 1)
    means = (sums / number.clamp(min=1)).permute(0, 3, 2, 1, 4).reshape(count, horizon, nodes, 3 * size)
    return torch.cat([h, means, _mean(h, alive)[:, :, None].expand_as(h)], dim=-1)


def _mean(h: Tensor, alive: Tensor) -> Tensor:
    return h.sum(2) / alive.sum(2, keepdim=True).clamp(min=1)


class BlockingPolicy(Policy):
    """Scores the candidates by their next operations and the mean of the graph. Provides `logp`, `entropy` and `value` [N,T] and `logits` [N,T,J].

    A batch's `action` [N,T] is a job, its `context` [N,J,O] the machine of every operation (-1 for none); the fields of `View` are signals. The value
    is a number of the graph's mean times the number of operations that are left, since a mean does not tell how many there are.
    """

    provides = frozenset({"logp", "entropy", "value", "logits"})
    optimizer = "adam"
    learning_rate = 1e-3
    unit = "moves"

    def __init__(self, *, hidden: int = 32, layers: int = 2, seed: int = 0) -> None:
        """Weights depend on `seed` alone."""
        super().__init__()
        self.hidden, self.layers = hidden, layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encode = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU())
            self.rounds = nn.ModuleList(_perceptron(5 * hidden, hidden, hidden) for _ in range(layers))
            self.score = _perceptron(2 * hidden, hidden, 1)
            self.judge = _perceptron(hidden, hidden, 1)
        self.name = "blocking shop policy"

    def parameter_groups(self) -> list[dict[str, Any]]:
        critic = list(self.judge.parameters())
        rest = [*self.encode.parameters(), *self.rounds.parameters(), *self.score.parameters()]
        return [{"params": rest, "role": "policy"}, {"params": critic, "role": "value"}]

    def forward(self, machine: Int[Tensor, "N J O"], view: View) -> tuple[Float[Tensor, "N T J"], Float[Tensor, "N T"]]:
        """Logits, -inf for jobs that may not move unless no job may, and values."""
        alive = view.alive.float()
        adjacency = adjacency_of(machine)
        h = self.encode(view.features)
        for layer in self.rounds:
            h = layer(gathered(h, adjacency, alive))
        mean = _mean(h * alive[..., None], alive)
        chosen = h.gather(2, view.following[..., None].expand(*view.following.shape, self.hidden))
        both = torch.cat([chosen, mean[:, :, None].expand_as(chosen)], dim=-1)
        closed = ~view.candidate & view.candidate.any(-1, keepdim=True)
        logits = self.score(both)[..., 0].masked_fill(closed, -torch.inf)
        return logits, self.judge(mean)[..., 0] * alive.sum(2)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        view = View(*(batch.signal(name) for name in View._fields))
        logits, value = self(batch.context, view)
        logp = logits.log_softmax(-1)
        taken = logp.gather(2, batch.action[..., None])[..., 0]
        entropy = -(logp.exp() * logp.masked_fill(torch.isinf(logp), 0.0)).sum(-1)
        found = {
            "logp": torch.where(batch.mask, taken, 0.0),
            "entropy": torch.where(batch.mask, entropy, 0.0),
            "value": value,
            "logits": logits,
        }
        return Signals({name: x for name, x in found.items() if name in needs})

    @torch.no_grad()
    def choose(self, machine: Int[Tensor, "B J O"], view: View, generator: torch.Generator | None = None) -> NDArray:
        """A job for each of B shops: drawn, or without a generator the likeliest."""
        seen = View(*(torch.from_numpy(x)[:, None] for x in view))
        logits = self(machine, seen)[0][:, 0]
        if generator is None:
            return logits.argmax(-1).numpy()
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].numpy()

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and sizes in a folder, which `load_blocking_policy` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "policy.safetensors")
        (folder / "blocking.json").write_text(json.dumps({"hidden": self.hidden, "layers": self.layers}))


def load_blocking_policy(folder: Path) -> BlockingPolicy:
    """A saved policy: a run's folder or its model/ folder. Raises ValueError when there is none."""
    folder = folder if (folder / "blocking.json").exists() else folder / "model"
    if not (folder / "blocking.json").exists():
        raise ValueError(
            f"{folder} holds no saved policy of a blocking shop (no blocking.json); give the folder of a run or its model/ folder"
        )
    policy = BlockingPolicy(**json.loads((folder / "blocking.json").read_text()))
    policy.load_state_dict(load_file(folder / "policy.safetensors"))
    return policy


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
