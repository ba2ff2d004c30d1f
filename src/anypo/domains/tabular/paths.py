"""Paths on finite graphs whose worth is a set function of the visited states: coverage and item collection on a grid, free choice of sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.path_policy import PathPolicy
from anypo.domains.tabular.set_functions import SetFunction
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt

EVALUATION_PATHS = 200


class SubmodularPaths:
    """Deterministic moves `next_state` [S,A] from one start; a path has `length` states, its score is F of them, [N].

    `signals` of its batches: `prompt_id` [N] (0), `path` [N,length] the visited states; the context is all of them but the last.
    """

    objectives: tuple[str, ...] = ("reward",)
    prompts_per_step = 1

    def __init__(
        self, name: str, next_state: Int[Tensor, "S A"], start: int, length: int, function: SetFunction, features: Float[Tensor, "S D"],
        *, hidden: tuple[int, ...] | None = (64, 64), history: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        """`features` [S,D]: what a network sees of a state. Raises ValueError for a path without a move."""
        if length < 2:
            raise ValueError(f"a path has at least 2 states, not {length}")
        self.name, self.next_state, self.start, self.length, self.set_function = name, next_state, start, length, function
        self.features, self.hidden, self.history, self.seed = features, hidden, history, seed

    def policy(self) -> PathPolicy:
        return PathPolicy(
            self.features, self.length - 1, self.next_state.shape[1], hidden=self.hidden, history=self.history, seed=self.seed
        )

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """The one start, `count` times."""
        return [Prompt(id=0, content=self.start) for _ in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        group = torch.tensor([i for i, p in enumerate(prompts) for _ in range(p.samples)])
        return self.sample(run.policy, group, run.generator)

    @torch.no_grad()
    def sample(self, policy: Policy, group: Int[Tensor, " N"], generator: torch.Generator) -> Batch:
        """One path for each entry of `group`."""
        choose, rows = policy.chooser(), torch.arange(len(group))
        state = torch.full_like(group, self.start)
        visited = torch.zeros(len(group), len(self.next_state))
        path, actions, logp, entropy = [state], [], [], []
        for t in range(self.length - 1):
            visited[rows, state] = 1.0
            log_probs = choose(t, state, visited).log_softmax(-1)
            action = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
            logp.append(log_probs[rows, action])
            entropy.append(-(log_probs.exp() * log_probs).sum(-1))
            state = self.next_state[state, action]
            actions.append(action)
            path.append(state)
        states = torch.stack(path, dim=1)
        ends = torch.zeros(len(group), self.length - 1, dtype=torch.bool)
        ends[:, -1] = True
        return Batch(
            action=torch.stack(actions, dim=1), mask=torch.ones_like(ends), logp=torch.stack(logp, dim=1), group=group, context=states[:, :-1],
            terminated=ends, truncated=torch.zeros_like(ends),
            signals={"prompt_id": torch.zeros_like(group), "path": states, "old_entropy": torch.stack(entropy, dim=1)},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        """F of the whole path [N]."""
        return self.set_function.value(batch.signal("path"))

    def measure(self, policy: Policy) -> dict[str, Tensor]:
        """F of sampled paths [200], from a random stream of its own."""
        batch = self.sample(policy, torch.zeros(EVALUATION_PATHS, dtype=torch.int64), torch.Generator().manual_seed(0))
        return {"return": self.set_function.value(batch.signal("path"))}

    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean F of sampled paths."""
        return {name: float(values.mean()) for name, values in self.measure(run.policy).items()}


def grid_moves(size: int) -> Int[Tensor, "S 5"]:
    """Stay, up, down, left, right on a `size` x `size` grid, states row by row; a move off the grid stays."""
    row, column = torch.arange(size).repeat_interleave(size), torch.arange(size).repeat(size)
    moves = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]
    return torch.stack([(row + r).clamp(0, size - 1) * size + (column + c).clamp(0, size - 1) for r, c in moves], dim=1)


