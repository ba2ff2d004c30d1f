"""Claims of LightningRL: normalization and filter by hand, and speed against quality on split_sum.

The built-in model is right on 0.44 of the sums when it writes one token a pass, and its accuracy would rise whatever the method; it is pre-trained
for 250 further steps first. The numbers of tokens a pass at a threshold differ little between its answers to one prompt, so nearly all prompts
would be filtered away: `tau` is 0 in the training claims, which only drops prompts without a correct answer.
"""

from __future__ import annotations

import copy
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.masked.builtin.pretrain import masked_loss
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.policy import MaskedPolicy
from anypo.domains.masked.tasks import SplitSum, adds_up, make_split_sum
from anypo.method import Method
from anypo.methods.masked.lightningrl import METHOD as LIGHTNING
from anypo.methods.masked.lightningrl import combined, keep_prompts
from anypo.reproductions.common import ShuffledCredit, train_on

BLOCK, THRESHOLD = 4, 0.5  # of the decoding that training sees
PRETRAINING, UPDATES = 250, 160
SEEDS = (0, 1)
LOOK = (0.15, 0.3, 0.5, 0.95)  # thresholds of the decoding that is measured
TOY = (
    LIGHTNING.set("select.prompts", 16).set("select.group_size", 16).set("update.learning_rate", 2e-4).set("credit.w_speed", 0.3)
    .set("rollout.tau", 0.0)
)  # fmt: skip


# ---- by hand


def _ranking(decoupled: bool) -> Evidence:
    correct, tpf = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([9.0, 1.0, 9.0, 1.0])
    found = combined(correct, tpf, torch.zeros(4, dtype=torch.int64), decoupled=decoupled).tolist()
    both, slow_right, fast_wrong, _ = found
    measured = dict(
        zip(("right and fast", "right and slow", "wrong and fast", "wrong and slow"), (round(r, 3) for r in found), strict=True)
    )
    return Evidence(measured, "slow and right as good as fast and wrong, right and fast above both",
                    abs(slow_right - fast_wrong) < 1e-9 and both > max(slow_right, fast_wrong))  # fmt: skip


@claim(
    "accuracy and speed normalized one by one weigh alike: right and slow is worth as much as wrong and fast, whatever the scale of speed"
)
def decoupled() -> Evidence:
    return _ranking(decoupled=True)


@ablation(decoupled, "the raw sum, normalized once")
def summed_first() -> Evidence:
    return _ranking(decoupled=False)


def _filter(**settings: Any) -> Evidence:
    """Of 400 prompts with 4 answers each, how many the filter treats otherwise than the rule, prompt by prompt, says."""
    g = torch.Generator().manual_seed(0)
    group = torch.arange(400).repeat_interleave(4)[torch.randperm(1600, generator=g)]
    chance = torch.rand(400, generator=g) * 0.6
    correct = (torch.rand(1600, generator=g) < chance[group]).double()
    tpf = 4.0 / torch.randint(1, 3, (1600,), generator=g).double()
    kept, wrong, dropped = keep_prompts(correct, tpf, group, **settings), 0, 0
    for n in range(400):
        rows = group == n
        wanted = bool(correct[rows].any()) and float(tpf[rows].max()) != float(tpf[rows].min())
        wrong += int((kept[rows] != wanted).any())
        dropped += int(not kept[rows].any())
    return Evidence({"treated otherwise": wrong, "dropped": dropped}, "0 of 400, some dropped and some kept", wrong == 0 < dropped < 400)


@claim("the filter drops prompts without a correct answer and prompts whose answers are equally fast, and no others")
def filtered() -> Evidence:
    return _filter()


@ablation(filtered, "prompts without a correct answer stay")
def wrong_prompts_stay() -> Evidence:
    return _filter(filter_all_wrong=False)


# ---- training


class Point(NamedTuple):
    accuracy: float
    tpf: float


