"""The skill grid: a student who walks to a goal past four pits and learns by doing, and an assistant who may take over any step.

At every step the student proposes a move, right (the expert's) with the probability that is the student's skill in that cell. The assistant hands over
or takes over. Skill grows where the student acts and the cell is neither mastered nor hopeless, and decays under assistance. What the assistant sees of
the student's skill is an estimate from unassisted steps. From the command line: `--env SkillGrid-v0`; a student stays for 300 episodes.
Dynamics of the student [reconstructed].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

SIZE, STEPS = 6, 40  # cells a side, steps of an episode
CELLS, MOVES = SIZE * SIZE, ((-1, 0), (1, 0), (0, -1), (0, 1))
START, GOAL = 0, CELLS - 1
PITS = tuple(SIZE * row + column for row, column in ((2, 2), (2, 3), (3, 1), (4, 4)))
EPISODES = 300  # of one student
SCALARS = ("right", "gap", "here", "after_user", "after_expert")  # what follows the one-hot cell in an observation
LEAST, MOST = 0.02, 0.98  # bounds of a skill
ALMOST_HALF = 0.5  # assistance below this says something about the student's own skill

Array = NDArray[np.float64]
Assistant = Callable[[NDArray[np.float32]], NDArray]  # observations [n,41] -> assistance b [n] in [0,1]


def _next_cells() -> NDArray[np.int64]:
    row, column = np.divmod(np.arange(CELLS), SIZE)
    there = [np.clip(row + dr, 0, SIZE - 1) * SIZE + np.clip(column + dc, 0, SIZE - 1) for dr, dc in MOVES]
    return np.stack(there, axis=1)


NEXT = _next_cells()  # [S,4]
ENDS = np.isin(np.arange(CELLS), [GOAL, *PITS])  # [S]
PAYS = np.where(np.arange(CELLS) == GOAL, 1.0, np.where(ENDS, -1.0, 0.0))  # [S], on arrival


def expert_values(gamma: float = 0.97) -> Array:
    """Q of the best play [S,4], by value iteration; 0 in cells that end an episode."""
    q = np.zeros((CELLS, 4))
    for _ in range(4 * CELLS):
        q = np.where(ENDS[:, None], 0.0, PAYS[NEXT] + gamma * q.max(1)[NEXT])
    return q


QUALITY = expert_values()
EXPERT = QUALITY.argmax(1)  # [S]


def initial_skill() -> Array:
    """[S]: from 0.9 at the start to 0.1 in the pits, by Manhattan distances to both."""
    row, column = np.divmod(np.arange(CELLS), SIZE)
    from_start = row + column
    from_pit = np.min([np.abs(row - p // SIZE) + np.abs(column - p % SIZE) for p in PITS], axis=0)
    return np.clip(0.9 - 0.8 * from_start / (from_start + from_pit), 0.1, 0.9)


def student_update(skill: Any, assistance: Any, eta: float = 0.005, rho: float = 0.01) -> Any:
    """Equation 8, of arrays or tensors: growth in the proximal zone without assistance, decay with it; in [0.02, 0.98]."""
    return (skill + eta * (1 - assistance) * 4 * skill * (1 - skill) - rho * assistance * skill).clip(LEAST, MOST)


def competence(successes: Any, trials: Any) -> Any:
    """Equation 2: the mean of a Beta posterior from a uniform prior, in (0,1)."""
    return (successes + 1) / (trials + 2)


def move_probabilities(skill: NDArray) -> NDArray:
    """[...,S] -> [...,S,4]: the expert's move with the skill, each other with a third of the rest."""
    right = np.eye(4)[EXPERT]
    return skill[..., None] * right + (1 - skill[..., None]) / 3 * (1 - right)


def unassisted_return(skill: NDArray, steps: int = STEPS) -> NDArray:
    """Exact expected return [...] of episodes without assistance, of students with skills [...,S] that stand still."""
    chances, value = move_probabilities(skill), np.zeros(skill.shape)
    for _ in range(steps):
        value = np.where(ENDS, 0.0, (chances * (PAYS[NEXT] + value[..., NEXT])).sum(-1))
    return value[..., START]


class View(NamedTuple):
    """What an observation [...,41] says beside the cell: arrays or tensors [...]."""

    right: Any  # 1 where the student proposes the expert's move
    gap: Any  # Q of the proposal less that of the expert's move, <= 0
    here: Any  # estimated competence in this cell, 0 where an episode ends
    after_user: Any  # and in the cell the proposal leads to
    after_expert: Any


def view(observation: Any) -> View:
    return View(*(observation[..., CELLS + i] for i in range(len(SCALARS))))


