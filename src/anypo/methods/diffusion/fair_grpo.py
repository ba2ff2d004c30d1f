"""Fair-GRPO: Flow-GRPO for even shares of attributes, measured by HoloFair's MGBI (arXiv:2605.24687).

A classifier reads attributes (columns and rows here, gender, age and race in the paper) of every sample. A sample is rewarded by how rare its class
is in the group of its own prompt: the log of the class's target share over its share in the group, centred, clipped and summed over attributes,
plus a quality score. Against Flow-GRPO it changes the reward alone; the KL to the reference stays. The measures - diversity of neutral prompts,
near-worst diversity over triggers, and their geometric mean MGBI - live with the domain's attributes and are public here.
A task takes part that has `classes` and `attributes(samples, prompt)`, see `anypo.domains.diffusion.attributes`.
Equations: measures, log-ratio, centring and clipping from the paper's public text; smoothed shares of the prompt's own group, the rule for invalid
readings, the mix with quality and the guards against hacking [reconstructed]. The spatial-and-frequency classifier is the domain's `spafreq.py`.
Left out: the paper's prompts and its three trained classifiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.attributes import Readings, diversity, mgbi
from anypo.domains.diffusion.sample import final
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.seams.groups import group_sum, standardize
from anypo.seams.reward import weighted_sum

if TYPE_CHECKING:
    from anypo.run import Run

__all__ = ["METHOD", "FairReward", "base_reward", "diversity", "fair_reward", "mgbi", "reward_hacking", "total_reward"]


def base_reward(
    attr: Int[Tensor, " N"], group: Int[Tensor, " N"], target: Float[Tensor, " K"], lam: float = 0.5, clip: float = 1.0
) -> Float[Tensor, " N"]:
    """Equations 4-6 for one attribute: log(target share / share in the group) of each row's class, shares smoothed by `lam` >= 0, centred over the
    group's valid rows and then clipped to +-clip. Rows with class -1 count nowhere and get -clip."""
    valid, own = attr >= 0, attr.clamp(min=0)
    counts = group_sum(torch.nn.functional.one_hot(own, len(target)).to(target) * valid[:, None], group)
    total = counts.sum(1)
    share = (counts.gather(1, own[:, None])[:, 0] + lam) / (total + lam * len(target)).clamp(min=torch.finfo(target.dtype).tiny)
    base = torch.where(valid, target[own].log() - torch.where(valid, share, torch.ones_like(share)).log(), torch.zeros_like(share))
    centred = (base - group_sum(base, group) / total.clamp(min=1)).clamp(-clip, clip)
    return torch.where(valid, centred, torch.full_like(centred, -clip))


def fair_reward(
    attr: Int[Tensor, "N A"], group: Int[Tensor, " N"], classes: Sequence[int], target: Any = None, lam: float = 0.5, clip: float = 1.0,
    weights: Sequence[float] | Tensor | None = None,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equation 7: the weighted sum over attributes of `base_reward`. `target`: A lists of shares, None = even; `weights`: [A], None = all 1.

    Raises ValueError when targets do not fit the classes or hold a share that is not above 0.
    """
    shares = _targets(target, classes)
    if attr.shape[1] != len(classes):
        raise ValueError(f"readings of {attr.shape[1]} attributes, but classes of {len(classes)}; give one number of classes an attribute")
    each = torch.stack([base_reward(attr[:, a], group, share, lam, clip) for a, share in enumerate(shares)], dim=1)
    return weighted_sum(each, tuple(float(w) for w in (weights if weights is not None else [1.0] * len(classes))))


def total_reward(fair: Float[Tensor, " N"], quality: Float[Tensor, " N"], w_f: float = 1.0, w_q: float = 0.3) -> Float[Tensor, " N"]:
    """Equation 7: w_f times the fairness reward plus w_q times the quality, standardized over the batch (ddof 0; 0 when constant)."""
    return w_f * fair + w_q * standardize(quality, torch.zeros(len(quality), dtype=torch.int64), ddof=0, eps=0.0)


def reward_hacking(training: tuple[float, float], held_out: tuple[float, float]) -> bool:
    """Guard (iv): whether a measure (before, after) rose for the classifier that rewards and fell for one that training never sees."""
    return training[1] > training[0] and held_out[1] < held_out[0]


def _targets(target: Any, classes: Sequence[int]) -> list[Float[Tensor, " K"]]:
    shares = [torch.as_tensor(t, dtype=torch.float64) for t in (target if target is not None else [[1 / k] * k for k in classes])]
    if [len(t) for t in shares] != list(classes):
        raise ValueError(f"the target has shares for {[len(t) for t in shares]} classes, the attributes have {list(classes)}")
    if not all(bool((t > 0).all()) for t in shares):
        raise ValueError("a target share must be above 0; give a small one to a class that should be rare")
    return shares


@dataclass
class FairReward:
    """Rarity of a sample's attributes in its group, plus the task's own reward as quality."""

    fairness: float = 1.0  # w_f, weight of the fairness reward, >= 0
    quality: float = 0.3  # w_q, weight of the task's reward standardized over the batch, >= 0
    lam: float = 0.5  # >= 0, added to every count of a class
    clip: float = 1.0  # > 0, limit of an attribute's reward; an invalid reading gets its negative
    least_confidence: float = 0.6  # in [0,1]; readings below are invalid, so a spoiled sample gains nothing
    target: tuple[tuple[float, ...], ...] | None = None  # shares wanted, by attribute; None = even
    attribute_weights: tuple[float, ...] | None = None  # w_a; None = all 1
    weights: tuple[float, ...] | None = None  # of the task's K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        task: Any = run.task
        if not hasattr(task, "attributes"):
            raise ValueError(
                f"{run.method.name} needs a task whose samples have attributes, and '{task.name}' reads none; take --task attributes"
            )
        readings: Readings = task.attributes(final(batch), batch.signal("prompt_id"))
        attr = readings.confident(self.least_confidence)
        fair = fair_reward(attr, batch.group, task.classes, self.target, self.lam, self.clip, self.attribute_weights)
        quality = weighted_sum(run.score_rewards(batch), self.weights)
        run.log(fairness=float(fair.mean()), quality=float(quality.double().mean()), valid=float((attr >= 0).double().mean()))
        return total_reward(fair, quality.to(fair), self.fairness, self.quality).to(batch.logp)


METHOD = FLOW_GRPO.but(
    name="fair_grpo",
    paper=Paper("HoloFair MGBI metric and Fair-GRPO debiasing", "2605.24687", 2026),
    summary="samples are rewarded by how rare their attributes are in the group of their prompt, so that shares even out",
    task="attributes",
    reward=FairReward(),
).set("select.group_size", 24)
