"""A leader sets incentives on the cells of a maze, a follower plays the entropy-regularized best response to them.

The policy that trains is the leader: its parameters are the incentives' weights, the actions of its batches are the follower's. X contexts (where the
follower's goal is), S cells, A = 4 moves. A goal pays and ends the walk. The follower is solved exactly or learns by soft Q-learning. Here too:
the household of the tax design problem, one step of it. Left out: training on that problem, and dynamics that depend on the leader.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt

SMALL = ("#######", "#..#..#", "#.....#", "#..#..#", "#.....#", "#..#..#", "#######")
FOUR_ROOMS = (
    "#############", "#.....#.....#", "#.....#.....#", "#...........#", "#.....#.....#", "#.....#.....#", "##.####.....#",
    "#.....###.###", "#.....#.....#", "#.....#.....#", "#...........#", "#.....#.....#", "#############",
)  # fmt: skip
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
WALKERS, WALK = 50, 100  # of soft Q-learning: 5000 steps each time the follower learns
Table = Float[Tensor, "... S A"]


class Incentive(NamedTuple):
    incentive: Tensor  # [S]


class Household(NamedTuple):
    reward: Tensor
    next_assets: Tensor


class Response(NamedTuple):
    policy: Tensor  # [...,S,A]
    value: Tensor  # [...,S] soft value


def incentive(weights: Float[Tensor, " S1"], low: float, high: float) -> Incentive:
    """low + (high - low) softmax(weights) without its last slot: a budget of |high - low| in all, part of which may stay unused."""
    return Incentive(low + (high - low) * weights.softmax(-1)[..., :-1])


def tax_step(
    assets: Any, hours: Any, consumption: Float[Tensor, "... 3"], noise: Any, *, asset_scale: float, prices: Any, vat: Any, pref: Any,
    work_disutility: float, income_tax: float, wage: float, lo: float, hi: float, std: float,
) -> Household:  # fmt: skip
    """One step of a household: its utility, and its assets after work, taxes, consumption and a shock of `noise` standard deviations."""
    a, worked = torch.as_tensor(assets, dtype=torch.float64), torch.as_tensor(hours, dtype=torch.float64)
    prices, vat, pref = (torch.as_tensor(x, dtype=torch.float64) for x in (prices, vat, pref))
    wealth = torch.where(a > 0, asset_scale * (a.clamp(min=0) / 20 + 1).log(), a)
    goods = ((consumption / (prices * (1 + vat))) ** pref).prod(-1)
    after = (a + (1 - income_tax) * worked * wage - consumption.sum(-1)).clamp(lo, hi)
    return Household(wealth - work_disutility * worked**2 + goods, (after + std * noise).clamp(lo, hi))


def chain(transition: Float[Tensor, "... S A S"], policy: Table, discount: float) -> Float[Tensor, "... S S"]:
    """I - discount P_pi, whose inverse sums what comes at every later step."""
    return torch.eye(policy.shape[-2]).to(policy) - discount * torch.einsum("...sa,...sat->...st", policy, transition)


def ahead(transition: Float[Tensor, "... S A S"], value: Float[Tensor, "... S"]) -> Table:
    """Mean over the next state of `value`; rows of `transition` that sum to 0 end the walk."""
    return torch.einsum("...sat,...t->...sa", transition, value)


def soft_response(
    transition: Float[Tensor, "... S A S"], reward: Table, gamma: float, reg: float, iterations: int | None = None,
    value: Float[Tensor, "... S"] | None = None,
) -> Response:  # fmt: skip
    """Equation 1: the policy softmax(Q*/reg), by soft policy iteration to 1e-12; or what so many soft value iterations from `value` (None: 0) give.
    The value is then that of one iteration more."""
    value = torch.zeros_like(reward[..., 0]) if value is None else value
    for _ in range(1000 if iterations is None else iterations):
        q = reward + gamma * ahead(transition, value)
        new = reg * (q / reg).logsumexp(-1)
        if iterations is None:
            log_policy = (q - new[..., None]) / reg
            policy = log_policy.exp()
            new = torch.linalg.solve(chain(transition, policy, gamma), (policy * (reward - reg * log_policy)).sum(-1))
            if float((new - value).abs().max()) <= 1e-12 * (1 + float(new.abs().max())):
                break
        value = new
    q = reward + gamma * ahead(transition, value)
    return Response((q / reg).softmax(-1), reg * (q / reg).logsumexp(-1))


def discounted_values(transition: Float[Tensor, "... S A S"], policy: Table, payoff: Table, discount: float) -> tuple[Tensor, Tensor]:
    """Q [...,S,A] and V [...,S] of a payoff under a policy."""
    value = torch.linalg.solve(chain(transition, policy, discount), (policy * payoff).sum(-1))
    return payoff + discount * ahead(transition, value), value


class LeaderPolicy(Policy):
    """Weights [S+1] of the incentives. What a batch asks for is the follower's: `logp` and `entropy` of its moves (differentiable in the weights through
    the best response), `follower_reward`, `leader_reward` and `leader_advantage` (without a gradient) at the visited pairs, all [N,T]; and the tables
    `follower_policy` (without a gradient), `reward_table` and `leader_table` [X,S,A]."""

    provides = frozenset(
        {"logp", "entropy", "follower_reward", "leader_reward", "leader_advantage", "follower_policy", "reward_table", "leader_table"}
    )
    learning_rate = 0.5
    optimizer = "sgd"
    unit = "moves of the follower"

    def __init__(self, game: IncentiveRooms, seed: int = 0) -> None:
        super().__init__()
        self.game, self.seed = game, seed
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.Parameter(0.1 * torch.randn(game.cells + 1, generator=generator, dtype=torch.float64))
        self.iterations: int | None = None  # soft value iterations of the follower; None = solved exactly
        self.trained: tuple[int, Tensor] | None = None  # how long it has trained under the present incentives, and the value then
        self.register_buffer("q", torch.zeros(*game.base.shape, len(MOVES), dtype=torch.float64))  # what soft Q-learning has learned
        self.register_buffer("lessons", torch.zeros((), dtype=torch.int64))

    def rewards(self) -> tuple[Tensor, Tensor]:
        """Follower's and leader's reward [X,S,A]."""
        game, paid = self.game, incentive(self.weights, 0.0, -self.game.budget).incentive
        follower = game.base + torch.where(game.is_goal, torch.zeros_like(paid), paid)
        leader = game.favoured - torch.where(game.is_goal, game.cost * paid.abs().sum(), torch.zeros_like(paid.sum()))
        return tuple(x[..., None].expand(*x.shape, len(MOVES)) for x in (follower, leader))  # type: ignore[return-value]

    @torch.no_grad()
    def response(self, exact: bool = False) -> Float[Tensor, "X S A"]:
        """The follower's policy; `exact`: the best response whatever the follower is."""
        game = self.game
        if game.follower == "q_learning" and not exact:
            return (self.q / game.reg).softmax(-1)
        if exact or self.iterations is None:
            return soft_response(game.transition, self.rewards()[0], game.gamma, game.reg).policy
        done, value = self.trained if self.trained and self.trained[0] <= self.iterations else (0, None)
        found = soft_response(game.transition, self.rewards()[0], game.gamma, game.reg, self.iterations - done, value)
        self.trained = (self.iterations + 1, found.value)
        return found.policy

    def limit(self, iterations: int | None) -> None:
        """How long the follower trains. While the incentives stay, a longer training goes on from a shorter one; None (solved exactly) ends that."""
        self.iterations = iterations
        if iterations is None:
            self.trained = None

    @torch.no_grad()
    def teach(self) -> None:
        """The follower goes on learning under the present incentives: soft Q-learning with random moves from random cells, rate 0.3."""
        game, rng = self.game, np.random.default_rng([self.seed, int(self.lessons)])
        reward, q, cumulative = self.rewards()[0].numpy(), self.q.numpy(), game.transition.cumsum(-1).numpy()
        context = np.repeat(np.arange(len(q)), WALKERS)
        cell = rng.integers(game.cells, size=len(context))
        for _ in range(WALK):
            move = rng.integers(len(MOVES), size=len(context))
            after = (cumulative[context, cell, move] <= rng.random(len(context))[:, None]).sum(-1)
            ends = after == game.cells
            after = np.where(ends, rng.integers(game.cells, size=len(context)), after)
            best = q[context, after].max(-1)
            soft = best + game.reg * np.log(np.exp((q[context, after] - best[:, None]) / game.reg).sum(-1))
            target = reward[context, cell, move] + np.where(ends, 0.0, game.gamma * soft)
            q[context, cell, move] += 0.3 * (target - q[context, cell, move])
            cell = after
        self.lessons += 1

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        game, policy = self.game, self.response()
        reward, leader = self.rewards()
        signals = {"follower_policy": policy, "reward_table": reward, "leader_table": leader}
        if needs - signals.keys():
            place = (batch.signal("prompt_id")[:, None], batch.context, batch.action)
            q, value = discounted_values(game.transition, policy, leader.detach(), game.gamma_leader)
            follower_q, follower_value = discounted_values(game.transition, policy, reward, game.gamma)
            advantage = follower_q - follower_value[..., None]
            log_policy = policy.clamp(min=1e-300).log() + (advantage - advantage.detach()) / game.reg  # its derivative is dA / reg
            entropy = -(log_policy.exp() * log_policy).sum(-1)
            signals |= {
                "logp": log_policy[place], "entropy": entropy[place[:2]], "follower_reward": reward[place], "leader_reward": leader[place],
                "leader_advantage": (q - value[..., None])[place],
            }  # fmt: skip
        return Signals({name: signals[name] for name in needs})


