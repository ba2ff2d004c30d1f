"""GCPO: geometric-aware calibrated policy optimization (arXiv:2605.21801).

Some variants of GRPO damp a group's update by its semantic entropy, the entropy over clusters of equivalent responses. That sees how many meanings
there are, not how far apart they lie, nor whether the rewards tell them apart. GCPO measures disagreement geometrically (cosine dispersion,
barycentric transport), calibrates it with the dispersion of the rewards, and multiplies the group's advantages, of any credit (`inner`), by the
weight: disagreement that rewards do not resolve is damped. The measures' names are the paper's; normalizations [ours]; barycentric transport and
the weight (equations 3 and 6) [reconstructed]. Responses are embedded by their tokens or by the policy's own states, and clustered by cosine
similarity [ours]; the paper's sentence encoder is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import group_mean, group_size, group_std, group_sum, peers
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward

if TYPE_CHECKING:
    from anypo.run import Run

MEASURES = ("cd", "bot", "mean", "se")
EMBEDDINGS = ("tokens", "hidden")


class Measures(NamedTuple):
    """What is known of each row's group, [N] each, in [0,1]."""

    se: Tensor  # semantic entropy over ln G
    cd: Tensor  # cosine dispersion: mean over pairs of (1 - cosine) / 2
    bot: Tensor  # barycentric transport: squared distance of the clusters' means to their barycentre
    rd: Tensor  # reward dispersion: population deviation over half of the range


