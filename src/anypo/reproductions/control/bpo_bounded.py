"""Claims of BPO: its target solves the constrained problem, improves the return by the stated amount and bounds it; overshoot; CartPole."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.methods.control.bpo_bounded import METHOD as BPO
from anypo.methods.control.bpo_bounded import BoundedRatio, loss, target_ratio
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.control.ppo import policy_loss
from anypo.reproductions.common import RandomMDP, ShuffledCredit, on_cartpole, train_on
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

EPS = 0.2
ARMS = (0.0, 0.2, 0.5, 1.0, -0.5)  # rewards of the bandit


def _bang_bang(prob: Tensor, q: Tensor, low: float, high: float, centre: str) -> Tensor:
    """The target ratio; around the mean in place of the quantile it is rescaled to keep the mass."""
    if centre == "median":
        return target_ratio(prob, q, low, high).ratio
    ratio = torch.where(q > (prob * q).sum(-1, keepdim=True), high, low)
    return ratio / (prob * ratio).sum(-1, keepdim=True)


def _linear_program(centre: str) -> Evidence:
    """Largest shortfall from the optimum and largest excess over the band in 100 problems: random, half with ties, half asymmetric."""
    from scipy.optimize import linprog

    rng = np.random.default_rng(0)
    gap = excess = 0.0
    for i in range(100):
        prob, q = rng.dirichlet(np.ones(6)), rng.standard_normal(6)
        q = q.round() if i % 2 else q
        low, high = (0.8, 1.2) if i % 4 < 2 else (0.3, 2.5)
        best = -linprog(-prob * q, A_eq=prob[None], b_eq=[1.0], bounds=[(low, high)] * 6).fun
        ratio = _bang_bang(torch.from_numpy(prob), torch.from_numpy(q), low, high, centre).numpy()
        gap = max(gap, abs(best - float(prob @ (ratio * q))))
        excess = max(excess, float((ratio - high).max()), float((low - ratio).max()), abs(float(prob @ ratio) - 1))
    found = {"gap": f"{gap:.1e}", "outside the band": f"{excess:.1e}"}
    return Evidence(found, "both below 1e-7 in all of 100 problems", gap < 1e-7 and excess < 1e-7)


@claim("The bang-bang ratio reaches the optimum of the linear program, with and without ties, in symmetric and asymmetric bands")
def target_is_optimal() -> Evidence:
    return _linear_program("median")


@ablation(target_is_optimal, "the mean value separates raised from lowered actions")
def target_around_the_mean() -> Evidence:
    return _linear_program("mean")


def _identity(centre: str) -> Evidence:
    worst, steps = 0.0, []
    for seed in range(3):
        problem = RandomMDP(seed)
        policy = problem.random_policy(seed)
        for _ in range(20):
            value = problem.values(policy)[1]
            better = policy * _bang_bang(policy, value, 1 - EPS, 1 + EPS, centre)
            far = (value - target_ratio(policy, value, 1 - EPS, 1 + EPS).threshold[:, None]).abs()
            promised = EPS * float(problem.visits(better) @ (policy * far).sum(-1))
            steps.append(problem.total(better) - problem.total(policy))
            worst = max(worst, abs(steps[-1] - promised))
            policy = better
    found = {"largest error": f"{worst:.1e}", "smallest improvement": f"{min(steps):.1e}"}
    return Evidence(found, "error < 1e-8, every improvement > 0; 20 iterations of 3 MDPs", worst < 1e-8 and min(steps) > 0)


@claim(
    "Iterating the target policy of a random MDP raises the return every time, by eps times the mean distance of the values from their median"
)
def improvement_identity() -> Evidence:
    return _identity("median")


@ablation(improvement_identity, "the mean value separates raised from lowered actions")
def identity_around_the_mean() -> Evidence:
    return _identity("mean")


def _bound(weight_by_median: bool) -> Evidence:
    slack: list[float] = []
    tight: list[float] = []
    for seed in range(100):
        problem = RandomMDP(seed % 5)
        old, new = problem.random_policy(seed), problem.random_policy(1000 + seed, spread=0.5 + seed % 3)
        value = problem.values(old)[1]
        centred = value - target_ratio(old, value, 1 - EPS, 1 + EPS).threshold[:, None]
        weight = centred.abs() if weight_by_median else (value - (old * value).sum(-1, keepdim=True)).abs()
        for policy, into in ((new, slack), (old * target_ratio(old, value, 1 - EPS, 1 + EPS).ratio, tight)):
            short = EPS - (policy / old - (1 + EPS * centred.sign())).abs()
            promised = float(problem.visits(policy) @ (old * weight * short).sum(-1))
            into.append(problem.total(policy) - problem.total(old) - promised)
    found = {"smallest slack": f"{min(slack):.2g}", "at the target": f"{max(tight, key=abs):.1e}"}
    holds = min(slack) >= -1e-9 and max(map(abs, tight)) < 1e-8
    return Evidence(found, "slack >= -1e-9 for each of 100 random policies, 0 within 1e-8 at the target policy", holds)


@claim(
    "The return of any policy is at least the old one's plus what the median-weighted BPO error leaves of the optimal gain, exactly at the target"
)
def loss_bounds_the_return() -> Evidence:
    return _bound(weight_by_median=True)


@ablation(loss_bounds_the_return, "the error is weighted by the advantage over the mean, as in the practical loss")
def bound_with_mean_weights() -> Evidence:
    return _bound(weight_by_median=False)


def _pull(method: str) -> Evidence:
    """Slope of the loss in the log-ratio at ratios beyond the band's border on the side the advantage pushes to."""
    ratio, a = torch.tensor([[1.3, 1.6, 0.7, 0.4]], dtype=torch.float64), torch.tensor([[1.0, 2.0, -1.0, -0.5]], dtype=torch.float64)
    logp, old, mask = ratio.log().requires_grad_(), torch.zeros_like(ratio), torch.ones_like(ratio)
    value = loss(logp, old, a, a, mask, EPS) if method == "bpo" else policy_loss(logp, old, a, mask, EPS)
    (slope,) = torch.autograd.grad(value.loss, logp)
    return Evidence([round(x, 3) for x in slope[0].tolist()], "every slope leads back to the band", bool((slope * (ratio - 1) > 0).all()))