@cache
def _start() -> MaskedPolicy:
    """The built-in model after further pre-training with a falling learning rate."""
    policy, source = load_policy(), SplitSum()
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / PRETRAINING)
    for _ in range(PRETRAINING):
        ids = torch.stack([policy.encode(prompt + answer) for prompt, answer in source.demonstrations(256, rng)])
        loss = masked_loss(policy, ids, len(source.trained[0].content), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return policy


def _measured(policy: MaskedPolicy) -> dict[float, Point]:
    """Accuracy and mean TPF of 24 sampled answers to each of the 99 prompts, by threshold of the decoding."""
    source, found = SplitSum(), {}
    prompts = [p.but(samples=24) for p in (*source.trained, *source.kept)]
    for threshold in LOOK:
        batch = make_split_sum(block=BLOCK, threshold=threshold).attempt(policy, prompts, torch.Generator().manual_seed(0))
        answers: Tensor = torch.tensor(
            [adds_up(text, **columns) for text, columns in zip(batch.signals["completion"], batch.signals["columns"], strict=True)]
        )
        found[threshold] = Point(float(answers.mean()), float((batch.lengths / batch.signals["passes"]).mean()))
    return found


@cache
def _before() -> dict[float, Point]:
    return _measured(_start())


def _train(method: Method, seed: int) -> dict[float, Point]:
    policy = copy.deepcopy(_start())
    train_on(method, policy, make_split_sum(block=BLOCK, threshold=THRESHOLD), steps=UPDATES, seed=seed, watch=lambda run, batch: None)
    return _measured(policy)


@cache
def _trained() -> list[dict[float, Point]]:
    return [_train(TOY, seed) for seed in SEEDS]


@cache
def _shuffled() -> list[dict[float, Point]]:
    """Without what the rewards say: advantages at the wrong rows, and no likelihood of correct answers. One seed, for time."""
    return [_train(TOY.but(credit=ShuffledCredit(TOY.credit), regularize=TOY.regularize[1:]), SEEDS[0])]


def _shown(found: list[dict[float, Point]]) -> list[dict[float, tuple[float, float]]]:
    return [{t: (round(p.accuracy, 3), round(p.tpf, 2)) for t, p in seed.items()} for seed in found]


def _faster(after: list[dict[float, Point]]) -> Evidence:
    before = _before()[0.95]
    gain = fmean(seed[0.95].tpf for seed in after) / before.tpf - 1
    drop = before.accuracy - fmean(seed[0.95].accuracy for seed in after)
    measured = {"before": _shown([_before()])[0], "after": _shown(after), "more tokens a pass": round(gain, 3), "drop": round(drop, 3)}
    return Evidence(
        measured, "at threshold 0.95 at least 30% more tokens a pass, and an accuracy at most 0.05 lower", gain >= 0.3 and drop <= 0.05
    )


@claim("160 updates raise the tokens a pass at threshold 0.95 by at least 30% and cost at most 0.05 of the accuracy", slow=True)
def faster() -> Evidence:
    return _faster(_trained())


@ablation(faster, "advantages dealt to the wrong rows, no likelihood of correct answers")
def faster_without_rewards() -> Evidence:
    return _faster(_shuffled())


def _pareto(after: list[dict[float, Point]]) -> Evidence:
    """The worst accuracy among thresholds with at least 1.6 tokens a pass, of the trained models, against the best one of the base."""
    fast = [p.accuracy for seed in after for p in seed.values() if p.tpf >= 1.6]
    base = [p.accuracy for p in _before().values() if p.tpf >= 1.6]
    worst, best = min(fast, default=0.0), max(base, default=0.0)
    measured = {"trained, worst": round(worst, 3), "base, best": round(best, 3)}
    return Evidence(measured, "trained at least 0.5, and above the base", worst >= 0.5 and worst > best)


@claim("at 1.6 tokens a pass and more the trained model is right on at least half of the sums, and oftener than the base", slow=True)
def pareto() -> Evidence:
    return _pareto(_trained())


@ablation(pareto, "advantages dealt to the wrong rows, no likelihood of correct answers")
def pareto_without_rewards() -> Evidence:
    return _pareto(_shuffled())


def _anchored(after: list[dict[float, Point]]) -> Evidence:
    """At threshold 0.3 against training without the likelihood of correct answers."""
    without = _without_likelihood()
    gains = [w[0.3].accuracy - o[0.3].accuracy for w, o in zip(after, without, strict=True)]
    measured = {"gains": [round(gain, 3) for gain in gains], "without": _shown(without)}
    return Evidence(measured, "at least 0.05 more on average, and no seed with less", fmean(gains) >= 0.05 and min(gains) >= 0)


@cache
def _without_likelihood() -> list[dict[float, Point]]:
    return [_train(TOY.set("regularize.0.weight", 0.0), seed) for seed in SEEDS]


# Not reproduced: the gain on seed 100, on which the setting was chosen, was 0.10; on seeds 0 and 1 it is -0.29 and 0.26, so two runs say nothing.
@claim("the likelihood of correct answers leaves a higher accuracy of parallel decoding (threshold 0.3)", slow=True, reproduced=False)
def anchored() -> Evidence:
    return _anchored(_trained())


@ablation(anchored, "no likelihood of correct answers on either side")
def not_anchored() -> Evidence:
    return _anchored(_without_likelihood())
