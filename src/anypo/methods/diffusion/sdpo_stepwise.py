"""SDPO: stepwise diffusion policy optimization (arXiv:2411.11727). Not the self-distillation of the same name (see `srpo_routed`).

Few-step diffusion models have few states, and one reward for the end of a chain tells their steps little. Here a step has two states, the noisy point
and the clean sample it points to, and clean samples can be scored: a reward at every step, of which three a chain are asked for (`reward`) and the
rest interpolated by similarity. Two chains from one noise make a pair (`rollout`); returns are standardized by prompt and step (`credit`), and the
difference of the pair's log-ratios is regressed onto the difference of their advantages, early steps first in weight (`objective`), one optimizer
step for each column of shuffled steps (`update`). Base: DDPO. Equations: the authors' code. [reconstructed]: linear interpolation where the
similarities cancel; the clean state of the last step is the end of the chain, whose last step gets a little noise so that it is an action too
(with `last_std` 0 it is none, and a chain of one step has nothing to train). Left out: decoding latents; a task scores clean states as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import Schedule, ddim_schedule, predicted_data
from anypo.domains.diffusion.sample import chains
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import DDPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import masked_mean
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps, minibatches

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run
    from anypo.task import Prompt

__all__ = ["METHOD", "advantages", "anchor_step", "clean_states", "dense_reward", "pair_loss", "pairs", "returns", "similarities"]


class DenseReward(NamedTuple):
    anchor: Tensor  # [N]
    reward: Tensor  # [N,T]


def similarities(x0: Float[Tensor, "N T D"], k: Int[Tensor, " N"]) -> Float[Tensor, "N T"]:
    """Cosine of every clean state with that of step k of its chain; 0 for a zero vector."""
    return torch.cosine_similarity(x0, x0[torch.arange(len(x0)), k][:, None], dim=-1)


def anchor_step(x0: Float[Tensor, "N T D"]) -> Int[Tensor, " N"]:
    """Equation 2: the step whose clean state is least like the first and the last."""
    ends = torch.zeros(len(x0), dtype=torch.int64)
    return (similarities(x0, ends) + similarities(x0, ends + x0.shape[1] - 1)).argmin(1)


def dense_reward(
    x0: Float[Tensor, "N T D"], R_first: Float[Tensor, " N"], R_anchor: Float[Tensor, " N"], R_last: Float[Tensor, " N"]
) -> DenseReward:
    """Equations 2 and 3: rewards of the first, anchor and last step as they are, between them their mean weighted by similarity.

    Where the weights cancel (|sum| < 1e-6) the reward is interpolated linearly in the step.
    """
    last, anchor, row = x0.shape[1] - 1, anchor_step(x0), torch.arange(len(x0))
    steps = (torch.zeros_like(anchor), anchor, torch.full_like(anchor, last))
    weight = torch.stack([similarities(x0, k) for k in steps], dim=-1)
    known = torch.stack([R_first, R_anchor, R_last], dim=-1).to(weight)
    total = weight.sum(-1)
    cancelled = total.abs() < 1e-6
    mixed = (weight * known[:, None]).sum(-1) / torch.where(cancelled, 1.0, total)
    k, c, (first, middle, end) = torch.arange(last + 1), anchor[:, None], known.T[..., None]
    before, after = first + (middle - first) * k / c.clamp(min=1), middle + (end - middle) * (k - c) / (last - c).clamp(min=1)
    reward = torch.where(cancelled, torch.where(k <= c, before, after), mixed)
    reward[:, 0], reward[:, last] = known[:, 0], known[:, 2]
    reward[row, anchor] = known[:, 1]
    return DenseReward(anchor, reward)


def returns(reward: Float[Tensor, "N T"], gamma: float) -> Float[Tensor, "N T"]:
    """Equation 4: discounted sum of the rewards from each step on; the reward itself for gamma = 0."""
    found = [reward[:, -1]]
    for k in range(reward.shape[1] - 2, -1, -1):
        found.append(reward[:, k] + gamma * found[-1])
    return torch.stack(found[::-1], dim=1)


def _extended(history: Any, new: Float[Tensor, "M T"], buffer: int) -> Float[Tensor, "m T"]:
    """The newest `buffer` returns of a prompt, these included."""
    old = torch.as_tensor(history, dtype=new.dtype) if len(history) else new[:0]
    return torch.cat([old, new])[-buffer:]


def advantages(
    ret: Float[Tensor, "N T"], prompt: Int[Tensor, " N"], history: Sequence[Any], min_count: int = 16, buffer: int = 32
) -> Float[Tensor, "N T"]:
    """Equation 5: returns standardized (ddof 0) by step, by the newest `buffer` returns of their prompt, now's among them; by the batch while a prompt
    has fewer than `min_count`. `history`: for each prompt number what it returned before, [m,T], oldest first."""
    found = torch.empty_like(ret)
    for p in torch.unique(prompt).tolist():
        mine = prompt == p
        seen = _extended(history[p], ret[mine], buffer)
        seen = ret if len(seen) < min_count else seen
        found[mine] = (ret[mine] - seen.mean(0)) / (seen.std(0, correction=0) + 1e-6)
    return found


def pair_errors(
    lp1: Float[Tensor, "P T"], old1: Tensor, lp2: Tensor, old2: Tensor, adv1: Tensor, adv2: Tensor, weight: Tensor, eps: float, adv_clip: float,
) -> Float[Tensor, "P T"]:  # fmt: skip
    """Equation 7: squared error of the weighted difference of log-ratios, plain or with each log-ratio within eps, whichever is larger."""
    target = (adv1.clamp(-adv_clip, adv_clip) - adv2.clamp(-adv_clip, adv_clip)).detach()
    first, second = lp1 - old1, lp2 - old2
    plain = (weight * (first - second) - target) ** 2
    return torch.maximum(plain, (weight * (first.clamp(-eps, eps) - second.clamp(-eps, eps)) - target) ** 2)


def pair_loss(
    lp1: Float[Tensor, "P T"], old1: Tensor, lp2: Tensor, old2: Tensor, adv1: Tensor, adv2: Tensor, lam: float, scale: float, eps: float, adv_clip: float,
) -> Tensor:  # fmt: skip
    """Equations 6 and 7 for whole chains: step k weighs lam^k / scale; mean over pairs and steps."""
    weight = lam ** torch.arange(lp1.shape[1], dtype=lp1.dtype) / scale
    return pair_errors(lp1, old1, lp2, old2, adv1, adv2, weight, eps, adv_clip).mean()


def pairs(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """The first with the second member of every group, the third with the fourth, ...; an odd one is left over."""
    order = torch.argsort(group, stable=True)
    along = group[order]
    rank = torch.arange(len(group)) - torch.searchsorted(along, along)
    first = ((rank[:-1] % 2 == 0) & (along[:-1] == along[1:])).nonzero().flatten()
    return order[first], order[first + 1]


def clean_states(batch: Batch) -> Float[Tensor, "N T D"]:
    """The clean sample that the acting policy pointed to at every step, for the last step the end of the chain; for any affine sampler."""
    keep, pull, _ = batch.signal("step")[..., None].unbind(-2)
    velocity = (batch.signal("old_mean") - keep * batch.context) / torch.where(pull == 0, 1.0, pull)
    found = predicted_data(batch.context, velocity, batch.signal("level")[..., None])
    return torch.cat([found[:, :-1], batch.action[:, -1:]], dim=1)


@dataclass
class PairRollout:
    """Chains of few ancestral steps, the attempts at a prompt from one noise."""

    steps: int = 4  # denoising steps, >= 1
    eta: float = 1.0  # noise of DDIM, in (0,1], 1 = ancestral
    last_std: float = 0.05  # noise of the last step, which DDIM has without any, >= 0; 0 = the last step is not trained
    shared_start: bool = True  # False = noise of their own

    def schedule(self, level: Float[Tensor, " T+1"]) -> Schedule:
        plain = ddim_schedule(level, self.eta)
        std = plain.std.clone()
        std[-1] = self.last_std
        return plain._replace(std=std)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        task: Any = run.task
        if not hasattr(task, "levels"):
            raise ValueError(f"{run.method.name} trains denoising steps, and the task '{task.name}' has none; take one such as digits:ink")
        if not self.eta > 0 or (self.steps == 1 and not self.last_std > 0):
            raise ValueError("there is no noise to train: rollout.eta must be above 0, and with one step rollout.last_std too")
        schedule = self.schedule(task.levels(self.steps))
        return run.collect(prompts, by=lambda prompts, run: chains(prompts, run, schedule, self.shared_start))


@dataclass
class SimilarityReward:
    """A reward at every step from three scored clean states a chain."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        task: Any = run.task
        if "old_mean" not in batch.signals or not hasattr(task, "reward"):
            raise ValueError(
                f"{run.method.name} scores clean states of denoising steps, and the task '{task.name}' has none; take digits:ink"
            )
        x0, prompt, row = clean_states(batch), batch.signal("prompt_id"), torch.arange(len(batch))
        with run.timed("reward"):
            first, anchor, last = (task.reward(x, prompt) for x in (x0[:, 0], x0[row, anchor_step(x0)], x0[:, -1]))
        run.log(final_reward=float(last.double().mean()))
        return dense_reward(x0, first, anchor, last).reward


