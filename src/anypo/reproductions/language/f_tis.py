"""Claims of F-TIS: two nodes share completions (tables on token_bandit P=12, V=4, T=4, three of four tokens right; GRUs on toy_arith)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.language.f_tis import METHOD as F_TIS
from anypo.methods.language.f_tis import FilteredSurrogate, Mailbox, SwarmRollout, filter_advantages
from anypo.policy import Loss, Signals
from anypo.reproductions.common import plain_sgd
from anypo.run import Run
from anypo.task import Prompt

SEEDS = range(4)
STEP = 12.0  # SGD step 1 for each of the 12 prompts, in a swarm as alone: rows of all nodes share it
FAR = 3.0  # the distance of the filter, for strings of four tokens
NEVER = float("inf")


class NearlyRight(TokenBandit):
    """Reward 1 for at least three of the four tokens."""

    def rewards(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return ((action == self.targets[prompt, 0]).sum(1) >= 3).double()


@dataclass
class Watched(FilteredSurrogate):
    """The objective, which also logs whose rows the filter drops."""

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        found = filter_advantages(batch.logp, new.logp, batch.counted, batch.advantage, self.distance, self.kl)
        dropped = (found.advantages != batch.advantage).any(1)
        bad, own = batch.advantage[:, 0] < 0, batch.signal("node") == 0
        run.log(dropped_peer=int((dropped & bad & ~own).sum()), dropped_other=int((dropped & (own | ~bad)).sum()))
        return super().__call__(batch, new, run)


def no_one(own: Batch, prompts: list[Prompt], run: Run) -> list[Batch]:
    """The exchange of a node by itself."""
    return []


def _together(runs: list[Run]) -> None:
    while not runs[0].finished:
        for run in runs:
            step(run)


@cache
def _tables(distance: float, weighted: bool, shared: bool = True) -> dict[str, Any]:
    """Final exact rewards of the two nodes by seed (logits N(0, 0.5^2) and N(0, 2.5^2)), and how many rows the filter dropped."""
    found: dict[str, Any] = {"mild": [], "peaked": [], "dropped bad rows of the peer": 0, "other dropped rows": 0}
    for seed in SEEDS:
        mailbox, runs = Mailbox(), []
        for node, scale in enumerate((0.5, 2.5)):
            task = NearlyRight(12, 4, 4, seed=seed)
            rollout = SwarmRollout(exchange=mailbox.join() if shared else no_one)
            method = F_TIS.but(rollout=rollout, objective=Watched(distance=distance, weighted=weighted))
            policy = task.policy(scale=scale, seed=100 * node + seed)
            runs.append(Run(plain_sgd(method, STEP), policy, task, steps=200, seed=10 * node + seed))
        _together(runs)
        for name, run in zip(("mild", "peaked"), runs, strict=True):
            found[name].append(float(run.task.expected_reward(run.policy).detach().mean()))
            found["dropped bad rows of the peer"] += sum(r["dropped_peer"] for r in run.history)
            found["other dropped rows"] += sum(r["dropped_other"] for r in run.history)
    return found


def _parity(distance: float, weighted: bool) -> Evidence:
    # 0.05, not 0.03: rows of the peer halve the weight of own ones at the same step size, which costs the mild node 0.02 and is within noise for
    # the peaked one. With twice the step size both end above their own runs (peaked by 0.16).
    alone, ours = _tables(FAR, True, shared=False), _tables(distance, weighted)
    gaps = {name: round(fmean(ours[name]) - fmean(alone[name]), 3) for name in ("mild", "peaked")}
    measured = {"alone": {n: round(fmean(alone[n]), 3) for n in gaps}, "difference": gaps}
    return Evidence(measured, "both within 0.05 (4 seeds)", max(map(abs, gaps.values())) < 0.05)


@claim("two tables that share completions under F-TIS end within 0.05 of their own on-policy runs", slow=True)
def parity() -> Evidence:
    return _parity(FAR, True)


@ablation(parity, "neither weights nor filter")
def no_parity() -> Evidence:
    return _parity(NEVER, False)


def _filter(distance: float) -> Evidence:
    plain, ours = _tables(NEVER, False), _tables(distance, False)
    gain = min(b - a for a, b in zip(plain["peaked"], ours["peaked"], strict=True))
    counts = {name: ours[name] for name in ("dropped bad rows of the peer", "other dropped rows")}
    measured = {
        "without": round(fmean(plain["peaked"]), 3),
        "with": round(fmean(ours["peaked"]), 3),
        "smallest gain": round(gain, 3),
        **counts,
    }
    holds = gain > 0.03 and counts["other dropped rows"] == 0 and counts["dropped bad rows of the peer"] > 0
    return Evidence(measured, "gain above 0.03 on each of 4 seeds; only bad rows of the peer are dropped", holds)


@claim(
    "without weights, the filter alone helps the peaked node on every seed, and it drops nothing but bad completions of the other node",
    slow=True,
)
def filter_helps() -> Evidence:
    return _filter(FAR)


@ablation(filter_helps, "no filter")
def nothing_filtered() -> Evidence:
    return _filter(NEVER)


@cache
def _gru(distance: float, weighted: bool, shared: bool, seed: int) -> float:
    """Exact success of a GRU of width 64 (warm start 0.3) after 30 steps of 4 epochs, beside one of width 32 (warm start 0.05)."""
    mailbox, runs = Mailbox(), []
    for node, (width, target) in enumerate(((64, 0.3), (32, 0.05))[: 2 if shared else 1]):
        policy, task = make_toy_arith(seed=seed + 7 * node, hidden=width, target=target)
        rollout = SwarmRollout(exchange=mailbox.join() if shared else no_one)
        method = F_TIS.but(rollout=rollout, objective=FilteredSurrogate(distance=distance, weighted=weighted))
        method = method.set("update.epochs", 4).set("update.learning_rate", 1e-2)
        runs.append(Run(method, policy, task, steps=30, seed=10 * node + seed))
    _together(runs)
    return runs[0].task.expected_success(runs[0].policy)


def _no_collapse(distance: float, weighted: bool) -> Evidence:
    # With one step a batch at the policy's own step size nothing collapses (one seed: 0.80 without weights and filter, 0.83 alone).
    # Epochs and step size were chosen on seeds 0 and 1 (0.788 alone, 0.319 naive, 0.760 F-TIS), so the claim runs on others, where naive sharing costs
    # less: 0.808, 0.634, 0.859.
    seeds = (2, 3)
    alone, naive, ours = (
        fmean(_gru(d, w, s, seed) for seed in seeds) for d, w, s in ((NEVER, True, False), (NEVER, False, True), (distance, weighted, True))
    )
    measured = {"alone": round(alone, 3), "neither weights nor filter": round(naive, 3), "F-TIS": round(ours, 3)}
    return Evidence(measured, "naive sharing loses > 0.2, F-TIS < 0.05 (2 seeds)", alone - naive > 0.2 and alone - ours < 0.05)


@claim(
    "a GRU that takes several steps on a weaker peer's completions loses more than 0.2 success against training alone; with F-TIS less than 0.05",
    slow=True,
    reproduced=False,
)
def no_collapse() -> Evidence:
    return _no_collapse(5.0, True)


@ablation(no_collapse, "neither weights nor filter")
def collapse() -> Evidence:
    return _no_collapse(NEVER, False)


class PaddedMailbox(Mailbox):
    """Sends whole rows instead of the tokens that were written."""

    def send(self, node: int, rows: Batch) -> None:
        before = self.bytes
        super().send(node, rows)
        self.bytes = before + 8 * rows.mask.numel() + 16 * len(rows)


def _bytes(mailbox_type: type[Mailbox]) -> Evidence:
    """Bytes a row beyond 8 a token, for strings of at most 4 and at most 32 tokens that end after 3 on average."""
    beyond = []
    for horizon in (4, 32):
        mailbox = mailbox_type()
        for node in (0, 1):
            task = TokenBandit(4, 3, horizon, eos=0, reward=lambda prompt, action, mask: (action[:, 0] == 1).double())
            step(Run(F_TIS.but(rollout=SwarmRollout(exchange=mailbox.join())), task.policy(), task, steps=1, seed=node))
        beyond.append((mailbox.bytes - 8 * mailbox.tokens) / mailbox.rows)
    return Evidence({"up to 4 tokens": beyond[0], "up to 32 tokens": beyond[1]}, "16 for both", beyond == [16.0, 16.0])


@claim("nodes send 8 bytes a token and a constant 16 a row, however long a completion may be")
def cheap_messages() -> Evidence:
    return _bytes(Mailbox)


@ablation(cheap_messages, "rows are sent padded")
def padded_messages() -> Evidence:
    return _bytes(PaddedMailbox)


def _independent(grouping: str) -> Evidence:
    """How far own advantages move when every reward of the peer is set to 1."""
    mailbox, runs = Mailbox(), []
    for node in (0, 1):
        task = NearlyRight(12, 4, 4, seed=0)
        method: Method = F_TIS.but(rollout=SwarmRollout(grouping, exchange=mailbox.join()))
        runs.append(Run(method, task.policy(scale=0.5, seed=node), task, steps=1, seed=node))
    step(runs[0])
    batch = step(runs[1])
    own = batch.signal("node") == 0
    changed = batch.but(reward=torch.where(own, batch.reward, torch.ones_like(batch.reward)))
    moved = float((F_TIS.credit(changed, runs[1])[own] - batch.advantage[own]).abs().max())
    learning = float(batch.advantage[own].abs().max())
    return Evidence({"moved": round(moved, 3), "largest advantage": round(learning, 3)}, "moved by 0, some not 0", moved == 0 < learning)


@claim("grouped by node, a completion's advantage does not depend on what other nodes' completions earned")
def one_generator_a_group() -> Evidence:
    return _independent("vertical")


@ablation(one_generator_a_group, "horizontal grouping: all nodes' completions of a prompt are compared")
def mixed_groups() -> Evidence:
    return _independent("horizontal")
