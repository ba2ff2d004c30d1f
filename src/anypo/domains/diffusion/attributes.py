"""Samples with attributes: how diverse they are (the HoloFair measures, arXiv:2605.24687), and a plane of six modes with two attributes to try it on.

A classifier reads A attributes of every sample, attribute a having `classes[a]` classes; -1 stands for a reading that does not count. Any
generation task takes part that has `classes` and a method `attributes(samples [N,D], prompt [N]) -> Readings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.diffusion.policy import DenoisingPolicy
from anypo.domains.diffusion.tasks import DenoisingTask
from anypo.report import plots
from anypo.run import Run


class Readings(NamedTuple):
    """What a classifier sees: a class for every attribute, and how sure it is."""

    attr: Int[Tensor, "N A"]  # in [0, classes[a]), or -1
    confidence: Float[Tensor, "N A"]  # in [0,1]

    def confident(self, least: float) -> Int[Tensor, "N A"]:
        """The classes, -1 where the confidence is below `least`."""
        return torch.where(self.confidence >= least, self.attr, -1)


class Diversity(NamedTuple):
    entropies: Float[Tensor, " A"]  # of each attribute, in [0,1]
    div: Tensor  # their geometric mean, a scalar


class Index(NamedTuple):
    """Scalars in [0,1]: diversity on neutral prompts, near-worst and mean diversity over triggers, and the index that joins the first two."""

    intrinsic: Tensor
    ca_q: Tensor
    ca_mean: Tensor
    mgbi: Tensor


def class_counts(attr: Int[Tensor, " N"], index: Int[Tensor, " N"], groups: int, classes: int) -> Float[Tensor, "groups classes"]:
    """How often each class was read (-1: not at all) in each of the groups 0 ... groups-1, which `index` names row by row."""
    valid = attr >= 0
    cell = index * classes + attr.clamp(min=0)
    return torch.zeros(groups * classes, dtype=torch.float64).index_add(0, cell, valid.double()).view(groups, classes)


def normalized_entropy(counts: Float[Tensor, "*N K"]) -> Float[Tensor, "*N"]:
    """Equation 1: entropy of the shares over log K, in [0,1]; 0 where nothing was counted, 1 for a single class that was."""
    total = counts.sum(-1)
    share = counts / total.clamp(min=1)[..., None]
    if counts.shape[-1] == 1:
        return (total > 0).to(counts)
    return (-torch.special.xlogy(share, share).sum(-1) / math.log(counts.shape[-1])).clamp(min=0)


def group_diversity(attr: Int[Tensor, "N A"], group: Int[Tensor, " N"], classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Equations 1-2 for every group, in the order of their numbers: entropies [G,A] and their geometric means [G]."""
    names, index = torch.unique(group, return_inverse=True)
    entropies = torch.stack([normalized_entropy(class_counts(attr[:, a], index, len(names), k)) for a, k in enumerate(classes)], dim=1)
    return entropies, _geometric_mean(entropies)


def _geometric_mean(entropies: Float[Tensor, "*N A"]) -> Float[Tensor, "*N"]:
    return entropies.prod(-1) ** (1 / entropies.shape[-1])


def diversity(attr: Int[Tensor, "N A"], classes: Sequence[int]) -> Diversity:
    """Equation 2: the geometric mean of the attributes' entropies; one collapsed attribute makes it 0."""
    one = torch.zeros(len(attr), dtype=torch.int64)
    entropies = torch.cat([normalized_entropy(class_counts(attr[:, a], one, 1, k)) for a, k in enumerate(classes)])
    return Diversity(entropies, _geometric_mean(entropies))


def mgbi(
    neutral: Int[Tensor, "N A"], trigger: Int[Tensor, "M A"], trigger_id: Int[Tensor, " M"], classes: Sequence[int], q: float = 0.1
) -> Index:
    """Equation 3: sqrt(diversity of the neutral samples, pooled, times the q-quantile over triggers of each trigger's diversity)."""
    intrinsic = diversity(neutral, classes).div
    conditional = group_diversity(trigger, trigger_id, classes)[1]
    worst = conditional.quantile(q)
    return Index(intrinsic, worst, conditional.mean(), (intrinsic * worst).sqrt())


