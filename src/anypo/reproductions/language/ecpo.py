"""Claims of ECPO on certified_ranking: eight candidates, three positions with two cited spans each, 60 steps of 32 instances by 8 joint actions.

All policies are trained alike (Adam 1e-2) on closed rosters; measures are means over one output for each of 512 held-out instances. The baselines that
train nothing take the trajectory reward fitted by pairs. Left out of the paper's list: imitation of labelled outputs.
"""

from __future__ import annotations

import functools
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import softplus

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.certificates import cert_ndcg
from anypo.domains.language.toys.certified_instances import ROSTER, Instances, audit
from anypo.domains.language.toys.certified_ranking import CertifiedRanking, CitingPolicy
from anypo.methods.language.ecpo import METHOD as ECPO
from anypo.methods.language.ecpo import fit_trajectory_reward, trajectory_reward
from anypo.reproductions.common import train_on
from anypo.seams.reward import TaskReward

SEEDS = range(3)
STEPS = 60
METHODS = {
    "ecpo": ECPO,
    "grpo": ECPO.but(reward=TaskReward()),
    "without support": ECPO.set("reward.w_cycle", 0.0).set("reward.w_cert", 0.0),
}


@functools.cache
def _task(seed: int, roster: str = "closed") -> CertifiedRanking:
    return CertifiedRanking(seed=seed, roster=roster)


@functools.cache
def _policy(name: str, seed: int) -> CitingPolicy:
    policy = _task(seed).policy()
    train_on(METHODS[name], policy, _task(seed), steps=STEPS, seed=seed, watch=lambda run, batch: None)
    return policy


def _mean(name: str, measure: str) -> float:
    return fmean(_task(seed).measures(_policy(name, seed))[measure] for seed in SEEDS)


def _certified(instances: Instances, ranking: Tensor, spans: Tensor) -> float:
    """Mean CertNDCG of rankings whose positions cite the given spans [N,C,M] of their candidates."""
    own = torch.arange(ROSTER)[:, None] == ranking[..., None, None]
    found = audit(instances, ranking, (own & spans[:, None]).flatten(2))
    return float(cert_ndcg(instances.relevance, ranking, found.validity, found.support).mean())


def _post_hoc(seed: int) -> float:
    """GRPO's ranking, each candidate with its first spans in the text."""
    held_out = _task(seed).held_out
    batch = _task(seed).attempt(_policy("grpo", seed), held_out, torch.Generator().manual_seed(seed))
    return _certified(held_out, batch.signals["ranking"], held_out.document_order())


def _coupled(name: str) -> Evidence:
    certified = {name: _mean(name, "cert_ndcg"), "grpo": _mean("grpo", "cert_ndcg"), "post-hoc": fmean(_post_hoc(seed) for seed in SEEDS)}
    ranking = {name: _mean(name, "ndcg"), "grpo": _mean("grpo", "ndcg")}
    ahead = certified[name] - max(certified["grpo"], certified["post-hoc"])
    found = {"cert_ndcg": {k: round(v, 3) for k, v in certified.items()}, "ndcg": {k: round(v, 3) for k, v in ranking.items()}}
    holds = ahead >= 0.05 and abs(ranking[name] - ranking["grpo"]) <= 0.03
    return Evidence(found, "CertNDCG at least 0.05 above both, NDCG within 0.03 of GRPO's", holds)


@claim("ECPO certifies its rankings better than GRPO and than post-hoc evidence, and ranks as well as GRPO", slow=True)
def coupled() -> Evidence:
    return _coupled("ecpo")


@ablation(coupled, "the reward is that of the ranking alone")
def uncoupled() -> Evidence:
    return _coupled("grpo")


def _sees_support(name: str) -> Evidence:
    found = {n: {m: round(_mean(n, m), 3) for m in ("validity", "support")} for n in ("ecpo", name)}
    falls = {m: found["ecpo"][m] - found[name][m] for m in ("validity", "support")}
    return Evidence(found, "support at least 0.1 lower, validity at most 0.02", falls["support"] >= 0.1 and falls["validity"] <= 0.02)


@claim("without the rewards that see support the cited spans stay valid and support less", slow=True)
def sees_support() -> Evidence:
    return _sees_support("without support")


@ablation(sees_support, "the reward for validity is missing too")
def sees_nothing() -> Evidence:
    return _sees_support("grpo")


