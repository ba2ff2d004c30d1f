"""Pats: policy-aware training scaffolding (arXiv:2607.21419).

Weak agents repeat the same failures, so that their groups carry no signal. Pats shows them guidance while they train, as much as the present policy
needs: each type of task has a level, from nothing (0) over a hint to a list of steps. Rollouts are condensed into evidence cards; part of every group
is rolled out one level lower, which tells what the guidance is worth; then guidance is added, kept, revised or removed. Skills never enter the reward,
and at deployment there is no guidance. Against GRPO it changes selection and credit (rows are compared with rows of equal guidance only) and adds a
control. Cards, evaluation by task and the direction of the decisions are from the abstract; the fields of the cards, equations 2-3 and 6, the rules of
equation 5 and all defaults are [reconstructed].

A task says by a problem's columns what can be shown: `type` (an integer from 0; default 0) and `guidance`, a sequence of texts, one a level; optionally
`hints`, {failure mode: text}. Texts go before the problem (chats: as a system message); the task finds the columns `level` and `focus` (the hinted
failure mode). A batch may carry `failure` [N] (-1 for none). Problems without `guidance` stay at level 0, where Pats is GRPO (ddof 1). Left out: a
language model that writes the cards and the skills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, standardize
from anypo.seams.reward import row_reward
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

Ids = Int[Tensor, " N"]
Card = dict[str, Any]  # type, level, n, p, steps, variation, top_failure
MISSING = -1.0
SCAFFOLD = "scaffold"  # run.state: P [C,L+1]; level, focus, highest [C]


class Decisions(NamedTuple):
    action: list[str]  # remove, add, revise or keep, by type
    level: list[int]  # the levels after it
    content: list[int]  # the failure mode that guidance turns to on "revise", else -1


def card(reward: Float[Tensor, " N"], steps: Tensor, failure: Ids, type: Ids, level: Ids) -> list[Card]:
    """Equation 1: one card for every type and level with rollouts, sorted. A reward above 0 is a success; `steps` is their mean length, -1 without any;
    ties of failure modes go to the smaller one."""
    pair, place = torch.unique(torch.stack([type, level], dim=1), dim=0, return_inverse=True)
    won, failed = (reward > 0).double(), failure >= 0
    n, successes = torch.bincount(place, minlength=len(pair)), torch.bincount(place, won, minlength=len(pair)).tolist()
    taken = torch.bincount(place, won * steps, minlength=len(pair)).tolist()
    modes = int(failure.max()) + 1 if bool(failed.any()) else 1
    counts = torch.bincount(place[failed] * modes + failure[failed], minlength=len(pair) * modes).view(-1, modes)
    most, top = (x.tolist() for x in counts.max(1))
    return [
        {
            "type": kind, "level": shown, "n": size, "p": wins / size, "steps": total / wins if wins else MISSING,
            "variation": 4 * (wins / size) * (1 - wins / size), "top_failure": mode if times else -1,
        }
        for (kind, shown), size, wins, total, times, mode in zip(pair.tolist(), n.tolist(), successes, taken, most, top, strict=True)
    ]  # fmt: skip


def update_estimate(P: Float[Tensor, "C L"], cards: Sequence[Card], beta: float = 0.5) -> Float[Tensor, "C L"]:
    """Equation 2: the running success rates (-1 = never seen), moved to those of the cards by `beta`; the first one is taken as it is."""
    out = P.clone()
    for found in cards:
        if found["n"] > 0:
            at = found["type"], found["level"]
            out[at] = found["p"] if P[at] < 0 else (1 - beta) * P[at] + beta * found["p"]
    return out


def decide(
    P: Float[Tensor, "C L"], level: Int[Tensor, " C"], top_failure: Int[Tensor, " C"], tau_rm: float = 0.75, tau_low: float = 0.25, delta: float = 0.05
) -> Decisions:  # fmt: skip
    """Equations 4-5 for every type, the first rule that applies."""
    rows = zip(P.tolist(), level.tolist(), top_failure.tolist(), strict=True)
    found = [_decide(rates, at, failure, tau_rm, tau_low, delta) for rates, at, failure in rows]
    return Decisions([f[0] for f in found], [f[1] for f in found], [f[2] for f in found])


def _decide(rates: list[float], level: int, failure: int, tau_rm: float, tau_low: float, delta: float) -> tuple[str, int, int]:
    here, less = rates[level], rates[level - 1] if level > 0 else MISSING
    if here < 0:
        return "keep", level, -1
    managed = less if less >= 0 else here  # with less, or, where nothing is known of that, as things are
    redundant = less >= 0 and here - less < delta and here >= tau_low
    if level > 0 and (managed >= tau_rm or redundant):
        return "remove", level - 1, -1
    if here >= tau_low:
        return "keep", level, -1
    return ("add", level + 1, -1) if level < len(rates) - 1 else ("revise", level, failure)


def advantages(reward: Float[Tensor, " N"], group: Ids, level: Ids, mask: Tensor, eps: float = 1e-6) -> Float[Tensor, "N T"]:
    """Equation 6: GRPO among the rows of a group that saw the same level, sample standard deviation."""
    return broadcast(standardize(reward, group * (int(level.max()) + 1) + level if len(level) else group, ddof=1, eps=eps), mask)


def prompt_cost(level: Ids, cost: Tensor) -> Float[Tensor, ""]:
    """Equation 8: the sum over rollouts of the length of their guidance."""
    return cost[level].double().sum()


def guided(prompt: Prompt, level: int, focus: int) -> Prompt:
    """The problem with the guidance of a level before it, and the hint for a failure mode where there is one."""
    columns = prompt.columns | {"level": level, "focus": focus if level > 0 else -1}
    if level == 0:
        return prompt.but(columns=columns)
    text = "\n".join([prompt.columns["guidance"][level - 1], *filter(None, [prompt.columns.get("hints", {}).get(focus)])])
    content = f"{text}\n{prompt.content}" if isinstance(prompt.content, str) else [{"role": "system", "content": text}, *prompt.content]
    return prompt.but(columns=columns, content=content)


def column(batch: Batch, name: str, default: int) -> Ids:
    """An integer a row: the signal of that name, else the problem's column, else `default`."""
    if name in batch.signals:
        return batch.signals[name].long()
    columns = batch.signals.get("columns")
    return torch.tensor([int(c.get(name, default)) for c in columns]) if columns else torch.full_like(batch.group, default)


