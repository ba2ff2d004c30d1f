"""Meta-MAPG basin entry: peer-learning correction and annealing (arXiv:2605.18078).

Several stable equilibria may attract independent policy gradients; which one is reached is decided by the basin that is entered first. Meta-MAPG
(arXiv:2011.00382) climbs a player's value after some learning steps of all players. Its gradient is the ordinary one at the end of these steps, an
own-learning term and a peer-learning term: how my parameters change what my peers will learn. The last moves starts into the basin of the wanted
equilibrium, and since it also shifts the points where updates vanish, its weight is annealed to 0 once the basin has been entered. Against independent
policy gradients (`meta_mapg.independent`) it changes the credit. The split into three terms is from Meta-MAPG; the form with exact gradients, the rule
of entry and annealing, and all constants are [reconstructed]. Left out: gradients from sampled episodes, the neural policies on a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.games.smooth import SmoothTask, dilemma_values, joint_of, matrix_values, quadratic_values
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Joint = Float[Tensor, "B n d"]
Values = Callable[[Tensor], Tensor]  # [B,n,d] -> [B,n], every player's value, differentiable twice


class Corrections(NamedTuple):
    final: Tensor  # [B,n,d] after the learning steps
    value: Tensor  # [B,n] there
    pg: Tensor  # [B,n,d] each player's own slope there
    own: Tensor  # [B,n,d] own-learning term
    peer: Tensor  # [B,n,d] peer-learning term
    total: Tensor  # [B,n,d] their sum, the derivative of the final value by the player's first parameters


class Schedule(NamedTuple):
    weight: Tensor  # [T,...]
    entry_step: Tensor  # [...] int64, -1 where the basin is never entered


def own_slopes(values: Values, theta: Joint, create_graph: bool = False) -> Joint:
    """Each player's slope of its own value in its own parameters."""
    found = values(theta)
    return torch.stack([_slope(found[:, i], theta, create_graph)[:, i] for i in range(theta.shape[1])], dim=1)


def _slope(value: Tensor, theta: Tensor, create_graph: bool = False) -> Tensor:
    return torch.autograd.grad(value.sum(), theta, create_graph=create_graph, retain_graph=True)[0]


def learn(values: Values, theta: Joint, alpha: float, unroll: int) -> Joint:
    """Equation 1: `unroll` simultaneous steps of size `alpha` of all players, differentiable in `theta`, which requires a gradient."""
    here = theta.clone()
    for _ in range(unroll):
        here = here + alpha * own_slopes(values, here, create_graph=True)
    return here


def corrections(values: Values, theta: Joint, alpha: float, unroll: int) -> Corrections:
    """Equations 1-3 for all starts and players at once; no gradient flows through what is returned. The starts must not affect one another."""
    with torch.enable_grad():
        start = theta.detach().requires_grad_()
        final = learn(values, start, alpha, unroll)
        there = final.detach().requires_grad_()
        value = values(there)
        pg, through_own, total = [], [], []
        for i in range(theta.shape[1]):
            slope = _slope(value[:, i], there)
            mine = torch.zeros_like(slope)
            mine[:, i] = slope[:, i]
            pg.append(slope[:, i])
            total.append(torch.autograd.grad(final, start, slope, retain_graph=True)[0][:, i])
            through_own.append(torch.autograd.grad(final, start, mine, retain_graph=True)[0][:, i])
    gradient, own, whole = (torch.stack(x, dim=1) for x in (pg, through_own, total))
    return Corrections(final.detach(), value.detach(), gradient, own - gradient, whole - own, whole)


def jacobian(values: Values, theta: Joint, alpha: float, unroll: int) -> Float[Tensor, "B m m"]:
    """Equation 2: all m = n d final parameters by all first ones."""
    with torch.enable_grad():
        start = theta.detach().requires_grad_()
        final = learn(values, start, alpha, unroll).flatten(1)
        return torch.stack([_slope(final[:, k], start).flatten(1) for k in range(final.shape[1])], dim=1)


def meta_gradient(theta: Float[Tensor, " n"], alpha: float, unroll: int, game: str = "matrix", **given: Tensor) -> dict[str, Tensor]:
    """Equations 1-3 of a game of two players with one number each, all [2], and their `jacobian` [2,2]; `matrix` is given by payoff1 and payoff2,
    `quadratic` by Q1, Q2, c1 and c2. Raises ValueError for another game."""
    if game not in ("matrix", "quadratic"):
        raise ValueError(f"unknown game '{game}'; there are matrix and quadratic")
    pair = lambda name: torch.stack([given[name + "1"], given[name + "2"]])  # noqa: E731
    values = partial(matrix_values, payoffs=pair("payoff")) if game == "matrix" else partial(quadratic_values, Q=pair("Q"), c=pair("c"))
    start = theta.reshape(1, -1, 1)
    found = {name: x.reshape(-1) for name, x in corrections(values, start, alpha, unroll)._asdict().items()}
    return found | {"jacobian": jacobian(values, start, alpha, unroll)[0]}


def ipd_value(theta: Float[Tensor, "... 2 5"], gamma: float, R: float, S: float, T: float, P: float) -> dict[str, Tensor]:
    """Equation 9: `value` [...,2]."""
    return {"value": dilemma_values(theta, gamma, R, S, T, P)}


