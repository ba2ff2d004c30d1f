"""Claims of partial policy gradients. Planning problem: twelve steps, three actions, independent softmaxes, one good action a step, noise N(0,1) on
every reward, four rollouts an update, 150 updates of SGD 0.3 on the mean gradient; 64 independent runs a seed, side by side as the prompts of a
token_bandit. Then a templated persona chat of six turns and eight replies. Probabilities and expected rewards are exact."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.language.reward_subset_pg import METHOD, PartialReturn
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run

SEEDS, STEPS, RUNS, ACTIONS, HORIZON, GROUP, STEP_SIZE = (0, 1), 150, 64, 3, 12, 4, 0.3
CLASSES: dict[str, PartialReturn] = {
    "greedy": PartialReturn(kind="greedy"),
    "3-step": PartialReturn(kind="kstep", k=3),
    "segment": PartialReturn(kind="segment", segment_turns=4),
    "full": PartialReturn(kind="full"),
}


class Planning(TokenBandit):
    """A point for every good action, paid at once, two steps later, or for a segment of four steps at its end."""

    def __init__(self, paid: str, seed: int, runs: int = RUNS) -> None:
        super().__init__(runs, ACTIONS, HORIZON, seed=seed)
        place = torch.arange(HORIZON)
        self.paid_at = {"at once": place, "later": (place + 2).clamp(max=HORIZON - 1), "by segment": place // 4 * 4 + 3}[paid]

    def score(self, batch: Batch, run: Run) -> Tensor:
        """[N,T]."""
        good = (batch.action == self.targets[batch.context, 0]).double()
        noise = torch.randn(good.shape, generator=run.generator, dtype=torch.float64)
        return noise.scatter_add(1, self.paid_at.expand_as(batch.action), good)


def _method(credit: PartialReturn, prompts: int, group: int, step_size: float) -> Method:
    """SGD of this step on every prompt's own mean over its rows."""
    return plain_sgd(METHOD.but(credit=credit), step_size * prompts, group_size=group)


@cache
def _learned(kind: str, paid: str) -> float:
    """Mean probability of the good actions at the end of training, mean over runs and seeds."""
    found = []
    for seed in SEEDS:
        task = Planning(paid, seed)
        policy: TabularTokens = task.policy()
        train_on(_method(CLASSES[kind], RUNS, GROUP, STEP_SIZE), policy, task, steps=STEPS, seed=seed, watch=lambda run, batch: None)
        found.append(float(policy.logits.detach().softmax(-1).gather(2, task.targets[:, 0, :, None]).mean()))
    return fmean(found)


def _all_learned(paid: str) -> dict[str, float]:
    return {kind: _learned(kind, paid) for kind in CLASSES}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def _pays_to_plan_less(kind: str) -> Evidence:
    mine, full = _learned(kind, "at once"), _learned("full", "at once")
    return Evidence(_rounded({"this": mine, "full": full}), "good actions more likely by 0.01 than with all rewards", mine >= full + 0.01)


@claim("where actions are paid at once, counting the immediate reward alone learns more from the same samples than counting all")
def pays_to_plan_less() -> Evidence:
    return _pays_to_plan_less("greedy")


@ablation(pays_to_plan_less, "all later rewards count")
def full_planning() -> Evidence:
    return _pays_to_plan_less("full")


def _looks_ahead(paid: str, kind: str = "3-step") -> Evidence:
    learned = _all_learned(paid)
    holds = learned[kind] >= learned["full"] + 0.01 and learned["greedy"] < 0.6
    return Evidence(_rounded(learned), "3-step at least 0.01 above full, greedy below 0.6", holds)


@claim("where actions are paid two steps later, three rewards are enough and better than all, and the immediate one teaches nothing")
def looks_ahead() -> Evidence:
    return _looks_ahead("later")


@ablation(looks_ahead, "actions are paid at once")
def nothing_to_look_ahead_to() -> Evidence:
    return _looks_ahead("at once")


@ablation(looks_ahead, "all later rewards count")
def full_looks_too_far() -> Evidence:
    return _looks_ahead("later", "full")


def _segments(paid: str) -> Evidence:
    learned = _all_learned(paid)
    order = [learned[kind] for kind in ("segment", "full", "3-step", "greedy")]
    return Evidence(
        _rounded(learned),
        "segment > full > 3-step > greedy, each by 0.01",
        all(a >= b + 0.01 for a, b in zip(order, order[1:], strict=False)),
    )


@claim("where segments are paid at their end, segment policies learn most, then full planning, three steps, one step")
def segments() -> Evidence:
    return _segments("by segment")


@ablation(segments, "actions are paid at once")
def no_segments() -> Evidence:
    return _segments("at once")


@cache
def _variance(kind: str, batches: int = 500) -> float:
    """Total variance of the gradient of one run's loss at the uniform policy, over batches of four rollouts, mean over seeds."""
    found = []
    for seed in SEEDS:
        task = Planning("at once", seed, batches)
        task.targets = torch.zeros_like(task.targets)  # the same problem in every batch
        policy: TabularTokens = task.policy()
        step(Run(_method(CLASSES[kind], batches, GROUP, 1.0), policy, task, steps=1, seed=seed))
        found.append(float(policy.logits.detach().var(0).sum()))  # from 0, by minus the gradient
    return fmean(found)


