"""Claims of T2PO on hesitant doors: two doors in a row, four keys, four turns; a reply is up to 20 full stops of "thinking", ";", a letter, end.

The observation tells question and door, which alone decide the right letter. A wrong letter leaves everything as it was. The policy is a character GRU
that imitated demonstrations of 3 to 20 full stops whose letters are right with probability 0.35. Settings were chosen on seeds from 100 on.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.gru_policy import GruPolicy, imitate
from anypo.method import Method
from anypo.methods.language.t2po import METHOD, SteeredTurns, intervene_at
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

QUESTIONS, DOORS, KEYS, TURNS = 8, 2, 4, 4
LONGEST = 20  # full stops
ALPHABET = "abcd.;0123456789"
FILL, STOP, DIGIT = (ALPHABET.index(c) + 1 for c in ".;0")
SEEDS = range(5)


class HesitantDoors:
    """The task. Rows are reply, observation, reply, ...; signals `turn_reward`, `invalid_turn`, `repeated` [N,TURNS] (the same letter at the same door
    as the turn before), `thinking` [N,TURNS] (full stops), `state_id` [N,TURNS] (-1: no such turn)."""

    name, objectives, prompts_per_step = "hesitant_doors", ("reward",), QUESTIONS

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed + 1000)
        self.right = 1 + torch.randint(KEYS, (QUESTIONS, DOORS), generator=generator)  # tokens

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        chosen = np.arange(QUESTIONS) if count == QUESTIONS else rng.choice(QUESTIONS, size=count)
        return [Prompt(id=int(i), content=int(i)) for i in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: Any = run.policy
        group = torch.tensor([i for i, p in enumerate(prompts) for _ in range(p.samples)])
        question = torch.tensor([p.content for p in prompts])[group].tolist()

        def write(starts: list[Tensor], rows: list[int]) -> list[Tensor]:
            out = policy.sample(starts, [1] * len(starts), max_tokens=LONGEST + 3, temperature=1.0, generator=run.generator)
            return [tokens[valid] for tokens, valid in zip(out.tokens, out.valid, strict=True)]

        batch = self.play(policy, question, group, write)
        batch.logp = policy.observe(batch, {"logp"}).logp
        batch.version = torch.full((len(group),), run.version)
        return batch

    def play(self, policy: Any, question: list[int], group: Tensor, write: Any) -> Batch:
        """`write(texts so far, their rows)` -> replies. Log-probs are left at 0."""
        count = len(question)
        context = [policy.encode(f"{q}0") for q in question]
        text, written, segment = ([torch.zeros(0, dtype=torch.int64) for _ in range(count)] for _ in range(3))
        door, before = [0] * count, [0] * count
        table = {name: torch.zeros(count, TURNS) for name in ("turn_reward", "invalid_turn", "repeated", "thinking")}
        state_id = torch.full((count, TURNS), -1)
        for turn in range(TURNS):
            live = [i for i in range(count) if door[i] < DOORS]
            if not live:
                break
            for i, reply in zip(live, write([torch.cat([context[i], text[i]]) for i in live], live), strict=True):
                state_id[i, turn] = question[i] * DOORS + door[i]
                stops = (reply == STOP).nonzero().flatten()
                at = int(stops[0]) if len(stops) else len(reply)
                letter = int(reply[at + 1]) if at + 1 < len(reply) else 0
                letter = letter if 1 <= letter <= KEYS else 0
                opened = letter == int(self.right[question[i], door[i]])
                table["invalid_turn"][i, turn], table["thinking"][i, turn] = letter == 0, at
                table["repeated"][i, turn] = letter == before[i] and letter > 0
                before[i], door[i] = (0, door[i] + 1) if opened else (letter, door[i])
                table["turn_reward"][i, turn] = float(door[i] == DOORS)
                seen = policy.encode(f"{question[i]}{door[i]}") if door[i] < DOORS and turn + 1 < TURNS else reply[:0]
                text[i] = torch.cat([text[i], reply, seen])
                written[i] = torch.cat([written[i], torch.ones_like(reply), torch.zeros_like(seen)])
                segment[i] = torch.cat([segment[i], torch.full((len(reply) + len(seen),), turn)])
        action = pad_sequence(text, batch_first=True)
        done = torch.tensor([d == DOORS for d in door])
        return Batch(
            action=action, mask=pad_sequence(written, batch_first=True).bool(), logp=torch.zeros(action.shape), group=group, context=context,
            valid=torch.arange(action.shape[1]) < torch.tensor([len(t) for t in text])[:, None], segment=pad_sequence(segment, batch_first=True),
            terminated=done, truncated=~done, signals={"prompt_id": torch.tensor(question), "state_id": state_id} | table,
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        return batch.signals["turn_reward"].sum(1)

    def evaluate(self, run: Run) -> dict[str, float]:
        batch = self.collect([p.but(samples=16) for p in self.prompts(QUESTIONS, run.rng)], run)
        return {"pass@1": float(self.score(batch, run).mean())}


_WARM: dict[int, dict[str, Tensor]] = {}  # for the life of the process


STAY = math.log(0.9)  # after three full stops the demonstrations stop thinking with probability 0.1 a token


def hesitant_doors(seed: int, updates: int = 80) -> tuple[GruPolicy, HesitantDoors]:
    """A policy that imitated hesitant conversations, and its task."""
    task, policy = HesitantDoors(seed), GruPolicy(hidden=32, alphabet=ALPHABET, seed=seed)
    if seed not in _WARM:
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
        for _ in range(updates):
            question = torch.randint(QUESTIONS, (32,), generator=generator).tolist()

            def demonstrate(starts: list[Tensor], rows: list[int]) -> list[Tensor]:
                draws = torch.rand(3, len(starts), generator=generator)
                length = ((draws[0].log() / STAY).long() + 3).clamp(max=LONGEST).tolist()
                right = [int(task.right[int(s[-2]) - DIGIT, int(s[-1]) - DIGIT]) for s in starts]
                letter = torch.where(draws[1] < 0.35, torch.tensor(right), 1 + (KEYS * draws[2]).long()).tolist()
                return [torch.tensor([*[FILL] * n, STOP, k, GruPolicy.eos]) for n, k in zip(length, letter, strict=True)]

            batch = task.play(policy, question, torch.arange(32), demonstrate)
            imitate(policy, batch, optimizer)
        _WARM[seed] = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.load_state_dict(_WARM[seed])
    policy.zero_grad(set_to_none=True)
    return policy, task


# Both methods alike. A mean over tokens, as a mean over rows by itself makes thinking shorter. eps and eta fit a tiny policy:
# with them one draw in five or six was a second one on the seeds they were chosen on (seeds differ widely).
BASE = METHOD.but(select=UniformPrompts(group_size=6), update=GradientSteps(learning_rate=2e-3)).set("objective.aggregation", "token_mean")
STEERED = SteeredTurns(eta=0.005, eps=0.1, window=2, shortest=4, longest=LONGEST, j=4, opening="", closing=";", action_tag="")


def tiny(**changes: Any) -> Method:
    """T2PO at the size of the doors, with some fields of its rollout changed."""
    return BASE.but(rollout=replace(STEERED, **changes))


OFF = {"eta": 0.0, "eps": 0.0, "longest": float("inf")}
METHODS = {"t2po": tiny(), "base": tiny(**OFF), "thinking only": tiny(eta=0.0)}
STEPS = 15


@cache
def trained(name: str) -> list[dict[str, float]]:
    """For every seed: means over the conversations of all steps, and the turns drawn again, as a share, in the first three."""
    found = []
    for seed in SEEDS:
        policy, task = hesitant_doors(seed)

        def watch(run: Run, batch: Batch) -> list[float]:
            happened = batch.signals["state_id"] >= 0
            per_turn = [float(batch.signals[name][happened].mean()) for name in ("thinking", "repeated")]
            return [float(batch.signals["turn_reward"].sum(1).mean()), *per_turn, run.history[-1]["resampled"]]

        steps = train_on(METHODS[name], policy, task, steps=STEPS, seed=seed, watch=watch)
        means = [fmean(values) for values in zip(*steps, strict=True)]
        again = fmean(values[3] for values in steps[:3])
        found.append({"success": means[0], "thinking": means[1], "repeated": means[2], "drawn again": again})
    return found


def mean(name: str, what: str) -> float:
    return fmean(row[what] for row in trained(name))


HUMP = [0.30, 0.50, 0.70, 0.80, 0.81, 0.80, 0.65, 0.50, 0.40, 0.40, 0.40, 0.40, 0.40, 0.40]  # rises, falls, goes flat from index 8 on


def _plateau(window: int) -> Evidence:
    at = intervene_at(torch.tensor(HUMP), N=window, eps=0.02, L_min=4, L_max=99)
    return Evidence({"forced token": at, "peak": 4}, "12: after three changes in a row below the threshold", at == 12)


@claim("thinking is ended at the exact token where the uncertainty has gone flat, and not at its peak")
def plateau() -> Evidence:
    return _plateau(2)


@ablation(plateau, "one change instead of a window")
def plateau_without_window() -> Evidence:
    return _plateau(0)


def _shorter(name: str) -> Evidence:
    thinking, success = ({n: mean(n, what) for n in (name, "base")} for what in ("thinking", "success"))
    measured = {what: {n: round(v, 3) for n, v in found.items()} for what, found in (("thinking", thinking), ("success", success))}
    holds = thinking[name] < 0.9 * thinking["base"] and success[name] > success["base"] - 0.02
    return Evidence(measured, "thinking more than 10% shorter, success not lower by more than 0.02", holds)


@claim("the policy thinks more than a tenth shorter than under the base method, and succeeds no less", slow=True)
def shorter() -> Evidence:
    return _shorter("t2po")


@ablation(shorter, "no interventions and no second draws")
def shorter_off() -> Evidence:
    return _shorter("base")


def _drawn_again(name: str) -> Evidence:
    shares = [round(row["drawn again"], 3) for row in trained(name)]
    return Evidence(shares, "above 0 in the first three steps of every seed", min(shares) > 0)


@claim("turns are drawn again from the first steps on", slow=True)
def drawn_again() -> Evidence:
    return _drawn_again("t2po")


@ablation(drawn_again, "a threshold of 0")
def never_drawn_again() -> Evidence:
    return _drawn_again("thinking only")


def _repeated(name: str) -> Evidence:
    """Seeds differ widely; eight further ones, looked at afterwards, had 0.127 against the base's 0.149 (0.160 without second draws)."""
    shares = {n: mean(n, "repeated") for n in (name, "base")}
    measured = {n: {"mean": round(v, 4), "seeds": [round(row["repeated"], 3) for row in trained(n)]} for n, v in shares.items()}
    return Evidence(measured, "more than 5% fewer than the base", shares[name] < 0.95 * shares["base"])


@claim("turns that repeat the letter of the turn before at the same door become rarer than under the base method", slow=True)
def repeated() -> Evidence:
    return _repeated("t2po")


@ablation(repeated, "no turn is drawn again")
def repeated_without_draws() -> Evidence:
    return _repeated("thinking only")
