"""Claims of AT2PO on key_chain (four actions a turn, exact success): where the tree grows, what the backup credits, how far turn ratios spread, and
learning at an equal budget of environment steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.key_chain import KeyChain, make_key_chain
from anypo.loops.on_policy import step
from anypo.method import Credit, Method, Rollout
from anypo.methods.language.at2po import METHOD as AT2PO
from anypo.methods.language.at2po import Forest, TurnValue, UncertainTurns, expansion, turn_log_ratio, turns_of
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import one_decision, plain_sgd
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

PROMPTS, DECIDING = 16, 3
SEEDS = range(5)


class RandomTurns(UncertainTurns):
    """Turns that are no leaves, drawn uniformly."""

    def choose(self, trees: Forest, run: Run) -> Tensor:
        lottery = 1e6 * torch.rand(len(trees.parent), generator=run.generator, dtype=torch.float64)  # far above the penalty for siblings
        return expansion(trees.parent, lottery, trees.is_leaf, self.beam).chosen


def _finds(rollout: type[UncertainTurns]) -> float:
    """200 trees of 4 chains and 8 single expansions."""
    policy, task = one_decision(200, 6, DECIDING)
    method = AT2PO.but(rollout=rollout(beam=1, rounds=8, leaves=None)).set("select.group_size", 4)
    run = Run(method, policy, task, steps=1)
    batch = method.rollout(method.select(task, run), run)
    assert batch.branch_at is not None
    return float((batch.branch_at[800:] == DECIDING).double().mean())


def _found(rollout: type[UncertainTurns]) -> Evidence:
    share, chance = _finds(rollout), _finds(RandomTurns)
    found = {"share of expansions at the deciding turn": round(share, 3), "uniform choice": round(chance, 3)}
    return Evidence(found, "above 0.4 and twice the uniform choice", share > max(0.4, 2 * chance))


@claim("in trees of six turns more than 0.4 of the expansions, and twice as many as by chance, draw the one deciding turn again")
def finds_the_decision() -> Evidence:
    return _found(UncertainTurns)


@ablation(finds_the_decision, "turns that are no leaves are drawn uniformly")
def finds_by_chance() -> Evidence:
    return _found(RandomTurns)


class EveryEndAgain(UncertainTurns):
    """Every leaf turn is drawn again, so that each round doubles the ends of every first turn."""

    def choose(self, trees: Forest, run: Run) -> Tensor:
        return trees.is_leaf.nonzero().flatten()


def _credits(credit: Credit) -> Evidence:
    """Two turns of which the second decides; 4 first turns a prompt with 4 second turns each."""
    task = KeyChain(right=torch.tensor([[True] * 4, [True, True, False, False]]).expand(PROMPTS, 2, 4))
    run = Run(AT2PO.but(rollout=EveryEndAgain()).set("select.group_size", 4), task.policy(bias=0.0), task, steps=1)
    batch = run.method.rollout(run.method.select(task, run), run)
    batch.reward = run.score_rewards(batch)
    first, second = credit(batch, run).abs().mean(0).tolist()
    return Evidence({"|a| of turn 1 over turn 2": round(first / second, 3)}, "below 0.6", first < 0.6 * second)


@claim("where the second of two turns decides, first turns get less than 0.6 of the second turns' advantage in size")
def credits_the_turn() -> Evidence:
    return _credits(TurnValue())


@ablation(credits_the_turn, "every turn of a chain gets the outcome of its end")
def credits_the_chain() -> Evidence:
    return _credits(GroupRelative())


@dataclass
class Blocks:
    """Chains whose turns are blocks of `size` actions."""

    size: int = 2
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = self.inner(prompts, run)
        assert batch.segment is not None
        return batch.but(segment=batch.segment // self.size)


def _spread(size: int) -> Evidence:
    """Log-ratios after 8 steps of ATPO on one batch of chains of six actions, in turns of `size`."""
    policy, task = make_key_chain(PROMPTS, 6)
    method = plain_sgd(AT2PO, PROMPTS * 6.0, epochs=8).but(rollout=Blocks(size))
    batch = step(Run(method, policy, task, steps=1))
    with torch.no_grad():
        logp = policy.evaluate(batch, {"logp"}).logp
    levels = {"token": torch.arange(6).expand(batch.mask.shape), "turn": batch.segment, "sequence": torch.zeros_like(batch.action)}
    found = {name: float(turn_log_ratio(logp, batch.logp, *turns_of(batch.mask, segment)).var()) for name, segment in levels.items()}
    holds = 1.1 * found["sequence"] < found["turn"] < 0.9 * found["token"]
    return Evidence({name: f"{value:.2e}" for name, value in found.items()}, "turn 10% below token and 10% above sequence", holds)


@claim("after eight steps on one batch the variance of turns' log-ratios lies between those of sequences and of tokens")
def spread() -> Evidence:
    return _spread(2)


@ablation(spread, "every action is a turn")
def spread_of_tokens() -> Evidence:
    return _spread(1)


STEPS, CHAINS, COST, ITERATIONS = 6, 18, 108, 40  # COST: environment steps of a prompt's tree, about, and of 18 chains


@cache
def trained(kind: str) -> float:
    """Mean success once as many environment steps are spent as 18 chains a prompt need in ITERATIONS; step 1 a prompt."""
    methods: dict[str, tuple[Method, int]] = {
        "chain": (GRPO, CHAINS),
        "tree": (AT2PO, 10),
        "tree, outcomes as credit": (AT2PO.but(credit=GroupRelative()), 10),
    }
    method = plain_sgd(methods[kind][0], PROMPTS * STEPS, group_size=methods[kind][1]).but(regularize=())
    ends = []
    for seed in SEEDS:
        policy, task = make_key_chain(PROMPTS, STEPS, seed=seed)
        run = Run(method, policy, task, steps=100 * ITERATIONS, seed=seed, max_actions=ITERATIONS * PROMPTS * COST)
        while not run.finished:
            step(run)
        ends.append(task.expected_success(policy))
    return fmean(ends)


# Averages over children are smaller than outcomes, so at one step size turn values move early turns less; the tree itself is no handicap.
@claim(
    "at an equal budget of environment steps and the same step size AT2PO succeeds at least as often as chains (6 turns, 5 seeds)",
    slow=True,
    reproduced=False,
)
def learns() -> Evidence:
    found = {kind: round(trained(kind), 3) for kind in ("tree", "chain", "tree, outcomes as credit")}
    return Evidence(found, "tree at least chain", trained("tree") >= trained("chain"))