def _feasible(constrained: bool) -> Evidence:
    """Untrained policies and ECPO's; for each the share of feasible outputs, and of instances that have one after up to 16 tries."""
    found: dict[str, list[float]] = {"untrained": [], "ecpo": []}
    retried = []
    for seed in SEEDS:
        for name in found:
            policy = _task(seed).policy(constrained)
            if name == "ecpo":
                policy.load_state_dict(_policy("ecpo", seed).state_dict())
            generator = torch.Generator().manual_seed(seed)
            tries = torch.stack([_task(seed).attempt(policy, _task(seed).held_out, generator).signals["feasible"] for _ in range(16)])
            found[name].append(float(tries[0].double().mean()))
            retried.append(float(tries.any(0).double().mean()))
    once = [share for shares in found.values() for share in shares]
    return Evidence({"first try": found, "up to 16 tries": retried}, "all outputs at the first try", min(once) == 1.0)


@claim("with the constraint masks every output is feasible, without retries", slow=True)
def feasible() -> Evidence:
    return _feasible(constrained=True)


@ablation(feasible, "no masks, a validator asks again")
def infeasible() -> Evidence:
    return _feasible(constrained=False)


def _area(positive: Tensor, negative: Tensor) -> float:
    """Area under the ROC curve; ties count half."""
    gap = positive[:, None] - negative
    return float(((gap > 0).double() + 0.5 * (gap == 0)).mean())


def _trajectory_reward(shuffled: bool) -> Evidence:
    """Hard negatives: no relevance though three or more types of the skeleton occur (in the wrong order or with wrong fillers)."""
    weights, areas = [], []
    for seed in SEEDS:
        features, relevance = _task(seed).training.trajectories()
        if shuffled:
            order = torch.rand(relevance.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
            relevance = relevance.gather(1, order)
        u = fit_trajectory_reward(features, relevance)
        unseen = _task(seed).held_out
        features, relevance = unseen.trajectories()
        types = (unseen.kind[:, : features.shape[1], :, None] == unseen.skeleton[:, None, None]).any(2).sum(-1)
        reward = trajectory_reward(u, features)
        weights.append([round(float(w), 3) for w in softplus(u)])
        areas.append(_area(reward[relevance > 0], reward[(relevance == 0) & (types >= 3)]))
    start = float(softplus(torch.zeros(())))
    holds = all(min(w[:2]) > start for w in weights) and min(areas) > 0.9
    return Evidence(
        {"weights of align, arg, graph": weights, "area": areas}, "both weights above their start at 0.69, area above 0.9", holds
    )


@claim("the learned trajectory reward puts weight on alignment and arguments and ranks hard negatives below positives")
def learned_reward() -> Evidence:
    return _trajectory_reward(shuffled=False)


@ablation(learned_reward, "labels dealt to the wrong candidates")
def learned_from_noise() -> Evidence:
    return _trajectory_reward(shuffled=True)


def _best_of(seed: int, roster: str, tries: int = 8) -> float:
    """The best of several untrained outputs by the discounted sum of the trajectory reward."""
    task = _task(seed, roster)
    u = fit_trajectory_reward(*_task(seed).training.trajectories())
    worth, generator = trajectory_reward(u, task.held_out.features), torch.Generator().manual_seed(seed)
    scores, certified = [], []
    for _ in range(tries):
        s = task.attempt(task.policy(), task.held_out, generator).signals
        scores.append((worth.gather(1, s["ranking"]) / (torch.arange(s["ranking"].shape[1]) + 2).log2()).sum(1))
        certified.append(cert_ndcg(s["relevance"], s["ranking"], s["validity"], s["support"]))
    best = torch.stack(scores).argmax(0)
    return float(torch.stack(certified).gather(0, best[None]).mean())


def _roster() -> tuple[float, float, dict[str, list[float]]]:
    """Relative loss of CertNDCG under predicted rosters, of ECPO and of the best of 8."""
    levels = {
        "ecpo": [fmean(_task(s, roster).measures(_policy("ecpo", s))["cert_ndcg"] for s in SEEDS) for roster in ("closed", "predicted")],
        "best of 8": [fmean(_best_of(s, roster) for s in SEEDS) for roster in ("closed", "predicted")],
    }
    mine, other = (1 - after / before for before, after in levels.values())
    return mine, other, {name: [round(v, 3) for v in pair] for name, pair in levels.items()}


@claim("rosters made by a model cost ECPO a smaller share of its CertNDCG than they cost the best of 8 untrained outputs by the trajectory reward",
       slow=True, reproduced=False)  # fmt: skip
def roster() -> Evidence:
    """Here losses come from candidates that are missing, which no policy can mend. On two other seeds the shares were 0.104 and 0.107, so that a larger
    gap on these is not taken for an effect: the untrained outputs certify so little that their share is mostly noise."""
    mine, other, levels = _roster()
    return Evidence({"share lost": [round(mine, 3), round(other, 3)], "closed, predicted": levels}, "smaller by 0.02", mine < other - 0.02)