def grid_places(size: int) -> Float[Tensor, "S 2"]:
    """Row and column of each state, in [-1,1]."""
    line = torch.linspace(-1, 1, size)
    return torch.stack([line.repeat_interleave(size), line.repeat(size)], dim=1)


def _grid(name: str, size: int, length: int, function: SetFunction, hidden: int, history: bool, seed: int) -> SubmodularPaths:
    start = (size // 2) * size + size // 2
    return SubmodularPaths(
        name, grid_moves(size), start, length, function, grid_places(size), hidden=(hidden, hidden), history=history, seed=seed
    )


def coverage_grid(
    size: int = 10, length: int = 15, radius: int = 1, hidden: int = 64, history: bool = False, seed: int = 0
) -> SubmodularPaths:  # fmt: skip
    """Cover cells: each state covers those within `radius` steps of the grid; from the centre, all cells of weight 1."""
    place = torch.stack([torch.arange(size).repeat_interleave(size), torch.arange(size).repeat(size)], dim=1)
    cover = ((place[:, None] - place[None]).abs().sum(-1) <= radius).double()
    function = SetFunction("coverage", {"cover": cover, "weight": torch.ones(size * size, dtype=torch.float64)})
    return _grid("coverage_grid", size, length, function, hidden, history, seed)


def items_grid(
    size: int = 8, length: int = 15, groups: int = 3, cap: int = 1, hidden: int = 64, history: bool = False, seed: int = 0
) -> SubmodularPaths:
    """Visit members of `groups` groups of states: 2x2 blocks around the centre, their nearest cells diagonal to it, `cap` members of each count.

    Raises ValueError for a grid below 6 or more than 4 groups.
    """
    if size < 6 or not 1 <= groups <= 4:
        raise ValueError(f"items_grid has 1 to 4 groups on a grid of at least 6, not {groups} on {size}")
    c = size // 2
    corners = [(c - 2, c - 2), (c - 2, c + 1), (c + 1, c - 2), (c + 1, c + 1)][:groups]
    blocks = [[(row + i) * size + column + j for i in (0, 1) for j in (0, 1)] for row, column in corners]
    function = SetFunction("items", {"groups": blocks, "cap": torch.full((groups,), cap), "count": size * size})
    return _grid("items_grid", size, length, function, hidden, history, seed)


def information_grid(
    size: int = 8, length: int = 12, scale: float = 1.5, noise: float = 0.5, hidden: int = 64, history: bool = False, seed: int = 0
) -> SubmodularPaths:
    """Measure a Gaussian process: a squared-exponential kernel of length `scale` (cells), observations with variance `noise`."""
    place = torch.stack([torch.arange(size).repeat_interleave(size), torch.arange(size).repeat(size)], dim=1).double()
    kernel = (-(torch.cdist(place, place) ** 2) / (2 * scale**2)).exp()
    return _grid("information_grid", size, length, SetFunction("information", {"kernel": kernel, "noise": noise}), hidden, history, seed)


def sets_bandit(sets: int = 12, cells: int = 30, picks: int = 4, density: float = 0.2, seed: int = 0) -> SubmodularPaths:
    """Choose `picks` of random sets of cells, each reachable from each; the start covers nothing. A table of logits."""
    generator = torch.Generator().manual_seed(seed)
    cover = (torch.rand(sets + 1, cells, generator=generator, dtype=torch.float64) < density).double()
    cover[sets] = 0.0
    function = SetFunction("coverage", {"cover": cover, "weight": torch.ones(cells, dtype=torch.float64)})
    moves = torch.arange(sets).expand(sets + 1, sets)
    return SubmodularPaths("sets_bandit", moves, sets, picks + 1, function, torch.zeros(sets + 1, 1), hidden=None, seed=seed)


TASKS: dict[str, Any] = {
    "coverage_grid": coverage_grid,
    "items_grid": items_grid,
    "information_grid": information_grid,
    "sets_bandit": sets_bandit,
}
