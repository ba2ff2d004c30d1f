"""PAIR: prefix-aware internal reward from hidden-state probes (arXiv:2605.17877).

GRPO whose reward is read off the policy itself, for every turn, without a judge, an answer or further rollouts. A frozen probe on the hidden state at a
turn's end says whether the turn fits what stands before it (which may be wrong), a second one corrects that from how the turn attends to its prefix.
Both are fitted once, before training, to labelled clean and contaminated turns that the task provides (`LabelledTurns`). Equations from the paper and
its code. Needs a policy that gives `hidden` and `attention_maps`; left out: turns cut out of dialogs by a tokenizer, refitting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward
from anypo.seams.groups import group_mean, group_std, standardize
from anypo.seams.select import UniformPrompts
from anypo.seams.steps import spread

if TYPE_CHECKING:
    from anypo.run import Run

STATE = "pair_probe"  # run.state: the two frozen probes, as `Probes._asdict()`
SIGNALS = frozenset({"hidden", "attention_maps"})
LOGIT_EDGE = 1e-6
LEVEL = 1e-8  # a group whose totals spread less is only centred


@runtime_checkable
class LabelledTurns(Protocol):
    """A task that can say, offline, which turns are right."""

    def labelled_turns(self, count: int, run: Run) -> tuple[Batch, Tensor]:
        """`count` rows, half of them with an earlier turn contaminated, and a label for each turn [count,K]: 1 right, 0 wrong, -1 not to be used."""
        ...


class Scores(NamedTuple):
    s_bc: Tensor  # [M] belief-consistency, softened
    s_final: Tensor  # [M] grounded correctness, softened


class Probes(NamedTuple):
    """Two logistic regressions with the means and deviations that standardize their inputs."""

    hidden_mean: Tensor  # [D]
    hidden_std: Tensor
    w1: Tensor
    b1: Tensor
    stacked_mean: Tensor  # [4HL+1] of the attention features and s_bc
    stacked_std: Tensor
    w2: Tensor
    b2: Tensor


def logit(p: Tensor) -> Tensor:
    """log(p / (1-p)), p clipped to [1e-6, 1-1e-6]."""
    return p.clamp(LOGIT_EDGE, 1 - LOGIT_EDGE).logit()


def softened(p: Tensor, temp: float, clip: float) -> Tensor:
    """Equation 4: probabilities at temperature `temp`, kept off both ends by `clip`."""
    return (logit(p) / temp).sigmoid().clamp(clip, 1 - clip)


def attn_features(attn: Float[Tensor, "L H S S"], start: int, end: int) -> Float[Tensor, " 4HL"]:
    """Equation 2 for the turn at positions start..end-1: by layer [max, std, share on the prefix, share on itself] of every head."""
    layers, heads, _, columns = attn.shape
    place = torch.arange(columns, device=attn.device)
    own = ((place >= start) & (place < end)).to(attn)
    return _features(attn[None], own[None], (place < start).to(attn)[None]).reshape(4 * heads * layers)


def _features(attn: Float[Tensor, "M L H S S"], own: Float[Tensor, "M S"], prefix: Float[Tensor, "M S"]) -> Float[Tensor, "M F"]:
    """The same for many turns; rows that are all 0 (padding) count for nothing."""
    total = attn.sum(-1).clamp(min=1e-10)
    queries = own[:, None, None] / own.sum(-1).clamp(min=1)[:, None, None, None]
    parts = (
        attn.amax(-1),
        attn.std(-1, correction=0),
        (attn * prefix[:, None, None, None]).sum(-1) / total,
        (attn * own[:, None, None, None]).sum(-1) / total,
    )
    return torch.stack([(part * queries).sum(-1) for part in parts], dim=2).flatten(1)


def score(
    hidden: Float[Tensor, "M D"], attn: Float[Tensor, "M F"], w1: Float[Tensor, " D"], w2: Float[Tensor, " F+1"], b1: Any = 0.0, b2: Any = 0.0,
    temp: float = 2.0, clip: float = 0.05,
) -> Scores:  # fmt: skip
    """Equations 3-4; inputs are standardized already."""
    s_bc = softened((hidden @ w1 + b1).sigmoid(), temp, clip)
    stacked = torch.cat([attn, s_bc[:, None]], dim=1)
    return Scores(s_bc, softened((stacked @ w2 + b2).sigmoid(), temp, clip))


def momentum(score: Float[Tensor, "N K"], turn_mask: Tensor, alpha: float = 5.0) -> Float[Tensor, "N K"]:
    """Equation 5: a turn better than the mean of those before it earns more. 0 outside the mask; turns are numbered from 0 without a gap."""
    inside = turn_mask.bool()
    s = torch.where(inside, score, torch.zeros_like(score))
    before = (s.cumsum(1) - s) / torch.arange(s.shape[1], device=s.device).clamp(min=1)
    later = (logit(s) + alpha * (s - before)).sigmoid()
    later = s if alpha == 0 else torch.cat([s[:, :1], later[:, 1:]], dim=1)
    return torch.where(inside, later, torch.zeros_like(s))


def turn_advantages(turn_reward: Float[Tensor, "N K"], turn_mask: Tensor, group: Int[Tensor, " N"]) -> Float[Tensor, "N K"]:
    """Equation 6: a turn relative to its trajectory's mean, plus the trajectory's total relative to its group."""
    inside = turn_mask.bool()
    r = torch.where(inside, turn_reward, torch.zeros_like(turn_reward))
    mean = r.sum(1) / inside.sum(1).clamp(min=1)
    total = r.sum(1)
    flat = group_std(total, group) <= LEVEL
    z = torch.where(flat, total - group_mean(total, group), standardize(total, group, ddof=0, eps=0.0))
    return torch.where(inside, r - mean[:, None] + z[:, None], torch.zeros_like(r))


def loss(
    logp: Float[Tensor, "N T"], ref_logp: Float[Tensor, "N T"], turn_advantages: Float[Tensor, "N K"], segment: Int[Tensor, "N T"], mask: Tensor,
    beta: float = 0.01,
) -> Tensor:  # fmt: skip
    """Equation 7: mean over the batch's turns; a turn is the tokens of one segment."""
    inside = mask.bool() & (segment >= 0)
    return turn_reinforce(logp, ref_logp, spread(turn_advantages, segment, inside), segment, inside, beta)


