"""household: chores whose steps must come in a hidden order, with guidance of three levels that the policy may be shown while it trains.

Six types of chores, 4, 4, 5, 5, 6 and 6 steps long, each a sequence of different actions out of ten. A right action brings the chore on, any other wastes
one of the twelve steps of an episode; reward 1 for a finished chore. The policy sees the type, which actions are done, and the last action. Guidance
adds: level 1 the actions still needed, level 2 also the next right one during the first half, level 3 always. A level above 0 may bring a hint besides:
the right action at one step of the chore. The level and the hinted step are a problem's columns `level` and `focus`; without them there is
no guidance. As states are few, everything is a table and success is exact; a batch's context is the number of each state [N,T]. Stands in for
ALFWorld with skill texts; left out: words, rooms, objects.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import one_hot

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

LENGTHS = (4, 4, 5, 5, 6, 6)  # steps of a chore of each type
ACTIONS, HORIZON, LEVELS = 10, 12, 3
LONGEST = max(LENGTHS)
SIZES = (
    len(LENGTHS),
    LONGEST,
    ACTIONS + 1,
    LEVELS + 1,
    LONGEST + 1,
)  # type, steps done, last action, level, hinted step; the last are "none"


def orders(seed: int = 0) -> Int[Tensor, "C 6"]:
    """The hidden sequence of every type, -1 after its end."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(len(LENGTHS), ACTIONS, generator=generator).argsort(1)[:, :LONGEST]
    return torch.where(torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None], drawn, -1)


def number(kind: Tensor, done: Tensor, last: Tensor, level: Tensor, focus: Tensor) -> Tensor:
    """The state's number. `last` is ACTIONS at the start; `focus` -1 for no hint."""
    index = torch.zeros_like(kind)
    for part, size in zip((kind, done, last, level, torch.where(focus < 0, LONGEST, focus)), SIZES, strict=True):
        index = index * size + part
    return index


def observations(order: Int[Tensor, "C 6"]) -> Float[Tensor, "M F"]:
    """What the policy sees in every state, as zeros and ones."""
    kind, done, last, level, focus = (p.flatten() for p in torch.meshgrid(*(torch.arange(n) for n in SIZES), indexing="ij"))
    exists = order >= 0
    steps = one_hot(order.clamp(min=0), ACTIONS) * exists[..., None]  # [C,6,A]
    place = torch.arange(LONGEST)
    did = (steps[kind] * (place < done[:, None])[..., None]).sum(1)
    first_half = done < (exists.sum(1)[kind] + 1) // 2
    named = (level >= 3) | ((level == 2) & first_half) | ((level >= 1) & (focus == done))
    return torch.cat(
        [
            one_hot(kind, len(LENGTHS)), did, one_hot(last, ACTIONS + 1),
            (steps.sum(1)[kind] - did) * (level >= 1)[:, None], steps[kind, done] * named[:, None],
        ], dim=1,
    ).float()  # fmt: skip


