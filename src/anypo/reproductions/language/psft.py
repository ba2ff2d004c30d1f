"""Claims of PSFT: closed forms, a table of logits, and a small model that knows one task and is fine-tuned on another.

The model is the character GRU of toy_arith (the specification uses a small transformer). It is pre-trained to reverse strings of digits (task A) and
then fine-tuned on 200 sums (task B, the other 200 held out): 15 batches of 64 (five passes), four minibatches, 20 inner epochs on each batch, Adam
1e-3. The clip is what tells PSFT from fine-tuning here, so fine-tuning in PSFT's place is the ablation.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.toy_arith import ToyArith, forced_batch, forced_logp
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.psft import METHOD as PSFT
from anypo.methods.language.psft import SFT, loss, sft
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.groups import masked_mean

SEEDS = (0, 1, 2)
BATCHES, PASSES = 15, 20


def _gradients(clip_high: float) -> Evidence:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 5, generator=generator, dtype=torch.float64) - 0.1
    mask = torch.rand(6, 5, generator=generator) < 0.7
    at_one = old.clone().requires_grad_(True)
    mine = torch.autograd.grad(loss(at_one, old, mask, clip_high=clip_high).loss, at_one)[0]
    plain = torch.autograd.grad(sft(at_one, mask).loss, at_one)[0]
    above = (old + np.log(1.3)).requires_grad_(True)
    left = torch.autograd.grad(loss(above, old, mask, clip_high=clip_high).loss, above)[0]
    found = {"difference at ratio 1": float((mine - plain).abs().max()), "gradient at ratio 1.3": float(left.abs().max())}
    return Evidence(found, "at most 1e-7 and exactly 0", found["difference at ratio 1"] <= 1e-7 and found["gradient at ratio 1.3"] == 0)


@claim("at ratio 1 the gradient is that of fine-tuning, and above the clip it is exactly 0")
def gradients() -> Evidence:
    return _gradients(0.28)


@ablation(gradients, "no upper bound")
def gradients_unbounded() -> Evidence:
    return _gradients(1e6)


def _bounded(clip_high: float) -> Evidence:
    """A table [32 demonstrations, 5 places, 6 symbols], SGD of 0.05 a demonstration, 20 steps on one batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 5, 6, generator=generator, dtype=torch.float64).requires_grad_(True)
    shown = torch.randint(6, (32, 5), generator=generator)
    mask = torch.ones(32, 5, dtype=torch.bool)

    def logp() -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, shown[..., None])[..., 0]

    old, growth = logp().detach(), 1.0
    for _ in range(PASSES):
        before = logp()
        gradient = torch.autograd.grad(loss(before, old, mask, clip_high=clip_high).loss, logits)[0]
        with torch.no_grad():
            logits -= 0.05 * mask.numel() * gradient
        growth = max(growth, float((logp() - before).detach().exp().max()))
    ratio = float((logp() - old).detach().exp().max())
    return Evidence(
        {"largest ratio": round(ratio, 3), "one step": round(growth, 3)},
        "at most 1.28 times the growth of one step",
        ratio <= 1.28 * growth,
    )


@claim("in a table of logits no ratio passes the clip by more than one step, in 20 steps on one batch")
def bounded() -> Evidence:
    return _bounded(0.28)


@ablation(bounded, "no upper bound")
def not_bounded() -> Evidence:
    return _bounded(1e6)


@dataclass
class TwoTasks(ToyArith):
    """Sums with half the pairs held out, whose 200 training pairs are shown in shuffled passes; and reversal, which the model knows before."""

    seed: int = 0
    waiting: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(held_out=0.5, seed=self.seed)

    def demonstrations(self, count: int, rng: np.random.Generator, noise: float = 0.0) -> list[tuple[str, str]]:
        if len(self.waiting) < count:
            pairs = [(p.content, p.columns["solution"]) for p in self.training]
            self.waiting = [pairs[i] for i in rng.permutation(len(pairs))]
        shown, self.waiting = self.waiting[:count], self.waiting[count:]
        return shown