def scaffold_of(run: Run, types: int, levels: int = 1, start: int = 0) -> dict[str, Tensor]:
    """The run's scaffold, with room for `types` types and `levels` levels; new types begin at level `start`."""
    new: dict[str, Tensor] = {"P": torch.empty(0, 1).double(), **{name: torch.empty(0).long() for name in ("level", "focus", "highest")}}
    state: dict[str, Tensor] = run.state.setdefault(SCAFFOLD, new)
    (rows, width), old = state["P"].shape, state["P"]
    if types > rows or levels > width:
        state["P"] = torch.full((max(types, rows), max(levels, width)), MISSING, dtype=torch.float64)
        state["P"][:rows, :width] = old
        for name, value in (("level", start), ("focus", -1), ("highest", 0)):
            state[name] = torch.cat([state[name], torch.full((max(types - rows, 0),), value)])
    return state


@dataclass
class Scaffolded:
    """Prompts with the guidance of their type's level; a share of the attempts is given one level less."""

    prompts: int | None = None  # prompts a step, >= 1; None = the task's own default
    group_size: int = 8  # attempts at each prompt, >= 1
    phi: float = 0.25  # share of the attempts with one level less, in [0,1)
    start: int = 0  # level of types that were not seen before, >= 0 (as high as their guidance goes)
    cost: tuple[float, ...] = (0.0, 10.0, 30.0, 80.0)  # tokens of each level's guidance, for the log; the last for higher ones

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        if self.group_size < 1 or not 0 <= self.phi < 1:
            raise ValueError(f"select.group_size must be at least 1 and select.phi in [0,1), not {self.group_size} and {self.phi}")
        drawn = task.prompts(self.prompts or task.prompts_per_step, run.rng)
        out: list[Prompt] = []
        for prompt in drawn:
            kind, highest = int(prompt.columns.get("type", 0)), len(prompt.columns.get("guidance", ()))
            state = scaffold_of(run, kind + 1, highest + 1, self.start)
            state["highest"][kind] = highest
            level, focus = min(int(state["level"][kind]), highest), int(state["focus"][kind])
            state["level"][kind] = level
            probes = round(self.phi * self.group_size) if level > 0 else 0
            out.append(guided(prompt, level, focus).but(samples=self.group_size - probes))
            if probes:
                out.append(guided(prompt, level - 1, focus).but(samples=probes))
        levels = torch.tensor([p.columns["level"] for p in out for _ in range(p.samples)])
        cost = torch.tensor(self.cost)
        run.log(prompt_cost=float(prompt_cost(levels.clamp(max=len(cost) - 1), cost)), level=float(levels.double().mean()))
        return out


@dataclass
class EqualGuidance:
    """Rewards relative to the attempts that saw the same guidance."""

    eps: float = 1e-6  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return advantages(row_reward(batch, self.weights), batch.group, column(batch, "level", 0), batch.mask, self.eps)


@dataclass
class EvidenceCards:
    """After the update: cards of the batch, running success rates, and a decision for every type that was rolled out."""

    beta: float = 0.5  # how far an estimate moves to a new rate, in (0,1]
    tau_rm: float = 0.75  # success with less guidance that makes the rest superfluous, in [0,1]
    tau_low: float = 0.25  # success below which guidance is added, in [0,1]
    delta: float = 0.05  # gain of success below which guidance is redundant, >= 0

    def __call__(self, batch: Batch, run: Run) -> None:
        if SCAFFOLD not in run.state:
            return
        kind, level = column(batch, "type", 0), column(batch, "level", 0)
        cards = card(row_reward(batch), batch.lengths, column(batch, "failure", -1), kind, level)
        state = scaffold_of(run, int(kind.max()) + 1, int(level.max()) + 1)
        state["P"] = update_estimate(state["P"], cards, self.beta)
        found = {(c["type"], c["level"]): c for c in cards}
        counts = {"add": 0.0, "remove": 0.0, "revise": 0.0}
        for c in torch.unique(kind).tolist():
            at, highest = int(state["level"][c]), int(state["highest"][c])
            if (c, at) not in found:
                continue
            rates = state["P"][c : c + 1, : highest + 1].clone()
            if at > 0 and (c, at - 1) not in found:  # an estimate of former policies says nothing of the present one
                rates[0, at - 1] = MISSING
            told = decide(rates, torch.tensor([at]), torch.tensor([found[c, at]["top_failure"]]), self.tau_rm, self.tau_low, self.delta)
            state["level"][c] = told.level[0]
            if told.action[0] == "revise":
                state["focus"][c] = told.content[0]
            counts[told.action[0]] = counts.get(told.action[0], 0.0) + 1
        run.log(**{f"scaffold/{name}": n for name, n in counts.items()})


METHOD = GRPO.but(
    name="pats",
    paper=Paper("PATS: policy-aware training scaffolding", "2607.21419", 2026),
    summary="each type of task is shown as much guidance as the present policy needs, added and removed by evidence, none at deployment",
    select=Scaffolded(),
    credit=EqualGuidance(),
    control=(EvidenceCards(),),
    task="household",
)
