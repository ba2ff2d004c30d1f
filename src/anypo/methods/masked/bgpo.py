"""BGPO: boundary-guided policy optimization for masked-diffusion language models (arXiv:2510.11683).

The likelihood of an answer is bounded by an ELBO, estimated with n random masks of it. In a ratio objective the estimate stands inside an
exponential, so the graphs of all n samples are kept for one backward pass. BGPO maximizes a lower bound that is a plain sum over the samples:
the tangent 1 + d of exp(d) where the advantage is positive, Jensen's mean of exponentials where it is negative. Each sample is back-propagated and
freed, memory does not grow with n, and on-policy value and gradient are those of the ELBO objective.

Against GRPO: ELBO terms instead of prefix-block log-probs, the linear bound instead of the clipped ratio, no KL. Equations 1, 3 and 4 from the paper;
the advantage and the two ways of drawing masks are [reconstructed]. Left out: the clip of the ELBO objective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.states import with_hidden
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.regression import row_advantage
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

DRIFT_LIMIT = 10.0  # of d inside an exponential
WEIGHTS = ("count", "inv_t")
DRAWN = "elbo_"  # prefix of the signals [N,n,...] that hold what belongs to each Monte-Carlo sample


class Bound(NamedTuple):
    terms: Tensor  # g [N,n]
    objective: Tensor  # scalar, to maximize


class Slopes(NamedTuple):
    bgpo: Tensor  # d objective / d l_new [N,n]
    elbo: Tensor


class Masks(NamedTuple):
    masked: Tensor  # [N,n,T] bool, at least one True wherever a row has an action
    weight: Tensor  # [N,n] of the sum of log-probs in the ELBO term


def elbo_weight(masked: Bool[Tensor, "*N L"], length: Tensor | int, weight: str, t: Tensor | None = None) -> Float[Tensor, " *N"]:
    """What multiplies the sum over the masked tokens in equation 1: L / |Omega| ("count") or 1 / t ("inv_t"). Raises ValueError for another name."""
    if weight == "count":
        return length / masked.sum(-1).clamp(min=1).double()
    if weight == "inv_t" and t is not None:
        return 1 / t
    raise ValueError(f"unknown weight '{weight}' of ELBO terms, or no t for it; use {' or '.join(WEIGHTS)}")


def elbo_term(
    token_logp: Float[Tensor, "*N L"], masked: Tensor, weight: str = "count", t: Float[Tensor, " *N"] | None = None
) -> Float[Tensor, " *N"]:
    """Equation 1: one sample's estimate of the ELBO from the log-probs of the masked tokens. Others may hold anything."""
    inside = masked.bool()
    total = torch.where(inside, token_logp, token_logp.new_zeros(())).sum(-1)
    return total * elbo_weight(inside, masked.shape[-1], weight, t).to(total.dtype)


def drift(l_new: Tensor, l_old: Tensor, length_norm: bool, L: Tensor | int) -> Float[Tensor, "N n"]:
    """Equation 2: d = l_new - l_old, by token with `length_norm`. `L` is a number or [N]."""
    return (l_new - l_old) / (torch.as_tensor(L, dtype=l_new.dtype).reshape(-1, 1) if length_norm else 1)


def bgpo(
    l_new: Float[Tensor, "N n"], l_old: Float[Tensor, "N n"], adv: Float[Tensor, " N"], length_norm: bool = False, L: Tensor | int = 1
) -> Bound:
    """Equation 4: A (1 + d) where A >= 0, A exp(d) where A < 0, and its mean over samples and rows."""
    d, a = drift(l_new, l_old, length_norm, L), adv[:, None]
    terms = a * torch.where(a >= 0, 1 + d, d.clamp(max=DRIFT_LIMIT).exp())
    return Bound(terms, terms.mean(1).mean())


def elbo_objective(
    l_new: Float[Tensor, "N n"], l_old: Float[Tensor, "N n"], adv: Float[Tensor, " N"], length_norm: bool = False, L: Tensor | int = 1
) -> Tensor:
    """Equation 3, what is bounded: the mean over rows of A exp(mean d)."""
    return (adv * drift(l_new, l_old, length_norm, L).mean(1).clamp(max=DRIFT_LIMIT).exp()).mean()


def grad_coeff(
    l_new: Float[Tensor, "N n"], l_old: Float[Tensor, "N n"], adv: Float[Tensor, " N"], length_norm: bool = False, L: Tensor | int = 1
) -> Slopes:
    """What multiplies the gradient of each l_j in both objectives."""
    leaf = l_new.detach().clone().requires_grad_(True)
    values = bgpo(leaf, l_old, adv, length_norm, L).objective, elbo_objective(leaf, l_old, adv, length_norm, L)
    return Slopes(*(torch.autograd.grad(value, leaf)[0] for value in values))


def draw_masks(counted: Bool[Tensor, "N T"], samples: int, generator: torch.Generator, weight: str = "count") -> Masks:
    """`samples` masks of every row's actions. "count": their number uniform in 1..L, then a uniform subset. "inv_t": t uniform in (0,1] but no less
    than 1/L, each token masked with chance t; a draw without any masks one token, at which a smaller t would have no bounded weight."""
    counted = counted[:, None]
    shape = (len(counted), samples)
    noise = torch.rand((*shape, counted.shape[-1]), generator=generator).masked_fill(~counted, torch.inf)
    length = counted.sum(-1)
    share = (1 - torch.rand(shape, generator=generator)).maximum(1 / length.clamp(min=1))
    order = noise.argsort(-1).argsort(-1)
    chosen = order < (share * length).ceil()[..., None] if weight == "count" else (noise < share[..., None]) | (order == 0)
    masked = chosen & counted
    return Masks(masked, elbo_weight(masked, length, weight, share).float())