def turn_reinforce(logp: Tensor, ref_logp: Tensor, advantage: Tensor, segment: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Equation 7 with one advantage a token [N,T]."""
    zero = logp.new_zeros(())
    clean = torch.where(mask, logp, zero)
    value = advantage.detach() * clean - beta * (clean - torch.where(mask, ref_logp, zero))
    member = _membership(segment, mask).to(logp)
    size = member.sum(1)
    means = (member * value[..., None]).sum(1) / size.clamp(min=1)
    return -means.sum() / (size > 0).sum().clamp(min=1)


def auroc(score: Float[Tensor, " M"], label: Tensor) -> Tensor:
    """Probability that a right turn scores above a wrong one, ties half; 0.5 when one kind is missing."""
    right = label.bool()
    if not bool(right.any()) or bool(right.all()):
        return score.new_tensor(0.5)
    wrong = score[~right].sort().values
    below, not_above = (torch.searchsorted(wrong, score[right].contiguous(), right=side) for side in (False, True))
    return ((below + not_above).to(score) / 2).mean() / len(wrong)


def _membership(segment: Int[Tensor, "N T"], mask: Tensor) -> Bool[Tensor, "N T K"]:
    count = int(torch.where(mask, segment, -1).max()) + 1 if mask.numel() else 0
    return (segment[..., None] == torch.arange(count, device=segment.device)) & mask[..., None]


def logistic_regression(x: Float[Tensor, "M D"], label: Tensor, C: float = 0.01, steps: int = 20) -> tuple[Tensor, Tensor]:
    """Weights [D] and bias that minimize C times the summed log loss plus half the squared weights, by Newton's method."""
    wide = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    ridge = torch.ones(wide.shape[1], dtype=x.dtype).index_fill(0, torch.tensor([x.shape[1]]), 0.0)
    w = torch.zeros_like(ridge)
    for _ in range(steps):
        p = (wide @ w).sigmoid()
        slope = C * wide.T @ (p - label.to(x)) + ridge * w
        curvature = C * (wide * (p * (1 - p))[:, None]).T @ wide + torch.diag(ridge + 1e-9)
        w = w - torch.linalg.solve(curvature, slope)
    return w[:-1], w[-1]


def fit_probes(hidden: Float[Tensor, "M D"], attn: Float[Tensor, "M F"], label: Tensor, C: float, temp: float, clip: float) -> Probes:
    """Equation 3: the hidden-state probe, then, with it frozen, the head that corrects it. As many turns of either label as the rarer one has.

    Raises ValueError when one is missing."""
    right, wrong = (side.nonzero().flatten() for side in (label == 1, label == 0))
    count = min(len(right), len(wrong))
    if count == 0:
        raise ValueError("the probes need right and wrong turns; the task labelled only one kind")
    rows = torch.cat([right[:count], wrong[:count]])
    hidden, attn, label = hidden[rows].double(), attn[rows].double(), label[rows]
    x, mean, std = _standardized(hidden)
    w1, b1 = logistic_regression(x, label, C)
    s_bc = softened((x @ w1 + b1).sigmoid(), temp, clip)
    y, stacked_mean, stacked_std = _standardized(torch.cat([attn, s_bc[:, None]], dim=1))
    return Probes(mean, std, w1, b1, stacked_mean, stacked_std, *logistic_regression(y, label, C))


def _standardized(x: Float[Tensor, "M D"]) -> tuple[Tensor, Tensor, Tensor]:
    mean, std = x.mean(0), x.std(0, correction=0)
    std = torch.where(std > 1e-8, std, torch.ones_like(std))  # a feature that never moves carries no weight
    return (x - mean) / std, mean, std


def probed(probes: Probes, hidden: Float[Tensor, "M D"], attn: Float[Tensor, "M F"], temp: float, clip: float) -> Scores:
    """`score` of features as they come: s_bc is standardized like the other inputs of the second probe, which its weight and bias take up."""
    p, width = probes, attn.shape[1]
    x = (hidden.double() - p.hidden_mean) / p.hidden_std
    y = (attn.double() - p.stacked_mean[:width]) / p.stacked_std[:width]
    w2 = torch.cat([p.w2[:width], p.w2[width:] / p.stacked_std[width:]])
    return score(x, y, p.w1, w2, p.b1, p.b2 - (p.w2 * p.stacked_mean / p.stacked_std)[width], temp, clip)


class TurnFeatures(NamedTuple):
    hidden: Tensor  # [N,K,D] after the turn's last token
    attn: Tensor  # [N,K,4HL]
    mask: Tensor  # [N,K] bool: the turn exists


def turn_features(batch: Batch, hidden: Float[Tensor, "N T D"], maps: Float[Tensor, "N L H S S"]) -> TurnFeatures:
    """Equations 1-2 for every turn (segment) of the batch; `maps` has the prompt's places first. Without segments a row is one turn."""
    segment = torch.zeros_like(batch.action) if batch.segment is None else batch.segment
    member = _membership(segment, batch.mask)
    place = torch.arange(batch.horizon)[None, :, None]
    end = torch.where(member, place + 1, 0).amax(1)  # [N,K], one past the last token
    start = torch.where(member, place, batch.horizon).amin(1)
    offset = torch.tensor([len(c) for c in batch.context])[:, None]
    columns = torch.arange(maps.shape[-1])
    low, high = (offset + start)[..., None], (offset + end)[..., None]
    row, turn = member.any(1).nonzero(as_tuple=True)
    own, prefix = ((columns >= low) & (columns < high))[row, turn], (columns < low)[row, turn]
    found = _features(maps[row], own.to(maps), prefix.to(maps))
    attn = found.new_zeros(*end.shape, found.shape[1]).index_put((row, turn), found)
    last = (end - 1).clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1])
    return TurnFeatures(hidden.gather(1, last), attn, member.any(1))


