"""ECPO: evidence-coupled listwise policy optimization (arXiv:2605.21993).

A ranking and the spans that certify it are one joint action: K candidates without replacement, then up to m spans for each, every pick an action and
every infeasible one masked. Three rewards are coupled: NDCG of the ranking, validity of the cited spans, and an evidence cycle, in which a verifier
without labels rebuilds each candidate's support from the cited spans alone; CertNDCG, which counts certified positions only, is the fourth term. An
interpretable trajectory reward is learned first and stands in for labels where there are none. Against GRPO it changes reward (and what the task lets
the policy do). Names of the parts are from the abstract, every formula is [reconstructed].

The verifier, Plackett-Luce and the metrics are in `domains/language/certificates.py`; a task says by signals what its audit found: `ranking`,
`validity` and `support` [N,K], `relevance` [N,C], and for a learned relevance `trajectory` [N,C,F]. On other tasks the reward is the task's own and
ECPO is GRPO with token-mean aggregation. Left out: event graphs from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from anypo.batch import Batch
from anypo.domains.language.certificates import cert_ndcg, ndcg
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import weighted_sum

if TYPE_CHECKING:
    from anypo.run import Run

WEIGHTS = "ecpo_trajectory_weights"  # where the run keeps u
LEVELS = 3  # of relevance, from 0
NEEDED = {"ranking", "validity", "support", "relevance"}


def trajectory_reward(u: Float[Tensor, " F"], features: Float[Tensor, "... F"]) -> Float[Tensor, "*batch"]:
    """Equation 2: sum of softplus(u) times the features; no weight is negative."""
    return features @ softplus(u).to(features)


def pairwise_loss(reward: Float[Tensor, "B C"], relevance: Float[Tensor, "B C"]) -> Tensor:
    """Equation 2: mean of log(1 + exp(-(r_a - r_b))) over the pairs of each row with y_a > y_b; 0 where there is none."""
    above = relevance[:, :, None] > relevance[:, None, :]
    gap = reward[:, :, None] - reward[:, None, :]
    return (softplus(-gap) * above).sum() / above.sum().clamp(min=1)


def fit_trajectory_reward(
    features: Float[Tensor, "B C F"], relevance: Float[Tensor, "B C"], steps: int = 200, rate: float = 0.1
) -> Float[Tensor, " F"]:
    """u that minimizes the pairwise loss: Adam from 0."""
    u = torch.zeros(features.shape[-1], dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([u], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.enable_grad():
            pairwise_loss(trajectory_reward(u, features), relevance).backward()
        optimizer.step()
    return u.detach()


def reward_bins(u: Float[Tensor, " F"], features: Float[Tensor, "... F"]) -> Tensor:
    """Relevance 0, 1 or 2 by thirds of the range of the trajectory reward for features in [0,1]; as labels are made of shares of matched slots."""
    share = trajectory_reward(u, features) / softplus(u).sum().to(features)
    return (LEVELS * share).floor().clamp(0, LEVELS - 1).long()


class Rewards(NamedTuple):
    reward: Tensor  # [N]
    advantages: Tensor  # [N]


def reward(
    components: Float[Tensor, "N 4"], weights: tuple[float, ...] | Tensor, ddof: int = 0, eps: float = 1e-6, group: Tensor | None = None
) -> Rewards:
    """Equation 8: NDCG, mean validity, evidence cycle and CertNDCG, weighted; relative to the group (all rows are one where none is given)."""
    total = weighted_sum(components, tuple(float(w) for w in weights))
    return Rewards(total, group_relative(total, torch.zeros(len(total), dtype=torch.int64) if group is None else group, True, ddof, eps))


@dataclass
class FitTrajectoryReward:
    """Learns the trajectory reward from the labelled trajectories of the task's training instances, where it has such."""

    steps: int = 200  # of Adam, >= 1
    rate: float = 0.1  # > 0

    def __call__(self, run: Run) -> None:
        instances = getattr(run.task, "training", None)
        if instances is not None and hasattr(instances, "trajectories"):
            features, relevance = instances.trajectories()
            run.state[WEIGHTS] = fit_trajectory_reward(features, relevance, self.steps, self.rate)


@dataclass
class CertifiedReward:
    """The four rewards of a ranking with its certificates, weighted; the task's own reward where its batches have none."""

    w_rank: float = 0.3  # of NDCG, >= 0
    w_valid: float = 0.2  # of the mean validity of the positions' citations
    w_cycle: float = 0.2  # of the mean support that the cited spans give
    w_cert: float = 0.3  # of CertNDCG
    tau: float = 0.5  # support that certifies a position, in [0,1]
    learned: bool = False  # relevance by bins of the learned trajectory reward instead of labels

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if not batch.signals.keys() >= NEEDED:
            return run.score_rewards(batch)
        s, places = batch.signals, batch.signals["ranking"].shape[1]
        if self.learned and WEIGHTS not in run.state:
            raise ValueError("ecpo has no trajectory reward to rank by: the task brings no labelled trajectories; set reward.learned=False")
        relevance = reward_bins(run.state[WEIGHTS], batch.signal("trajectory")) if self.learned else s["relevance"]
        parts = {
            "ndcg": ndcg(relevance, s["ranking"], places),
            "validity": s["validity"].double().mean(1),
            "support": s["support"].double().mean(1),
            "cert_ndcg": cert_ndcg(relevance, s["ranking"], s["validity"], s["support"], places, self.tau),
        }
        run.log(**{name: float(value.mean()) for name, value in parts.items()})
        return weighted_sum(torch.stack(list(parts.values()), dim=1), (self.w_rank, self.w_valid, self.w_cycle, self.w_cert))


METHOD = GRPO.but(
    name="ecpo",
    paper=Paper("ECPO: evidence-coupled listwise policy optimization", "2605.21993", 2026),
    summary="ranking and cited evidence are one action; rewards for ranking, valid spans, support that a verifier rebuilds from them, and certified NDCG",
    prepare=FitTrajectoryReward(),
    reward=CertifiedReward(),
    credit=GroupRelative(std=True, ddof=0, eps=1e-6),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(),
    task="certified_ranking",
)
VARIANTS = {
    "unlabelled": METHOD.but(
        name="ecpo.unlabelled",
        summary="ECPO that ranks by the learned trajectory reward in place of labels",
        reward=CertifiedReward(learned=True),
    )
}
