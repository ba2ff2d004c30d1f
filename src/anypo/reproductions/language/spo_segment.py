"""Claims of SPO on token_bandit (16 prompts, V=4), whose values are known exactly: what a segment's advantage is worth as an estimate, what it says
about a ruined response, what it does for learning, and what the tree saves."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo import catalogue
from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.loops.on_policy import step
from anypo.method import Method, Study
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.spo_segment import METHOD as CHAIN
from anypo.methods.language.spo_segment import TREE, segment_differences
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run

WHOLE = 1000  # an interval that leaves the first boundary alone


def chain(interval: int, rollouts: int) -> Method:
    return CHAIN.set("rollout.interval", interval).set("rollout.rollouts", rollouts).but(regularize=())


def halfway(seed: int, horizon: int = 6) -> tuple[TokenBandit, TabularTokens]:
    """A policy whose target tokens have probability 0.6 each (three others share the rest)."""
    task = TokenBandit(16, 4, horizon, seed=seed)
    policy = task.policy()
    target = torch.nn.functional.one_hot(task.targets[:, 0], 4)
    with torch.no_grad():
        policy.logits.copy_(target * torch.log(torch.tensor(3 * 0.6 / 0.4)))
    return task, policy


def rolled(method: Method, task: TokenBandit, policy: TabularTokens, seed: int = 0) -> tuple[Run, Batch]:
    """A batch with its reward, and its advantages."""
    run = Run(method, policy, task, steps=1, seed=seed)
    batch = method.rollout(method.select(task, run), run)
    batch.reward = method.reward(batch, run)
    batch.advantage = method.credit(batch, run)
    return run, batch


def exact_values(task: TokenBandit, policy: TabularTokens, batch: Batch) -> Tensor:
    """[N,T+1]: success probability of the policy from every prefix of every row."""
    target = task.targets[batch.context, 0]
    p = policy.logits.detach().softmax(-1)[batch.context].gather(2, target[..., None])[..., 0]
    ahead = torch.cat([p.flip(1).cumprod(1).flip(1), torch.ones_like(p[:, :1])], dim=1)
    intact = torch.cat([torch.ones_like(p[:, :1]), (batch.action == target).double().cumprod(1)], dim=1)
    return ahead * intact


def _telescopes(shared: bool) -> Evidence:
    """Largest |sum over segments of their advantages - (R - V(first boundary))|, a segment's advantage counted once."""
    task, policy = halfway(0)
    run, batch = rolled(chain(2, 9), task, policy)
    boundary, value = batch.signals["boundary"], batch.signals["boundary_value"]
    assert batch.reward is not None
    difference = segment_differences(boundary, batch.mask, batch.reward, value)
    if not shared:
        again = CHAIN.rollout.values(batch, boundary, run)  # type: ignore[attr-defined]
        before = torch.where(boundary[:, :-1].bool(), value[:, :-1] - again[:, :-1], 0.0)
        difference = difference + before
    total = (difference * boundary[:, :-1]).sum(1)
    first = boundary.argmax(1)
    error = float((total - (batch.reward - value.gather(1, first[:, None])[:, 0])).abs().max())
    return Evidence(f"{error:.1e}", "below 1e-9", error < 1e-9)


@claim("the advantages of a response's segments add up to its reward minus the value at the first boundary")
def telescopes() -> Evidence:
    return _telescopes(True)


@ablation(telescopes, "a segment's two values come from separate estimates")
def separate_estimates() -> Evidence:
    return _telescopes(False)


def _error(interval: int) -> Evidence:
    """Mean squared error to the exact advantage of every token, over 5 seeds; GRPO without its scale, which it does not have in common."""
    mine, plain = list[float](), list[float]()
    for seed in range(5):
        task, policy = halfway(seed)
        for method, errors in ((chain(interval, 9), mine), (GRPO.set("credit.std", False).but(regularize=()), plain)):
            _, batch = rolled(method, task, policy, seed)
            value = exact_values(task, policy, batch)
            assert batch.advantage is not None
            errors.append(float((batch.advantage - (value[:, 1:] - value[:, :-1])).square().mean()))
    found = {"segments": round(fmean(mine), 4), "GRPO": round(fmean(plain), 4)}
    return Evidence(found, "below 0.6 of GRPO's", fmean(mine) < 0.6 * fmean(plain))


@claim(
    "segment advantages from 9 rollouts a boundary are closer to the true advantages of tokens than GRPO's (mean squared error below 0.6 of it)"
)
def closer_to_the_truth() -> Evidence:
    return _error(2)


@ablation(closer_to_the_truth, "one boundary, at the prompt")
def one_segment() -> Evidence:
    return _error(WHOLE)


