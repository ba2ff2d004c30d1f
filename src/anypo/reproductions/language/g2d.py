"""Claims of G2D on strings that generalize: a linear softmax policy over features of the prompt, exact accuracy on held-out prompts.

Features phi ~ N(0, I_12), 256 training and 128 held-out prompts, 4 positions of 5 symbols; the right symbol is the argmax of a hidden linear map, the
policy starts near it (about 6% right). K steps of GRPO (32 prompts x 8), then DPO on 32 rollouts of every training prompt, 20 passes.
"""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.loops.on_policy import step
from anypo.methods.language.g2d import OFFLINE, WARM_UP, informativeness
from anypo.policy import Policy, Signals
from anypo.reproductions.common import plain_sgd
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from anypo.task import Prompt

FEATURES, POSITIONS, SYMBOLS = 12, 4, 5
TRAINING, HELD_OUT = 256, 128
SEEDS = (0, 1, 2)
WARM_UPS = (0, 40, 80, 160, 320, 640)
BATCH, PASSES = 32, 20


class LinearStrings(Policy):
    """Independent softmax of W_t phi at every position; `batch.context` holds the features [N,12]."""

    provides = frozenset({"logp"})
    learning_rate, optimizer = 1.0, "sgd"

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())  # [T, features, V]

    def log_probs(self, features: Tensor) -> Tensor:
        return torch.einsum("nf,tfv->ntv", features, self.weight).log_softmax(-1)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        return Signals(logp=self.log_probs(batch.context).gather(-1, batch.action[..., None])[..., 0])


