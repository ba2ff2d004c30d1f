"""DGPO: directed graph policy optimization for architecture search (arXiv:2602.19261).

A discrete diffusion model of graphs is tuned by an eager policy gradient: the likelihood of the FINAL graph at noisy states of its own trajectory,
weighted by the advantage, without a ratio. What makes it work for directed acyclic graphs (topological order, positions at the nodes, the upper
triangle alone) is in `domains/masked/graphs.py`; without positions it is GDPO, for undirected graphs.

Against REINFORCE: the credit (running statistics over batches, clipped), the objective and an update that draws noisy states of the trajectories,
on a model that is pre-trained on the task's known architectures first. Equations 1-4 are the domain's, 7 to 9 follow the authors' code.
[reconstructed]: one optimizer step a pass over the batch. Left out: graphs of different sizes in one batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.cells import VALID
from anypo.domains.masked.graphs import STATE, TIME, pretrain
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

LIMIT = 5.0  # of an advantage
NO_SPREAD = 1e-8
KNOWN = "known"  # what tasks of graphs offer: architectures to pre-train on


class Statistics(NamedTuple):
    mean: float
    std: float


class Epochs(NamedTuple):
    adv: list[Tensor]
    stats: list[dict[str, float]]


def moved(before: Statistics | None, reward: Float[Tensor, " N"], ema: float) -> Statistics:
    """Equation 7: the first batch's mean and deviation (ddof 0), then a moving average of them with weight `ema`."""
    now = Statistics(float(reward.mean()), float(reward.std(correction=0)))
    if before is None:
        return now
    return Statistics(*((1 - ema) * old + ema * new for old, new in zip(before, now, strict=True)))


def normalized(reward: Float[Tensor, " N"], stats: Statistics) -> Float[Tensor, " N"]:
    """Equation 7: (R - mean) / std within +-5; all 0 for fewer than 2 samples or rewards that differ by less than 1e-8."""
    if len(reward) < 2 or float(reward.max() - reward.min()) < NO_SPREAD:
        return torch.zeros_like(reward)
    return ((reward - stats.mean) / max(stats.std, NO_SPREAD)).clamp(-LIMIT, LIMIT)


def advantages(rewards: list[list[float]], ema: float = 0.1) -> Epochs:
    """Equation 7 over batches of any sizes; the statistics are moved before they are used."""
    found, seen, stats = list[Tensor](), list[dict[str, float]](), None
    for epoch in rewards:
        reward = torch.as_tensor(epoch, dtype=torch.float64)
        stats = moved(stats, reward, ema)
        found.append(normalized(reward, stats))
        seen.append(stats._asdict())
    return Epochs(found, seen)


def weighted_likelihood(
    nodes: Float[Tensor, "N n"], node_mask: Tensor, edges: Float[Tensor, "N P"], edge_mask: Tensor, adv: Tensor, lam_e: float
) -> Tensor:
    """Equation 8 from cross-entropies: the mean over all valid nodes of the batch of A times theirs, plus `lam_e` times that of the edges. `adv` [N,1]."""
    total = masked_mean(adv * nodes, node_mask)
    return total + lam_e * masked_mean(adv * edges, edge_mask) if lam_e and edges.numel() else total


def eager_loss(
    logits_X: Float[Tensor, "N n a"], X0: Int[Tensor, "N n"], logits_E: Float[Tensor, "N n n b"], E0: Int[Tensor, "N n n"], node_mask: Tensor,
    adv: Float[Tensor, " N"], lam_e: float = 0.0,
) -> Tensor:  # fmt: skip
    """Equation 8 at one time, to minimize; edges are all ordered pairs of different valid nodes."""
    mask = node_mask.bool()
    pairs = mask[:, :, None] & mask[:, None] & ~torch.eye(mask.shape[1], dtype=torch.bool)
    nodes, edges = (-g.log_softmax(-1).gather(-1, x[..., None])[..., 0] for g, x in ((logits_X, X0), (logits_E, E0)))
    return weighted_likelihood(nodes, mask, edges.flatten(1), pairs.flatten(1), adv[:, None], lam_e)


# ---- components


@dataclass
class Pretraining:
    """Learn the task's known architectures before the first step."""

    steps: int = 600  # optimizer steps, >= 0

    def __call__(self, run: Run) -> None:
        known = getattr(run.task, KNOWN, None)
        if known is None:
            raise ValueError(f"{run.method.name} pre-trains on known graphs, of which the task '{run.task.name}' has none; take cells")
        policy: Any = run.policy
        pretrain(policy, known(), self.steps, run.seed)


