"""Differentiable games: players whose values are smooth functions of everybody's parameters, for many starts at once, and runs on them as a task.

A game is one-shot with two actions (stag hunt), quadratic, or a dilemma that is repeated for ever between strategies that remember one round. Values
are exact, so nothing is sampled; a start is one row of a batch, a coordinate of one player's parameters is one action.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt

Joint = Float[Tensor, "... n d"]  # n players, d parameters each
SWAPPED = (0, 2, 1, 3)  # CC, CD, DC, DD as the second player sees them


def matrix_values(theta: Joint, payoffs: Float[Tensor, "2 2 2"]) -> Float[Tensor, "... 2"]:
    """V_i = p_1^T M_i p_2 for p = (sigmoid, 1 - sigmoid) of the one logit of each player; `payoffs` [player, action of 1, action of 2]."""
    first, second = theta[..., 0].sigmoid().unbind(-1)
    chances = torch.stack([first * second, first * (1 - second), (1 - first) * second, (1 - first) * (1 - second)], -1)
    return chances @ payoffs.to(theta).flatten(1).T


def quadratic_values(theta: Joint, Q: Float[Tensor, "n n n"], c: Float[Tensor, "n n"]) -> Float[Tensor, "... n"]:
    """V_i = -z^T Q_i z / 2 + c_i^T z for z [n], one number a player."""
    z = theta[..., 0]
    return -torch.einsum("...a,iab,...b->...i", z, Q.to(theta), z) / 2 + z @ c.to(theta).T


def dilemma_values(theta: Float[Tensor, "... 2 5"], gamma: float, R: float, S: float, T: float, P: float) -> Float[Tensor, "... 2"]:
    """Normalized discounted payoffs of two strategies given by logits of cooperating at (start, CC, CD, DC, DD), each from the player's own side."""
    own = theta.sigmoid()
    first, second = own[..., 0, :], own[..., 1, [0, *(1 + s for s in SWAPPED)]]
    after = torch.stack([first * second, first * (1 - second), (1 - first) * second, (1 - first) * (1 - second)], -1)  # [...,5,4]
    payoffs = theta.new_tensor([[R, S, T, P], [R, T, S, P]]).T
    worth = torch.linalg.solve(torch.eye(4).to(theta) - gamma * after[..., 1:, :], payoffs.expand(*after.shape[:-2], 4, 2))
    return (1 - gamma) * (after[..., 0, None, :] @ worth)[..., 0, :]


@dataclass(frozen=True)
class SmoothGame:
    """Values, and how far a joint strategy is from the equilibria that one would like to reach."""

    name: str
    players: int
    size: int  # parameters of a player
    values: Callable[[Tensor], Tensor]  # [...,n,d] -> [...,n], differentiable twice
    distance: Callable[[Tensor], Tensor]  # [...,n,d] -> [...], 0 at the target
    radius: float = 0.1  # a start whose distance ends within it has entered the basin


def stag_hunt(both: float = 4.0, alone: float = 0.0, hare: float = 3.0) -> SmoothGame:
    """The logit of hunting the stag; the target is that both hunt it, at distance max_i |P_i(stag) - 1|."""
    row = torch.tensor([[both, alone], [hare, hare]])
    payoffs = torch.stack([row, row.T])
    return SmoothGame(
        "stag_hunt", 2, 1, lambda theta: matrix_values(theta, payoffs), lambda theta: (1 - theta.sigmoid()).flatten(-2).amax(-1)
    )


def quadratic_game(Q: Tensor, c: Tensor) -> SmoothGame:
    """The target is the Nash point, where each player's own slope is 0; Q_i symmetric, Q_ii > 0."""
    players = range(len(Q))
    nash = torch.linalg.solve(torch.stack([Q[i, i] for i in players]), torch.stack([c[i, i] for i in players]))
    return SmoothGame(
        "quadratic_game",
        len(Q),
        1,
        lambda theta: quadratic_values(theta, Q, c),
        lambda theta: (theta[..., 0] - nash.to(theta)).norm(dim=-1),
    )


