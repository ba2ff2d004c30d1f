"""Claims of VRPO: variance and mean of the advantages at an equilibrium of Kuhn poker with the exact critic, and self-play with learned critics.

In Kuhn poker all cards are dealt before the first move, so a critic that sees them knows everything but the moves. Exploitability is exact.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.games.policy import GamePolicy
from anypo.domains.games.tasks import SelfPlay, play
from anypo.domains.games.tree import GameTree, compile_game
from anypo.method import Method
from anypo.methods.games.vrpo import METHOD, SelfPlayGAE, advantages, expected_value, gae_comparison
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.regularize import ValueLoss

LAM = 0.95
GAMES = 20_000


@lru_cache
def _kuhn() -> GameTree:
    return compile_game("kuhn_poker")


def equilibrium(tree: GameTree, alpha: float) -> Tensor:
    """The equilibria of Kuhn poker, alpha in [0,1/3]: probabilities of pass and bet at every information set, cards 0 < 1 < 2."""
    bets = {
        "0": alpha, "1": 0.0, "2": 3 * alpha, "0p": 1 / 3, "1p": 0.0, "2p": 1.0, "0b": 0.0, "1b": 1 / 3, "2b": 1.0, "0pb": 0.0,
        "1pb": alpha + 1 / 3, "2pb": 1.0,
    }  # fmt: skip
    bet = torch.tensor([bets[name] for name in tree.names], dtype=torch.float64)
    return torch.stack([1 - bet, bet], dim=1)


class _Played(NamedTuple):
    batch: Batch
    q: Tensor  # [N,T,A] exact
    policy: Tensor  # [N,T,A]
    boosted: Tensor  # [N,T]
    gae: Tensor  # [N,T]


def _play(alpha: float, expectation: str = "policy") -> _Played:
    """Games at an equilibrium; `expectation`: policy, or what the ablations put in its place (uniform: the wrong policy; sampled: the move made)."""
    tree = _kuhn()
    table = equilibrium(tree, alpha)
    batch = play(tree, table, GAMES, torch.Generator().manual_seed(0))
    q, policy = tree.action_values(table)[batch.context], table[tree.infoset[batch.context]]
    shared = {"reward": batch.signals["payoff"].double(), "terminated": batch.terminated.double(), "mask": batch.mask.double()}  # type: ignore[union-attr]
    shared |= {"mover_sign": batch.signals["mover_sign"], "action": batch.action, "bootstrap": torch.zeros(GAMES).double(), "q": q}
    gae = gae_comparison(policy=policy, gamma=1.0, lam=LAM, **shared)
    if expectation == "sampled":
        blind = expected_value(q, policy)[..., None].expand_as(q)  # a critic of states: the trace then holds the moves' noise
        return _Played(batch, q, policy, advantages(policy=policy, gamma=1.0, lam=LAM, **shared | {"q": blind}).advantages, gae)
    used = policy if expectation == "policy" else torch.full_like(policy, 0.5)
    return _Played(batch, q, policy, advantages(policy=used, gamma=1.0, lam=LAM, **shared).advantages, gae)


def _variances(expectation: str) -> Evidence:
    found, holds = {}, True
    for alpha in (0.0, 1 / 6, 1 / 3):
        played = _play(alpha, expectation)
        mask = played.batch.mask
        everywhere = float(played.boosted[mask].var() / played.gae[mask].var())
        first = float(played.boosted[:, 0].var() / played.gae[:, 0].var())
        found[f"alpha {alpha:.2f}"] = {"all moves": round(everywhere, 3), "first moves": round(first, 3)}
        holds = holds and everywhere < 0.55 and first < 0.3
    return Evidence(found, "variance over that of GAE(0.95): below 0.55 over all moves, below 0.3 on first moves", holds)


@claim(
    "at an equilibrium of Kuhn poker, with the exact critic, Q-boosting has about half the variance of GAE, and less than a third on first moves"
)
def less_variance() -> Evidence:
    return _variances("policy")


@ablation(less_variance, "a critic that does not tell actions apart")
def no_less_variance() -> Evidence:
    return _variances("sampled")


def _predicted(expectation: str) -> Evidence:
    """Equation 6: what GAE has more is the sum over later moves of lam^2l times the variance of q over the mover's policy."""
    found, holds = {}, True
    for alpha in (0.0, 1 / 6, 1 / 3):
        played = _play(alpha, expectation)
        mask, v = played.batch.mask, expected_value(played.q, played.policy)
        spread = torch.where(mask, expected_value((played.q - v[..., None]) ** 2, played.policy), 0.0)
        later = torch.zeros_like(spread)
        for t in range(spread.shape[1] - 2, -1, -1):
            later[:, t] = LAM**2 * (spread[:, t + 1] + later[:, t + 1])
        predicted = float(later[mask].mean())
        measured = float(played.gae[mask].var() - played.boosted[mask].var())
        found[f"alpha {alpha:.2f}"] = {"measured": round(measured, 4), "predicted": round(predicted, 4)}
        holds = holds and abs(measured / predicted - 1) < 0.1
    return Evidence(found, "difference of the variances within 10% of the sum of the later moves' variances", holds)


@claim("the variance that Q-boosting takes away is that of the later moves' sampling")
def as_predicted() -> Evidence:
    return _predicted("policy")


