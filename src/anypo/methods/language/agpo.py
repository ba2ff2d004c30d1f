"""AGPO: adaptive group policy optimization (arXiv:2605.20722).

GRPO's fixed clip range and temperature, made adaptive. A probe group at the base temperature gives one statistical state for each prompt: dispersion
and skewness of its rewards, entropy of its answers' votes. It drives the temperature of the training group (hotter than the base when the prompt is
more uncertain than the running mean, cooler when less) and its clip range (narrower with dispersion, skewness and recent drift, wider with vote
entropy and with policy entropy above its running mean). All formulas are those of the authors' code as the row's specification gives them. The
vote key is the completion's text, or the actions where a policy writes none. Probe rollouts count as generated and are not trained on.
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
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, log_ratio, ratio_metrics, token_ratio
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

MODES = ("std", "mad", "iqr")
STATE = "adaptive_group"  # run.state: moving averages {uncertainty, entropy, kl}, shared over prompts
CLIP = "clip_range"  # batch signal [N]
TINY = 1e-8


class Temperatures(NamedTuple):
    tau: Tensor  # [S]
    ema: Tensor  # scalar, after the last


def dispersion(reward: Float[Tensor, "*Q G"], mode: str = "std") -> Float[Tensor, "*Q"]:
    """Equation 1 over the last dimension; NaN entries (padding) do not count. Raises ValueError for an unknown mode."""
    if mode not in MODES:
        raise ValueError(f"unknown dispersion '{mode}'; use one of {', '.join(MODES)}")
    if mode == "std":
        count = (~reward.isnan()).sum(-1)
        centred = reward - reward.nanmean(-1, keepdim=True)
        return torch.where(count > 1, (centred.square().nansum(-1) / (count - 1).clamp(min=1)).sqrt(), torch.zeros_like(centred[..., 0]))
    if mode == "mad":
        return 1.4826 * (reward - reward.nanmedian(-1, keepdim=True).values).abs().nanmedian(-1).values
    low, high = reward.nanquantile(reward.new_tensor([0.25, 0.75]), dim=-1)
    return (high - low) / 1.349


def skewness(reward: Float[Tensor, "*Q G"]) -> Float[Tensor, "*Q"]:
    """Equation 2 over the last dimension: sample skewness within +-10, 0 without spread; NaN entries do not count."""
    count = (~reward.isnan()).sum(-1)
    deviation = dispersion(reward)
    third = ((reward - reward.nanmean(-1, keepdim=True)) / deviation.clamp(min=1e-6)[..., None]).pow(3).nanmean(-1)
    n = count.to(reward)
    unbiased = torch.where(n > 2, (n * (n - 1)).clamp(min=0).sqrt() / (n - 2).clamp(min=1), torch.ones_like(n))
    return torch.where(deviation < 1e-6, torch.zeros_like(third), third * unbiased).clamp(-10, 10)


def vote_entropy(keys: Int[Tensor, "*Q G"]) -> Float[Tensor, "*Q"]:
    """Equation 3 over the last dimension: entropy of the answers in nats; negative keys (padding) do not count."""
    counts = keys >= 0
    same = (keys[..., :, None] == keys[..., None, :]) & counts[..., None, :]
    size = counts.sum(-1).clamp(min=1)
    share = (same.sum(-1) / size[..., None]).double().clamp(min=TINY)
    return -(share.log() * counts).sum(-1) / size  # the mean over members of -log of their answer's share


def temperature(
    uncertainty: Float[Tensor, " S"], tau_base: float = 1.0, lam_temp: float = 0.15, tau_min: float = 0.5, tau_max: float = 1.5,
    ema_init: float = 0.0,
) -> Temperatures:  # fmt: skip
    """Equations 5-6, prompt after prompt: each is centred on the moving average from before it."""
    ema, taus = float(ema_init), []
    for u in uncertainty.tolist():
        centred = 0.0 if ema <= TINY else (u - ema) / (ema + TINY)
        ema = u if ema <= TINY else 0.1 * u + 0.9 * ema
        taus.append(min(max(tau_base * (1 + lam_temp * centred), tau_min), tau_max))
    return Temperatures(torch.tensor(taus, dtype=torch.float64), torch.tensor(ema, dtype=torch.float64))


def clip(
    sigma: float, skew: float, entropy: float, entropy_ref: float, vote: float, kl: float, eps_base: float = 0.2, eps_min: float = 0.05,
    eps_max: float = 0.4, alpha: float = 1.0, gamma: float = 0.5, delta: float = 0.1, zeta: float = 0.0,
) -> float:  # fmt: skip
    """Equations 8-9: the clip range of one prompt. `entropy_ref` is the moving average; at 0 (unset) the entropy itself."""
    reference = entropy_ref if entropy_ref > TINY else entropy
    relative = min(max(max(entropy, TINY) / (max(reference, TINY) + TINY), 0.5), 1.5)
    eps = eps_base * relative * (1 + delta * vote) / (1 + alpha * sigma + gamma * kl + zeta * abs(skew))
    return min(max(eps, eps_min), eps_max)


def advantages(reward: Float[Tensor, "*Q G"], mode: str = "std") -> Float[Tensor, "*Q G"]:
    """Equation 7 for one group, or for rows padded with NaN; 0 without spread. "mad" and "iqr" fall back to the standard deviation where they
    vanish although the rewards differ."""
    spread = dispersion(reward, mode)
    spread = torch.where(spread <= TINY, dispersion(reward), spread)
    differ = reward.nan_to_num(nan=-torch.inf).amax(-1) != reward.nan_to_num(nan=torch.inf).amin(-1)
    centred = torch.where(differ[..., None], reward - reward.nanmean(-1, keepdim=True), torch.zeros_like(reward))
    return centred / spread.clamp(min=TINY)[..., None]


def by_group(values: Tensor, group: Int[Tensor, " N"], padding: float) -> tuple[Tensor, Tensor, Tensor]:
    """[N] values as a table [Q, largest group] with one row a group, and the row and column of each value."""
    _, row, counts = torch.unique(group, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row[order]]
    table = values.new_full((len(counts), int(counts.max())), padding)
    table[row, column] = values
    return table, row, column


@dataclass
class ProbeRollout:
    """A probe group at the base temperature for every prompt, then the training group at the prompt's own temperature and clip range.

    Signal: `clip_range` [N]. The moving averages live in the run's state.
    """

    probe_size: int | None = None  # probe rollouts a prompt, >= 1; None = as many as are trained on
    mode: str = "std"  # dispersion: std, mad or iqr
    weight_reward: float = 1.0  # of the dispersion in the uncertainty
    weight_votes: float = 1.0  # of the vote entropy
    weight_skew: float = 0.0  # of the absolute skewness
    tau_base: float = 1.0  # > 0
    lam_temp: float = 0.15  # >= 0; 0 = the temperature stays tau_base
    tau_min: float = 0.5  # > 0
    tau_max: float = 1.5
    eps_base: float = 0.2  # > 0, clip range
    eps_min: float = 0.05
    eps_max: float = 0.4
    alpha: float = 1.0  # narrows with dispersion, >= 0
    gamma: float = 0.5  # narrows with the KL drift, >= 0
    delta: float = 0.1  # widens with the vote entropy, >= 0
    zeta: float = 0.0  # narrows with the absolute skewness, >= 0
    follow_entropy: bool = True  # widens and narrows with the policy's entropy
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    needs = frozenset({"old_entropy"})

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        state = run.state.setdefault(STATE, {"uncertainty": 0.0, "entropy": 0.0, "kl": 0.0})
        base = [p.but(temperature=self.tau_base) for p in prompts]
        probe = run.collect([p.but(samples=self.probe_size or p.samples) for p in base])
        probe.reward = run.score_rewards(probe)
        reward = by_group(row_reward(probe, self.weights).double(), probe.group, torch.nan)[0]
        sigma, skew = dispersion(reward, self.mode), skewness(reward)
        vote = vote_entropy(by_group(vote_keys(probe), probe.group, -1)[0])
        uncertainty = self.weight_reward * sigma + self.weight_votes * vote + self.weight_skew * skew.abs()
        heat = temperature(uncertainty, self.tau_base, self.lam_temp, self.tau_min, self.tau_max, state["uncertainty"])
        state["uncertainty"] = float(heat.ema)
        batch = run.collect([p.but(temperature=tau) for p, tau in zip(prompts, heat.tau.tolist(), strict=True)])
        run.prepare_signals(batch, self.needs)
        ranges = self.clip_ranges(batch, sigma.tolist(), skew.tolist(), vote.tolist(), state)
        batch.signals[CLIP] = ranges[torch.unique(batch.group, return_inverse=True)[1]]
        run.log(
            temperature=float(heat.tau.mean()), temperature_min=float(heat.tau.min()), temperature_max=float(heat.tau.max()),
            clip_range=float(ranges.mean()), clip_range_min=float(ranges.min()), clip_range_max=float(ranges.max()),
            clip_saturation=float(((ranges <= self.eps_min) | (ranges >= self.eps_max)).double().mean()), probe_actions=float(probe.mask.sum()),
        )  # fmt: skip
        return batch

    def clip_ranges(self, batch: Batch, sigma: list[float], skew: list[float], vote: list[float], state: dict[str, float]) -> Tensor:
        """Equations 8-10, prompt after prompt; the entropy's moving average follows each."""
        found = []
        for q, entropy in enumerate(group_token_mean(batch.signal("old_entropy"), batch).tolist()):
            reference = state["entropy"] if self.follow_entropy else 0.0
            found.append(
                clip(
                    sigma[q], skew[q], entropy, reference, vote[q], state["kl"], self.eps_base, self.eps_min, self.eps_max, self.alpha, self.gamma,
                    self.delta, self.zeta,
                )
            )  # fmt: skip
            state["entropy"] = entropy if state["entropy"] <= TINY else 0.01 * entropy + 0.99 * state["entropy"]
        return torch.tensor(found, dtype=torch.float64)


