"""Claims of BandPO: the band is exact and follows the probability, and rare right tokens rise (token_bandit, T=1, V=8, 64 prompts, G=16)."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq, minimize

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Objective
from anypo.methods.language.bandpo import METHOD as BANDPO
from anypo.methods.language.bandpo import Band, BandClip, band, divergence
from anypo.reproductions.common import plain_sgd, steps_to, train_on
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate

DELTA = 0.05
STEP = 64.0  # SGD step 1 on the sum over the 64 prompts
PROBABILITIES = torch.tensor([1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99], dtype=torch.float64)


def fixed_band(old_logp: torch.Tensor) -> Band:
    """The bounds of GRPO's clip, the same for every token."""
    return Band(torch.full_like(old_logp, 0.8), torch.full_like(old_logp, 1.2))


def _on_the_boundary(bounds: Band, kind: str) -> Evidence:
    """Distance of the divergence at the bounds from delta where they are not saturated, and from the root that brentq finds (KL)."""
    logp = PROBABILITIES.log()
    open_low, open_high = bounds.lower > 0, bounds.upper < torch.minimum(1 / PROBABILITIES, torch.tensor(100.0)) * (1 - 1e-12)
    gaps = [(divergence(logp, bounds.lower, kind) - DELTA)[open_low], (divergence(logp, bounds.upper, kind) - DELTA)[open_high]]
    worst = float(torch.cat(gaps).abs().max())
    if kind == "kl":
        for p, upper in zip(PROBABILITIES.tolist(), bounds.upper.tolist(), strict=True):
            root = brentq(lambda r, p=p: -p * np.log(r) - (1 - p) * np.log((1 - r * p) / (1 - p)) - DELTA, 1.0, (1 - 1e-12) / p, xtol=1e-13)
            worst = max(worst, abs(upper - min(root, 100.0)) / upper)
    inside = bool((bounds.upper * PROBABILITIES <= 1 + 1e-12).all())
    return Evidence(
        {"largest error": worst, "inside the simplex": inside}, "error below 1e-6, no probability above 1", worst < 1e-6 and inside
    )


@claim(
    "both bounds of the band lie on the divergence's boundary (KL, TV, chi-square), agree with a root finder and never leave the simplex"
)
def exact_bounds() -> Evidence:
    found = {kind: _on_the_boundary(band(PROBABILITIES.log(), kind, DELTA), kind) for kind in ("kl", "tv", "chi2")}
    return Evidence({k: e.measured for k, e in found.items()}, found["kl"].expected, all(e.holds for e in found.values()))


@ablation(exact_bounds, "the fixed bounds 0.8 and 1.2")
def fixed_bounds() -> Evidence:
    return _on_the_boundary(fixed_band(PROBABILITIES.log()), "kl")


def _room_for_rare(bounds: Any) -> Evidence:
    """Whether the upper bound falls with the probability, and how far a token of probability 0.01 may rise against the clip at 0.2."""
    upper = bounds(PROBABILITIES.log()).upper
    falling = bool((upper.diff() < 0).logical_or(upper[:-1] == 100.0).all())
    room = float(bounds(torch.tensor([0.01], dtype=torch.float64).log()).upper - 1) / 0.2
    return Evidence(
        {"falls with p": falling, "room at 0.01 against clip 0.2": round(room, 2)}, "falls, room above 5x", falling and room > 5
    )


@claim(
    "the upper bound falls with the probability, and a token of probability 0.01 may rise more than 5 times as far as under a clip of 0.2"
)
def wide_for_rare() -> Evidence:
    return _room_for_rare(lambda logp: band(logp, "kl", DELTA))


@ablation(wide_for_rare, "the fixed bounds 0.8 and 1.2")
def as_narrow_for_rare() -> Evidence:
    return _room_for_rare(fixed_band)


def _simplex_optimum(bounds: Any) -> Evidence:
    """Numeric maximum of one token's probability over the whole simplex within the trust region, against what the bound allows."""
    random = np.random.default_rng(0)
    worst = 0.0
    for _ in range(8):
        old = random.dirichlet(np.ones(4) * 2)
        limits = [(1e-9, 1.0)] * 4
        rules = [
            {"type": "eq", "fun": lambda q: q.sum() - 1},
            {"type": "ineq", "fun": lambda q, old=old: DELTA - (old * np.log(old / q)).sum()},
        ]
        best = minimize(lambda q: -q[0], old, bounds=limits, constraints=rules, method="SLSQP", options={"ftol": 1e-12, "maxiter": 300})
        allowed = float(bounds(torch.tensor([old[0]]).log()).upper) * old[0]
        worst = max(worst, abs(allowed + best.fun))
    return Evidence(worst, "< 1e-4", worst < 1e-4)


@claim("no distribution of four tokens within KL 0.05 of the old one gives a token more probability than the upper bound does")
def optimal_over_simplex() -> Evidence:
    return _simplex_optimum(lambda logp: band(logp, "kl", DELTA))


@ablation(optimal_over_simplex, "the fixed bounds 0.8 and 1.2")
def fixed_over_simplex() -> Evidence:
    return _simplex_optimum(fixed_band)


