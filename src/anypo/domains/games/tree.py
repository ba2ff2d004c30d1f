"""A two-player zero-sum game as arrays, and what follows from them exactly: values, exploitability, many games played at once.

OpenSpiel's rules are walked once; after that nothing calls them. Nodes are numbered by depth. A policy is a table [I,A] over information sets.
Left out: games of more players, and games whose information sets mix depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHANCE, END = -1, -2
NODE_LIMIT = 200_000

PolicyTable = Float[Tensor, "I A"]


@dataclass(frozen=True)
class GameTree:
    """M nodes, I information sets, A actions, C = most branches of a node (actions or chance outcomes, C >= A)."""

    name: str
    actions: int  # A
    player: Tensor  # [M] 0 or 1 to move, CHANCE or END
    child: Tensor  # [M,C]; an end leads to itself, so does a branch that does not exist
    chance: Tensor  # [M,C] probabilities at chance nodes, 1 on branch 0 at ends, else 0
    payoff: Tensor  # [M] to player 0, at ends; else 0
    infoset: Tensor  # [M] index of the mover's information set, 0 where nobody moves
    levels: tuple[slice, ...]  # nodes of each depth
    names: tuple[str, ...]  # [I] information sets as the rules name them
    mover: Tensor  # [I] player whose information set it is
    legal: Tensor  # [I,A] bool
    seen: Tensor  # [I,F] float32, what the mover knows
    full: Tensor  # [M,2F] float32, what both players know together, hidden cards included

    def branch_probability(self, policy: PolicyTable) -> Float[Tensor, "M C"]:
        """Chance of every branch of every node when both seats play `policy`."""
        moves = torch.zeros_like(self.chance)
        moves[:, : self.actions] = policy.to(self.chance)[self.infoset]
        return torch.where((self.player >= 0)[:, None], moves, self.chance)

    def values(self, policy: PolicyTable) -> Float[Tensor, " M"]:
        """Exact expected payoff of player 0 from every node on."""
        branch, value = self.branch_probability(policy), self.payoff.clone()
        for level in reversed(self.levels):
            value[level] = self.payoff[level] + torch.where(
                self.player[level] == END, 0.0, (branch[level] * value[self.child[level]]).sum(1)
            )
        return value

    def action_values(self, policy: PolicyTable) -> Float[Tensor, "M A"]:
        """Exact q from player 0's view: the value of the node that each action leads to (for actions that are not legal, of the node itself)."""
        return self.values(policy)[self.child[:, : self.actions]]

    def best_response(self, policy: PolicyTable, player: int) -> float:
        """What `player` gets by the best answer to the other seat's `policy`."""
        branch, sign = self.branch_probability(policy), 1 - 2 * player
        mine = self.player == player
        counted = torch.where(mine[:, None], 1.0, branch)  # probability that the others, chance among them, lead here
        reach = torch.zeros_like(self.payoff)
        reach[0] = 1.0
        for level in self.levels:
            going = (self.player[level] != END)[:, None] & (counted[level] > 0) & self._exists(level)
            reach.index_add_(0, self.child[level][going], (reach[level][:, None] * counted[level])[going])
        value = sign * self.payoff
        for level in reversed(self.levels):
            after = value[self.child[level]]
            value[level] += torch.where(self.player[level] == END, 0.0, (branch[level] * after).sum(1))
            nodes = mine[level].nonzero().flatten()
            if len(nodes):
                sets, following = self.infoset[level][nodes], after[nodes, : self.actions]
                total = torch.zeros(len(self.names), self.actions, dtype=value.dtype)
                total.index_add_(0, sets, reach[level][nodes, None] * following)
                best = torch.where(self.legal, total, -torch.inf).argmax(1)
                value[level.start + nodes] = following.gather(1, best[sets, None])[:, 0]
        return float(value[0])

    def exploitability(self, policy: PolicyTable) -> float:
        """Mean over the seats of what a best answer gains; 0 at an equilibrium."""
        return (self.best_response(policy, 0) + self.best_response(policy, 1)) / 2

    def own_reach(self, policy: PolicyTable) -> Float[Tensor, " I"]:
        """Probability that the mover's own moves lead to each information set, when chance and the other seat allow it."""
        branch, found = self.branch_probability(policy), torch.zeros(len(self.names), dtype=torch.float64)
        for player in (0, 1):
            counted, reach = torch.where((self.player == player)[:, None], branch, 1.0), torch.ones_like(self.payoff)
            for level in self.levels:
                there = self._exists(level)
                reach[self.child[level][there]] = (reach[level][:, None] * counted[level])[there]
            nodes = self.player == player
            found[self.infoset[nodes]] = reach[nodes]
        return found

    def average(self, policies: list[PolicyTable]) -> PolicyTable:
        """The policy that plays as one of these drawn at random before each game: their mean, weighted by each one's own reach."""
        weights = torch.stack([self.own_reach(policy) for policy in policies])[..., None]
        tables = torch.stack([policy.to(weights) for policy in policies])
        total = weights.sum(0)
        return torch.where(total > 0, (weights * tables).sum(0) / total.clamp(min=1e-300), tables.mean(0))

    def play(self, policy: PolicyTable, games: int, generator: torch.Generator) -> tuple[Int[Tensor, "N D"], Int[Tensor, "N D"]]:
        """Nodes passed and branches taken, from the root to an end (shorter games stay at their end)."""
        branch, node = self.branch_probability(policy), torch.zeros(games, dtype=torch.int64)
        nodes, taken = [], []
        for _ in range(len(self.levels)):
            choice = torch.multinomial(branch[node], 1, generator=generator)[:, 0]
            nodes.append(node)
            taken.append(choice)
            node = self.child[node, choice]
        return torch.stack(nodes, dim=1), torch.stack(taken, dim=1)

    def _exists(self, level: slice) -> Tensor:
        """[m,C] bool: branches that are there."""
        here = torch.arange(level.start, level.stop)[:, None]
        return self.child[level] != here


