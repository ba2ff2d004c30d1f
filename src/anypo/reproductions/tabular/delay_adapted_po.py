"""Claims of DAPO: the second moment of the adapted estimate, learning and its price under delay, and one recorded run of a bandit that flips.

The learning problem: three steps, three states a step, three actions, transitions Dirichlet(0.5), losses 0 or 1 with means uniform in [0.2,0.8]; eight
copies at once are eight problems. No bonus, as the settings of these claims ask for. The stress problem: two actions, one state, one step, losses 0 and
1 that change places every 150 episodes. Not shown: that the adapted estimate has less regret on the stochastic problem (it need not), and DAPPO
on environments.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.tabular.tasks import EpisodicLosses
from anypo.loops.tabular import step
from anypo.methods.tabular.delay_adapted_po import METHOD, DelayAdaptedLoss, q_estimate
from anypo.run import Run

SEED = 0
EPISODES, PART = 1500, 100
NO_BONUS = METHOD.but(regularize=())


class RandomLosses(EpisodicLosses):
    """Random mean losses and sparser transitions than the task's own."""

    def __init__(self, seed: int, copies: int = 8) -> None:
        super().__init__(3, 3, 3, copies=copies, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(*self.transition.shape, generator=generator, dtype=torch.float64)
        weight = normal**2  # half of it is Gamma(0.5): Dirichlet(0.5) once normalized
        self.transition = weight / weight.sum(-1, keepdim=True)
        mean = 0.2 + 0.6 * torch.rand(*self.shape, generator=generator, dtype=torch.float64)
        self.mean_losses = [mean, mean]


class FlippingArms(EpisodicLosses):
    """Two actions, losses 0 and 1, which change places every 150 episodes."""

    def __init__(self, seed: int, copies: int = 5) -> None:
        super().__init__(1, 1, 2, copies=copies, good=0.0, others=1.0, seed=seed)

    def mean_loss(self, run: Run) -> Tensor:
        return self.mean_losses[run.step // 150 % 2]


@lru_cache
def _regrets(delay: int, seed: int) -> tuple[float, float, float]:
    """Mean over the copies: regret of the first and of the last 100 episodes against the best policy, and of all."""
    problem = RandomLosses(seed)
    run = Run(NO_BONUS.set("rollout.delay", delay), problem.policy(), problem, steps=EPISODES, seed=seed)
    seen = [0.0]
    while not run.finished:
        step(run)
        seen.append(run.history[-1]["regret"])
    return seen[PART], seen[-1] - seen[-1 - PART], seen[-1]


def _learning(delays: tuple[int, ...], seed: int) -> Evidence:
    ratios = {delay: round(_regrets(delay, seed)[1] / _regrets(delay, seed)[0], 3) for delay in delays}
    return Evidence(ratios, "regret of the last 100 of 1500 episodes below 0.75 of that of the first 100", max(ratios.values()) < 0.75)


@claim(
    "with feedback at once and 20 episodes late the regret of the last 100 of 1500 episodes is below 0.75 of the first 100's",
    slow=True,
)
def learns() -> Evidence:
    return _learning((0, 20), SEED)


@ablation(learns, "all feedback comes after the end and is lost")
def all_is_lost() -> Evidence:
    return _learning((EPISODES,), SEED)


def _late(delay: int) -> Evidence:
    """Over 24 problems: where the swings stand at the end differs from draw to draw."""
    firsts, lasts, _ = zip(*(_regrets(delay, seed) for seed in (0, 1, 2)), strict=True)
    ratio = round(sum(lasts) / sum(firsts), 3)
    return Evidence(ratio, "regret of the last 100 of 1500 episodes below 0.75 of that of the first 100, over 24 problems", ratio < 0.75)


# Not supported: with this delay the policies swing around the good ones with a period of several hundred episodes, and sets of 24 problems fall on
# either side of the threshold.
@claim(
    "with feedback 100 episodes late the regret of the last 100 of 1500 episodes is below 0.75 of the first 100's",
    slow=True,
    reproduced=False,
)
def learns_late() -> Evidence:
    return _late(100)


@ablation(learns_late, "all feedback comes after the end and is lost")
def all_is_lost_too() -> Evidence:
    return _late(EPISODES)


def _price(delays: tuple[int, int, int], seed: int) -> Evidence:
    totals = [round(_regrets(delay, seed)[2], 1) for delay in delays]
    holds = 1.05 * totals[0] < totals[1] and 1.05 * totals[1] < totals[2]
    return Evidence(totals, "regret of 1500 episodes with delays 0, 20, 100: each at least 5% above the one before", holds)


@claim("the regret grows with the delay", slow=True)
def delay_costs() -> Evidence:
    return _price((0, 20, 100), SEED)


@ablation(delay_costs, "all feedback comes at once")
def at_once() -> Evidence:
    return _price((0, 0, 0), SEED)


def _moment(adapt: bool) -> Evidence:
    """Exact: the estimate of the first action is L / denominator with the chance that it is played, else 0."""
    play, arrive = (torch.tensor([[[p, 1 - p]]], dtype=torch.float64) for p in (0.01, 0.9))
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    q = q_estimate(zero, zero, one, one[None], play, arrive if adapt else play, 0.0).q[0, 0, 0]
    moment = float(arrive[0, 0, 0] * play[0, 0, 0] * q**2)
    return Evidence(round(moment, 4), "0.0111 L^2 (90 L^2 for the plain estimate), to 1%", abs(moment - 0.01 / 0.9) < 1e-4)


@claim("an action of probability 0.01 when played and 0.9 at arrival adds 0.011 L^2, not 90 L^2, to the second moment of the estimate")
def bounded_moment() -> Evidence:
    return _moment(True)


@ablation(bounded_moment, "the plain estimate")
def plain_moment() -> Evidence:
    return _moment(False)


@lru_cache
def _recorded(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """One run, played by the adapted estimate: of every arrival the adapted estimate, the plain one, and the probability at arrival [updates,copies]."""
    problem = FlippingArms(seed)
    run = Run(NO_BONUS.set("rollout.delay", 100).set("update.eta", 0.4), problem.policy(), problem, steps=1200, seed=seed)
    plain_credit = DelayAdaptedLoss(adapt=False)
    rows = []
    while not run.finished:
        policy = run.policy.table
        batch = step(run)
        if not batch.counted.any():
            continue
        chance = policy[:, 0, 0].gather(-1, batch.action)[:, 0]
        rows.append((-batch.advantage[:, 0], -plain_credit(batch, run)[:, 0], chance))
    adapted, plain, chance = (torch.stack(column) for column in zip(*rows, strict=True))
    return adapted, plain, chance


def _stress(adapt: bool, seed: int) -> Evidence:
    adapted, plain, chance = _recorded(seed)
    mine = adapted if adapt else plain
    smaller = (mine < plain - 1e-12).double().mean(0)
    found = {
        "never larger": bool((mine <= plain + 1e-12).all()),
        "smallest share strictly smaller": round(float(smaller.min()), 3),
        "updates with pi Q > L": int((chance * mine > 1 + 1e-12).sum()),
        "of the plain one": int((chance * plain > 1 + 1e-12).sum()),
        "updates": mine.numel(),
    }
    holds = found["never larger"] and float(smaller.min()) >= 0.1 and found["updates with pi Q > L"] == 0 and found["of the plain one"] > 0
    return Evidence(
        found, "never larger, smaller in 10% of the updates of each of 5 seeds, pi Q <= L always; not so for the plain one", holds
    )


@claim(
    "where losses flip, the adapted estimate is never larger than the plain one, often smaller, and times the probability at arrival at most L",
    slow=True,
)
def stays_bounded() -> Evidence:
    return _stress(True, SEED)


@ablation(stays_bounded, "the plain estimate on the same run")
def plain_estimate() -> Evidence:
    return _stress(False, SEED)