@claim("Beyond the border of the band BPO's gradient pulls the ratio back")
def overshoot_is_pulled_back() -> Evidence:
    return _pull("bpo")


@ablation(overshoot_is_pulled_back, "PPO's clip")
def overshoot_under_ppo() -> Evidence:
    return _pull("ppo")


def _drift(method: str) -> Evidence:
    """Largest |ratio - 1| after 40 epochs on one batch of 256 draws of a 5-armed bandit: 320 Adam steps at 0.01."""
    moves = []
    for seed in range(3):
        task = TokenBandit(1, 5, 1, seed=seed, reward=lambda prompt, action, mask: torch.tensor(ARMS, dtype=torch.float64)[action[:, 0]])
        policy = task.policy()
        trained = PPO.but(
            select=UniformPrompts(group_size=256),
            credit=GroupRelative(),
            objective=BoundedRatio(EPS) if method == "bpo" else ClippedSurrogate(EPS, EPS, "token_mean"),
            regularize=(),
            update=GradientSteps(epochs=40, minibatches=8, learning_rate=1e-2, optimizer="adam", max_grad_norm=None, unit="row"),
        )

        def move(run: Run, batch: Batch) -> float:
            return float(((run.policy.observe(batch, {"logp"}).logp - batch.logp).exp() - 1).abs().max())

        moves.append(train_on(trained, policy, task, steps=1, seed=seed, watch=move)[0])
    return Evidence([round(m, 3) for m in moves], "at most 1.5 eps = 0.3 in each of 3 seeds", max(moves) <= 1.5 * EPS)


@claim("After 40 epochs on one batch the largest |ratio - 1| under BPO is at most 1.5 eps")
def ratios_stay_near_the_band() -> Evidence:
    return _drift("bpo")


@ablation(ratios_stay_near_the_band, "PPO's clip")
def ratios_under_ppo() -> Evidence:
    return _drift("ppo")


STEPS = 26  # of 1024 environment steps, fewer than the spec's 60000: both methods are at the limit of 500 by then


@cache
def _last_fifth(name: str, seed: int) -> float:
    method = {"bpo": BPO, "ppo": PPO, "shuffled": BPO.but(credit=ShuffledCredit(BPO.credit))}[name]
    return fmean(record["reward"] for record in on_cartpole(method, steps=STEPS, seed=seed).history[-(STEPS // 5) :])


def _cartpole(name: str, seeds: tuple[int, ...]) -> Evidence:
    mine, theirs = ([round(_last_fifth(n, seed)) for seed in seeds] for n in (name, "ppo"))
    return Evidence({"returns": mine, "PPO": theirs}, "mean over seeds at least PPO's less 5%", fmean(mine) >= 0.95 * fmean(theirs))


@claim("On CartPole the mean return of the last fifth of 26000 steps is not below PPO's by more than 5%, over 3 seeds", slow=True)
def as_good_as_ppo() -> Evidence:
    return _cartpole("bpo", (0, 1, 2))


@ablation(as_good_as_ppo, "advantages dealt to the wrong environments")
def cartpole_without_credit() -> Evidence:
    return _cartpole("shuffled", (0,))