class HouseholdPolicy(Policy):
    """What is seen into a layer of tanh units. At the start all actions are equally likely but for those that guidance names: as a language model does, the
    policy understands what it is told, though not well. `reads`: the logit that being named gives an action at the start (learned)."""

    provides = frozenset({"logp", "entropy", "logits"})
    learning_rate, optimizer = 5e-3, "adam"
    memoryless = True
    vocabulary = ACTIONS

    def __init__(self, order: Int[Tensor, "C 6"], *, hidden: int = 64, reads: float = 2.0, seed: int = 0) -> None:
        super().__init__()
        seen = observations(order)
        self.register_buffer("seen", seen, persistent=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.output = nn.Linear(seen.shape[1], hidden), nn.Linear(hidden, ACTIONS)
        self.reads = nn.Parameter(torch.tensor(reads))
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def logits(self, state: Int[Tensor, "*N"]) -> Float[Tensor, "*N A"]:
        """Logits of the actions in numbered states."""
        seen = cast(Tensor, self.seen)[state]
        return self.output(self.first(seen).tanh()) + self.reads * (seen[..., -2 * ACTIONS : -ACTIONS] + seen[..., -ACTIONS:])

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        logits = self.logits(batch.context)
        log_probs = logits.log_softmax(-1)
        signals = Signals(logits=logits)
        if "logp" in needs:
            logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
            signals["logp"] = torch.where(batch.mask, logp, torch.zeros_like(logp))
        if "entropy" in needs:
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        return Signals({name: value for name, value in signals.items() if name in needs})


class Household:
    """The task. Signals of a batch: `type`, `level`, `failure` (the step a failed chore was stuck at, else -1), `prompt_id` [N]."""

    name, objectives, prompts_per_step = "household", ("reward",), len(LENGTHS)

    def __init__(self, *, seed: int = 0) -> None:
        self.order, self.lengths = orders(seed), torch.tensor(LENGTHS)
        self.problems = [
            Prompt(c, f"chore {c}", {"type": c, "guidance": ("what is needed", "how to begin", "what comes next")})
            for c in range(len(LENGTHS))
        ]

    def policy(self, **options: Any) -> HouseholdPolicy:
        """A policy for these chores."""
        return HouseholdPolicy(self.order, **options)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """All types in order, again and again, when `count` is a multiple of their number, else a draw without replacement where possible."""
        total = len(self.problems)
        chosen = np.arange(count) % total if count % total == 0 else rng.choice(total, size=count, replace=count > total)
        return [self.problems[i] for i in chosen]

    @torch.no_grad()
    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        told = [(p.id, p.columns.get("level", 0), p.columns.get("focus", -1)) for p in prompts]
        kind, level, focus = torch.tensor(told)[group].T
        policy = cast(HouseholdPolicy, run.policy)
        done, last = torch.zeros_like(kind), torch.full_like(kind, ACTIONS)
        alive, length, written = torch.ones_like(kind, dtype=torch.bool), self.lengths[kind], []
        for _ in range(HORIZON):
            state = number(kind, done.clamp(max=LONGEST - 1), last, level, focus)
            log_probs = policy.logits(state).log_softmax(-1)
            action = torch.multinomial(log_probs.exp(), 1, generator=run.generator)[:, 0]
            chosen = log_probs.gather(1, action[:, None])[:, 0] * alive
            written.append((action, alive, chosen, -(log_probs.exp() * log_probs).sum(1) * alive, state))
            right = alive & (action == self.order[kind, done.clamp(max=LONGEST - 1)])
            done, last = done + right, action
            alive = done < length
            if not bool(alive.any()):
                break
        actions, mask, logp, entropy, context = (torch.stack(part, dim=1) for part in zip(*written, strict=True))
        return Batch(
            action=actions, mask=mask, logp=logp, group=group, context=context, terminated=~alive, truncated=alive,
            segment=torch.arange(mask.shape[1]).expand(mask.shape).clone(), version=torch.full_like(group, run.version),
            signals={"prompt_id": kind, "old_entropy": entropy, "type": kind, "level": level, "failure": torch.where(alive, done, -1)},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        """1 for a finished chore, else 0, [N]."""
        return (batch.signal("failure") < 0).float()

    @torch.no_grad()
    def success_by_type(self, policy: HouseholdPolicy, level: int = 0) -> Float[Tensor, " C"]:
        """Exact success on every type with guidance of one level for all."""
        kind, done, last = torch.meshgrid(*(torch.arange(n) for n in SIZES[:3]), indexing="ij")
        fixed = torch.full_like(kind, level)
        chance = policy.logits(number(kind, done, last, fixed, torch.full_like(kind, -1))).double().softmax(-1)  # [C,6,11,A]
        right = one_hot(self.order.clamp(min=0), ACTIONS).bool()[:, :, None]
        finishes = (torch.arange(LONGEST) == self.lengths[:, None] - 1)[:, :, None, None]
        value = torch.zeros(SIZES[:3], dtype=torch.float64)
        for _ in range(HORIZON):
            stay = value[:, :, None, :ACTIONS]  # the action becomes the last one
            onward = torch.cat([stay[:, 1:], torch.zeros_like(stay[:, :1])], dim=1)
            value = (chance * torch.where(right, torch.where(finishes, 1.0, onward), stay)).sum(-1)
        return value[:, 0, ACTIONS]

    def expected_success(self, policy: HouseholdPolicy) -> float:
        """Mean of `success_by_type` without guidance, as at deployment."""
        return float(self.success_by_type(policy).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        found = self.success_by_type(cast(HouseholdPolicy, run.policy)).tolist()
        return {"pass@1": sum(found) / len(found)} | {p.content: value for p, value in zip(self.problems, found, strict=True)}


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    chores = Household(seed=seed, **options)
    return chores.policy(seed=seed), chores