@dataclass
class Students:
    """N students, each with an episode under way; methods act on some `rows`."""

    count: int
    eta: float = 0.005  # growth of skill, > 0
    rho: float = 0.01  # decay of skill under assistance, >= 0
    skill: Array = field(init=False)  # [N,S]
    successes: Array = field(init=False)  # [N,S] unassisted steps that went right
    trials: Array = field(init=False)  # [N,S] unassisted steps
    cell: NDArray[np.int64] = field(init=False)  # [N]
    proposal: NDArray[np.int64] = field(init=False)  # [N]

    def __post_init__(self) -> None:
        self.skill = np.tile(initial_skill(), (self.count, 1))
        self.successes, self.trials = np.zeros((2, self.count, CELLS))
        self.cell, self.proposal = np.full(self.count, START), np.zeros(self.count, dtype=np.int64)

    def begin(self, rows: NDArray[np.int64], rng: np.random.Generator) -> None:
        self.cell[rows] = START
        self.propose(rows, rng)

    def propose(self, rows: NDArray[np.int64], rng: np.random.Generator) -> None:
        cell = self.cell[rows]
        wrong = (EXPERT[cell] + 1 + rng.integers(3, size=len(rows))) % 4
        self.proposal[rows] = np.where(rng.random(len(rows)) < self.skill[rows, cell], EXPERT[cell], wrong)

    def observe(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        cell, proposal = self.cell[rows], self.proposal[rows]
        best = EXPERT[cell]
        estimate = np.where(ENDS, 0.0, competence(self.successes[rows], self.trials[rows]))
        seen, each = np.zeros((len(rows), CELLS + len(SCALARS)), dtype=np.float32), np.arange(len(rows))
        seen[each, cell] = 1
        places = [cell, NEXT[cell, proposal], NEXT[cell, best]]
        seen[:, CELLS] = proposal == best
        seen[:, CELLS + 1] = QUALITY[cell, proposal] - QUALITY[cell, best]
        seen[:, CELLS + 2 :] = np.stack([estimate[each, place] for place in places], axis=1)
        return seen

    def step(self, rows: NDArray[np.int64], assistance: NDArray, rng: np.random.Generator) -> tuple[Array, NDArray[np.bool_]]:
        """The expert moves with probability `assistance` [n], else the student; who learns accordingly. Returns reward and whether it ended, [n]."""
        cell, proposal = self.cell[rows], self.proposal[rows]
        own = assistance < ALMOST_HALF
        self.trials[rows, cell] += own
        self.successes[rows, cell] += own & (proposal == EXPERT[cell])
        self.skill[rows, cell] = student_update(self.skill[rows, cell], assistance, self.eta, self.rho)
        move = np.where(rng.random(len(rows)) < assistance, EXPERT[cell], proposal)
        there = NEXT[cell, move]
        self.cell[rows] = there
        self.propose(rows, rng)
        return PAYS[there], ENDS[there]


class Lessons(NamedTuple):
    """What each of N students [N] went through."""

    gain: Array  # unassisted return afterwards less that before
    shared: Array  # mean return of the episodes
    pits: Array  # mean number of pits hit in an episode
    zone: Array  # share of steps in cells whose true skill k has 4 k (1 - k) > 1/2
    assistance: Array  # mean assistance a step


def lessons(
    assistant: Assistant, *, students: int = 40, episodes: int = EPISODES, seed: int = 0, eta: float = 0.005, rho: float = 0.01
) -> Lessons:
    """A whole course of episodes with each of some students. `assistant` sees observations [n,41] and answers with assistance [n] in [0,1]."""
    rng, pairs = np.random.default_rng(seed), Students(students, eta, rho)
    before = unassisted_return(pairs.skill[0])
    shared, pits, zone, helped, steps = np.zeros((5, students))
    for _ in range(episodes):
        rows = np.arange(students)
        pairs.begin(rows, rng)
        for _ in range(STEPS):
            skill, assistance = pairs.skill[rows, pairs.cell[rows]], np.asarray(assistant(pairs.observe(rows)), dtype=np.float64)
            reward, ended = pairs.step(rows, assistance, rng)
            shared[rows] += reward
            pits[rows] += reward < 0
            zone[rows] += 4 * skill * (1 - skill) > 0.5
            helped[rows] += assistance
            steps[rows] += 1
            rows = rows[~ended]
            if not len(rows):
                break
    return Lessons(unassisted_return(pairs.skill) - before, shared / episodes, pits / episodes, zone / steps, helped / steps)


class SkillGrid(gymnasium.Env):
    """Observation: the cell one-hot, then `View`. Action of the assistant: 0 hands over, 1 takes over. Reward: 1 at the goal, -1 in a pit. The student's
    skill is kept from episode to episode; after `EPISODES` of them a new student comes."""

    metadata = {"render_modes": []}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (CELLS + len(SCALARS),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.student, self.row, self.episode = Students(1), np.zeros(1, dtype=np.int64), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A seed brings a new student, as a reset after the last episode does."""
        super().reset(seed=seed)
        self.episode += 1
        if seed is not None or self.episode > EPISODES:
            self.student, self.episode = Students(1), 1
        self.student.begin(self.row, self.np_random)
        return self.student.observe(self.row)[0], {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        reward, ended = self.student.step(self.row, np.array([float(action)]), self.np_random)
        return self.student.observe(self.row)[0], float(reward[0]), bool(ended[0]), False, {}

    def get_state(self) -> dict[str, Any]:
        parts = {name: getattr(self.student, name).copy() for name in ("skill", "successes", "trials", "cell", "proposal")}
        return parts | {"episode": self.episode}

    def restore_state(self, state: dict[str, Any]) -> None:
        for name in ("skill", "successes", "trials", "cell", "proposal"):
            setattr(self.student, name, np.array(state[name]))
        self.episode = int(state["episode"])


if "SkillGrid-v0" not in gymnasium.registry:
    gymnasium.register("SkillGrid-v0", entry_point="anypo.domains.control.skill_grid:SkillGrid", max_episode_steps=STEPS)