def vote_keys(batch: Batch) -> Int[Tensor, " N"]:
    """A number for each different answer: the completion without surrounding blanks, or the row's own actions."""
    if "completion" in batch.signals:
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(text.strip(), len(numbers)) for text in batch.signals["completion"]])
    shown = torch.where(_expand(batch.mask, batch.action), batch.action, torch.full_like(batch.action, -1)).flatten(1)
    return torch.unique(shown, dim=0, return_inverse=True)[1]


def group_token_mean(values: Float[Tensor, "N T"], batch: Batch) -> Float[Tensor, " Q"]:
    """Mean over the actions of each group, in ascending order of the group number; 0 for a group without any."""
    _, row = torch.unique(batch.group, return_inverse=True)
    zero = torch.zeros(int(row.max()) + 1, dtype=torch.float64)
    inside = torch.where(batch.mask, values, torch.zeros_like(values)).double().sum(1).cpu()
    return zero.index_add(0, row, inside) / zero.index_add(0, row, batch.mask.sum(1).double()).clamp(min=1)


def _expand(mask: Tensor, action: Tensor) -> Tensor:
    return mask if action.dim() == 2 else mask[..., None].expand_as(action)


@dataclass
class DispersionRelative:
    """Reward relative to the training group's mean, over its dispersion."""

    mode: str = "std"  # std, mad or iqr
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        table, row, column = by_group(row_reward(batch, self.weights).double(), batch.group, torch.nan)
        return broadcast(advantages(table, self.mode)[row, column].to(batch.logp), batch.mask)