def entry(inside: Int[Tensor, " B"], since: Int[Tensor, " B"], near: Tensor, patience: int) -> tuple[Tensor, Tensor]:
    """Equation 6, one step: how many steps each start has been near without a break, and the number of steps since it entered (the first counts as 1)."""
    inside = torch.where(near, inside + 1, torch.zeros_like(inside))
    return inside, torch.where(since > 0, since + 1, (inside >= patience).to(since))


def schedule(distance: Float[Tensor, "T ..."], lam0: float, kappa: float, radius: float, patience: int) -> Schedule:
    """Equation 6: `lam0` until the basin is entered, times `kappa` at every step from then on."""
    inside = since = torch.zeros_like(distance[0], dtype=torch.int64)
    steps = []
    for now in distance:
        inside, since = entry(inside, since, now <= radius, patience)
        steps.append(since)
    passed = torch.stack(steps)
    return Schedule(lam0 * kappa ** passed.to(distance.dtype), torch.where(since > 0, len(steps) - since, -1))


@dataclass
class Annealing:
    """The weight of the peer term, of every start apart. Keeps for each start how long it has been near and since when it is inside."""

    first: float = 1.0  # weight before entry, 0 switches the term off
    kappa: float = 0.9  # factor a step after entry, in [0,1]; 1 = constant weight
    radius: float = 0.1  # distance that counts as near, >= 0
    patience: int = 5  # steps near without a break that count as entry, >= 1
    inside: Tensor | None = field(default=None, init=False, repr=False)
    since: Tensor | None = field(default=None, init=False, repr=False)

    def __call__(self, distance: Float[Tensor, " N"], start: Int[Tensor, " N"], starts: int) -> Float[Tensor, " N"]:
        if self.inside is None or self.since is None:
            self.inside, self.since = (torch.zeros(starts, dtype=torch.int64) for _ in range(2))
        self.inside[start], self.since[start] = entry(self.inside[start], self.since[start], distance <= self.radius, self.patience)
        return self.first * self.kappa ** self.since[start].to(distance.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"inside": self.inside, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inside, self.since = state["inside"], state["since"]


@dataclass
class LearningAwareGradient:
    """Equation 4: how far every coordinate should move, pg + own * own-learning + weight * peer-learning. Advantages are those slopes."""

    alpha: float = 1.0  # size of the learning steps that are looked through, >= 0
    unroll: int = 1  # their number, >= 0; 0 = independent policy gradients
    own: float = 1.0  # weight of the own-learning term
    peer: Annealing = field(default_factory=Annealing)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if not isinstance(run.task, SmoothTask):
            raise ValueError(
                f"{run.method.name} differentiates through the players' learning, which takes a differentiable game and not "
                f"'{run.task.name}'; use stag_hunt or iterated_dilemma"
            )
        found = corrections(run.task.game.values, joint_of(batch, run.task.game), self.alpha, self.unroll)
        weight = self.peer(batch.signal("distance"), batch.signal("prompt_id"), len(run.task.starts))
        run.log(peer_weight=float(weight.mean()), distance=float(batch.signal("distance").mean()))
        return (found.pg + self.own * found.own + weight[:, None, None] * found.peer).flatten(1)


@dataclass
class StrategyAscent:
    """Linear in the strategies with the advantages as slopes, summed: every start takes its own step of the learning rate's size."""

    needs = frozenset({"strategy"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(-torch.where(batch.counted, batch.advantage.detach() * new.strategy, torch.zeros_like(new.strategy)).sum())


@dataclass
class BoundedSteps(GradientSteps):
    """Gradient steps after which parameters are put back into [-bound, bound]: logits of a pure equilibrium have no limit."""

    bound: float = 10.0  # > 0

    def one_step(self, part: Batch, loss_fn: MethodLoss, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, float]:
        metrics = super().one_step(part, loss_fn, optimizer, run)
        with torch.no_grad():
            for parameter in run.policy.parameters():
                parameter.clamp_(-self.bound, self.bound)
        return metrics


INDEPENDENT = Method(
    name="meta_mapg.independent",
    paper=Paper("Meta-MAPG basin entry: peer-learning correction and annealing", "2605.18078", 2026),
    domain="games",
    summary="the baseline: every player climbs its own value as if the others stood still",
    task="stag_hunt",
    select=UniformPrompts(group_size=1),
    rollout=OnPolicy(),
    reward=TaskReward(),
    credit=LearningAwareGradient(unroll=0),
    objective=StrategyAscent(),
    update=BoundedSteps(learning_rate=0.5, optimizer="sgd", max_grad_norm=None),
)

METHOD = INDEPENDENT.but(
    name="meta_mapg",
    summary="policy gradients that see how they change what peers learn, which chooses the equilibrium; annealed once its basin is entered",
    credit=LearningAwareGradient(),
)

VARIANTS = {
    "independent": INDEPENDENT,
    "own": METHOD.but(
        name="meta_mapg.own", summary="own-learning alone: meta-learning that is blind to its peers", credit=LearningAwareGradient(peer=Annealing(0.0))
    ),
    "lookahead": METHOD.but(
        name="meta_mapg.lookahead", summary="peer-learning alone, as in learning with opponent awareness", credit=LearningAwareGradient(own=0.0)
    ),
}  # fmt: skip