class IncentiveRooms:
    """`signals` of its batches: `prompt_id` [N] the contexts, drawn uniformly. The context of a batch is the cells [N,T]; rows end at the goal.

    Its score is the leader's reward, [N,T]. The leader gets 1 a step while the follower stands on the favoured cell; at the goal it pays `cost` times the
    incentives of all cells.
    """

    objectives: tuple[str, ...] = ("reward",)
    prompts_per_step = 5

    def __init__(
        self, name: str, rows: tuple[str, ...], start: tuple[int, int], goals: tuple[tuple[int, int], ...], favoured: tuple[int, int], *,
        budget: float, cost: float, slip: float, gamma: float, gamma_leader: float, reg: float, horizon: int, follower: str, seed: int,
    ) -> None:  # fmt: skip
        """`slip`: chance that a move is replaced by a random one; `horizon`: longest walk. Raises ValueError for what is out of range."""
        if follower not in ("exact", "q_learning"):
            raise ValueError(f"the follower is exact or q_learning, not '{follower}'")
        if not (0 <= gamma < 1 and 0 <= gamma_leader < 1 and reg > 0 and horizon > 0 and 0 <= slip <= 1):
            raise ValueError("gamma and gamma_leader lie in [0,1), slip in [0,1], reg and horizon above 0")
        places = [(i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell == "."]
        self.number = {place: i for i, place in enumerate(places)}
        self.name, self.cells, self.seed, self.follower, self.horizon = name, len(places), seed, follower, horizon
        self.budget, self.cost, self.gamma, self.gamma_leader, self.reg = budget, cost, gamma, gamma_leader, reg
        moved = torch.tensor([[self.number.get((i + di, j + dj), self.number[i, j]) for di, dj in MOVES] for i, j in places])
        moves = torch.nn.functional.one_hot(moved, self.cells).double()
        moves = (1 - slip) * moves + slip * moves.mean(1, keepdim=True)
        goal = torch.tensor([self.number[g] for g in goals])
        self.is_goal = torch.nn.functional.one_hot(goal, self.cells).bool()  # [X,S]
        self.base = self.is_goal.double()
        self.transition = moves * ~self.is_goal[:, :, None, None]  # [X,S,A,S]
        self.favoured = torch.nn.functional.one_hot(torch.tensor(self.number[favoured]), self.cells).double()
        self.start = torch.nn.functional.one_hot(torch.tensor(self.number[start]), self.cells).double()

    def policy(self) -> LeaderPolicy:
        return LeaderPolicy(self, self.seed)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(id=int(x), content=int(x)) for x in rng.integers(len(self.base), size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """Walks of the follower, which has learned under the present incentives."""
        policy: LeaderPolicy = run.policy  # type: ignore[assignment]
        if self.follower == "q_learning":
            policy.teach()
        table = policy.response()
        context = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        group = torch.tensor([i for i, p in enumerate(prompts) for _ in range(p.samples)])
        moving, cell = torch.ones_like(context, dtype=torch.bool), torch.full_like(context, int(self.start.argmax()))
        cells, actions, mask = [], [], []
        for _ in range(self.horizon):
            action = torch.multinomial(table[context, cell], 1, generator=run.generator)[:, 0]
            cells.append(cell)
            actions.append(action)
            mask.append(moving)
            moving = moving & ~self.is_goal[context, cell]
            if not moving.any():
                break
            chances = self.transition[context, cell, action]
            after = torch.multinomial(torch.where(moving[:, None], chances, torch.ones_like(chances)), 1, generator=run.generator)[:, 0]
            cell = torch.where(moving, after, cell)
        states, played, alive = (torch.stack(x, dim=1) for x in (cells, actions, mask))
        ends = self.is_goal[context[:, None], states] & alive
        late = torch.zeros_like(ends)
        late[:, -1] = alive[:, -1] & ~ends[:, -1]
        logp = torch.where(alive, table[context[:, None], states, played].log(), torch.zeros(()).double())
        return Batch(
            action=played, mask=alive, logp=logp, group=group, context=states, terminated=ends, truncated=late, signals={"prompt_id": context}
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        found = run.policy.rewards()[1].detach()[batch.signal("prompt_id")[:, None], batch.context, batch.action]
        return torch.where(batch.mask, found, torch.zeros_like(found))

    @torch.no_grad()
    def measure(self, policy: Policy) -> dict[str, Tensor]:
        """For each context [X], exactly and with the best response: the leader's discounted return, and the follower's without its entropy."""
        reward, leader = policy.rewards()
        table = policy.response(exact=True)
        payoffs = {"leader_objective": (leader, self.gamma_leader), "follower_return": (reward, self.gamma)}
        return {name: discounted_values(self.transition, table, r, discount)[1] @ self.start for name, (r, discount) in payoffs.items()}

    def evaluate(self, run: Run) -> dict[str, float]:
        """Means over the contexts."""
        return {name: float(values.mean()) for name, values in self.measure(run.policy).items()}


def incentive_rooms(
    budget: float = 0.5, cost: float = 0.5, slip: float = 0.1, gamma: float = 0.95, gamma_leader: float = 0.95, reg: float = 0.05,
    horizon: int = 100, follower: str = "exact", seed: int = 0,
) -> IncentiveRooms:  # fmt: skip
    """Two rooms of 7x7 with two doors; the follower is lured to the farther one, on which the leader is paid while it stands there."""
    return IncentiveRooms(
        "incentive_rooms", SMALL, (1, 1), ((1, 5),), (4, 3), budget=budget, cost=cost, slip=slip, gamma=gamma, gamma_leader=gamma_leader, reg=reg,
        horizon=horizon, follower=follower, seed=seed,
    )  # fmt: skip


def four_rooms(
    budget: float = 0.2, cost: float = 1.0, slip: float = 0.44, gamma: float = 0.99, gamma_leader: float = 0.99, reg: float = 0.005,
    horizon: int = 200, follower: str = "exact", seed: int = 0,
) -> IncentiveRooms:  # fmt: skip
    """The four rooms of 13x13 with the goal in one of two places."""
    return IncentiveRooms(
        "four_rooms", FOUR_ROOMS, (4, 1), ((1, 9), (11, 11)), (8, 4), budget=budget, cost=cost, slip=slip, gamma=gamma, gamma_leader=gamma_leader,
        reg=reg, horizon=horizon, follower=follower, seed=seed,
    )  # fmt: skip


TASKS: dict[str, Any] = {"incentive_rooms": incentive_rooms, "four_rooms": four_rooms}
