"""Level-based foraging for many layouts at once, and its programs: priority lists over a few options, one of which reads the other's list.

Agents and foods have levels on a grid; foods are taken by loading agents beside them whose levels together suffice. Rules after `lbforaging`; the options
are stand-ins for programs that a language model would write. Left out: observations that hide parts of the grid, more than one grid size at a time.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

NONE, LOAD = 0, 5
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (0, 0))  # none, north, south, west, east, load; rows grow to the south
OPTIONS = ("goto_nearest_feasible", "goto_nearest_joint", "follow_opponent_target", "load_if_adjacent", "wait")
FEASIBLE, JOINT, FOLLOW, ADJACENT, WAIT = range(len(OPTIONS))
LONGEST = 4  # options of a program
LIMIT = 50  # steps of an episode


class Stepped(NamedTuple):
    agents: Tensor  # [...,A,2] row and column
    food_levels: Tensor  # [...,F], 0 = taken
    reward: Tensor  # [...,A]


class Layouts(NamedTuple):
    """B starts. Levels of the agents are the same in all."""

    agents: Tensor  # [B,A,2]
    foods: Tensor  # [B,F,2]
    food_levels: Tensor  # [B,F]


def lbf_step(
    agents: Int[Tensor, "... A 2"], levels: Int[Tensor, " A"], foods: Int[Tensor, "... F 2"], food_levels: Int[Tensor, "... F"],
    actions: Int[Tensor, "... A"], size: int = 5, max_level_sum: int = 5,
) -> Stepped:  # fmt: skip
    """One step. `max_level_sum`: the levels of all foods at the start, so that rewards of an episode sum to 1 when everything is taken.

    A move is cancelled when it leads outside, onto a food, where another agent stands, or where another one wants to go.
    """
    wanted = agents + torch.tensor(MOVES)[actions]
    inside = ((wanted >= 0) & (wanted < size)).all(-1)
    alive = food_levels > 0
    on_food = ((wanted[..., :, None, :] == foods[..., None, :, :]).all(-1) & alive[..., None, :]).any(-1)
    others = ~torch.eye(len(levels), dtype=torch.bool)
    contested = ((wanted[..., :, None, :] == wanted[..., None, :, :]).all(-1) & others).any(-1)
    occupied = ((wanted[..., :, None, :] == agents[..., None, :, :]).all(-1) & others).any(-1)
    moved = torch.where((inside & ~on_food & ~contested & ~occupied)[..., None], wanted, agents)
    beside = _distances(agents, foods) == 1
    loading = beside & (actions == LOAD)[..., None] & alive[..., None, :]  # [...,A,F]
    pooled = (loading * levels[:, None]).sum(-2)
    taken = alive & (pooled >= food_levels)
    worth = torch.where(taken, food_levels / (pooled.clamp(min=1) * max_level_sum), 0.0)
    return Stepped(moved, torch.where(taken, 0, food_levels), (loading * levels[:, None] * worth[..., None, :]).sum(-1))


def _distances(agents: Tensor, foods: Tensor) -> Tensor:
    """[...,A,F] Manhattan distances."""
    return (agents[..., :, None, :] - foods[..., None, :, :]).abs().sum(-1)


def layouts(count: int, rng: np.random.Generator, food_levels: tuple[int, ...] = (3, 2), agents: int = 2, size: int = 5) -> Layouts:
    """Random starts: foods inside the border that do not touch, not even at corners, agents on free cells. Raises ValueError where there is no room."""
    spots = [(r, c) for r in range(1, size - 1) for c in range(1, size - 1)]
    free = [
        p for p in permutations(spots, len(food_levels))
        if all(max(abs(a[0] - b[0]), abs(a[1] - b[1])) > 1 for i, a in enumerate(p) for b in p[:i])
    ]  # fmt: skip
    if not free:
        raise ValueError(
            f"{len(food_levels)} foods that do not touch have no room on a grid of {size}x{size}; use fewer foods or a larger grid"
        )
    foods = [free[rng.integers(len(free))] for _ in range(count)]
    cells = [[(r, c) for r in range(size) for c in range(size) if (r, c) not in taken] for taken in foods]
    places = [[open_cells[i] for i in rng.choice(len(open_cells), size=agents, replace=False)] for open_cells in cells]
    return Layouts(torch.tensor(places), torch.tensor(foods), torch.tensor(food_levels).expand(count, -1).clone())


def candidates() -> list[tuple[int, ...]]:
    """All ordered lists of 2 to 4 different options, 200 programs, shorter ones first."""
    return [p for n in range(2, LONGEST + 1) for p in permutations(range(len(OPTIONS)), n)]


def encode(programs: list[tuple[int, ...]]) -> Int[Tensor, "C L"]:
    """Programs as rows of a table, with -1 where there is no option."""
    return torch.tensor([[*p, *[-1] * (LONGEST - len(p))] for p in programs])


def decide(programs: Int[Tensor, "B A L"], state: Layouts, levels: Int[Tensor, " A"], size: int = 5) -> Int[Tensor, "B A"]:
    """Actions of all agents: each takes the first option of its list that applies, and a later agent gives way to those before it."""
    distance = _distances(state.agents, state.foods)
    alive = state.food_levels > 0
    own = [_targets(distance[:, i], alive, state.food_levels, levels, i) for i in range(len(levels))]
    actions, claimed = [], state.agents.new_full((len(programs), 0, 2), -1)
    for i in range(len(levels)):
        j = (i + 1) % len(levels)
        targets = own[i].clone()
        targets[:, FOLLOW] = _predicted(programs[:, j], own[j])
        target_distance = distance[:, i].gather(1, targets.clamp(min=0))
        applies = (targets >= 0) & (target_distance > 1)  # who is there already does something else
        applies[:, ADJACENT] = targets[:, ADJACENT] >= 0
        applies[:, WAIT] = True
        option = _first(programs[:, i], applies)
        going = (option >= 0) & (option != ADJACENT) & (option != WAIT)
        target = targets.gather(1, option.clamp(min=0)[:, None])[:, 0].clamp(min=0)
        move = _step_towards(state, i, target, claimed, size)
        action = torch.where(going, move, torch.where(option == ADJACENT, LOAD, NONE))
        actions.append(action)
        claimed = torch.cat([claimed, (state.agents[:, i] + torch.tensor(MOVES)[action])[:, None]], 1)
    return torch.stack(actions, 1)


def _targets(distance: Tensor, alive: Tensor, food_levels: Tensor, levels: Tensor, agent: int) -> Int[Tensor, "B O"]:
    """Which food each option of one agent means, -1 for none; following is filled in later."""
    strong_enough = food_levels <= levels[agent]
    groups = {
        FEASIBLE: alive & strong_enough,
        JOINT: alive & ~strong_enough & (food_levels <= levels.sum()),
        ADJACENT: alive & (distance == 1),
    }
    found = torch.full((len(distance), len(OPTIONS)), -1)
    for option, among in groups.items():
        nearest = torch.where(among, distance, 10**6).argmin(-1)
        found[:, option] = torch.where(among.any(-1), nearest, -1)
    return found


def _predicted(program: Int[Tensor, "B L"], targets: Int[Tensor, "B O"]) -> Int[Tensor, " B"]:
    """Where an agent with this program is heading, read off its source; what it would follow itself is passed over, and one that waits goes nowhere."""
    known = targets >= 0
    known[:, FOLLOW], known[:, WAIT] = False, True
    option = _first(program, known)
    return torch.where(option >= 0, targets.gather(1, option.clamp(min=0)[:, None])[:, 0], -1)


def _first(program: Int[Tensor, "B L"], applies: Tensor) -> Int[Tensor, " B"]:
    """The first option of each list that applies, -1 if none does."""
    usable = applies.gather(1, program.clamp(min=0)) & (program >= 0)
    return torch.where(usable.any(1), program.gather(1, usable.int().argmax(1, keepdim=True))[:, 0], -1)


def _step_towards(state: Layouts, agent: int, food: Int[Tensor, " B"], claimed: Int[Tensor, "B k 2"], size: int) -> Int[Tensor, " B"]:
    """The move on a shortest way to a cell beside the food, around foods and other agents; none where that gains nothing or the cell is claimed."""
    rows, far = torch.arange(len(food)), float(size * size)
    closed = torch.zeros(len(food), size + 2, size + 2, dtype=torch.bool)
    closed[:, 0], closed[:, -1], closed[:, :, 0], closed[:, :, -1] = True, True, True, True
    for f in range(state.foods.shape[1]):
        closed[rows, state.foods[:, f, 0] + 1, state.foods[:, f, 1] + 1] |= state.food_levels[:, f] > 0
    for j in range(state.agents.shape[1]):
        if j != agent:
            closed[rows, state.agents[:, j, 0] + 1, state.agents[:, j, 1] + 1] = True
    way = torch.full(closed.shape, far)
    goal = state.foods[rows, food] + 1
    way[rows, goal[:, 0], goal[:, 1]] = 0
    inner = way[:, 1:-1, 1:-1]
    for _ in range(2 * size + 4):  # no way around two foods and an agent is longer
        nearest = torch.stack([way[:, :-2, 1:-1], way[:, 2:, 1:-1], way[:, 1:-1, :-2], way[:, 1:-1, 2:]]).amin(0) + 1
        inner.copy_(torch.where(closed[:, 1:-1, 1:-1], inner, torch.minimum(inner, nearest)))
    here = state.agents[:, agent]
    around = here[:, None] + torch.tensor(MOVES[1:5])  # [B,4,2]
    ahead = way[rows[:, None], around[..., 0] + 1, around[..., 1] + 1]
    shut = closed[rows[:, None], around[..., 0] + 1, around[..., 1] + 1]
    shut |= (around[:, :, None] == claimed[:, None]).all(-1).any(-1)
    best, move = torch.where(shut, far, ahead).min(1)
    return torch.where(best < way[rows, here[:, 0] + 1, here[:, 1] + 1], move + 1, NONE)


def episodes(programs: Int[Tensor, "B A L"], start: Layouts, levels: Int[Tensor, " A"], size: int = 5) -> Float[Tensor, "B A"]:
    """Returns of whole episodes, which end when no food is left and after 50 steps; their sum over agents is the share of food value that was taken."""
    total, state = int(start.food_levels[0].sum()), start
    earned = torch.zeros(programs.shape[:2])
    for _ in range(LIMIT):
        if not (state.food_levels > 0).any():
            break
        found = lbf_step(state.agents, levels, state.foods, state.food_levels, decide(programs, state, levels, size), size, total)
        state, earned = Layouts(found.agents, state.foods, found.food_levels), earned + found.reward
    return earned