@dataclass
class StepwiseStandardized:
    """Returns standardized by prompt and step. A reward that is not dense is that of the last step."""

    gamma: float = 0.99  # discount, in [0,1]; 0 = a step's own reward
    buffer: int = 32  # returns remembered for each prompt, >= 1
    min_count: int = 16  # fewer, and the batch's mean and deviation are used
    seen: dict[str, Tensor] = field(default_factory=dict, repr=False)  # by prompt: its returns [m,T], the newest last

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        reward = batch.reward.double()
        if not batch.reward_is_dense:
            reward = torch.nn.functional.pad(batch.outcome.double()[:, None], (batch.horizon - 1, 0))
        ret = returns(reward, self.gamma)
        known, prompt = torch.unique(batch.signal("prompt_id"), return_inverse=True)
        history = [self.seen.get(str(p), ret[:0]) for p in known.tolist()]
        found = advantages(ret, prompt, history, self.min_count, self.buffer)
        self.seen |= {str(p): _extended(history[i], ret[prompt == i], self.buffer) for i, p in enumerate(known.tolist())}
        return found.to(batch.logp.dtype) * batch.mask

    def state_dict(self) -> dict[str, Any]:
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state["seen"])


@dataclass
class PairRegression:
    """The difference of two chains' log-ratios regressed onto the difference of their advantages, step by step."""

    lam: float = 0.99  # weight of a step relative to the one before, in (0,1]
    scale: float = 1.0  # > 0, divides the log-ratios
    eps: float = 1e-2  # log-ratios (mean over D) may move by this; 1e-4 for large models
    adv_clip: float = 5.0  # > 0

    needs = frozenset({"logp"})
    compares_group = True

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        (i, j), size = pairs(batch.group), batch.action.shape[-1] if batch.action.dim() == 3 else 1
        mask, zero = batch.counted[i] & batch.counted[j], new.logp.new_zeros(())
        position = batch.signals.get("step_index", torch.arange(batch.horizon).expand(batch.mask.shape))[i]
        weight = self.lam ** position.to(new.logp.dtype) / self.scale
        lp, old = (torch.where(batch.counted, value, zero) / size for value in (new.logp, batch.logp))
        error = pair_errors(lp[i], old[i], lp[j], old[j], batch.advantage[i], batch.advantage[j], weight, self.eps, self.adv_clip)
        return Loss(masked_mean(error, mask), {"log_ratio": float(masked_mean((lp - old).detach().abs(), batch.counted))})