SHARES = (  # by prompt: shares of the two columns and of the three rows; prompt 0 is neutral, the others are triggers
    ((0.8, 0.2), (0.6, 0.3, 0.1)),
    ((0.95, 0.05), (0.9, 0.05, 0.05)),
    ((0.05, 0.95), (0.9, 0.05, 0.05)),
    ((0.95, 0.05), (0.05, 0.05, 0.9)),
    ((0.3, 0.7), (0.05, 0.9, 0.05)),
)


class AttributeModes(DenoisingTask):
    """Six Gaussians in two columns and three rows, unevenly likely by prompt; the reward is minus the distance to the nearest one.

    The attributes are the column and the row of the nearest mode; the classifier's confidence falls by 1 over a distance of 3, so that at the
    default limit of 0.6 a point farther than 1.2 from all modes has none.
    """

    name, size, count, prompts_per_step = "attributes", 2, 5, 5
    classes = (2, 3)
    STD, REACH, CONFIDENT = 0.2, 3.0, 0.6

    def __init__(self, *, evaluation_samples: int = 2000, **options: Any) -> None:
        super().__init__(evaluation_samples=evaluation_samples, **options)
        self.reward = lambda x, prompt: -self.distances(x).amin(1)

    @classmethod
    def modes(cls) -> Float[Tensor, "6 2"]:
        """The centres, row by row in each column."""
        return torch.cartesian_prod(torch.tensor([-2.0, 2.0]), torch.tensor([-2.0, 0.0, 2.0]))

    @classmethod
    def data(cls, count: int, generator: torch.Generator) -> tuple[Float[Tensor, "N 2"], Float[Tensor, "N 5"]]:
        """Points and their prompts, one-hot: what the model is pre-trained on."""
        prompt = torch.randint(cls.count, (count,), generator=generator)
        column, row = (
            torch.multinomial(torch.tensor([shares[a] for shares in SHARES])[prompt], 1, generator=generator)[:, 0] for a in range(2)
        )
        points = cls.modes()[3 * column + row] + cls.STD * torch.randn(count, 2, generator=generator)
        return points, torch.nn.functional.one_hot(prompt, cls.count).float()

    def condition(self, prompt: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(prompt, self.count).float()[:, None]

    def distances(self, x: Float[Tensor, "N 2"]) -> Float[Tensor, "N 6"]:
        """To all modes."""
        return (x[:, None] - self.modes().to(x)).norm(dim=-1)

    def attributes(self, x: Float[Tensor, "N 2"], prompt: Int[Tensor, " N"]) -> Readings:
        """Column and row of the nearest mode."""
        distance, mode = self.distances(x).min(1)
        confidence = (1 - distance / self.REACH).clamp(min=0)
        return Readings(torch.stack([mode // 3, mode % 3], dim=1), confidence[:, None].expand(-1, 2))

    def measures(self, x: Tensor, prompt: Tensor) -> dict[str, Tensor]:
        """`valid`: whether the classifier is sure of a sample."""
        return {"valid": (self.attributes(x, prompt).confidence[:, 0] >= self.CONFIDENT).float()}

    def index(self, policy: DenoisingPolicy, least: float = CONFIDENT) -> Index:
        """The measures of held-out samples, with readings of at least this confidence."""
        prompt = torch.arange(self.evaluation_samples) % self.count
        attr = self.attributes(self.samples(policy, prompt), prompt).confident(least)
        return mgbi(attr[prompt == 0], attr[prompt > 0], prompt[prompt > 0], self.classes)

    def evaluate(self, run: Run) -> dict[str, float]:
        """The index first, then what it is made of, then the reward."""
        found = self.index(run.policy)  # type: ignore[arg-type]
        return {"mgbi": float(found.mgbi), "intrinsic": float(found.intrinsic), "triggered": float(found.ca_q)} | super().evaluate(run)

    def figures(self, run: Run) -> list[tuple[str, Any]]:
        """The samples of every prompt in the plane."""
        from matplotlib.figure import Figure

        prompt = torch.arange(1000) % self.count
        x = self.samples(run.policy, prompt)  # type: ignore[arg-type]
        figure = Figure(figsize=(10, 2.6), layout="constrained")
        for p, axes in enumerate(figure.subplots(1, self.count)):
            axes.scatter(*x[prompt == p].T.numpy(), s=4, alpha=0.5, color=plots.color(0))
            axes.set(xlim=(-3.5, 3.5), ylim=(-3.5, 3.5), aspect="equal", title=f"trigger {p}" if p else "neutral")
        return [("Samples of the neutral prompt and of the four triggers", figure)]
