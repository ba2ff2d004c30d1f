"""FixPO: KL penalty with fixup phase (arXiv:2312.05405).

A plain KL penalty whose coefficient follows the largest KL of a minibatch keeps almost every state inside the trust region; a short fixup phase after the
epochs then takes gradient steps on the KL alone until every state of the batch satisfies KL <= eps. Against PPO it changes the objective (no clip)
and the update. Loss, coefficient and fixup follow the authors' code; the interpolation that ends a fixup which does not come to an end
by itself is a safety net of this library [reconstructed]. Left out: the coefficient that follows the mean KL instead of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.control.trpo import kl as kl
from anypo.policy import Loss, Signals
from anypo.seams.credit import GAE, whiten
from anypo.seams.groups import masked_mean
from anypo.seams.natural import assign, flatten, policy_parameters
from anypo.seams.objective import token_ratio
from anypo.seams.regularize import EntropyBonus, ValueLoss
from anypo.seams.update import GradientSteps, flatten_actions, minibatches

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

PerAction = Float[Tensor, "N T"]
WORST_KL = 1e6  # what a KL that is no number counts as
SMALLEST_BETA = 1e-2  # of a fixup step, so that it is no null step [ours]
HALVINGS = 30  # of the interpolation, before the update is given up


class PrimaryLoss(NamedTuple):
    loss: Tensor
    policy: Tensor  # minus the mean of ratio * advantage
    penalty: Tensor  # mean KL(old || new)


class BetaStep(NamedTuple):
    beta: float
    d_max: float


class Fixup(NamedTuple):
    violating: Tensor  # [B] bool
    loss: Tensor  # [B]
    done: bool


def primary_loss(logp: PerAction, old_logp: PerAction, advantages: PerAction, kl: PerAction, mask: Tensor, beta: float) -> PrimaryLoss:
    """Equation 1 without the critic and the entropy: importance-weighted policy gradient plus beta times the mean KL. No clip."""
    policy = -masked_mean(token_ratio(logp, old_logp, mask) * advantages, mask)
    penalty = masked_mean(kl, mask)
    return PrimaryLoss(policy + beta * penalty, policy, penalty)


def largest(kl: Tensor, mask: Tensor) -> float:
    """Equation 2: the largest KL over the mask; 0 where there is nothing. A KL that is no number counts as a million."""
    inside = torch.where(mask.bool(), kl.detach().nan_to_num(WORST_KL, WORST_KL), torch.zeros_like(kl))
    return float(inside.max()) if inside.numel() else 0.0


def beta_step(kl: Tensor, mask: Tensor, beta: float, eps: float, c_beta: float, lr_beta: float) -> BetaStep:
    """Equation 3 by plain gradient descent: beta grows when c_beta times the largest KL exceeds eps, and is never negative."""
    d_max = largest(kl, mask)
    return BetaStep(max(0.0, beta - lr_beta * (eps - c_beta * d_max)), d_max)


def fixup_mask(kl: Float[Tensor, "B M"], mask: Tensor, eps: float) -> Fixup:
    """Equation 4: which minibatches hold a state with KL > eps, and the mean KL of those over all their states (0 for the others)."""
    inside = mask.bool()
    violating = (inside & ~(kl <= eps)).any(dim=1)
    mean = torch.where(inside, kl, torch.zeros_like(kl)).sum(1) / inside.sum(1).clamp(min=1)
    return Fixup(violating, torch.where(violating, mean, torch.zeros_like(mean)), not bool(violating.any()))


def interpolation(kl_at: Sequence[Sequence[float]] | Tensor, eps: float) -> float:
    """Equation 5: the first of the weights w of (w, largest KL at w) that is inside the region, 0 when none is. [reconstructed]"""
    return next((float(w) for w, worst in kl_at if float(worst) <= eps), 0.0)


@dataclass
class PenalizedSurrogate:
    """Ratio times advantage, advantages whitened by minibatch, minus beta times the exact mean KL from the policy that acted."""

    beta: float = 1.0  # first coefficient, >= 0; the update moves it during the run

    needs = frozenset({"logp", "kl_old"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, beta = batch.counted, run.state.setdefault("fixpo", {"beta": self.beta})["beta"]
        found = primary_loss(new.logp, batch.logp, whiten(batch.advantage, mask), new.kl_old, mask, beta)
        return Loss(found.loss, {"kl": float(found.penalty.detach()), "kl_max": largest(new.kl_old, mask), "beta": beta})


@dataclass
class FixupSteps(GradientSteps):
    """Epochs of minibatch steps, each followed by a step on beta; then steps on the KL alone until no state is outside the region."""

    eps: float = 0.2  # largest KL of any state after an update, nats, > 0
    c_beta: float = 2.0  # slack: the coefficient aims at eps / c_beta, >= 0
    lr_beta: float = 0.01  # Adam step of the coefficient, >= 0
    fixup: str = "epoch"  # after every epoch, after the "last" one, or "off" (no guarantee)
    fixup_minibatch: int = 1024  # states in a fixup step, >= 1
    max_fix: int = 50  # passes over the batch before the interpolation, >= 1

    needs = frozenset({"kl_old"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if self.fixup not in ("epoch", "last", "off"):
            raise ValueError(f"update.fixup is epoch, last or off, not '{self.fixup}'")
        optimizer, parameters = run.optimizer(self.build), policy_parameters(run.policy)
        before, unit = flatten(parameters), self.unit
        if unit in ("auto", "action"):
            unit = "row" if run.policy.memoryless else "group"
            batch = flatten_actions(batch) if run.policy.memoryless else batch
        totals: dict[str, list[float]] = {}
        fixes = 0
        for epoch in range(self.epochs):
            for part in minibatches(batch, self.minibatches, unit, run.generator):
                found = self.one_step(part, loss_fn, optimizer, run)
                self.move_beta(found.get("kl_max", 0.0), run)
                for name, value in found.items():
                    totals.setdefault(name, []).append(value)
            if self.fixup == "epoch" or (self.fixup == "last" and epoch == self.epochs - 1):
                fixes += self.fix(batch, optimizer, run)
        weight = 1.0 if self.fixup == "off" else self.pull_back(batch, before, parameters, optimizer, run)
        kept = {"fix_fraction": fixes / (fixes + len(totals["loss"])), "fixup_steps": float(fixes), "interpolation": weight}
        return {name: sum(values) / len(values) for name, values in totals.items()} | kept | {"kl_max": self.worst(batch, run)}

    def fix(self, batch: Batch, optimizer: torch.optim.Optimizer, run: Run) -> int:
        """Passes over the batch with a step on the KL of every piece that leaves the region, until a pass needs none; the number of steps."""
        steps, rows = 0, max(1, self.fixup_minibatch // batch.horizon)
        pieces = [batch[i : i + rows] for i in range(0, len(batch), rows)]
        for _ in range(self.max_fix):
            taken = sum(self.fixup_step(piece, optimizer, run) for piece in pieces)
            steps += taken
            if taken == 0:
                break
        return steps

    def fixup_step(self, piece: Batch, optimizer: torch.optim.Optimizer, run: Run) -> bool:
        """One step on beta times the mean KL if any state of the piece is outside the region; the critic is left alone."""
        optimizer.zero_grad(set_to_none=True)
        beta = max(run.state["fixpo"]["beta"], SMALLEST_BETA) if "fixpo" in run.state else 1.0

        def loss(part: Batch, new: Signals) -> Loss:
            found = fixup_mask(new.kl_old.reshape(1, -1), part.counted.reshape(1, -1), self.eps)
            value = beta * found.loss.sum()
            return Loss(
                value.detach() if found.done else value, {"kl_max": largest(new.kl_old, part.counted), "step": float(not found.done)}
            )

        found = run.policy.backward(piece, {"kl_old"}, loss)
        if not found.metrics["step"]:
            return False
        optimizer.step()
        run.advance_version()
        self.move_beta(found.metrics["kl_max"], run)
        return True

    def move_beta(self, d_max: float, run: Run) -> None:
        """One Adam step on beta (eps - c_beta D_max); under a loss without the coefficient there is nothing to move."""
        if "fixpo" not in run.state:
            return
        kept = {"mean": 0.0, "square": 0.0, "count": 0} | run.state["fixpo"]
        gradient = min(self.eps - self.c_beta * d_max, WORST_KL)
        count = kept["count"] + 1
        mean, square = 0.9 * kept["mean"] + 0.1 * gradient, 0.999 * kept["square"] + 0.001 * gradient**2
        move = self.lr_beta * (mean / (1 - 0.9**count)) / (math.sqrt(square / (1 - 0.999**count)) + 1e-8)
        run.state["fixpo"] = {"beta": max(0.0, kept["beta"] - move), "mean": mean, "square": square, "count": count}

    def pull_back(self, batch: Batch, before: Tensor, parameters: list[Tensor], optimizer: torch.optim.Optimizer, run: Run) -> float:
        """If the region is still left: go back towards the old policy by halves until it is not, and forget the optimizer's momentum. [reconstructed]"""
        after, kl_at = flatten(parameters), [(1.0, self.worst(batch, run))]
        while kl_at[-1][1] > self.eps and len(kl_at) <= HALVINGS:
            weight = kl_at[-1][0] / 2
            assign(parameters, before + weight * (after - before))
            kl_at.append((weight, self.worst(batch, run)))
        weight = interpolation(kl_at, self.eps)
        if weight < 1:
            assign(parameters, before + weight * (after - before))
            for parameter in parameters:
                optimizer.state.pop(parameter, None)
            run.advance_version()
        return weight

    def worst(self, batch: Batch, run: Run) -> float:
        """The largest KL of any counted state under the parameters of this moment."""
        return largest(run.policy.observe(batch, {"kl_old"}).kl_old, batch.counted)


METHOD = PPO.but(
    name="fixpo",
    paper=Paper("Guaranteed Trust Region Optimization via Two-Phase KL Penalization", "2312.05405", 2023),
    summary="an adaptive KL penalty, and steps on the KL alone until every state is inside the trust region",
    credit=GAE(gamma=0.99, lam=0.95, normalize=False),
    objective=PenalizedSurrogate(),
    regularize=(ValueLoss(coefficient=0.5), EntropyBonus(coefficient=0.01)),
    update=FixupSteps(epochs=10, minibatches=32, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
)