def _blames(by_segment: bool) -> Evidence:
    """Responses that are right but for the last of three segments of two tokens, in a group with others; 9 rollouts a boundary, 5 seeds."""
    good, bad = [], []
    for seed in range(5):
        task, policy = halfway(seed)
        method = chain(2, 9) if by_segment else GRPO.but(regularize=())
        run = Run(method, policy, task, steps=1, seed=seed)
        batch = run.collect(method.select(task, run))
        ruined = torch.arange(len(batch)) % 8 == 0
        target = task.targets[batch.context, 0]
        wrong = target.clone()
        wrong[:, 4] = (target[:, 4] + 1) % 4
        batch.action = torch.where(ruined[:, None], wrong, batch.action)
        batch.logp = run.score(batch, {"logp"}).logp
        batch.keep = batch.mask
        if by_segment:
            boundary = (torch.arange(7) % 2 == 0).long().expand(len(batch), -1).clone()
            boundary[:, -1] = 0
            batch.signals |= {"boundary": boundary, "boundary_value": method.rollout.values(batch, boundary, run)}  # type: ignore[attr-defined]
        batch.reward = method.reward(batch, run)
        advantage = method.credit(batch, run)[ruined]
        good += advantage[:, 2].tolist()
        bad += advantage[:, 4].tolist()
    found = {"second segment": round(fmean(good), 3), "third segment": round(fmean(bad), 3)}
    return Evidence(
        found,
        "second above 0.1 and third below -0.1 on average, third never above 0",
        fmean(good) > 0.1 and fmean(bad) < -0.1 and max(bad) <= 0,
    )


@claim(
    "a response that is right up to its second segment and ruined in the third: the second is credited, the third blamed, though the reward is 0"
)
def blames_the_segment() -> Evidence:
    return _blames(True)


@ablation(blames_the_segment, "one advantage for the whole response")
def blames_the_response() -> Evidence:
    return _blames(False)


STEP_SIZES = (64.0, 256.0, 1024.0)
UPDATES = 50


@cache
def best_success(kind: str) -> float:
    """Mean exact success of 3 seeds after 50 updates on T=4 (start 1/256), at the best of three step sizes; 8 attempts at each prompt."""
    ppo = catalogue.get("ppo", "language")
    assert not isinstance(ppo, Study)
    methods = {
        "SPO-chain": chain(1, 8),
        "one segment": chain(WHOLE, 8),
        "SPO-tree": TREE.set("rollout.segment_length", 1).but(regularize=()),
        "GRPO": GRPO.but(regularize=()),
        "PPO": ppo.set("update.minibatches", 1),
    }
    found = []
    for size in STEP_SIZES:
        ends = []
        for seed in range(3):
            task = TokenBandit(16, 4, 4, seed=seed)
            method = plain_sgd(methods[kind], size, group_size=4 if kind == "SPO-tree" else 8)
            ends.append(train_on(method, task.policy(), task, steps=UPDATES, seed=seed)[-1])
        found.append(fmean(ends))
    return max(found)


def _learns(kind: str) -> Evidence:
    found = {name: round(best_success(name), 3) for name in (kind, "GRPO", "PPO")}
    return Evidence(found, "above both others by 0.05", found[kind] > max(found["GRPO"], found["PPO"]) + 0.05)


@claim("after 50 updates SPO-chain succeeds more often than GRPO and PPO, each at its best step size", slow=True)
def chain_learns() -> Evidence:
    return _learns("SPO-chain")


@ablation(chain_learns, "one boundary, at the prompt")
def chain_learns_without_boundaries() -> Evidence:
    return _learns("one segment")


@claim("after 50 updates SPO-tree succeeds more often than GRPO and PPO, each at its best step size", slow=True)
def tree_learns() -> Evidence:
    return _learns("SPO-tree")


@ablation(tree_learns, "no tree: one advantage for the whole response")
def tree_learns_without_tree() -> Evidence:
    return _learns("GRPO")


def tokens_a_value(method: Method) -> float:
    """Generated tokens for every value that is estimated (T=6, segments of two tokens)."""
    task, policy = halfway(0)
    run = Run(plain_sgd(method, 1.0), policy, task, steps=1)
    batch = step(run)
    if "values_estimated" in run.history[-1]:
        return run.actions / run.history[-1]["values_estimated"]
    assert batch.branch_at is not None
    levels = [(batch.branch_at < 2 * level) & (batch.attended.sum(1) > 2 * level) for level in (1, 2)]  # rows that own an inner node there
    return run.actions / (task.count + sum(int(owners.sum()) for owners in levels))


def _saves(shared: bool) -> Evidence:
    mine = tokens_a_value(TREE if shared else chain(2, 9))
    other = tokens_a_value(chain(2, 9))
    return Evidence(
        {"tree" if shared else "chain": round(mine, 1), "chain": round(other, 1)}, "at most half of the chain's", mine <= 0.5 * other
    )


@claim("the tree generates at most half as many tokens for every estimated value as the chain does (branching 4, 9 rollouts a boundary)")
def tree_saves_tokens() -> Evidence:
    return _saves(True)


@ablation(tree_saves_tokens, "rollouts of its own for every value")
def chain_saves_nothing() -> Evidence:
    return _saves(False)
