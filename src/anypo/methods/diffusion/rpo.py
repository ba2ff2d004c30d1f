"""RPO: routing policy optimization over attention blocks (velox-world.com/rpo).

Flow-GRPO explores by noise in the sampler. Here the sampler stays the deterministic ODE and chance is inside the network: at a few steps the
attention of the layers between anchors is made block-sparse along sampled routes, which moves the velocity a little. A Gaussian around the dense
velocity scores the move, and two rollouts that differ in nothing but their routes are each other's baseline. The gradient is that of the dense
velocity, so what was learned stays when routing is taken away. Against Flow-GRPO it changes `rollout` and `credit`; a step's log-probability is the
mean over its D numbers, and batches train the routed steps alone. Equations: the abstract; the draw of routes, the automatic deviation and
the scale of the advantages [reconstructed].
A policy must offer what `anypo.domains.diffusion.patch_flow.PatchFlow` has: `blocks`, `layers`, and a call with `keep` and `seen`.
Left out: the penalty on the dense velocity's distance from the reference (StepKL is that up to the deviation), and sparse kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import ode_schedule
from anypo.domains.diffusion.patch_flow import block_mass, routed_attention
from anypo.domains.diffusion.policy import step_signals
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import StepClip, StepKL
from anypo.methods.diffusion.flow_grpo import loss as clipped_loss
from anypo.seams.groups import broadcast, group_size
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run
    from anypo.task import Prompt

__all__ = ["METHOD", "block_mass", "deviation", "logp", "loss", "pair_advantages", "route", "routed_attention"]

TINY = 1e-12  # smallest mass and smallest uniform number that are told from 0


def route(
    M: Float[Tensor, "*N B B"], u: Float[Tensor, "*N B B"], u_dense: Float[Tensor, "*N B"], K: int, p_dense: float
) -> Float[Tensor, "*N B B"]:
    """Equation 2: 1 for the key blocks that each query block keeps. All of them where u_dense < p_dense; else its own and K-1 others, drawn without
    replacement in proportion to M by the largest log M + Gumbel noise."""
    own = torch.eye(M.shape[-1], dtype=torch.bool)
    gumbel = -(-u.clamp(min=TINY).log()).clamp(min=TINY).log()
    drawn = (M.clamp(min=TINY).log() + gumbel).masked_fill(own, -torch.inf).topk(K - 1, dim=-1).indices
    keep = own.to(M).expand(*drawn.shape[:-1], -1).scatter(-1, drawn, 1.0)
    return torch.where((u_dense < p_dense)[..., None], torch.ones_like(keep), keep)


def deviation(v_routed: Float[Tensor, "N T D"], v_dense: Float[Tensor, "N T D"], routed: Float[Tensor, "N T"]) -> Tensor:
    """Equation 5, automatic: root mean square of what routes changed, over all numbers of routed steps; a constant."""
    change = (v_routed - v_dense).detach()[routed.bool()]
    return change.square().mean().sqrt() if change.numel() else change.new_zeros(())


def logp(
    v_routed: Float[Tensor, "N T D"], v_dense: Float[Tensor, "N T D"], routed: Float[Tensor, "N T"], sig: float | str = "auto"
) -> Float[Tensor, "N T"]:
    """Equation 5: minus the mean squared distance of the routed from the dense velocity over 2 sig^2; 0 for steps that were not routed.

    `sig`: a number > 0, or "auto". The gradient flows through `v_dense` alone.
    """
    scale = deviation(v_routed, v_dense, routed).clamp(min=TINY) if sig == "auto" else torch.as_tensor(sig, dtype=v_dense.dtype)
    found = -(v_routed.detach() - v_dense).square().mean(-1) / (2 * scale**2)
    return torch.where(routed.bool(), found, torch.zeros_like(found))


def pair_advantages(reward: Float[Tensor, "P 2"], norm: bool) -> Float[Tensor, "P 2"]:
    """Equation 6: half of the difference to the other one, divided by the deviation (ddof 0) of the pairs' differences when `norm`."""
    half = (reward - reward.flip(1)) / 2
    return half / (2 * half[:, 0].std(correction=0) + 1e-4) if norm else half


def loss(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], routed: Tensor, adv: Float[Tensor, " N"], eps: float) -> Tensor:
    """Equation 7: minus the clipped surrogate, averaged over routed steps; at ratio 1 its gradient is that of -mean(A logp)."""
    return clipped_loss(logp, old_logp, routed, adv, eps)