def compile_game(name: str) -> GameTree:
    """The tree of an OpenSpiel game. Raises ImportError with the command to run without the package, ValueError for an unknown or unfit game."""
    try:
        import pyspiel
    except ImportError as error:
        raise ImportError('games need OpenSpiel; pip install "anypo[games]"') from error
    try:
        game = pyspiel.load_game(name)
    except pyspiel.SpielError as error:
        raise ValueError(f"OpenSpiel knows no game '{name}'") from error
    kind = game.get_type()
    if (
        game.num_players() != 2
        or kind.utility != pyspiel.GameType.Utility.ZERO_SUM
        or kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL
    ):
        raise ValueError(f"'{name}' is not a two-player zero-sum game with moves in turn")
    if not kind.provides_information_state_tensor:
        raise ValueError(f"'{name}' does not say what a player knows (no information state tensor)")
    return _walk(name, game)


def _walk(name: str, game: Any) -> GameTree:
    actions, features = game.num_distinct_actions(), game.information_state_tensor_size()
    width = max(actions, game.max_chance_outcomes())
    sets: dict[tuple[int, str], int] = {}
    depth_of: dict[int, int] = {}
    legal: list[Tensor] = []
    seen: list[list[float]] = []
    rows: list[tuple[int, list[int], list[float], float, int, list[float]]] = []
    levels: list[slice] = []
    level, first = [game.new_initial_state()], 0
    while level:
        following: list[Any] = []
        below = first + len(level)
        for index, state in enumerate(level, first):
            child, chance, payoff, infoset, player, full = [index] * width, [0.0] * width, 0.0, 0, END, [0.0] * (2 * features)
            if state.is_terminal():
                chance[0], payoff = 1.0, state.returns()[0]
            elif state.is_chance_node():
                player = CHANCE
                for branch, (outcome, probability) in enumerate(state.chance_outcomes()):
                    child[branch], chance[branch] = below + len(following), probability
                    following.append(state.child(outcome))
            else:
                player = state.current_player()
                key = (player, state.information_state_string(player))
                infoset = sets.setdefault(key, len(sets))
                if infoset == len(legal):
                    legal.append(torch.zeros(actions, dtype=torch.bool).index_fill(0, torch.tensor(state.legal_actions()), True))
                    seen.append(state.information_state_tensor(player))
                if depth_of.setdefault(infoset, len(levels)) != len(levels):
                    raise ValueError(f"an information set of '{name}' mixes depths; such games cannot be compiled")
                full = [*state.information_state_tensor(0), *state.information_state_tensor(1)]
                for action in state.legal_actions():
                    child[action] = below + len(following)
                    following.append(state.child(action))
            rows.append((player, child, chance, payoff, infoset, full))
        if below + len(following) > NODE_LIMIT:
            raise ValueError(f"'{name}' has more than {NODE_LIMIT} nodes; take a smaller game such as kuhn_poker or leduc_poker")
        levels.append(slice(first, below))
        first, level = below, following
    players, children, chances, payoffs, infosets, fulls = zip(*rows, strict=True)
    return GameTree(
        name=name, actions=actions, player=torch.tensor(players), child=torch.tensor(children), chance=torch.tensor(chances, dtype=torch.float64),
        payoff=torch.tensor(payoffs, dtype=torch.float64), infoset=torch.tensor(infosets), levels=tuple(levels), names=tuple(k[1] for k in sets),
        mover=torch.tensor([k[0] for k in sets]), legal=torch.stack(legal), seen=torch.tensor(seen), full=torch.tensor(fulls),
    )  # fmt: skip
