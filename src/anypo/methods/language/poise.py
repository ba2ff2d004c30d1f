"""POISE: policy optimization with internal state value estimation (arXiv:2605.07579).

A baseline from what the policy has computed anyway: a ridge probe maps the hidden states at the end of the prompt and of the response, and
statistics of the token entropies, to the expected reward. Trained online on a sliding window, beside the policy. A rollout's baseline is predicted
from the prompt's OTHER rollouts, which keeps the gradient unbiased although the features see the trajectory. Two rollouts a prompt are enough, so
a budget covers more prompts than GRPO's groups; set `select.prompts` accordingly. The loss is DAPO's, without its dynamic sampling. Features and
the cross-rollout rule from the paper; the probe's kind, the warm-up and the batch normalization are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import last_action
from anypo.seams.groups import broadcast, group_size, group_std, group_sum, leave_one_out_mean
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import Run

STATE = "value_probe"  # run.state: the window of features and rewards, and the fitted probe
FEATURE = "probe_feature"  # batch signal [N,F] that the credit leaves for the fit
NORMALIZATIONS = ("none", "batch")


class Probe(NamedTuple):
    weight: Tensor  # [F]
    bias: Tensor  # scalar
    prediction: Tensor  # [Q] of the query, in [0,1]


class Advantages(NamedTuple):
    baseline: Tensor  # [N]
    advantages: Tensor  # [N]


def features(
    prompt_hidden: Float[Tensor, "N D"], end_hidden: Float[Tensor, "N D"], entropy: Float[Tensor, "N T"], mask: Tensor
) -> Float[Tensor, "N F"]:
    """Equation 1: both hidden states, then mean, population standard deviation and maximum of the entropy over the row's own actions; F = 2D+3.
    A row without actions has entropy statistics 0. No gradient."""
    inside = mask.bool()
    count = inside.sum(1).clamp(min=1)
    zero = entropy.new_zeros(())
    mean = torch.where(inside, entropy, zero).sum(1) / count
    spread = (torch.where(inside, entropy - mean[:, None], zero) ** 2).sum(1) / count
    top = torch.where(inside, entropy, -torch.inf).amax(1)
    top = torch.where(inside.any(1), top, zero)
    return torch.cat([prompt_hidden, end_hidden, torch.stack([mean, spread.sqrt(), top], 1).to(prompt_hidden)], dim=1).detach()


def probe(feature: Float[Tensor, "M F"], reward: Float[Tensor, " M"], query: Float[Tensor, "Q F"], ridge: float = 1.0) -> Probe:
    """Equation 2: ridge regression with an unpenalized bias; predictions are clipped to [0,1]. `ridge` > 0."""
    centre, target = feature.mean(0), reward.mean()
    x, y = feature - centre, reward - target
    rows, columns = x.shape
    if columns <= rows:
        weight = torch.linalg.solve(x.T @ x + ridge * torch.eye(columns, dtype=x.dtype), x.T @ y)
    else:  # the same solution from the smaller system
        weight = x.T @ torch.linalg.solve(x @ x.T + ridge * torch.eye(rows, dtype=x.dtype), y)
    bias = target - weight @ centre
    return Probe(weight, bias, (query @ weight + bias).clamp(0, 1))


def advantages(
    prediction: Float[Tensor, " N"], reward: Float[Tensor, " N"], group: Int[Tensor, " N"], normalize: str = "batch", eps: float = 1e-6
) -> Advantages:
    """Equations 3-4: reward minus the mean prediction of the group's other rollouts; `prediction` is that of each rollout's own features.

    A group of one gets 0. "batch" divides by the population standard deviation over the batch where there is one. Raises ValueError.
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize is none or batch, not '{normalize}'")
    baseline = torch.where(group_size(group) > 1, leave_one_out_mean(prediction, group), reward)
    return Advantages(baseline, scaled(reward - baseline, normalize, eps))


def scaled(advantage: Float[Tensor, " N"], normalize: str, eps: float) -> Float[Tensor, " N"]:
    """Equation 4's option; advantages that are all alike stay as they are."""
    if normalize == "none" or not len(advantage):
        return advantage
    deviation = group_std(advantage, torch.zeros(len(advantage), dtype=torch.int64))
    return torch.where(deviation > 0, advantage / (deviation + eps), advantage)


