"""Claims of FixPO: no state ever leaves the trust region, the fixup costs few steps, the penalty alone nearly suffices, and CartPole is learned without
a clip. Watched runs have 20 updates of 1024 steps (CartPole-v1) or 10 (Pendulum-v1) with minibatches of 64."""

from __future__ import annotations

import functools
from statistics import fmean
from typing import NamedTuple

import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.setup import build
from anypo.methods.control.fixpo import METHOD
from anypo.reproductions.common import ShuffledCredit, on_cartpole, train_on
from anypo.run import Run

EPS = 0.2
SEEDS = (0, 1)


class Seen(NamedTuple):
    worst: list[float]  # largest KL of any state after every update
    outside: list[float]  # share of states beyond eps after every update
    fix_fraction: list[float]


@functools.cache
def watched(env: str, seed: int, fixup: str, penalty: bool) -> Seen:
    """A run, measured after every update on the very states of its batch. Without `penalty` the coefficient is 0 for good."""
    torch.set_num_threads(1)
    steps = 20 if env == "CartPole-v1" else 10
    method = METHOD.set("update.minibatches", 16).set("update.fixup", fixup)
    if not penalty:
        method = method.set("objective.beta", 0.0).set("update.c_beta", 0.0)
    policy, task = build(env, None, seed=seed, envs=8, horizon=128)

    def look(run: Run, batch: Batch) -> tuple[float, float, float]:
        kl = policy.observe(batch, {"kl_old"}).kl_old
        return float(kl.max()), float((kl > EPS).double().mean()), run.history[-1]["fix_fraction"]

    return Seen(*(list(column) for column in zip(*train_on(method, policy, task, steps=steps, seed=seed, watch=look), strict=True)))


def _guarantee(fixup: str) -> Evidence:
    worst = {env: round(max(max(watched(env, seed, fixup, True).worst) for seed in SEEDS), 4) for env in ("CartPole-v1", "Pendulum-v1")}
    return Evidence(worst, f"at most {EPS} (1 + 1e-6) after every update of both runs", max(worst.values()) <= EPS * (1 + 1e-6))


@claim(
    "After every update of a CartPole and of a Pendulum run, every state of the batch has a KL of at most 0.2 from the policy that acted",
    slow=True,
)
def every_state_is_inside() -> Evidence:
    return _guarantee("epoch")


@ablation(every_state_is_inside, "no fixup")
def without_fixup_states_leave() -> Evidence:
    return _guarantee("off")


def _cheap(penalty: bool) -> Evidence:
    seeds = SEEDS if penalty else SEEDS[:1]
    share = fmean(fmean(watched("CartPole-v1", seed, "epoch", penalty).fix_fraction[5:]) for seed in seeds)
    return Evidence(round(share, 4), "below 0.05 on average after the first 5 updates", share < 0.05)


@claim("The fixup phase takes fewer than 5% of the gradient steps on CartPole", slow=True)
def fixup_is_cheap() -> Evidence:
    return _cheap(penalty=True)


@ablation(fixup_is_cheap, "no penalty, so that the fixup alone holds the region")
def fixup_alone_is_not() -> Evidence:
    return _cheap(penalty=False)


def _nearly(penalty: bool) -> Evidence:
    seeds = SEEDS if penalty else SEEDS[:1]
    shares = {env: fmean(fmean(watched(env, seed, "off", penalty).outside) for seed in seeds) for env in ("CartPole-v1", "Pendulum-v1")}
    return Evidence(
        {k: round(s, 5) for k, s in shares.items()}, "below 0.01 in both environments, mean of 2 seeds", max(shares.values()) < 0.01
    )


@claim("Without the fixup the penalty alone leaves fewer than 1% of the states outside the region", slow=True)
def the_penalty_nearly_suffices() -> Evidence:
    return _nearly(penalty=True)


@ablation(the_penalty_nearly_suffices, "no penalty either")
def nothing_holds_the_region() -> Evidence:
    return _nearly(penalty=False)


def _cartpole(shuffled: bool) -> Evidence:
    """The best mean return of a step within 25 steps of 1024 actions, minibatches of 32; a run ends once it has 400."""
    method = METHOD.but(credit=ShuffledCredit(METHOD.credit)) if shuffled else METHOD
    seeds = SEEDS[:1] if shuffled else SEEDS
    best = [round(max(r["reward"] for r in on_cartpole(method, steps=25, seed=seed, enough=400).history)) for seed in seeds]
    return Evidence(best, "a step's mean return reaches 400, in every seed", min(best) >= 400)


@claim("FixPO, without a clip, reaches a mean return of 400 on CartPole within 25600 steps", slow=True)
def learns_cartpole() -> Evidence:
    return _cartpole(shuffled=False)


@ablation(learns_cartpole, "advantages dealt to the wrong environments")
def cartpole_without_credit() -> Evidence:
    return _cartpole(shuffled=True)