@dataclass
class FitProbes:
    """Before training: the probes are fitted to turns that the task labels, seen by the policy as it is then, and frozen."""

    rows: int = 2000  # labelled trajectories, >= 2
    C: float = 0.01  # inverse strength of the L2 penalty, > 0
    temp: float = 2.0  # of s_bc as an input of the second probe, > 0
    clip: float = 0.05  # likewise, in [0,0.5)

    def __call__(self, run: Run) -> None:
        if not isinstance(run.task, LabelledTurns):
            raise ValueError(
                f"{run.method.name} fits its probes to turns known to be right or wrong, which '{run.task.name}' does not offer; give the task "
                "labelled_turns(count, run), or take lookup_chain"
            )
        batch, label = run.task.labelled_turns(self.rows, run)
        seen = run.score(batch, SIGNALS)
        found = turn_features(batch, seen.hidden, seen.attention_maps)
        used = (label >= 0) & found.mask
        run.state[STATE] = fit_probes(found.hidden[used], found.attn[used], label[used], self.C, self.temp, self.clip)._asdict()


@dataclass
class InternalReward:
    """s_final with momentum for every turn, at its last token; also the signals `turn_reward` and `turn_score` [N,K]. Reads no answer. A turn whose
    internals are not finite earns 0 and is counted in the log."""

    alpha: float = 5.0  # weight of the progress over the turns before, >= 0
    temp: float = 2.0  # > 0; 1: raw probabilities
    clip: float = 0.05  # in [0,0.5); 0: raw probabilities

    needs = frozenset({"old_hidden", "old_attention_maps"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if STATE not in run.state:
            raise ValueError(f"{run.method.name} has no probes to read its reward from; put FitProbes among its `prepare`")
        found = turn_features(batch, batch.signal("old_hidden"), batch.signal("old_attention_maps"))
        sound = found.mask & torch.isfinite(found.hidden).all(-1) & torch.isfinite(found.attn).all(-1)
        s = found.attn.new_zeros(found.mask.shape).double()
        s[sound] = probed(Probes(**run.state[STATE]), found.hidden[sound], found.attn[sound], self.temp, self.clip).s_final
        turn_reward = torch.where(sound, momentum(s, found.mask, self.alpha), 0.0).to(batch.logp)
        batch.signals["turn_score"], batch.signals["turn_reward"] = s.to(batch.logp), turn_reward
        run.log(turn_score=float(s[sound].mean()) if bool(sound.any()) else 0.0, turns_without_internals=int((found.mask & ~sound).sum()))
        segment = torch.zeros_like(batch.action) if batch.segment is None else batch.segment
        later = torch.cat([segment[:, 1:], torch.full_like(segment[:, :1], -1)], dim=1)
        ends = batch.mask & ((segment != later) | ~torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], dim=1))
        return spread(turn_reward, segment, ends)


