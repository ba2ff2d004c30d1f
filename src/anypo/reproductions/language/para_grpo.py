"""Claims of PARA-GRPO on event_video: 64 frames, four windows, helpers that miss 15% of the events; 8 videos by 8 conversations a step at temperature 1.

Measured on 512 conversations about other videos, with the same random numbers every time. "Calls" is the share of conversations with a call that can be
read; a response "parses" when its thought and its answer are closed and not empty, which is what the anchor asks. "Vanilla" is the recipe without the
two remedies: no anchor, no answer suffix, 64 frames, one advantage on all tokens.
"""

from __future__ import annotations

import functools
from statistics import fmean
from typing import Any

import numpy as np
import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.agents import AgentTask
from anypo.domains.language.toys.event_video import BUDGETS, WordPolicy, make_event_video
from anypo.methods.language.para_grpo import METHOD as PARA
from anypo.methods.language.para_grpo import BudgetedPrompts, format_reward, judged_texts, parts
from anypo.reproductions.common import train_on

SEEDS = range(2)
CONVERSATIONS = 512
ALL, FEWEST, FEW, MANY = BUDGETS, (4,), (8,), (64,)
FIXED = BudgetedPrompts(choices=MANY)
VANILLA = PARA.but(select=FIXED).set("reward.anchor_weight", 0.0).set("reward.answer_suffix", False).set("credit.placement", "sequence")
NO_BONUS = PARA.set("reward.tool_weight", 0.0)  # with the bonus calling pays whatever the overview shows (equation 4)
METHODS = {"para": PARA, "vanilla": VANILLA, "random budget": NO_BONUS, "64 frames": NO_BONUS.but(select=FIXED)}


def _measured(policy: WordPolicy, task: AgentTask, frames: tuple[int, ...]) -> dict[str, float]:
    """Accuracy and the shares of conversations that call the tool and that parse, for overviews of these sizes in turn."""
    prompts = task.source.training(CONVERSATIONS, np.random.default_rng(1 << 20), frames)  # type: ignore[call-arg]
    with torch.no_grad():
        batch = task.attempt(policy, prompts, torch.Generator().manual_seed(0))
    found = [parts(text) for text in judged_texts(batch)]
    return {
        "accuracy": float(task.score(batch).double().mean()),
        "calls": fmean(p.tool for p in found),
        "parses": fmean(p.closed and p.think and p.answer for p in found),
    }


@functools.cache
def _trained(name: str, seed: int, steps: int, rate: float, **world: Any) -> tuple[WordPolicy, AgentTask]:
    policy, task = make_event_video(temperature=1.0, **world)
    method = METHODS[name].set("update.learning_rate", rate)
    train_on(method, policy, task, steps=steps, seed=seed, watch=lambda run, batch: None)
    return policy, task


def _mean(name: str, measure: str, frames: tuple[int, ...] = ALL, steps: int = 40, rate: float = 5e-3, **world: Any) -> float:
    return round(fmean(_measured(*_trained(name, seed, steps, rate, **world), frames)[measure] for seed in SEEDS), 3)


SLOW = {
    "steps": 30,
    "rate": 1e-3,
    "spoilt": 0.9,
}  # format is judged while it is being learned, by a policy that saw nine in ten conversations spoilt


def _format(name: str) -> Evidence:
    """With 30% spoilt, or after more steps, both recipes repair the format (on another seed 0.98 and 0.96 after 40 steps). The margin is a third of the
    mean difference on two other seeds (0.38 and 0.21)."""
    found = {n: _mean(n, "parses", **SLOW) for n in (name, "vanilla")}
    return Evidence(found, "above 0.6, and 0.1 above vanilla", found[name] > max(0.6, found["vanilla"] + 0.1))


@claim("the anchored format reward on the tags' tokens mends a broken format sooner than the vanilla recipe", slow=True)
def anchored() -> Evidence:
    return _format("para")


@ablation(anchored, "no anchor, and one advantage on all tokens")
def unanchored() -> Evidence:
    return _format("vanilla")


def _tool_use(name: str) -> Evidence:
    found = {
        name: {"calls": _mean(name, "calls"), "accuracy at 8 frames": _mean(name, "accuracy", FEW)},
        "64 frames": {"calls": _mean("64 frames", "calls"), "accuracy at 8 frames": _mean("64 frames", "accuracy", FEW)},
    }
    mine, fixed = found[name], found["64 frames"]
    holds = fixed["calls"] < 0.2 and mine["calls"] > 0.4 and mine["accuracy at 8 frames"] > fixed["accuracy at 8 frames"] + 0.15
    return Evidence(found, "calls below 0.2 with 64 frames, above 0.4 with random budgets, accuracy at 8 frames 0.15 higher", holds)


@claim(
    "without a bonus for it the tool falls out of use where the overview always has 64 frames, and stays where budgets are random",
    slow=True,
)
def tool_use() -> Evidence:
    return _tool_use("random budget")


@ablation(tool_use, "the budget is always 64 frames")
def tool_dies() -> Evidence:
    return _tool_use("64 frames")


def _parallel(windows: int) -> Evidence:
    """Both imitated as many windows a turn. One at a time also forgets the overview, so it stays below the 0.6 or so that one window would allow."""
    several, one = (_mean("para", "accuracy", FEWEST, parallel=m) for m in (windows, 1))
    return Evidence({f"{windows} a turn": several, "1 a turn": one}, "0.1 more accurate at 4 frames", several > one + 0.1)


@claim("four windows in one turn are more accurate than one window a turn, with the same three turns", slow=True)
def parallel() -> Evidence:
    return _parallel(4)


@ablation(parallel, "one window a turn on both sides")
def one_after_another() -> Evidence:
    return _parallel(1)


def _exact(min_chars: int) -> Evidence:
    call, thought = '<tool_call>{"name": "crop"}</tool_call>', "<think>an event may hide anywhere</think>"
    found = {
        "empty tags": format_reward("<think></think><answer> </answer>", min_chars=min_chars),
        "thought, call": format_reward(thought + call, min_chars=min_chars),
        "call, thought": format_reward(call + thought, min_chars=min_chars),
    }
    return Evidence(
        found,
        "exactly 0; less for the thought after the call",
        found["empty tags"] == 0 and found["thought, call"] > found["call, thought"],
    )


@claim("empty tags earn nothing, and a thought after the call earns less than before it")
def exact() -> Evidence:
    return _exact(10)


@ablation(exact, "a thought may have any length")
def empty_thoughts() -> Evidence:
    return _exact(0)


def _weak(prior: float) -> Evidence:
    found = {measure: _mean("vanilla", measure, prior=prior) for measure in ("parses", "calls")}
    return Evidence(found, "parses above 0.8, calls below 0.05", found["parses"] > 0.8 and found["calls"] < 0.05)


@claim("a policy that never saw the tool used keeps its format under GRPO and does not take to the tool", slow=True)
def weak_prior() -> Evidence:
    return _weak(0.0)


@ablation(weak_prior, "it saw the tool used in 70% of the conversations")
def strong_prior() -> Evidence:
    return _weak(0.7)