@dataclass
class LinearBound:
    """Minus the bound over the one Monte-Carlo sample that the batch shows. A per-token credit counts by its mean over the masked tokens."""

    length_norm: bool = False  # d by token: for answers so long that exp(d) would explode

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        if "elbo_weight" not in batch.signals:
            raise ValueError(
                f"{run.method.name}: the bound is on ELBO terms of random masks, which the update of bgpo draws; use --update bgpo"
            )
        some = batch.counted.any(1)
        mask, weight = batch.counted[some], batch.signals["elbo_weight"][some]
        if not len(mask):
            return Loss(new.logp.sum() * 0)
        adv = row_advantage(batch.advantage[some], mask)
        l_new, l_old = ((torch.where(mask, logp[some], 0.0).sum(1) * weight)[:, None] for logp in (new.logp, batch.logp))
        value = bgpo(l_new, l_old, adv, self.length_norm, batch.signals["elbo_length"][some]).objective
        return Loss(-value, {"elbo": float(l_new.detach().mean()), "elbo_drift": float((l_new.detach() - l_old).mean())})


@dataclass
class Share:
    """One sample's part of a mean over samples of a method's loss."""

    loss_fn: MethodLoss
    samples: int

    @property
    def needs(self) -> frozenset[str]:
        return self.loss_fn.needs

    def __call__(self, batch: Batch, new: Signals) -> Loss:
        found = self.loss_fn(batch, new)
        return Loss(found.value / self.samples, found.metrics)


@dataclass
class SampleBySample(GradientSteps):
    """Optimizer steps on the mean of the loss over n random masks of the answers: each mask's graph is built, back-propagated and freed before the
    next. Every epoch has masks of its own; all are drawn, and scored under the policy that acted, before the first step."""

    samples: int = 16  # masks of every answer, >= 1
    weight: str = "count"  # of a mask's ELBO term: count (|masked| uniform) or inv_t (independent masking)

    needs = frozenset({"views"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if self.samples < 1:
            raise ValueError(f"update.samples must be at least 1, not {self.samples}")
        if "sampled_elsewhere" in batch.signals:
            raise ValueError(
                f"{run.method.name} scores its masks under the policy that acted, which is the current one; use --rollout grpo"
            )
        drawn = [self.draw(batch, run) for _ in range(self.epochs)]
        steps = replace(self, epochs=1)
        found = [GradientSteps.__call__(steps, part, loss_fn, run) for part in drawn]
        return {name: sum(metrics[name] for metrics in found) / len(found) for name in found[0]}

    def draw(self, batch: Batch, run: Run) -> Batch:
        """The batch with its masks, and with the log-probs under them that the acting policy and the reference give, as signals [N,n,...]."""
        masks = draw_masks(batch.counted, self.samples, run.generator, self.weight)
        wanted = {"old_logp", *run.method.needs("objective", "regularize")}
        scored = [with_hidden(batch, masks.masked[:, j]) for j in range(self.samples)]
        for view in scored:
            run.prepare_signals(view, wanted)
        names = [name for name in scored[0].signals if name.startswith(("old_", "ref_"))]
        signals = {DRAWN + name: torch.stack([view.signals[name] for view in scored], 1) for name in names}
        signals |= {"elbo_masked": masks.masked, "elbo_weight": masks.weight, "elbo_length": batch.counted.sum(1)}
        return batch.but(signals=batch.signals | signals)

    def sample(self, part: Batch, j: int) -> Batch:
        """The rows as sample j sees them."""
        view, prefixes = with_hidden(part, part.signals["elbo_masked"][:, j]), (DRAWN + "old_", DRAWN + "ref_")
        for name, value in part.signals.items():
            if name.startswith(prefixes):
                view.signals[name.removeprefix(DRAWN)] = value[:, j]
        view.signals["elbo_weight"] = part.signals["elbo_weight"][:, j]
        return view.but(logp=view.signals["old_logp"])

    def backward(self, part: Batch, loss_fn: MethodLoss, run: Run) -> Loss:
        share = Share(loss_fn, self.samples)
        losses = [run.backward(self.sample(part, j), share) for j in range(self.samples)]  # type: ignore[arg-type]
        metrics = {name: sum(loss.metrics[name] for loss in losses) / self.samples for name in losses[0].metrics}
        return Loss(torch.stack([loss.value for loss in losses]).sum(), metrics)


METHOD = GRPO.but(
    name="bgpo",
    paper=Paper("Boundary-Guided Policy Optimization for Memory-efficient RL of Diffusion Large Language Models", "2510.11683", 2025),
    domain="masked",
    summary="a lower bound of the ELBO objective that is a sum over Monte-Carlo masks, back-propagated one by one in constant memory",
    credit=GroupRelative(std=True, ddof=0, eps=1e-4),
    objective=LinearBound(),
    regularize=(),
    update=SampleBySample(),
)
