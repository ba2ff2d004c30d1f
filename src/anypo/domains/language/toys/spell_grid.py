"""spell_grid: an agent walks a 5x5 grid by spelling its moves, in words of one to six characters that mean the same.

A word is the letter of a direction, up to five fillers and a space, so every move has six synonyms of different length; the direction comes first,
so that short and long words are equally easy to get right. Reward 1 for reaching the far corner within twelve moves. A row of the batch is a walk,
its words written one after another; `segment` counts the moves. As positions and words are few, success and the mean word length are found exactly.
Left out: any observation but the position.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt

SIDE, GOAL = 5, 24
LETTERS = 6  # the longest word, without its space
FILLER, SPACE = 4, 5  # symbols 0-3 are the directions
PLACES = LETTERS + 1
FILLER_SHARE = 0.6  # probability of one more filler at the start: mean word length 2.4


def _destinations() -> Int[Tensor, "cells 4"]:
    """The cell that each move leads to; walls hold, and the goal is left by no move."""
    cell = torch.arange(SIDE * SIDE)
    x, y = cell % SIDE, cell // SIDE
    moves = [(x, y - 1), (x, y + 1), (x - 1, y), (x + 1, y)]
    table = torch.stack([b.clamp(0, SIDE - 1) * SIDE + a.clamp(0, SIDE - 1) for a, b in moves], dim=1)
    table[GOAL] = GOAL
    return table


def _spelling() -> Bool[Tensor, "places symbols"]:
    """What may be written at each place of a word: a direction, then fillers or the space, at last the space."""
    allowed = torch.zeros(PLACES, SPACE + 1, dtype=torch.bool)
    allowed[0, :FILLER] = True
    allowed[1:, SPACE] = True
    allowed[1:-1, FILLER] = True
    return allowed


DESTINATION, SPELLING = _destinations(), _spelling()


class SpellPolicy(Policy):
    """A GRU over the characters of a word, begun from the position, and a small critic over position, word so far and moves so far.

    `batch.context` is [N,T,4]: position, direction of the word (0 before it is written), place in the word and move number of every character.
    """

    provides = frozenset({"logp", "entropy", "value"})
    learning_rate, optimizer = 3e-3, "adam"

    def __init__(self, hidden: int = 32, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.position = nn.Embedding(SIDE * SIDE, hidden)
            self.character = nn.Embedding(SPACE + 1, hidden)  # the space before a word is read first
            self.gru = nn.GRU(hidden, hidden, batch_first=True)
            self.output = nn.Linear(hidden, SPACE + 1)
            judge = nn.Linear(hidden, 1)
            self.critic = nn.Sequential(nn.Linear(SIDE * SIDE + FILLER + PLACES + 1, hidden), nn.Tanh(), judge)
        for layer in (self.output, judge):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.output.bias[FILLER] = np.log(FILLER_SHARE / (1 - FILLER_SHARE))

    def parameter_groups(self) -> list[dict[str, Any]]:
        trunk = [p for name, p in self.named_parameters() if not name.startswith("critic")]
        return [{"params": trunk, "role": "policy"}, {"params": list(self.critic.parameters()), "role": "value"}]

    def log_probs(self) -> Float[Tensor, "cells directions places symbols"]:
        """Of every character at every position, direction written and place in the word."""
        read = torch.full((FILLER, PLACES), FILLER)
        read[:, 0], read[:, 1] = SPACE, torch.arange(FILLER)
        begun = self.position.weight.repeat_interleave(FILLER, dim=0)[None]
        states = self.gru(self.character(read).repeat(SIDE * SIDE, 1, 1), begun)[0]
        logits = self.output(states).masked_fill(~SPELLING, -1e9)
        return logits.log_softmax(-1).view(SIDE * SIDE, FILLER, PLACES, SPACE + 1)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        cell, direction, place, move = batch.context.unbind(-1)
        signals = Signals()
        if needs & {"logp", "entropy"}:
            log_probs = self.log_probs()[cell, direction, place]
            logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
            signals["logp"] = torch.where(batch.mask, logp, torch.zeros_like(logp))
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "value" in needs:
            written = nn.functional.one_hot(direction, FILLER) * (place > 0)[..., None]
            seen = [nn.functional.one_hot(cell, SIDE * SIDE), written, nn.functional.one_hot(place, PLACES), move[..., None] / 10]
            signals["value"] = self.critic(torch.cat(seen, dim=-1))[..., 0]
        return signals


class SpellGrid:
    """The task: walks from a random cell. `horizon`: moves a walk may have."""

    name, objectives, prompts_per_step = "spell_grid", ("reward",), 32

    def __init__(self, horizon: int = 12) -> None:
        self.horizon = horizon

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(id=int(cell), content=int(cell)) for cell in rng.integers(GOAL, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy = cast(SpellPolicy, run.policy)
        group = torch.tensor([i for i, p in enumerate(prompts) for _ in range(p.samples)])
        cell = torch.tensor([p.content for p in prompts])[group]
        direction, place, move = (torch.zeros_like(cell) for _ in range(3))
        probabilities, written = policy.log_probs().exp(), []
        for _ in range(PLACES * self.horizon):
            alive = (cell != GOAL) & (move < self.horizon)
            if not bool(alive.any()):
                break
            symbol = torch.multinomial(probabilities[cell, direction, place], 1, generator=run.generator)[:, 0]
            written.append((symbol, alive, torch.stack([cell, direction, place, move], dim=1)))
            ends = alive & (symbol == SPACE)
            cell = torch.where(ends, DESTINATION[cell, direction], cell)
            direction = torch.where(ends, 0, torch.where(alive & (place == 0), symbol, direction))
            place = torch.where(ends, 0, place + alive.long())
            move = move + ends.long()
        action, mask, context = (torch.stack(part, dim=1) for part in zip(*written, strict=True))
        last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        batch = Batch(
            action=action, mask=mask, logp=torch.zeros(mask.shape), group=group, context=context,
            segment=context[..., 3], terminated=torch.ones(len(group), dtype=torch.bool), truncated=torch.zeros(len(group), dtype=torch.bool),
            version=torch.full((len(group),), run.version),
            signals={"prompt_id": torch.tensor([p.id for p in prompts])[group], "goal_reward": (last & (cell == GOAL)[:, None]).float()},
        )  # fmt: skip
        batch.logp = policy.evaluate(batch, {"logp"}).logp.detach()
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """[N,T]: 1 at the character that completes the move to the goal."""
        return batch.signals["goal_reward"]

    @torch.no_grad()
    def expected_success(self, policy: SpellPolicy) -> float:
        """Exact probability of reaching the goal, mean over the starts."""
        step = torch.zeros(SIDE * SIDE, SIDE * SIDE).double()
        step.scatter_add_(1, DESTINATION, policy.log_probs()[:, 0, 0, :FILLER].exp().double())
        return float(torch.linalg.matrix_power(step, self.horizon)[:GOAL, GOAL].mean())

    @torch.no_grad()
    def mean_word(self, policy: SpellPolicy) -> float:
        """Exact mean number of letters of a word, over the cells other than the goal."""
        probabilities = policy.log_probs()[:GOAL].exp()
        letters = 1 + probabilities[:, :, 1:-1, FILLER].cumprod(-1).sum(-1)
        return float((probabilities[:, 0, 0, :FILLER] * letters).sum(1).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        policy = cast(SpellPolicy, run.policy)
        return {"pass@1": self.expected_success(policy), "word_length": self.mean_word(policy)}