@dataclass
class RoutedPairs:
    """Pairs of ODE chains from the same noise, with routed attention at a few steps; those steps are the actions that count."""

    steps: int = 10  # of the ODE, >= 1
    routed: int = 2  # n_r: how many of the first half of the steps are routed, drawn for each pair, >= 1
    keep: int | None = None  # K: key blocks a query block keeps, in [1,B]; None = half of them, rounded up
    p_dense: float = 0.25  # chance that a query block keeps all blocks, in [0,1]
    anchors: tuple[int, ...] = (0, -1)  # layers that are never routed
    sig: float | None = None  # deviation of the velocity's Gaussian, > 0; None = automatic

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        task, policy = run.task, run.policy
        if not hasattr(task, "levels") or not hasattr(policy, "blocks"):
            raise ValueError(
                f"{run.method.name} routes attention between blocks, and the model of '{task.name}' has none; take --task patches:classifier"
            )
        if any(p.samples % 2 for p in prompts):
            raise ValueError(f"{run.method.name} compares pairs; set select.group_size to an even number")
        if not 1 <= self.routed <= max(1, self.steps // 2):
            raise ValueError(f"rollout.routed must be between 1 and half of the {self.steps} steps, not {self.routed}")
        if self.keep is not None and not 1 <= self.keep <= policy.blocks:
            raise ValueError(f"rollout.keep must be between 1 and the {policy.blocks} blocks, not {self.keep}")
        return run.collect(prompts, by=self.collect)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        task: Any = run.task
        policy: Any = run.policy
        prompt_id = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        pairs, steps = len(prompt_id) // 2, ode_schedule(task.levels(self.steps))
        twice = torch.arange(pairs).repeat_interleave(2)
        early = torch.rand(pairs, max(1, self.steps // 2), generator=run.generator).argsort(1)[:, : self.routed]
        routed = torch.zeros(pairs, self.steps, dtype=torch.bool).scatter(1, early, True)[twice]
        condition = task.condition(prompt_id)[:, 0]
        x = [torch.randn(pairs, task.size, generator=run.generator)[twice]]
        dense, moved = [], []
        for k in range(self.steps):
            level, rows = steps.level[k].expand(len(twice)), routed[:, k].nonzero().flatten()
            seen: list[Tensor] | None = [] if len(rows) else None  # masses are needed where routes are drawn
            dense.append(policy(x[-1], level, condition, seen=seen))
            moved.append(dense[-1].clone())
            if seen is not None:
                keep = self.routes(torch.stack(seen, dim=1)[rows], policy.blocks, run.generator)
                moved[-1][rows] = policy(x[-1][rows], level[rows], condition[rows], keep=keep)
            x.append(x[-1] + steps.pull[k].to(x[-1]) * moved[-1])
        velocity, reached = torch.stack(dense, dim=1), torch.stack(x, dim=1)
        sig = float(deviation(torch.stack(moved, dim=1), velocity, routed)) if self.sig is None else self.sig
        run.log(route_deviation=sig)
        pull = steps.pull.to(reached).expand(len(twice), -1)
        std = torch.where(routed, max(sig, math.sqrt(TINY)) * pull.abs(), torch.zeros_like(pull))
        batch = Batch(action=reached[:, 1:], mask=routed, logp=torch.zeros(routed.shape), group=twice, context=reached[:, :-1])
        batch.signals = {
            "prompt_id": prompt_id,
            "condition": condition[:, None].expand(-1, self.steps, -1),
            "level": steps.level[:-1].to(reached).expand(len(twice), -1),
            "step": torch.stack([torch.ones_like(pull), pull, std], dim=-1),
        }
        batch.valid = torch.ones_like(routed)
        batch.terminated, batch.truncated = torch.ones(len(twice), dtype=torch.bool), torch.zeros(len(twice), dtype=torch.bool)
        found = step_signals(batch.context + pull[..., None] * velocity, std, batch, {"logp", "entropy", "mean", "log_std"})
        batch.logp = found.pop("logp")
        batch.signals |= {f"old_{name}": value for name, value in found.items()}
        return batch

    def routes(self, mass: Float[Tensor, "N L B B"], blocks: int, generator: torch.Generator) -> Float[Tensor, "N L B B"]:
        """Routes of every row and layer, from the dense pass's block masses; anchors keep everything."""
        K = math.ceil(blocks / 2) if self.keep is None else self.keep
        keep = route(mass, torch.rand(mass.shape, generator=generator), torch.rand(mass.shape[:-1], generator=generator), K, self.p_dense)
        keep[:, list(self.anchors)] = 1.0
        return keep


@dataclass
class PairDifference:
    """Half of the reward's difference to the other member of a group of two."""

    norm: bool = True  # divide by the deviation of the pairs' differences
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if bool((group_size(batch.group) != 2).any()):
            raise ValueError(f"{run.method.name} compares the two members of a pair; set select.group_size to 2")
        order: Int[Tensor, " N"] = batch.group.argsort(stable=True)
        found = pair_advantages(row_reward(batch, self.weights)[order].view(-1, 2), self.norm).flatten()
        return broadcast(torch.empty_like(found).index_copy(0, order, found), batch.mask)


METHOD = FLOW_GRPO.but(
    name="rpo",
    paper=Paper("Routing Policy Optimization", "", 2026),
    summary="exploration by sampled block-sparse attention instead of noise in the sampler; two rollouts that differ in their routes alone",
    task="patches:classifier",
    select=UniformPrompts(group_size=2),
    rollout=RoutedPairs(),
    credit=PairDifference(),
    objective=StepClip(clip=0.2, reduce="mean"),
    regularize=(StepKL(beta=0.0, reduce="mean"),),
    update=GradientSteps(epochs=1, unit="row"),
)