@dataclass
class ArchitectureReward:
    """The task's reward, or its negative; what is invalid keeps its own."""

    inverse: bool = False  # look for the worst architectures

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        found = run.score_rewards(batch)
        valid = batch.signals.get(VALID, batch.mask.any(1))
        run.log(valid=float(valid.double().mean()))
        return torch.where(valid, -found, found) if self.inverse else found


@dataclass
class RunningStatistics:
    """Rewards relative to a moving average over batches. Rows with the signal `valid_graph` False count nowhere."""

    ema: float = 0.1  # weight of the newest batch, in (0,1]
    stats: Statistics | None = field(default=None, init=False, repr=False)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        valid = batch.signals.get(VALID, batch.mask.any(1))
        reward = row_reward(batch)
        batch.keep = batch.counted & valid[:, None]
        found = torch.zeros_like(reward)
        if bool(valid.any()):
            self.stats = moved(self.stats, reward[valid], self.ema)
            found[valid] = normalized(reward[valid], self.stats)
            run.log(reward_mean=self.stats.mean, reward_std=self.stats.std)
        return broadcast(found.to(batch.logp.dtype), batch.mask)

    def state_dict(self) -> dict[str, Any]:
        return {"stats": None if self.stats is None else list(self.stats)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stats = None if state["stats"] is None else Statistics(*state["stats"])


@dataclass
class EagerLikelihood:
    """Equation 8. The segment of an entry is 0 for nodes, 1 for edges; without segments all entries are nodes."""

    edge_weight: float = 5.0  # lam_e, >= 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        edge = batch.segment > 0 if batch.segment is not None else torch.zeros_like(batch.mask)
        mask = batch.counted
        return Loss(weighted_likelihood(-new.logp, mask & ~edge, -new.logp, mask & edge, batch.advantage, self.edge_weight))


@dataclass
class EagerSteps(GradientSteps):
    """Passes over the batch, each one optimizer step on the mean over a random part of the times of every trajectory, drawn for each row by itself."""

    epochs: int = 4  # passes over the batch, >= 1
    learning_rate: float | None = 1e-4  # > 0; large ones cost validity
    max_grad_norm: float | None = 1.0  # > 0
    share: float = 0.3  # of the times that a pass looks at, in (0,1]
    step_freq: int = 2  # divides the loss, >= 1
    frozen: float = 0.0  # share of the layers that are not trained, the first ones, in [0,1)

    needs = frozenset({STATE})  # the policy reads a graph at any noisy state

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if not 0 < self.share <= 1:
            raise ValueError(f"update.share is a share of the times, in (0,1], not {self.share}")
        if self.frozen:
            policy: Any = run.policy
            policy.freeze(self.frozen)
        views = [self.view(batch, run) for _ in range(self.epochs)]
        found = [GradientSteps.__call__(replace(self, epochs=1), view, loss_fn, run) for view in views]
        return {name: sum(metrics[name] for metrics in found) / len(found) for name in found[0]}

    def view(self, batch: Batch, run: Run) -> Batch:
        """ceil(share T) rows for every row, at different times of its trajectory, with the log-probs there of the policy that acted and of others."""
        states = batch.signals["states"]
        rows, steps = states.shape[:2]
        count = math.ceil(self.share * steps)
        chosen = torch.rand(rows, steps, generator=run.generator).argsort(1)[:, :count].flatten()
        row = torch.arange(rows).repeat_interleave(count)
        signals = {n: value for n, value in batch.signals.items() if n != "states" and not n.startswith(("old_", "ref_"))}
        view = batch.but(signals=signals)[row]
        view.signals |= {STATE: states[row, chosen], TIME: steps - chosen}
        run.prepare_signals(view, {"old_logp", *run.method.needs("objective", "regularize")})
        return view.but(logp=view.signals["old_logp"])

    def backward(self, part: Batch, loss_fn: MethodLoss, run: Run) -> Loss:
        return run.backward(part, Scaled(loss_fn, 1 / self.step_freq))  # type: ignore[arg-type]


@dataclass
class Scaled:
    """A part of a method's loss."""

    loss_fn: MethodLoss
    share: float

    @property
    def needs(self) -> frozenset[str]:
        return self.loss_fn.needs

    def __call__(self, batch: Batch, new: Signals) -> Loss:
        found = self.loss_fn(batch, new)
        return replace(found, value=found.value * self.share)


METHOD = GRPO.but(
    name="dgpo",
    paper=Paper("DGPO: directed graph policy optimization for architecture search", "2602.19261", 2026),
    domain="masked",
    task="cells",
    summary="directed graphs by discrete diffusion, tuned by the advantage-weighted likelihood of the final graph at noisy states of its trajectory",
    prepare=(Pretraining(),),
    select=UniformPrompts(group_size=32),
    reward=ArchitectureReward(),
    credit=RunningStatistics(),
    objective=EagerLikelihood(),
    regularize=(),
    update=EagerSteps(),
)