def _less_noise(subset: str, wider: str) -> Evidence:
    chain = [_variance(kind) for kind in (subset, wider, "full")]
    return Evidence(
        [round(v, 2) for v in chain],
        "each variance below 0.8 of the next",
        all(a < 0.8 * b for a, b in zip(chain, chain[1:], strict=False)),
    )


@claim("the fewer rewards count, the smaller the variance of the gradient: greedy below 3-step below full")
def less_noise() -> Evidence:
    return _less_noise("greedy", "3-step")


@ablation(less_noise, "all later rewards count")
def all_the_noise() -> Evidence:
    return _less_noise("full", "full")


PERSONAS, TURNS, REPLIES, ATTRIBUTES = 64, 6, 8, 3
CHAT_CLASSES = {"greedy": CLASSES["greedy"], "segment": PartialReturn(kind="segment", segment_turns=3), "full": CLASSES["full"]}


class PersonaChat(TokenBandit):
    """A persona is asked for two of its three attributes, in four of six turns; twice it may say what it likes.

    Two replies tell each attribute and two tell nothing. A turn pays 1 for the attribute asked for and, with `whole`, -0.5 for a reply given before and,
    at the end, 1 when all three attributes came up.
    """

    def __init__(self, whole: bool, seed: int) -> None:
        super().__init__(PERSONAS, REPLIES, TURNS, seed=seed)
        g = torch.Generator().manual_seed(seed + 2000)
        order = torch.rand(PERSONAS, REPLIES, generator=g).argsort(1)
        self.tells = torch.tensor([0, 0, 1, 1, 2, 2, -1, -1])[order]  # [P,V] attribute that each reply tells
        asked = torch.tensor([0, 0, 1, 1, -2, -2])  # -2: nothing
        self.asked = asked[torch.rand(PERSONAS, TURNS, generator=g).argsort(1)]
        self.whole = whole

    def score(self, batch: Batch, run: Run) -> Tensor:
        """[N,T]."""
        told = self.tells[batch.context].gather(1, batch.action)
        reward = (told == self.asked[batch.context]).double()
        if self.whole:
            earlier = (batch.action[:, :, None] == batch.action[:, None]).tril(-1).any(2)
            reward = reward - 0.5 * earlier.double()
            reward[:, -1] += (told[..., None] == torch.arange(ATTRIBUTES)).any(1).all(1).double()
        return reward

    def expected(self, policy: TabularTokens) -> float:
        """Exact mean total reward of a conversation."""
        chance = policy.logits.detach().softmax(-1)  # [P,T,V]
        tells = (self.tells[..., None] == torch.arange(ATTRIBUTES)).double()  # [P,V,3]
        told = chance @ tells
        asked = (self.asked[..., None] == torch.arange(ATTRIBUTES)).double()
        total = (told * asked).sum((1, 2))
        if self.whole:
            unsaid = torch.cat([torch.ones_like(chance[:, :1]), (1 - chance).cumprod(1)[:, :-1]], dim=1)
            total = total - 0.5 * (chance * (1 - unsaid)).sum((1, 2))
            for left_out in range(2**ATTRIBUTES):  # inclusion and exclusion over the attributes that never come up
                chosen = torch.tensor([bool(left_out >> a & 1) for a in range(ATTRIBUTES)])
                total = total + (-1.0) ** int(chosen.sum()) * (1 - told[..., chosen].sum(-1)).prod(1)
        return float(total.mean())


@cache
def _chatted(kind: str, whole: bool) -> float:
    found = []
    for seed in SEEDS:
        task = PersonaChat(whole, seed)
        policy: TabularTokens = task.policy()
        train_on(_method(CHAT_CLASSES[kind], PERSONAS, 8, 1.0), policy, task, steps=150, seed=seed, watch=lambda run, batch: None)
        found.append(task.expected(policy))
    return fmean(found)


def _chats(whole: bool) -> dict[str, float]:
    return {kind: _chatted(kind, whole) for kind in CHAT_CLASSES}


def _greedy_is_enough(whole: bool) -> Evidence:
    found = _chats(whole)
    return Evidence(_rounded(found), "greedy within 5% of full", abs(found["greedy"] - found["full"]) <= 0.05 * found["full"])


@claim("in a persona chat that pays each turn for the attribute asked for, greedy is within 5% of full planning")
def greedy_is_enough() -> Evidence:
    return _greedy_is_enough(whole=False)


@ablation(greedy_is_enough, "repeated replies cost, and a revealed persona pays at the end")
def not_for_the_whole_chat() -> Evidence:
    return _greedy_is_enough(whole=True)


def _planning_pays(whole: bool) -> Evidence:
    found = _chats(whole)
    holds = found["full"] >= found["greedy"] + 0.3 and found["segment"] >= found["greedy"] + 0.1
    return Evidence(_rounded(found), "full at least 0.3 and segment at least 0.1 above greedy", holds)


@claim("once a fully revealed persona pays at the end of the chat, full planning and segment policies earn more than greedy")
def planning_pays() -> Evidence:
    return _planning_pays(whole=True)


@ablation(planning_pays, "each turn pays for itself")
def planning_pays_nothing() -> Evidence:
    return _planning_pays(whole=False)
