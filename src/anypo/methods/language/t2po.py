"""T2PO: token- and turn-level exploration control (arXiv:2605.02178).

Agents trained over many turns come to hesitate: they think on after their mind is made up, and repeat turns that change nothing. T2PO leaves the loss
alone and steers the rollout by an uncertainty that mixes entropy with the confidence in the likeliest tokens. Where it no longer changes inside
the thinking, the end of thinking is forced; where its mean over a turn hardly differs from that of the turn before, the turn is drawn again
before the environment sees it. Against GRPO it changes the rollout, and takes episode- and turn-relative advantages (GiGPO). Equations 1-6 from
notes on the paper, the extra condition of resampling and the return from the authors' code; the online normalization, the floor, alpha, j and the
window are [reconstructed]. Left out: the prompt's memory of the last turns, which is the task's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.steering import SteeredPolicy
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast
from anypo.seams.reward import row_reward
from anypo.seams.states import depth_advantages, returns, state_ids
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

FLOOR = 1e-8  # of M inside the logarithm


class Resampled(NamedTuple):
    kept: Tensor  # [K] turn signal of the draw that was kept
    tries: Tensor  # [K] int64, draws thrown away


def entropy_and_confidence(log_prob: Float[Tensor, "... V"], j: int = 20) -> tuple[Float[Tensor, ...], Float[Tensor, ...]]:
    """Equation 1: H, and C = minus the mean log-probability of the `j` likeliest tokens (all, when there are fewer)."""
    likeliest = log_prob.topk(min(j, log_prob.shape[-1]), dim=-1).values
    return -torch.where(log_prob > -torch.inf, log_prob.exp() * log_prob, 0.0).sum(-1), -likeliest.clamp(min=-1e4).mean(-1)


def mixed(
    entropy: Float[Tensor, "N T"], confidence: Float[Tensor, "N T"], own: Bool[Tensor, "N T"], alpha: float = 0.5, normalize: str = "running"
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 2-3: M in [0,1] at the policy's own tokens. The extremes are those of all own tokens ("full") or of those so far ("running"); a range
    of 0 counts as the value 0. Raises ValueError for another normalization."""
    if normalize not in ("full", "running"):
        raise ValueError(f"normalize must be full or running, not '{normalize}'")

    def share(values: Tensor) -> Tensor:
        low, high = values.masked_fill(~own, torch.inf), values.masked_fill(~own, -torch.inf)
        if normalize == "running":
            low, high = low.cummin(1).values, high.cummax(1).values
        else:
            low, high = low.amin(1, keepdim=True), high.amax(1, keepdim=True)
        spread = own & (high > low)
        return torch.where(spread, (values - low) / torch.where(spread, high - low, 1.0), 0.0)

    return alpha * share(entropy) + (1 - alpha) * (1 - share(confidence))


def uncertainty(prob: Float[Tensor, "T V"], alpha: float = 0.5, j: int = 20, normalize: str = "running") -> Float[Tensor, " T"]:
    """Equations 1-3 for one turn's next-token distributions."""
    found = entropy_and_confidence(prob.log()[None], j)
    return mixed(*found, torch.ones_like(found[0], dtype=torch.bool), alpha, normalize)[0]


def first_flat(M: Float[Tensor, "N T"], length: Int[Tensor, " N"], N: int, eps: float, L_min: int, L_max: float) -> Int[Tensor, " N"]:
    """Equation 4: the index of the token to force, of thinking parts of the given lengths; -1 for none. It may be `length`, the token after them."""
    place = torch.arange(M.shape[1])
    flat = torch.zeros_like(M, dtype=torch.bool)
    if M.shape[1] > N + 1:
        change = (M[:, 1:] - M[:, :-1]).abs()
        flat[:, N + 1 :] = change.unfold(1, N + 1, 1).mean(-1) < eps
    fire = ((flat & (place + 1 >= L_min)) | (place + 1 >= L_max)) & (place < length[:, None])
    return torch.where(fire.any(1), fire.long().argmax(1) + 1, -1) if M.shape[1] else torch.full_like(length, -1)


def intervene_at(M: Float[Tensor, " T"], N: int = 8, eps: float = 0.02, L_min: int = 32, L_max: float = 450) -> int:
    """Equation 4 for one thinking part."""
    return int(first_flat(M[None], torch.tensor([len(M)]), N, eps, L_min, L_max))


def turn_signal(M: Float[Tensor, "*N T"], own: Tensor | None = None) -> Float[Tensor, "*N"]:
    """Equation 5: the geometric mean of M over the tokens of a turn, or over those in `own`."""
    inside = torch.ones_like(M) if own is None else own.to(M)
    return ((M.clamp(min=FLOOR).log() * inside).sum(-1) / inside.sum(-1).clamp(min=1)).exp()


def too_close(phi: Tensor, previous: Tensor, eta: float = 0.3, require_positive: bool = True) -> Tensor:
    """Equation 6: whether a turn is to be drawn again. NaN as `previous`, for a first turn, never is."""
    distance = (phi - previous).abs()
    return (distance < eta) & (distance > 0) if require_positive else distance < eta