FIXED: dict[str, Objective] = {
    "clip 0.2": ClippedSurrogate(0.2, 0.2, "token_mean"),
    "clip-higher": ClippedSurrogate(0.2, 0.28, "token_mean"),
}
NO_RADIUS = BandClip(delta=0.0, relax=True)  # what is left of the band without its trust region: clip-higher


def _start(task: TokenBandit, chances: tuple[float, ...]) -> TabularTokens:
    """A policy that gives each prompt's targets these probabilities, and the rest of the tokens equal ones."""
    policy = task.policy()
    probabilities = torch.full((task.count, task.vocabulary), (1 - sum(chances)) / (task.vocabulary - len(chances)), dtype=torch.float64)
    for k, chance in enumerate(chances):
        probabilities[torch.arange(task.count), task.targets[:, k, 0]] = chance
    with torch.no_grad():
        policy.logits[:, 0] = probabilities.log()
    return policy


def _rounds_from_rare(objective: Objective, seed: int) -> float:
    """Batches of 4 epochs until right tokens that began at probability 0.01 have a mean probability of 0.9."""
    task = TokenBandit(64, 8, 1, seed=seed)
    method = plain_sgd(BANDPO.but(objective=objective), STEP, epochs=4, group_size=16)
    return steps_to(train_on(method, _start(task, (0.01,)), task, steps=60, seed=seed, stop=lambda p: p >= 0.9), 0.9)


@cache
def _fixed_rounds() -> dict[str, float]:
    return {name: fmean(_rounds_from_rare(objective, seed) for seed in range(3)) for name, objective in FIXED.items()}


def _rare_token(objective: Objective) -> Evidence:
    rounds = {"band": fmean(_rounds_from_rare(objective, seed) for seed in range(3))} | _fixed_rounds()
    faster = all(rounds["band"] < 0.7 * rounds[name] for name in FIXED)
    return Evidence(
        {n: round(r, 1) for n, r in rounds.items()}, "rounds to success 0.9 with the band < 0.7 of either clip (3 seeds)", faster
    )


@claim(
    "right tokens that start at probability 0.01 reach success 0.9 in less than 0.7 of the batches of a fixed clip or clip-higher",
    slow=True,
)
def rare_tokens_rise() -> Evidence:
    return _rare_token(BandClip(delta=DELTA))


@ablation(rare_tokens_rise, "the trust region at radius 0, so that only the relaxation to clip-higher is left")
def rare_tokens_without_radius() -> Evidence:
    return _rare_token(NO_RADIUS)


def _tail(objective: Objective, seed: int) -> tuple[float, float]:
    """(rare token's share, entropy over the two right tokens), means over prompts, when the right tokens together hold 95%."""
    task = TokenBandit(64, 8, 1, targets=2, seed=seed)
    common, rare = task.targets[:, 0, 0], task.targets[:, 1, 0]
    task.reward_function = lambda prompt, action, mask: (
        0.5 * (action[:, 0] == common[prompt]).double() + (action[:, 0] == rare[prompt]).double()
    )
    policy = _start(task, (0.3, 0.01))
    rows = torch.arange(task.count)

    def shares(run: Run, batch: object) -> tuple[float, float, float]:
        p = policy.logits.detach()[:, 0].softmax(-1)
        both, share = p[rows, common] + p[rows, rare], p[rows, rare] / (p[rows, common] + p[rows, rare])
        entropy = -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share))
        return float(both.mean()), float(share.mean()), float(entropy.mean())

    method = plain_sgd(BANDPO.but(objective=objective), STEP, epochs=4, group_size=16)
    seen = train_on(method, policy, task, steps=60, seed=seed, watch=shares, stop=lambda s: s[0] >= 0.95)
    return seen[-1][1], seen[-1][2]


def _mean_tail(objective: Objective) -> dict[str, float]:
    runs = [_tail(objective, seed) for seed in range(5)]
    return {"share": fmean(r[0] for r in runs), "entropy": fmean(r[1] for r in runs)}


@cache
def _fixed_tails() -> dict[str, dict[str, float]]:
    return {name: _mean_tail(objective) for name, objective in FIXED.items()}


def _tail_evidence(objective: Objective) -> Evidence:
    found = {"band": _mean_tail(objective)} | _fixed_tails()
    share, entropy = (min(found["band"][what] / found[name][what] for name in FIXED) for what in ("share", "entropy"))
    measured = {name: {k: round(v, 4) for k, v in values.items()} for name, values in found.items()}
    expected = "at 95% for the two right tokens: rare one's share > 4x, entropy > 1.4x that of either clip (5 seeds)"
    return Evidence(measured | {"ratio": [round(share, 1), round(entropy, 2)]}, expected, share > 4 and entropy > 1.4)


@claim(
    "the better but rare of two right tokens keeps more than 4 times the share, and entropy over them stays higher, than under fixed clips"
)
def tail_survives() -> Evidence:
    return _tail_evidence(BandClip(delta=DELTA))


@ablation(tail_survives, "the trust region at radius 0, so that only the relaxation to clip-higher is left")
def tail_without_radius() -> Evidence:
    return _tail_evidence(NO_RADIUS)
