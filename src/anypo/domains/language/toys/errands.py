"""errands: an agent on a small grid is told by a text which errand to run; walls, locked doors, keys, and success known exactly.

Two worlds of four texts each. `corridor`: twelve cells in a row, a key somewhere and a door at the right end; reach the door, fetch the key, open
the door with it, bring it back to the left end. `rooms`: 3x3 cells as in the smallest problems of MiniGrid; go to the corner, fetch the red or the
blue of two things (taking the wrong one ends the errand), and find the key to a door in a wall. Actions: up, down, left, right, take. Reward 1 at the
end. A problem is a text, its instances are drawn at random. As states are few, everything is a table; a batch's context is the state of every step
[N,T]. Left out: pictures, facing, dropping things.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))
TAKE, ACTIONS = 4, 5
JUDGED_SEED, JUDGED = 77, 256  # errands a text over which a policy with memory is judged


@dataclass(frozen=True)
class Errand:
    """What a text asks for. Cells are numbered row by row."""

    text: str
    starts: tuple[int, ...]  # where the agent and the things may be at first, each in a cell of its own
    things: int = 1  # 0 to 2; thing 0 is the key
    goal: int | None = None  # the cell to be in
    with_key: bool = False  # and to have the key there
    wanted: int | None = None  # the thing to take; taking another ends the errand
    walls: frozenset[int] = frozenset()
    locked: int | None = None  # a cell that only the key opens


@dataclass(frozen=True)
class World:
    width: int
    height: int
    errands: tuple[Errand, ...]

    @property
    def cells(self) -> int:
        return self.width * self.height


_ROW, _ALL, _LEFT = tuple(range(11)), tuple(range(9)), (0, 3, 6)
WORLDS = {
    "corridor": World(12, 1, (
        Errand("reach the door", _ROW, goal=11), Errand("fetch the key", _ROW, wanted=0),
        Errand("open the door", _ROW, goal=11, with_key=True), Errand("bring the key home", _ROW, goal=0, with_key=True),
    )),
    "rooms": World(3, 3, (
        Errand("go to the corner", _ALL[:8], things=0, goal=8),
        Errand("fetch the red thing", _ALL, things=2, wanted=0), Errand("fetch the blue thing", _ALL, things=2, wanted=1),
        Errand("find a way to the corner", _LEFT, goal=8, walls=frozenset({1, 7}), locked=4),
    )),
}  # fmt: skip


class Tables(NamedTuple):
    """The M states of a world. A place is a cell, then "carried", then "nowhere"."""

    following: Tensor  # [M,A] int64
    won: Tensor  # [M,A] bool: the action ends the errand well
    over: Tensor  # [M,A] bool: it ends the errand
    places: Tensor  # [M,4] int64: errand, cell of the agent, places of both things
    starts: list[Tensor]  # by errand, the states in which it may begin


@functools.lru_cache(maxsize=8)
def tables(name: str) -> Tables:
    """Every state and what each action does in it. Raises ValueError for a world that does not exist."""
    if name not in WORLDS:
        raise ValueError(f"unknown world '{name}' of errands; use one of {', '.join(WORLDS)}")
    world = WORLDS[name]
    carried, nowhere = world.cells, world.cells + 1
    states = [
        (e, agent, *things)
        for e, errand in enumerate(world.errands)
        for agent in range(world.cells)
        for things in itertools.product(*(range(carried + 1) if i < errand.things else (nowhere,) for i in range(2)))
    ]
    number = {state: i for i, state in enumerate(states)}
    moves = [[_after(world, state, action) for action in range(ACTIONS)] for state in states]
    starts = [
        [number[e, agent, *(*things, nowhere, nowhere)[:2]] for agent, *things in itertools.permutations(errand.starts, 1 + errand.things)]
        for e, errand in enumerate(world.errands)
    ]
    return Tables(
        torch.tensor([[number[state] for state, _, _ in row] for row in moves]),
        torch.tensor([[won for _, won, _ in row] for row in moves]),
        torch.tensor([[over for _, _, over in row] for row in moves]),
        torch.tensor(states),
        [torch.tensor(rows) for rows in starts],
    )


def _after(world: World, state: tuple[int, ...], action: int) -> tuple[tuple[int, ...], bool, bool]:
    """The next state, whether the errand is done well, and whether it is over."""
    e, agent, *things = state
    errand, carried = world.errands[e], world.cells
    if action == TAKE:
        here = [i for i, place in enumerate(things) if place == agent]
        if here and carried not in things:
            things[here[0]] = carried
            won = errand.wanted == here[0]
            return (e, agent, *things), won, errand.wanted is not None
        return state, False, False
    (x, y), (dx, dy) = (agent % world.width, agent // world.width), MOVES[action]
    x, y = min(max(x + dx, 0), world.width - 1), min(max(y + dy, 0), world.height - 1)
    cell = y * world.width + x
    if cell in errand.walls or (cell == errand.locked and things[0] != carried):
        cell = agent
    won = cell == errand.goal and (not errand.with_key or things[0] == carried)
    return (e, cell, *things), won, won


def observations(name: str) -> Float[Tensor, "M F"]:
    """What the agent sees in every state, as one-hot vectors: the text, its cell, and of each thing whether it lies before, at or behind its own
    column and row, or is carried, or nowhere."""
    world, places = WORLDS[name], tables(name).places
    parts = [nn.functional.one_hot(places[:, 0], len(world.errands)), nn.functional.one_hot(places[:, 1], world.cells)]
    for thing in (2, 3):
        lies = (places[:, thing] < world.cells)[:, None]
        for away in (
            places[:, thing] % world.width - places[:, 1] % world.width,
            places[:, thing] // world.width - places[:, 1] // world.width,
        ):
            parts.append(nn.functional.one_hot(away.sign() + 1, 3) * lies)
        parts.append(nn.functional.one_hot((places[:, thing] - world.cells).clamp(min=-1) + 1, 3)[:, 1:])
    return torch.cat(parts, dim=1).float()


class ErrandPolicy(Policy):
    """Observations as one-hot vectors into a layer of tanh units, or, with `history`, into a GRU that also reads the actions so far."""

    provides = frozenset({"logp", "entropy", "logits"})
    learning_rate, optimizer = 5e-3, "adam"
    vocabulary = ACTIONS

    def __init__(self, world: str = "corridor", *, hidden: int = 64, history: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.memoryless = not history
        seen = observations(world)
        self.register_buffer("seen", seen, persistent=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(seen.shape[1], hidden)
            self.acted = nn.Embedding(ACTIONS + 1, hidden) if history else None  # the last is "nothing yet"
            self.gru = nn.GRU(hidden, hidden, batch_first=True) if history else None
            self.output = nn.Linear(hidden, ACTIONS)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def step_logits(self, state: Int[Tensor, " N"], before: Int[Tensor, " N"], memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits [N,A] of one step after the actions `before` (ACTIONS at the start), and what is remembered."""
        read = self.first(cast(Tensor, self.seen)[state])
        if self.gru is None or self.acted is None:
            return self.output(read.tanh()), None
        out, memory = self.gru((read + self.acted(before)).tanh()[:, None], memory)
        return self.output(out[:, 0]), memory

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        read = self.first(cast(Tensor, self.seen)[batch.context])
        if self.gru is not None and self.acted is not None:
            before = torch.cat([torch.full_like(batch.action[:, :1], ACTIONS), batch.action[:, :-1]], dim=1)
            read = self.gru((read + self.acted(before)).tanh())[0]
        else:
            read = read.tanh()
        logits = self.output(read)
        log_probs = logits.log_softmax(-1)
        signals = Signals(logits=logits)
        if "logp" in needs:
            logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
            signals["logp"] = torch.where(batch.mask, logp, torch.zeros_like(logp))
        if "entropy" in needs:
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        return Signals({name: value for name, value in signals.items() if name in needs})

    def context_read(self, batch: Batch) -> int:
        """How many observations the log-probs of the batch's actions depend on, summed over the actions: one each without memory."""
        length = batch.lengths
        return int(length.sum()) if self.memoryless else int((length * (length + 1) // 2).sum())


class Errands:
    """The task. `horizon`: steps an errand may take."""

    name, objectives = "errands", ("reward",)

    def __init__(self, world: str = "corridor", *, horizon: int = 40, prompts_per_step: int | None = None) -> None:
        self.world, self.tables, self.horizon = world, tables(world), horizon
        self.problems = [Prompt(id=i, content=errand.text) for i, errand in enumerate(WORLDS[world].errands)]
        self.prompts_per_step = prompts_per_step or len(self.problems)

    def policy(self, **options: Any) -> ErrandPolicy:
        """A policy of this world."""
        return ErrandPolicy(self.world, **options)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """All texts in order when `count` is their number, else a draw without replacement (with it, when more are wanted)."""
        total = len(self.problems)
        chosen = np.arange(total) if count == total else rng.choice(total, size=count, replace=count > total)
        return [self.problems[i] for i in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        return self.attempt(cast(ErrandPolicy, run.policy), prompts, run.generator, run.version)

    @torch.no_grad()
    def attempt(self, policy: ErrandPolicy, prompts: list[Prompt], generator: torch.Generator, version: int = 0) -> Batch:
        """`collect` without a run: every attempt at a text begins in a state of its own."""
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        errand = torch.tensor([p.id for p in prompts])[group]
        state = torch.zeros_like(errand)
        for e, starts in enumerate(self.tables.starts):
            rows = (errand == e).nonzero().flatten()
            state[rows] = starts[torch.randint(len(starts), (len(rows),), generator=generator)]
        alive, won = torch.ones_like(errand, dtype=torch.bool), torch.zeros_like(errand, dtype=torch.bool)
        action, memory, written = torch.full_like(errand, ACTIONS), None, []
        for _ in range(self.horizon):
            logits, memory = policy.step_logits(state, action, memory)
            log_probs = logits.log_softmax(-1)
            action = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
            chosen = log_probs.gather(1, action[:, None])[:, 0] * alive
            written.append((action, alive, chosen, -(log_probs.exp() * log_probs).sum(1) * alive, state))
            won = won | (alive & self.tables.won[state, action])
            alive, state = alive & ~self.tables.over[state, action], self.tables.following[state, action]
            if not bool(alive.any()):
                break
        actions, mask, logp, entropy, context = (torch.stack(part, dim=1) for part in zip(*written, strict=True))
        return Batch(
            action=actions, mask=mask, logp=logp, group=group, context=context, segment=torch.arange(mask.shape[1]).expand(mask.shape).clone(),
            terminated=~alive, truncated=alive, version=torch.full_like(group, version),
            signals={"prompt_id": errand, "old_entropy": entropy, "won": won},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        """1 for an errand done, else 0, [N]."""
        return batch.signal("won").float()

    @torch.no_grad()
    def success_by_text(self, policy: ErrandPolicy) -> Float[Tensor, " E"]:
        """Success on every text: exact for a policy without memory, else over JUDGED sampled errands a text, the same random numbers every time."""
        if not policy.memoryless:
            prompts = [p.but(samples=JUDGED) for p in self.problems]
            return self.score(self.attempt(policy, prompts, torch.Generator().manual_seed(JUDGED_SEED))).view(-1, JUDGED).mean(1).double()
        state = torch.arange(len(self.tables.places))
        chance = policy.step_logits(state, torch.full_like(state, ACTIONS), None)[0].double().softmax(-1)
        value = torch.zeros(len(state), dtype=torch.float64)
        for _ in range(self.horizon):
            value = (chance * (self.tables.won + ~self.tables.over * value[self.tables.following])).sum(1)
        return torch.stack([value[starts].mean() for starts in self.tables.starts])

    def expected_success(self, policy: ErrandPolicy) -> float:
        """Mean of `success_by_text`."""
        return float(self.success_by_text(policy).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        found = self.success_by_text(cast(ErrandPolicy, run.policy)).tolist()
        texts = {p.content: value for p, value in zip(self.problems, found, strict=True)}
        return {"pass@1": sum(found) / len(found)} | texts

    def best_actions(self) -> Float[Tensor, "M A"]:
        """The actions on shortest ways to success, each of a state's as likely as the others; uniform where there is none."""
        far = torch.full((len(self.tables.places),), torch.inf)
        cost = torch.full(self.tables.won.shape, torch.inf)
        for _ in range(4 * self.horizon):
            onward = torch.where(self.tables.over, torch.inf, far[self.tables.following])
            cost = 1 + torch.where(self.tables.won, 0.0, onward)
            far = cost.amin(1)
        best = (cost == far[:, None]).double()
        return best / best.sum(1, keepdim=True)


def clone(policy: ErrandPolicy, task: Errands, steps: int, noise: float = 0.5, seed: int = 0) -> None:
    """Imitate, for `steps` batches of random states, one who takes a best action with probability 1 - `noise` and any action otherwise."""
    target = (1 - noise) * task.best_actions() + noise / ACTIONS
    generator, optimizer = torch.Generator().manual_seed(seed), torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(steps):
        state = torch.randint(len(target), (256,), generator=generator)
        logits, _ = policy.step_logits(state, torch.full_like(state, ACTIONS), None)
        optimizer.zero_grad()
        (-(target[state] * logits.log_softmax(-1)).sum(1).mean()).backward()
        optimizer.step()
    policy.zero_grad(set_to_none=True)


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    history = options.pop("history", False)
    places = Errands(**options)
    return places.policy(history=history, seed=seed), places