class FeatureStrings:
    """The task: reward 1 when all four symbols are right."""

    name, objectives, prompts_per_step = "feature_strings", ("reward",), 32

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.truth = torch.randn(POSITIONS, FEATURES, SYMBOLS, generator=generator, dtype=torch.float64)
        self.features = torch.randn(TRAINING + HELD_OUT, FEATURES, generator=generator, dtype=torch.float64)
        self.right = torch.einsum("nf,tfv->ntv", self.features, self.truth).argmax(-1)
        noise = torch.randn(self.truth.shape, generator=generator, dtype=torch.float64)
        self.start = 0.5 * self.truth + 0.35 * noise

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        chosen = np.arange(count) if count == TRAINING else rng.choice(TRAINING, size=count, replace=False)
        return [Prompt(id=int(i), content=int(i)) for i in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        rows = torch.tensor([p.content for p in prompts for _ in range(p.samples)])
        policy: Any = run.policy
        log_probs = policy.log_probs(self.features[rows])
        action = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=run.generator).view(len(rows), POSITIONS)
        return Batch(
            action=action, mask=torch.ones_like(action, dtype=torch.bool), logp=log_probs.gather(-1, action[..., None])[..., 0],
            group=torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)]), context=self.features[rows], signals={"prompt_id": rows},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        return (batch.action == self.right[batch.signals["prompt_id"]]).all(1).double()

    def expected_success(self, policy: LinearStrings) -> float:
        """Mean probability of the right string on held-out prompts."""
        with torch.no_grad():
            log_probs = policy.log_probs(self.features[TRAINING:]).gather(-1, self.right[TRAINING:, :, None])[..., 0]
        return float(log_probs.sum(1).exp().mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        policy: Any = run.policy
        return {"accuracy": self.expected_success(policy)}


@lru_cache
def warmed(seed: int) -> tuple[FeatureStrings, dict[int, tuple[float, Tensor]]]:
    """Accuracy and weights of one GRPO run after each number of steps in WARM_UPS."""
    task = FeatureStrings(seed)
    policy = LinearStrings(task.start)
    summed = WARM_UP.but(objective=ClippedSurrogate(aggregation="constant", max_len=1))  # a response's log-prob is the sum over its tokens
    run = Run(plain_sgd(summed, 1.0), policy, task, steps=max(WARM_UPS), seed=seed)
    kept = {}
    for k in range(max(WARM_UPS) + 1):
        if k in WARM_UPS:
            kept[k] = (task.expected_success(policy), policy.weight.detach().clone())
        if k < max(WARM_UPS):
            step(run)
    return task, kept


@lru_cache
def offline(seed: int, warm_up: int, passes: int = PASSES) -> dict[str, float]:
    """DPO on the static pairs of the policy after `warm_up` steps: accuracy, pairs, mean p(1-p), usable share and share of positive margins."""
    task, kept = warmed(seed)
    policy = LinearStrings(kept[warm_up][1])
    method = plain_sgd(OFFLINE, 0.3 * 10)
    for path, value in {"prompts": TRAINING, "samples": 32, "lo": 0.0, "hi": 1.0, "batch_pairs": BATCH}.items():
        method = method.set(f"rollout.{path}", value)
    run = Run(method.set("objective.beta", 0.3), policy, task, steps=1_000_000, seed=seed + 100)
    first = step(run)
    rollout: Any = run.method.rollout
    static = rollout.data
    report = {name: run.history[0][name] for name in ("pairs", "mean_variance", "usable")}
    steps = passes * -(-len(static) // 2 // BATCH)
    reference = run.named_policy("reference").state_dict()["weight"].clone()
    for _ in range(steps - 1):
        step(run)
    assert torch.equal(reference, run.named_policy("reference").state_dict()["weight"]) and len(first)
    gain = run.score(static, {"logp"}).logp.sum(1) - run.score(static, {"logp"}, "reference").logp.sum(1)
    half = len(static) // 2
    return report | {"accuracy": task.expected_success(policy), "positive": float((gain[:half] > gain[half:]).double().mean())}


def mean_offline(warm_up: int, key: str = "accuracy") -> float:
    return fmean(offline(seed, warm_up)[key] for seed in SEEDS)


def mean_online(warm_up: int) -> float:
    return fmean(warmed(seed)[1][warm_up][0] for seed in SEEDS)


def _interior(choices: tuple[int, ...]) -> Evidence:
    curve = {k: round(mean_offline(k), 3) for k in choices}
    best = max(curve, key=lambda k: curve[k])
    cold, late = mean_offline(0), mean_offline(640)
    found = {
        "after DPO, by warm-up": curve,
        "cold": round(cold, 3),
        "GRPO 640": round(mean_online(640), 3),
        "GRPO 640 + DPO": round(late, 3),
    }
    holds = best in (80, 160, 320) and curve[best] > cold + 0.2 and late <= mean_online(640)
    return Evidence(found, "best warm-up 80 to 320 steps, 0.2 above cold DPO; after 640 steps DPO adds nothing", holds)


@claim("accuracy after offline DPO has an interior maximum over the length of the warm-up", slow=True)
def interior() -> Evidence:
    return _interior(WARM_UPS)


@ablation(interior, "no warm-up")
def no_warm_up() -> Evidence:
    return _interior((0,))


def _cheap(warm_up: int) -> Evidence:
    mine, online = mean_offline(warm_up), mean_online(640)
    share = (warm_up * 256 + TRAINING * 32) / (640 * 256)
    found = {"g2d": round(mine, 3), "GRPO 640": round(online, 3), "share of its rollouts": round(share, 2)}
    return Evidence(found, "within 0.03 of GRPO with less than 0.4 of its rollouts", mine >= online - 0.03 and share < 0.4)


@claim("a warm-up of 160 steps and DPO reach GRPO's accuracy after 640 steps with less than 0.4 of its rollouts", slow=True)
def cheap() -> Evidence:
    return _cheap(160)


@ablation(cheap, "no warm-up")
def cheap_but_cold() -> Evidence:
    return _cheap(0)


def _informative(key: str) -> Evidence:
    """Which warm-up makes the data most informative, and which gains the most accuracy over GRPO alone."""
    level = {k: mean_offline(k, key) for k in WARM_UPS}
    gain = {k: mean_offline(k) - mean_online(k) for k in WARM_UPS}
    peak, best = (max(table, key=lambda k: table[k]) for table in (level, gain))
    near = abs(WARM_UPS.index(peak) - WARM_UPS.index(best)) <= 1
    found = {key: {k: round(v, 3) for k, v in level.items()}, "gain": {k: round(v, 3) for k, v in gain.items()}}
    return Evidence(
        found, "an interior peak, at most one grid step from the largest gain", near and peak not in (WARM_UPS[0], WARM_UPS[-1])
    )


@claim("the informativeness of the static data, mean p(1-p), peaks at an interior warm-up next to the largest gain of DPO", slow=True)
def informative() -> Evidence:
    return _informative("mean_variance")


@ablation(informative, "informativeness of coins: rewards that ignore the response")
def uninformative() -> Evidence:
    generator, level = torch.Generator().manual_seed(0), {}
    for k in WARM_UPS:
        group = torch.arange(TRAINING).repeat_interleave(32)
        coins = torch.bernoulli(torch.full((len(group),), mean_online(k), dtype=torch.float64), generator=generator)
        logp = torch.zeros(len(group), 1, dtype=torch.float64)
        level[k] = float(informativeness(coins, group, logp, torch.ones_like(logp)).mean_variance)
    peak = max(level, key=lambda k: level[k])
    return Evidence({k: round(v, 3) for k, v in level.items()}, "an interior peak", peak not in (WARM_UPS[0], WARM_UPS[-1]))


def _fitted(passes: int) -> Evidence:
    counts = {k: mean_offline(k, "pairs") for k in WARM_UPS if k >= 80}
    positive = fmean(offline(seed, 160, passes)["positive"] for seed in SEEDS)
    found = {"pairs": {k: round(v) for k, v in counts.items()}, "positive margins": round(positive, 3)}
    holds = max(counts.values()) < 1.5 * min(counts.values()) and positive > 0.9
    return Evidence(found, "pairs within 1.5x of one another from 80 steps on, over 0.9 of the margins positive", holds)


@claim("the number of pairs hardly varies with the warm-up, and DPO ends with nearly all margins positive", slow=True)
def fitted() -> Evidence:
    return _fitted(PASSES)


@ablation(fitted, "one pass over the pairs")
def hardly_fitted() -> Evidence:
    return _fitted(1)