def unit(embeddings: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Rows of length 1, detached, in double precision; a zero row stays zero."""
    rows = embeddings.detach().double()
    length = rows.norm(dim=1, keepdim=True)
    return rows / torch.where(length > 0, length, 1.0)


def measures(
    embeddings: Float[Tensor, "N D"], cluster: Int[Tensor, " N"], group: Int[Tensor, " N"], reward: Float[Tensor, " N"],
    r_lo: float = 0.0, r_hi: float = 1.0,
) -> Measures:  # fmt: skip
    """Equations 1-4. Cluster numbers need to differ inside a group only; rewards outside [r_lo, r_hi] count as full dispersion at the most.
    A lone response has 0 everywhere. Raises ValueError for an empty range."""
    if not r_hi > r_lo:
        raise ValueError(f"r_hi is the largest reward and must be above r_lo, the smallest; got {r_hi} and {r_lo}")
    z, size = unit(embeddings), group_size(group).double()
    _, meaning = torch.unique(torch.stack([group, cluster], 1), dim=0, return_inverse=True)
    entropy = group_mean((size / group_size(meaning)).log(), group) / size.log().clamp(min=math.log(2))
    total, own = group_sum(z, group).square().sum(1), group_sum(z.square().sum(1), group)
    similarity = (total - own) / (size * (size - 1)).clamp(min=1)
    dispersion = torch.where(size > 1, (1 - similarity) / 2, 0.0).clamp(0, 1)
    transport = group_mean((group_mean(z, meaning) - group_mean(z, group)).square().sum(1), group).clamp(max=1)
    spread = group_std(reward.detach().double(), group) / (0.5 * (r_hi - r_lo))
    return Measures(entropy, dispersion, transport, spread.clamp(max=1))


def weights(
    embeddings: Float[Tensor, "N D"], cluster: Int[Tensor, " N"], group: Int[Tensor, " N"], reward: Float[Tensor, " N"],
    r_lo: float = 0.0, r_hi: float = 1.0, a: float = 1.0, w_min: float = 0.1, measure: str = "mean", renorm: bool = True,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equations 5-8: the weight of each row's group, a constant of the step. Raises ValueError for another measure than MEASURES."""
    return weights_of(measures(embeddings, cluster, group, reward, r_lo, r_hi), group, a, w_min, measure, renorm)


def weights_of(
    found: Measures, group: Int[Tensor, " N"], a: float = 1.0, w_min: float = 0.1, measure: str = "mean", renorm: bool = True
) -> Float[Tensor, " N"]:
    """Equation 6: max(w_min, 1 - a U (1 - RD)); for "se" equation 8, which knows no rewards: max(w_min, 1 - a SE). With `renorm` over the mean
    weight of the groups whose rewards differ, each group once; all 1 when there are none."""
    if measure not in MEASURES:
        raise ValueError(f"unknown measure '{measure}'; use one of {', '.join(MEASURES)}")
    if measure == "se":
        damping = found.se
    else:
        damping = {"cd": found.cd, "bot": found.bot, "mean": (found.cd + found.bot) / 2}[measure] * (1 - found.rd)
    weight = (1 - a * damping).clamp(min=w_min)
    if not renorm:
        return weight
    share = (found.rd > 0) / group_size(group)
    return weight * share.sum() / (weight * share).sum() if share.any() else torch.ones_like(weight)


def advantages(
    embeddings: Float[Tensor, "N D"], cluster: Int[Tensor, " N"], group: Int[Tensor, " N"], reward: Float[Tensor, " N"],
    r_lo: float = 0.0, r_hi: float = 1.0, a: float = 1.0, w_min: float = 0.1, measure: str = "mean", renorm: bool = True,
    ddof: int = 0, eps: float = 1e-6,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equation 7: GRPO's advantages times the group's weight."""
    weight = weights(embeddings, cluster, group, reward, r_lo, r_hi, a, w_min, measure, renorm)
    return weight.to(reward) * group_relative(reward, group, True, ddof, eps)


def bag_of_tokens(action: Int[Tensor, "N T"], mask: Tensor) -> Float[Tensor, "N V"]:
    """How often each of the batch's V different tokens stands in a row, over the mask."""
    tokens, index = torch.unique(action, return_inverse=True)
    return torch.zeros(len(action), len(tokens), dtype=torch.float64).scatter_add(1, index.cpu(), mask.cpu().double())


def clusters(embeddings: Float[Tensor, "N D"], group: Int[Tensor, " N"], similarity: float = 0.9) -> Int[Tensor, " N"]:
    """Single linkage inside groups: rows joined by a chain of cosines of at least `similarity` share a number, the smallest row's."""
    z = unit(embeddings)
    rows, other = peers(group)
    near = ~other | ((z[:, None] * z[rows]).sum(2) >= similarity)
    label = torch.arange(len(group), device=group.device)
    while True:
        joined = torch.where(near, label[rows], len(group)).amin(1)
        if torch.equal(joined, label):
            return label
        label = joined


@dataclass
class CalibratedDisagreement:
    """The inner credit's advantages, weighted by how much of the group's disagreement the rewards resolve."""

    inner: Credit = field(default_factory=GroupRelative)
    a: float = 1.0  # >= 0, strength of the damping; 0: the inner credit
    w_min: float = 0.1  # in (0,1], smallest weight
    measure: str = "mean"  # of disagreement: cd, bot or their mean; se: semantic entropy without calibration
    renorm: bool = True  # keep the mean weight of the groups whose rewards differ at 1
    r_lo: float = 0.0  # smallest reward
    r_hi: float = 1.0  # and largest one, > r_lo
    embedding: str = "tokens"  # tokens: counts of the response's tokens; hidden: mean of the policy's states over the response
    similarity: float = 0.9  # cosine from which two responses mean the same, in (0,1]
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old_hidden"} if self.embedding == "hidden" else ())

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        advantage = self.inner(batch, run)
        reward = row_reward(batch, self.weights)
        embeddings = self.embed(batch).to(reward.device)
        found = measures(embeddings, clusters(embeddings, batch.group, self.similarity), batch.group, reward, self.r_lo, self.r_hi)
        weight = weights_of(found, batch.group, self.a, self.w_min, self.measure, self.renorm)
        run.log(
            semantic_entropy=float(found.se.mean()), disagreement=float((found.cd + found.bot).mean() / 2), weight_min=float(weight.min())
        )
        return weight.to(advantage)[:, None] * advantage

    def embed(self, batch: Batch) -> Float[Tensor, "N D"]:
        """One vector a response. Raises ValueError for an unknown embedding."""
        if self.embedding not in EMBEDDINGS:
            raise ValueError(f"unknown embedding '{self.embedding}'; use one of {', '.join(EMBEDDINGS)}")
        if self.embedding == "tokens":
            return bag_of_tokens(batch.action, batch.mask)
        hidden = batch.signal("old_hidden")
        return torch.where(batch.mask[..., None], hidden, hidden.new_zeros(())).sum(1) / batch.lengths.clamp(min=1)[:, None]


METHOD = GRPO.but(
    name="gcpo",
    paper=Paper("Why Semantic Entropy Fails: Geometry-Aware and Calibrated Uncertainty for Policy Optimization", "2605.21801", 2026),
    summary="a group's advantages are damped by how far apart its responses lie where the rewards do not tell them apart",
    credit=CalibratedDisagreement(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(KLPenalty(beta=0.04, aggregation="token_mean"),),
)

ENTROPY = METHOD.but(
    name="gcpo.entropy",
    summary="the baseline of the paper: groups are damped by their semantic entropy, whatever their rewards",
    credit=CalibratedDisagreement(measure="se"),
)

VARIANTS = {"entropy": ENTROPY}