@dataclass
class TurnAdvantages:
    """Each turn relative to the others of its row, plus the row's total relative to its group."""

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        segment = torch.zeros_like(batch.action) if batch.segment is None else batch.segment
        member = _membership(segment, batch.mask).to(batch.logp)
        reward = batch.signals.get("turn_reward")
        reward = (member * dense_reward(batch).to(batch.logp)[..., None]).sum(1) if reward is None else reward
        return spread(turn_advantages(reward, member.any(1), batch.group), segment, batch.mask)


@dataclass
class TurnReinforce:
    """Log-probs weighted by advantages, averaged over a turn's tokens and then over all turns; no ratio, so one step a batch. Anchored by a plain
    log-ratio to the reference."""

    beta: float = 0.01  # weight of the anchor, >= 0

    needs = frozenset({"logp", "ref_logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        segment = torch.zeros_like(batch.mask, dtype=torch.int64) if batch.segment is None else batch.segment
        return Loss(turn_reinforce(new.logp, batch.signal("ref_logp"), batch.advantage, segment, batch.counted & (segment >= 0), self.beta))


@dataclass
class LogOutcome:
    """The task's own reward, for the log alone."""

    def __call__(self, batch: Batch, run: Run) -> None:
        run.log(outcome=float(run.score_rewards(batch).double().mean()))


METHOD = GRPO.but(
    name="pair",
    paper=Paper("PAIR: prefix-aware internal reward from hidden-state probes", "2605.17877", 2026),
    summary="the reward of each turn is read off the policy's hidden states and attention by two frozen probes",
    prepare=(FitProbes(),),
    select=UniformPrompts(group_size=4),
    reward=InternalReward(),
    credit=TurnAdvantages(),
    objective=TurnReinforce(),
    regularize=(),
    control=(LogOutcome(),),
    task="lookup_chain",
)