@ablation(as_predicted, "a critic that does not tell actions apart")
def not_as_predicted() -> Evidence:
    return _predicted("sampled")


def _same_mean(expectation: str) -> Evidence:
    played = _play(1 / 6, expectation)
    batch, mask = played.batch, played.batch.mask
    kind = (_kuhn().infoset[batch.context] * 2 + batch.action)[mask]
    difference = (played.boosted - played.gae)[mask]
    apart, compared = 0, 0
    for value in torch.unique(kind).tolist():
        rows = difference[kind == value]
        if len(rows) >= 100:
            compared += 1
            error = float(rows.std()) / len(rows) ** 0.5
            apart += (
                abs(float(rows.mean())) > 3 * error + 1e-9
            )  # moves that end the game have no later noise: the same number, up to rounding
    found = {"pairs": compared, "further apart than 3 standard errors": apart}
    return Evidence(
        found, "means given information set and action differ by less than 3 standard errors, all pairs", apart == 0 and compared > 10
    )


@claim("with the exact critic Q-boosting and GAE have the same mean given what the mover knew and did")
def unbiased() -> Evidence:
    return _same_mean("policy")


@ablation(unbiased, "the expectation over a uniform policy instead of the mover's")
def biased() -> Evidence:
    return _same_mean("uniform")


STEPS, BATCH, ENTROPY, SEEDS = 100, 128, 0.3, (0, 1, 2)
# Of the settings tried (entropy 0.01, 0.1 and 0.3, actor rates 3e-3 to 5e-4) this is the steadiest; the last policies of both methods still swing.
BASELINE = METHOD.but(name="ppo_gae", credit=SelfPlayGAE(), regularize=(ValueLoss(0.5), METHOD.regularize[1]))


def _self_play(method: Method, seed: int, watch: Any) -> list[Any]:
    task = SelfPlay(_kuhn())
    changes = {
        "select.group_size": BATCH, "update.learning_rate": 5e-4, "update.value_learning_rate": 3e-3, "regularize.1.first": ENTROPY,
        "regularize.1.last": ENTROPY,
    }  # fmt: skip
    for path, value in changes.items():
        method = method.set(path, value)
    policy = GamePolicy(task.tree, {n.removeprefix("old_") for n in method.needs()}, seed=seed)
    return train_on(method, policy, task, steps=STEPS, seed=seed, watch=watch)


@lru_cache
def _with_learned_critic(blind: bool = False) -> tuple[float, ...]:
    """Variance ratio of the advantages of each step of a VRPO run, both estimators on the same batch and critic; `blind`: q without its action."""

    def ratio(run: Run, batch: Batch) -> float:
        policy = batch.signals["old_logits"].softmax(-1)
        q = batch.signals["old_q"]
        q = expected_value(q, policy)[..., None].expand_as(q) if blind else q
        shared = (
            batch.reward,
            batch.terminated.to(q),
            batch.mask.to(q),
            batch.signals["mover_sign"],
            q,
            policy,
            batch.action,
            q.new_zeros(len(batch)),
        )  # type: ignore[union-attr]
        boosted, plain = advantages(*shared, 1.0, LAM).advantages, gae_comparison(*shared, 1.0, LAM)  # type: ignore[arg-type]
        return float(boosted[batch.mask].var() / plain[batch.mask].var())

    return tuple(_self_play(METHOD, 0, ratio))


def _stays_lower(blind: bool) -> Evidence:
    ratios = _with_learned_critic(blind)[STEPS // 4 :]  # the critic knows nothing at the start
    found = {"mean": round(fmean(ratios), 3), "largest": round(max(ratios), 3)}
    return Evidence(found, "variance over that of GAE below 0.8 in every step after the first quarter of the run", max(ratios) < 0.8)


# Lower on average, not in every step, with 128 games a step and 100 steps; whether a critic taught longer or by larger batches gets there was not tried.
@claim(
    "with a learned critic the variance of Q-boosted advantages stays below that of GAE on the same games throughout training",
    slow=True,
    reproduced=False,
)
def learned_critic() -> Evidence:
    return _stays_lower(False)


@ablation(learned_critic, "a critic that does not tell actions apart")
def learned_blind_critic() -> Evidence:
    return _stays_lower(True)


@lru_cache
def _exploitability(boosted: bool) -> tuple[tuple[float, ...], ...]:
    """Of the average policy after a quarter, a half and the whole run, for every seed."""
    method = METHOD if boosted else BASELINE
    found = []
    for seed in SEEDS:
        policies = _self_play(method, seed, lambda run, batch: run.policy.table)
        found.append(tuple(_kuhn().exploitability(_kuhn().average(policies[:n])) for n in (STEPS // 4, STEPS // 2, STEPS)))
    return tuple(found)


# Not supported: in these runs VRPO was slightly more exploitable in every seed; for both methods it falls at first and rises again later.
@claim(
    "after equal games of self-play in Kuhn poker the average policy is less exploitable with Q-boosting than with GAE",
    slow=True,
    reproduced=False,
)
def less_exploitable() -> Evidence:
    mine, other = ([round(fmean(run[i] for run in _exploitability(boosted)), 4) for i in range(3)] for boosted in (True, False))
    found = {"vrpo": mine, "ppo with gae": other}
    return Evidence(found, "mean of 3 seeds lower at the end of the run", mine[-1] < other[-1])