def reversals(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Two to four digits, and the same from behind."""
    texts = ["".join(map(str, rng.integers(10, size=rng.integers(2, 5)))) for _ in range(count)]
    return [(f"{text};", text[::-1]) for text in texts]


@functools.cache
def pretrained(seed: int) -> dict[str, torch.Tensor]:
    """Weights of a model that reverses."""
    policy, rng = GruPolicy(seed=seed), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    for _ in range(400):
        batch = forced_batch(policy, reversals(64, rng))
        value = sft(policy.evaluate(batch, {"logp"}).logp, batch.mask).loss
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return {name: weight.clone() for name, weight in policy.state_dict().items()}


@dataclass
class Tuned:
    """A fine-tuned model and what was measured on it."""

    policy: GruPolicy
    task: TwoTasks
    ratio: float  # mean ratio to the start of the batch at the end of each batch, mean over the batches
    entropy: float  # of the policy along the right answers to held-out sums
    sums: float  # exact success on held-out sums
    reversal: float  # exact success on fresh strings


METHODS = {"psft": PSFT, "sft": SFT}


@functools.cache
def tuned(name: str, seed: int) -> Tuned:
    policy, task = GruPolicy(seed=seed), TwoTasks(seed)
    policy.load_state_dict(pretrained(seed))
    method: Method = METHODS[name]
    settings: dict[str, Any] = {"epochs": PASSES, "minibatches": 4, "optimizer": "adam", "learning_rate": 1e-3}
    for setting, value in settings.items():
        method = method.set(f"update.{setting}", value)

    def ratio(run: Run, batch: Batch) -> float:
        return float(masked_mean((policy.observe(batch, {"logp"}).logp - batch.logp).exp(), batch.mask))

    ratios = train_on(method, policy, task, steps=BATCHES, seed=seed, watch=ratio)
    held_out = forced_batch(policy, [(p.content, p.columns["solution"]) for p in task.test])
    entropy = float(masked_mean(policy.observe(held_out, {"entropy"}).entropy, held_out.mask))
    reversed_right = float(forced_logp(policy, reversals(200, np.random.default_rng(1000))).exp().mean())
    return Tuned(policy, task, fmean(ratios), entropy, task.expected_success(policy, task.test), reversed_right)


def _mean(name: str, what: str) -> float:
    return fmean(getattr(tuned(name, seed), what) for seed in SEEDS)


def _drift(name: str) -> Evidence:
    found = {n: _mean(n, "ratio") for n in (name, "sft")}
    return Evidence({n: round(v, 2) for n, v in found.items()}, "below half of fine-tuning's", found[name] < found["sft"] / 2)


@claim(
    "with shared weights, which carry clipped tokens along, the mean ratio after 20 inner epochs stays below half of fine-tuning's",
    slow=True,
)
def drift() -> Evidence:
    return _drift("psft")


@ablation(drift, "fine-tuning itself")
def drift_of_sft() -> Evidence:
    return _drift("sft")


def _entropy(name: str) -> Evidence:
    found = {n: _mean(n, "entropy") for n in (name, "sft")}
    return Evidence({n: round(v, 3) for n, v in found.items()}, "above 1.1 times fine-tuning's", found[name] > 1.1 * found["sft"])


@claim("after prolonged training the entropy on held-out answers is above fine-tuning's", slow=True)
def entropy() -> Evidence:
    return _entropy("psft")


@ablation(entropy, "fine-tuning itself")
def entropy_of_sft() -> Evidence:
    return _entropy("sft")


# Measured 4.9 points below, inside the specification's 5 but without a margin, so it does not count as reproduced: the bounded steps are still on
# their way to the new task when the five passes end.
@claim("after as many steps success on held-out sums is at most 0.05 below fine-tuning's", slow=True, reproduced=False)
def matches() -> Evidence:
    found = {n: _mean(n, "sums") for n in ("psft", "sft")}
    return Evidence(
        {n: round(v, 3) for n, v in found.items()}, "at most 0.04 below, a margin of 0.01", found["psft"] >= found["sft"] - 0.04
    )


# Mixed over seeds, as the specification found too.
@claim("less of the task learned before is forgotten than by fine-tuning", slow=True, reproduced=False)
def remembers() -> Evidence:
    pairs = [(tuned("psft", seed).reversal, tuned("sft", seed).reversal) for seed in SEEDS]
    found = [f"psft {mine:.3f}, sft {plain:.3f}" for mine, plain in pairs]
    return Evidence(found, "at least 0.02 above fine-tuning's in every seed", all(mine >= plain + 0.02 for mine, plain in pairs))


def _gain(name: str) -> float:
    """What 50 steps of GRPO (16 prompts, 8 attempts) from the fine-tuned model add to the success on held-out sums, mean over seeds."""
    gains = []
    for seed in SEEDS:
        start = tuned(name, seed)
        policy = copy.deepcopy(start.policy)
        policy.zero_grad(set_to_none=True)
        method = GRPO.but(regularize=()).set("select.prompts", 16)
        train_on(method, policy, start.task, steps=50, seed=seed, watch=lambda run, batch: None)
        gains.append(start.task.expected_success(policy, start.task.test) - start.sums)
    return fmean(gains)


# GRPO on the 200 training sums gains nothing on the held-out ones from either model, so there is nothing to compare.
@claim("reinforcement learning afterwards gains at least as much as from the fine-tuned model, up to 0.02", slow=True, reproduced=False)
def foundation() -> Evidence:
    found = {name: _gain(name) for name in ("psft", "sft")}
    return Evidence(
        {n: round(v, 4) for n, v in found.items()},
        "above 0 and at most 0.02 below",
        found["psft"] > 0 and found["psft"] >= found["sft"] - 0.02,
    )