def other_prompts_mean(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The baseline of the warm-up: mean reward of the rollouts of all other prompts; with one prompt, of its other rollouts."""
    others = len(reward) - group_size(group)
    return torch.where(others > 0, (reward.sum() - group_sum(reward, group)) / others.clamp(min=1), leave_one_out_mean(reward, group))


@dataclass
class CrossRolloutValue:
    """Reward minus the value that the probe sees in the prompt's other rollouts; leaves the features in the batch for `FitProbe`."""

    normalize: str = "batch"  # none or batch
    eps: float = 1e-6  # > 0
    warmup: int = 64  # rollouts in the window before the probe is used; 4 for each feature are enough when that is less
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    needs = frozenset({"old_hidden", "old_entropy"})
    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights).double()
        feature = batch.signals[FEATURE] = batch_features(batch)
        state = run.state.get(STATE)
        if state is None or len(state["reward"]) < min(self.warmup, 4 * feature.shape[1]):
            lone = group_size(batch.group) == 1
            baseline = torch.where(lone, reward, other_prompts_mean(reward, batch.group))
            found = Advantages(baseline, scaled(reward - baseline, self.normalize, self.eps))
        else:
            prediction = ((feature - state["mean"]) / state["std"] @ state["weight"] + state["bias"]).clamp(0, 1)
            found = advantages(prediction, reward, batch.group, self.normalize, self.eps)
        error, spread = (reward - found.baseline).square().mean(), reward.var(correction=0)
        run.log(baseline=float(found.baseline.mean()), baseline_explained=float(1 - error / spread) if spread > 0 else 0.0)
        return broadcast(found.advantages.to(batch.logp), batch.mask)


@dataclass
class FitProbe:
    """After the policy's step: the batch joins the sliding window, and the probe is fitted to it anew."""

    ridge: float = 1.0  # > 0, on features standardized by the window's mean and standard deviation
    memory: int = 2048  # rollouts in the window, >= 1
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> None:
        if FEATURE not in batch.signals:
            raise ValueError("poise fits its probe to features that its credit leaves in the batch; use CrossRolloutValue as the credit")
        with run.timed("probe"):
            state = run.state.get(STATE, {})
            feature, reward = batch.signals[FEATURE], row_reward(batch, self.weights).double()
            if state:
                feature, reward = torch.cat([state["feature"], feature]), torch.cat([state["reward"], reward])
            feature, reward = feature[-self.memory :], reward[-self.memory :]
            mean, std = feature.mean(0), feature.std(0, correction=0)
            std = torch.where(std > 1e-8, std, torch.ones_like(std))  # a feature that never moves carries no weight
            fitted = probe((feature - mean) / std, reward, feature[:0], self.ridge)
            run.state[STATE] = {
                "feature": feature, "reward": reward, "mean": mean, "std": std, "weight": fitted.weight, "bias": fitted.bias,
            }  # fmt: skip


def batch_features(batch: Batch) -> Float[Tensor, "N F"]:
    """`features` of a collected batch, float64 on the CPU. A policy without a state of the prompt alone (a table, a control policy), whose hidden
    states precede their actions, stands in with the state before the first action."""
    hidden = batch.signal("old_hidden")
    prompt = batch.signals.get("old_prompt_hidden", hidden[:, 0])
    end = torch.where(last_action(batch.mask)[..., None].to(hidden.device), hidden, hidden.new_zeros(())).sum(1)
    return features(prompt.double().cpu(), end.double().cpu(), batch.signal("old_entropy").double().cpu(), batch.mask.cpu())


METHOD = GRPO.but(
    name="poise",
    paper=Paper(
        "Your Language Model is Its Own Critic: Reinforcement Learning with Value Estimation from Actor's Internal States",
        "2605.07579",
        2026,
    ),
    summary="a probe on the policy's own hidden states predicts each rollout's baseline from the prompt's other rollout",
    select=UniformPrompts(group_size=2),
    credit=CrossRolloutValue(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
    control=(FitProbe(),),
)