def at_step(batch: Batch, column: Int[Tensor, " N"]) -> Batch:
    """One step of every row, a step of its own: [N,T,...] becomes [N,1,...]; the signal `step_index` [N,1] says which it is."""
    horizon, row = batch.horizon, torch.arange(len(batch))

    def pick(value: Any) -> Any:
        per_step = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == horizon
        return value[row, column][:, None] if per_step else value

    changed = {name: pick(getattr(batch, name)) for name in Batch.__dataclass_fields__ if name not in ("signals", "objectives")}
    signals = {name: pick(value) for name, value in batch.signals.items()} | {"step_index": column[:, None]}
    return Batch(**changed, objectives=batch.objectives, signals=signals)


@dataclass
class ShuffledSteps(GradientSteps):
    """The steps of a chain in random order (one order for the chains of a group), an optimizer step for each column; minibatches are of whole groups."""

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        optimizer, totals = run.optimizer(self.build), defaultdict[str, list[float]](list)
        index = torch.unique(batch.group, return_inverse=True)[1]
        for _ in range(self.epochs):
            draw = torch.rand(int(index.max()) + 1, batch.horizon, generator=run.generator)
            order = torch.where(batch.counted.any(0), draw, 2.0).argsort(1)[index]
            for column in order.T[: int(batch.counted.any(0).sum())]:
                for part in minibatches(at_step(batch, column), self.minibatches, "group", run.generator):
                    for name, value in self.one_step(part, loss_fn, optimizer, run).items():
                        totals[name].append(value)
        return {name: fmean(values) for name, values in totals.items()}


METHOD = DDPO.but(
    name="sdpo_stepwise",
    paper=Paper("SDPO: stepwise diffusion policy optimization", "2411.11727", 2024),
    summary="a reward for the clean sample that every step points to; pairs of chains from one noise, their log-ratios regressed on their advantages",
    select=UniformPrompts(prompts=80, group_size=2),
    rollout=PairRollout(),
    reward=SimilarityReward(),
    credit=StepwiseStandardized(),
    objective=PairRegression(),
    update=ShuffledSteps(),
)