def iterated_dilemma(gamma: float = 0.96, R: float = -1.0, S: float = -3.0, T: float = 0.0, P: float = -2.0) -> SmoothGame:
    """The target is that both begin with cooperation and go on with it: distance max_i |P_i - 1| at the start and after CC."""
    return SmoothGame(
        "iterated_dilemma", 2, 5, lambda theta: dilemma_values(theta, gamma, R, S, T, P),
        lambda theta: (1 - theta[..., :2].sigmoid()).flatten(-2).amax(-1),
    )  # fmt: skip


class JointPolicy(Policy):
    """The parameters of all players, [B,n,d] for B starts. Its one signal is `strategy` [N,n*d], differentiable, player after player."""

    provides = frozenset({"strategy"})
    learning_rate = 0.5
    optimizer = "sgd"
    unit = "coordinates"

    def __init__(self, starts: Float[Tensor, "B n d"]) -> None:
        super().__init__()
        self.theta = nn.Parameter(starts.clone())

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        return Signals({"strategy": self.theta[batch.signal("prompt_id")].flatten(1)} if "strategy" in needs else {})


class SmoothTask:
    """A differentiable game from many starts, all of them one prompt: an attempt at it is B rows. Scores are the values of the players [N,n].

    The action of a coordinate [N,n*d,1] is its parameter itself, without randomness. Signals: `prompt_id` [N] the start, `distance` [N]; the batch's
    `segment` [N,n*d] says whose coordinate it is.
    """

    domain = "games"
    prompts_per_step = 1

    def __init__(self, game: SmoothGame, starts: Float[Tensor, "B n d"]) -> None:
        """Raises ValueError for starts of another shape."""
        if starts.shape[1:] != (game.players, game.size):
            raise ValueError(
                f"starts of {game.name} have the shape [B,{game.players},{game.size}] with one row a start, not {list(starts.shape)}"
            )
        self.game, self.starts, self.name = game, starts, game.name
        self.objectives = tuple(f"player_{i + 1}" for i in range(game.players))

    def policy(self) -> JointPolicy:
        return JointPolicy(self.starts)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """The game, `count` times."""
        return [Prompt(id=i, content=self.name) for i in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        start = torch.arange(len(self.starts)).repeat(sum(p.samples for p in prompts))
        theta = run.policy.theta.detach()[start]
        rows, coordinates = len(start), self.game.players * self.game.size
        everywhere = torch.ones(rows, coordinates, dtype=torch.bool)
        return Batch(
            action=theta.reshape(rows, coordinates, 1), mask=everywhere, logp=theta.new_zeros(rows, coordinates), group=start,
            segment=(torch.arange(coordinates) // self.game.size).expand(rows, -1), terminated=torch.ones(rows, dtype=torch.bool),
            truncated=torch.zeros(rows, dtype=torch.bool), signals={"prompt_id": start, "distance": self.game.distance(theta)},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        return self.game.values(joint_of(batch, self.game))

    @torch.no_grad()
    def measure(self, policy: Policy) -> dict[str, Tensor]:
        """For each start [B], exactly: whether it is in the target's basin (0 or 1), and the mean value of the players."""
        theta = policy.theta
        return {"basin": (self.game.distance(theta) <= self.game.radius).double(), "value": self.game.values(theta).mean(-1)}

    def evaluate(self, run: Run) -> dict[str, float]:
        """Means over the starts."""
        return {name: float(values.mean()) for name, values in self.measure(run.policy).items()}


def joint_of(batch: Batch, game: SmoothGame) -> Joint:
    """The joint parameters [N,n,d] that a batch of `SmoothTask` holds as actions."""
    return batch.action[..., 0].unflatten(1, (game.players, game.size))


def _starts(game: SmoothGame, count: int, seed: int, uniform: float | None = None) -> Float[Tensor, "B n d"]:
    """Standard normal, or uniform on [-uniform, uniform]."""
    generator, shape = torch.Generator().manual_seed(seed), (count, game.players, game.size)
    if uniform is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return uniform * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)


def _stag_hunt_task(starts: int = 200, seed: int = 0) -> SmoothTask:
    game = stag_hunt()
    return SmoothTask(game, _starts(game, starts, seed, 3.0))


def _dilemma_task(starts: int = 64, gamma: float = 0.96, seed: int = 0) -> SmoothTask:
    game = iterated_dilemma(gamma)
    return SmoothTask(game, _starts(game, starts, seed))


TASKS: dict[str, Callable[..., Any]] = {"stag_hunt": _stag_hunt_task, "iterated_dilemma": _dilemma_task}