@dataclass
class AdaptiveClip(ClippedSurrogate):
    """The clipped surrogate with the range that the rollout found for each prompt; `clip_low` and `clip_high` hold where it found none."""

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if CLIP not in batch.signals:
            return super().__call__(batch, new, run)
        assert batch.advantage is not None
        mask, eps = batch.counted, batch.signals[CLIP][:, None].to(new.logp)
        ratio = token_ratio(new.logp, batch.logp, mask)
        low, high = (1 - eps).expand_as(ratio), (1 + eps).expand_as(ratio)
        value = clipped(ratio, batch.advantage, low, high, self.dual_clip)
        loss = aggregate(-value, mask, self.aggregation, self.max_len or batch.limit)
        return Loss(loss, ratio_metrics(ratio, low, high, mask))


@dataclass
class TrackDrift:
    """Equation 10: after the optimizer's epochs, the moving average of how far the policy went from the one that acted."""

    def __call__(self, batch: Batch, run: Run) -> None:
        state = run.state.setdefault(STATE, {"uncertainty": 0.0, "entropy": 0.0, "kl": 0.0})
        drift = -log_ratio(run.score(batch, {"logp"}).logp, batch.logp, batch.mask)
        kl = float(group_token_mean(drift, batch).clamp(min=0).mean())
        state["kl"] = 0.1 * kl + 0.9 * state["kl"]
        run.log(kl_drift=kl)


METHOD = GRPO.but(
    name="agpo",
    paper=Paper("AGPO: Adaptive Group Policy Optimization with Dual Statistical Feedback", "2605.20722", 2026),
    summary="a probe group's statistics set each prompt's temperature and clip range",
    rollout=ProbeRollout(),
    credit=DispersionRelative(),
    objective=AdaptiveClip(clip_low=0.2, clip_high=0.2, aggregation="seq_mean"),
    regularize=(KLPenalty(beta=0.03),),
    update=GradientSteps(epochs=4),
    control=(TrackDrift(),),
)