def resample_trace(draws: Float[Tensor, "K B"], eta: float = 0.3, max_try: int = 2, require_positive: bool = True) -> Resampled:
    """Equation 6 over K turns whose draws have these signals, one after another; at most `max_try` of a turn's draws are thrown away."""
    kept, tries = [draws[0, 0]], [0]
    for candidates in draws[1:]:
        t = 0
        while t < max_try and bool(too_close(candidates[t], kept[-1], eta, require_positive)):
            t += 1
        kept.append(candidates[t])
        tries.append(t)
    return Resampled(torch.stack(kept), torch.tensor(tries))


@dataclass
class SteeredTurns:
    """Conversations whose turns are steered: thinking that went flat is ended, a turn as uncertain as the one before is drawn again.

    Forced tokens are context only (not in `mask`). A reply thinks when it begins with `opening` (empty: always), up to `closing`.
    """

    eta: float = 0.3  # a turn whose signal is nearer than this to the turn before is drawn again, in [0,1]; 0 = never
    max_try: int = 2  # draws thrown away a turn, >= 0
    require_positive: bool = True  # an exactly equal signal is kept
    eps: float = 0.02  # mean change of M over the window that counts as flat, >= 0; 0 = never
    window: int = 8  # N, >= 0: the last N + 1 changes
    shortest: int = 32  # thinking tokens before an intervention, >= 0
    longest: float = 450.0  # thinking tokens at most; inf = no cap
    alpha: float = 0.5  # share of the entropy in M, in [0,1]
    j: int = 20  # likeliest tokens in the confidence, >= 1
    opening: str = "<think>"
    closing: str = "</think>"  # forced, and after it
    action_tag: str = "\n<action>"

    needs = frozenset({"logits"})

    def measure(self, log_prob: Float[Tensor, "N T V"]) -> tuple[Tensor, Tensor]:
        return entropy_and_confidence(log_prob, self.j)

    def signal(self, measured: tuple[Tensor, Tensor], own: Tensor) -> Float[Tensor, "N T"]:
        return mixed(*measured, own, self.alpha)

    def cut(self, M: Float[Tensor, "N T"], length: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        return first_flat(M, length, self.window, self.eps, self.shortest, self.longest)

    def turn(self, M: Float[Tensor, "N T"], own: Tensor) -> Float[Tensor, " N"]:
        return turn_signal(M, own)

    def again(self, phi: Tensor, previous: Tensor) -> Bool[Tensor, " N"]:
        return too_close(phi, previous, self.eta, self.require_positive)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: Any = run.policy
        if not (hasattr(policy, "encode") and hasattr(policy, "decode")):
            raise ValueError(
                f"{run.method.name} steers replies of text while they are written; take an agent task such as calculator or grid"
            )
        steered = SteeredPolicy(policy, self, (self.opening, self.closing, self.action_tag), self.max_try)
        run.policy = steered  # type: ignore[assignment]
        try:
            batch = run.collect(prompts)
        finally:
            run.policy = policy
        forced = steered.forced(batch)
        run.actions += steered.discarded - int(forced.sum())
        replies = max(steered.replies, 1)
        run.log(interventions=steered.interventions / replies, resampled=steered.resampled / replies, discarded=float(steered.discarded))
        if not bool(forced.any()):
            return batch
        mask = batch.mask & ~forced
        return batch.but(mask=mask, valid=batch.attended, logp=torch.where(mask, batch.logp, torch.zeros_like(batch.logp)))


@dataclass
class EpisodeAndTurns:
    """Equation 7: the episode's reward relative to the group, plus each turn's discounted return relative to other turns in the same state (GiGPO,
    means without standard deviations). Tasks without turns or states have the first part alone."""

    gamma: float = 0.95  # discount a turn, in [0,1]
    turn_weight: float = 1.0  # >= 0
    invalid_penalty: float = 0.1  # >= 0, what an invalid action costs its turn (signal `invalid_turn` [N,turns])
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        fine = batch.signals["invalid_turn"] * -self.invalid_penalty if "invalid_turn" in batch.signals else torch.zeros(len(batch), 1)
        episode = broadcast(group_relative(reward + fine.sum(1).to(reward), batch.group, std=False), batch.mask)
        if batch.segment is None or "turn_reward" not in batch.signals or not {"state_id", "turn_state"} & set(batch.signals):
            return episode
        states = state_ids(batch)
        traj, turn = (states >= 0).nonzero(as_tuple=True)
        rewards = batch.signals["turn_reward"].double() + fine
        gain = returns(rewards[traj, turn], traj, self.gamma)
        table = torch.zeros(states.shape, dtype=gain.dtype)
        table[traj, turn] = depth_advantages(gain, batch.group[traj], traj, states[traj, turn], 0, "mean_norm").A[:, 0]
        of_turn = table.gather(1, batch.segment.clamp(min=0, max=states.shape[1] - 1)) * batch.mask
        return (episode + self.turn_weight * of_turn).to(batch.logp.dtype)


METHOD = GRPO.but(
    name="t2po",
    paper=Paper("T2PO: Uncertainty-Guided Exploration Control for Stable Multi-Turn Agentic Reinforcement Learning", "2605.02178", 2026),
    summary="thinking whose uncertainty went flat is ended by force, and turns as uncertain as the one before are drawn again",
    rollout=SteeredTurns(),
    credit=EpisodeAndTurns(),
    regularize=(),
    task="calculator",
)
