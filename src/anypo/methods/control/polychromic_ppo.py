"""Polychromic PPO: set-level diversity objective with vine sampling (arXiv:2509.25424).

Fine-tuning by reinforcement lets a policy collapse on the few behaviours that pay first. Here sets of trajectories are scored: the mean return of a set
times the share of its members that differ, so that a set must succeed and be diverse. Against PPO the rollout becomes a vine (several rollouts from the
same visited state), and the actions after such a state, all or the first W, get the advantage of the sets that their trajectory belongs to; the others
get PPO's. Objective, shared advantage and vine are the paper's; what makes trajectories distinct, the window of actions and the choice of states are
[reconstructed]. The clip stands inside the sum over sets: since it scales with the advantage, each trajectory carries two numbers, what its sets gain
and what they lose. Left out: dividing advantages by their spread.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.report import statistics
from anypo.seams.credit import dense_reward, gae, per_action_ends, whiten
from anypo.seams.groups import group_mean, group_size, masked_mean
from anypo.seams.objective import aggregate, clipped, token_ratio
from anypo.seams.regularize import KLPenalty, ValueLoss
from anypo.seams.rollout import as_roots, continue_rows
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run
    from anypo.task import Prompt

MODES = ("fraction", "shifted")
PerAction = Float[Tensor, "N T"]
Sets = Int[Tensor, "M n"]  # row numbers, no row twice in a set


class Scores(NamedTuple):
    diversity: Float[Tensor, " M"]  # in (0,1], or [0,1] when shifted
    score: Float[Tensor, " M"]


class Advantages(NamedTuple):
    set: Float[Tensor, " M"]
    trajectory: Float[Tensor, " N"]  # gain + loss
    gain: Float[Tensor, " N"]  # share of the sets better than their state's mean, >= 0
    loss: Float[Tensor, " N"]  # share of the worse ones, <= 0


def set_scores(reward: Float[Tensor, " N"], signature: Int[Tensor, " N"], sets: Sets, mode: str = "fraction") -> Scores:
    """Equations 1 and 2: mean reward of each set times its diversity. U different signatures among n: U/n, or (U-1)/(n-1) when "shifted".

    Rewards in [0,1]. Raises ValueError for another mode.
    """
    if mode not in MODES:
        raise ValueError(f"unknown diversity '{mode}'; use {' or '.join(MODES)}")
    ordered = signature[sets].sort(dim=1).values
    size, distinct = sets.shape[1], 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1).to(reward.dtype)
    diversity = (distinct - 1) / max(size - 1, 1) if mode == "shifted" else distinct / size
    return Scores(diversity, diversity * reward[sets].mean(1))


def advantages(
    reward: Float[Tensor, " N"], signature: Int[Tensor, " N"], sets: Sets, mode: str = "fraction", group: Int[Tensor, " N"] | None = None
) -> Advantages:
    """Equations 4 and 5: each set's score minus the mean over the sets of its state (`group`; None: all rows share one), and every trajectory's
    share N/(M n) of the sets it is in."""
    group = torch.zeros(len(reward), dtype=torch.int64) if group is None else group
    of_set = group[sets[:, 0]]
    score = set_scores(reward, signature, sets, mode).score
    found = score - group_mean(score, of_set)
    share = group_size(group)[sets[:, 0]] / (group_size(of_set) * sets.shape[1])
    member, pull = sets.flatten(), (share * found).repeat_interleave(sets.shape[1])
    gain, loss = (torch.zeros_like(reward).index_add(0, member, part) for part in (pull.clamp(min=0), pull.clamp(max=0)))
    return Advantages(found, gain + loss, gain, loss)


def vine_loss(
    logp: PerAction, old_logp: PerAction, gain: Float[Tensor, " N"], loss: Float[Tensor, " N"], window: Tensor, clip: float = 0.2
) -> Tensor:
    """Equation 5 from the two shares of each trajectory: minus the mean over trajectories of the mean over the window's actions [N,T] of
    gain * min(ratio, 1 + clip) + loss * max(ratio, 1 - clip), which is the sum over sets of the clipped surrogate."""
    ratio = token_ratio(logp, old_logp, window)
    value = clipped(ratio, gain[:, None], 1 - clip, 1 + clip) + clipped(ratio, loss[:, None], 1 - clip, 1 + clip)
    return aggregate(-value, window, "seq_mean")


def loss(
    logp: PerAction, old_logp: PerAction, mask: Tensor, reward: Float[Tensor, " N"], signature: Int[Tensor, " N"], sets: Sets, clip: float = 0.2,
    window: int | None = None, mode: str = "fraction",
) -> Tensor:  # fmt: skip
    """Equation 5 for the N rollouts of one state; `window`: the first so many actions of each, None = all."""
    found = advantages(reward, signature, sets, mode)
    return vine_loss(logp, old_logp, found.gain, found.loss, first_actions(mask, torch.zeros(len(mask), dtype=torch.int64), window), clip)


def first_actions(mask: Tensor, start: Int[Tensor, " N"], window: int | None) -> Tensor:
    """[N,T] bool: the first `window` actions (None: all) from each row's action `start` on."""
    place = torch.arange(mask.shape[1])[None] - start[:, None]
    return mask.bool() & (place >= 0) & (place < (mask.shape[1] if window is None else window))


def pass_at_k(n: int, c: Int[Tensor, " P"], k: int) -> Float[Tensor, " P"]:
    """Equation 7: the chance that k of a problem's n attempts, c of them right, hold a right one."""
    return torch.tensor([statistics.pass_at_k(n, right, k) for right in c.tolist()], dtype=torch.float64)


def draw_sets(group: Int[Tensor, " N"], size: int, count: int | None, generator: torch.Generator) -> Sets:
    """`count` random sets of `size` rows of each group, or all of them where there are no more (None: always). Raises ValueError for small groups."""
    drawn = []
    for g in torch.unique(group):
        rows = (group == g).nonzero().flatten()
        if len(rows) < size:
            raise ValueError(
                f"sets of {size} trajectories need as many attempts at a prompt, not {len(rows)}; set select.group_size to {size} or more"
            )
        if count is None or math.comb(len(rows), size) <= count:
            drawn.append(rows[torch.tensor(list(itertools.combinations(range(len(rows)), size)))])
        else:
            drawn.append(rows[torch.rand(count, len(rows), generator=generator).argsort(1)[:, :size]])
    return torch.cat(drawn)


@dataclass
class Visited:
    """Two trajectories differ when the sets of observation cells they visit differ, or, where actions have no observation each, their actions."""

    cell: float = 0.25  # side of a cell in the observation's units, > 0

    def __call__(self, batch: Batch, window: Tensor) -> Int[Tensor, " N"]:
        """Equal numbers [N] for equal behaviour on the actions of `window` [N,T]."""
        seen = batch.context
        by_action = not isinstance(seen, Tensor) or seen.shape[:2] != window.shape
        cells = batch.action if by_action else (seen / self.cell).round().long()
        kinds: dict[Any, int] = {}
        rows = zip(cells.reshape(*window.shape, -1).numpy(), window.numpy(), strict=True)
        keys = [row[chosen].tobytes() if by_action else np.unique(row[chosen], axis=0).tobytes() for row, chosen in rows]
        return torch.tensor([kinds.setdefault(key, len(kinds)) for key in keys])


@dataclass
class VineRollout:
    """Attempts from each start, which is the first state of the vine, and as many fresh ones from states that the first of them visited."""

    states: int = 2  # vine states for each start, itself among them, >= 1

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = as_roots(run.collect(prompts))
        if self.states <= 1:
            return batch
        first = torch.tensor([int((batch.group == g).nonzero()[0]) for g in torch.unique(batch.group)])
        chance = torch.rand(len(first), self.states - 1, generator=run.generator)
        depth = (
            1 + chance * (batch.lengths[first, None] - 1)
        ).long()  # a state visited after the start; the start itself in an episode of one
        attempts = prompts[0].samples
        rows, depth = (x.flatten().repeat_interleave(attempts) for x in (first[:, None].expand_as(depth), depth))
        vines = continue_rows(batch, rows, depth.clamp(max=batch.lengths[rows] - 1), run)
        vines.group = int(batch.group.max()) + 1 + torch.arange(len(rows)) // attempts
        return Batch.concat([batch, vines])


@dataclass
class SetCredit:
    """Set advantages for the first actions after a vine state, generalized advantages for the others.

    Signals: `set_gain`, `set_loss` [N], `vine` [N,T] bool (the actions they hold for), and `returns` where there are other actions.
    """

    size: int = 4  # n, trajectories in a set, >= 1; 1 = reward minus the mean
    sets: int | None = 16  # M, sets of each state; None = all
    window: int | None = None  # W, actions after the vine state that get the set's advantage, >= 1; None = all, and no critic is asked for
    mode: str = "fraction"  # fraction or shifted
    gamma: float = 0.99  # discount of the trajectories' returns and of the other actions, in [0,1]
    lam: float = 0.95  # trace decay for the other actions, in [0,1]
    low: float | None = None  # return that counts as 0; None = the lowest so far, at most 0
    high: float | None = None  # return that counts as 1, > low; None = the highest so far
    signature: Any = field(default_factory=Visited)  # (batch, actions after the vine state [N,T]) -> numbers [N], equal for equal behaviour

    compares_group = True
    gives = frozenset({"returns"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.window is None else frozenset({"old_value"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        start = torch.zeros_like(batch.group) if batch.branch_at is None else batch.branch_at
        after = first_actions(batch.mask, start, None)
        batch.keep = after
        reward, signature = self.scaled(self.discounted(batch, after, start), run), self.signature(batch, after)
        found = advantages(reward, signature, draw_sets(batch.group, self.size, self.sets, run.generator), self.mode, batch.group)
        vine = first_actions(batch.mask, start, self.window)
        batch.signals |= {"set_gain": found.gain, "set_loss": found.loss, "vine": vine}
        kinds = torch.unique(batch.group * (signature.max() + 1) + signature)
        run.log(kinds=len(kinds) / len(torch.unique(batch.group)))  # of trajectories, from a vine state
        return torch.where(vine, found.trajectory[:, None].to(batch.logp.dtype), self.others(batch, after & ~vine))

    def discounted(self, batch: Batch, after: Tensor, start: Tensor) -> Float[Tensor, " N"]:
        """Return from the vine state on."""
        power = (torch.arange(batch.horizon)[None] - start[:, None]).clamp(min=0)
        reward = dense_reward(batch)
        return torch.where(after, reward * self.gamma**power, torch.zeros_like(reward)).sum(1)

    def scaled(self, returns: Float[Tensor, " N"], run: Run) -> Float[Tensor, " N"]:
        """Returns in [0,1], for only then do success and diversity multiply."""
        low, high = run.state.get("polychromic.range", [0.0, 0.0])
        low, high = run.state["polychromic.range"] = [min(low, float(returns.min())), max(high, float(returns.max()))]
        low, high = low if self.low is None else self.low, high if self.high is None else self.high
        return ((returns - low) / max(high - low, 1e-12)).clamp(0, 1)

    def others(self, batch: Batch, rest: Tensor) -> PerAction:
        """PPO's advantages, whitened over the actions outside the window; 0 where there is no critic."""
        if self.window is None:
            return torch.zeros_like(batch.logp)
        terminated, truncated = per_action_ends(batch)
        found = gae(
            dense_reward(batch), batch.signal("old_value"), terminated, truncated, batch.mask, self.gamma, self.lam, batch.next_value
        )
        batch.signals["returns"] = found.returns
        return whiten(found.advantages, rest)


@dataclass
class VineSurrogate:
    """The sets' clipped surrogate on the vine's actions plus PPO's on the others."""

    clip: float = 0.2  # the ratio's band is 1 - clip to 1 + clip, in (0,1)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        window, rest = batch.counted & batch.signal("vine"), batch.counted & ~batch.signal("vine")
        value = vine_loss(new.logp, batch.logp, batch.signal("set_gain"), batch.signal("set_loss"), window, self.clip)
        ratio = token_ratio(new.logp, batch.logp, batch.counted)
        plain = -masked_mean(clipped(ratio, batch.advantage, 1 - self.clip, 1 + self.clip), rest)
        outside = ((ratio.detach() - 1).abs() > self.clip).to(ratio.dtype)
        return Loss(value + plain, {"clip_fraction": float(masked_mean(outside, batch.counted)), "vine_loss": float(value.detach())})


METHOD = PPO.but(
    name="polychromic_ppo",
    paper=Paper("Polychromic Objectives for Reinforcement Learning", "2509.25424", 2025),
    summary="rollouts from visited states in sets, whose members share the advantage of being successful and diverse together",
    select=UniformPrompts(prompts=2, group_size=8),
    rollout=VineRollout(states=2),
    credit=SetCredit(),
    objective=VineSurrogate(clip=0.2),
    regularize=(KLPenalty(beta=0.01),),
    update=GradientSteps(epochs=4, minibatches=4, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5, unit="row"),
)

VARIANTS = {
    # PPO's part then outweighs the sets': in the four rooms of the claims little was left of their gain in coverage
    "window": METHOD.but(
        name="polychromic_ppo.window",
        summary="the sets' advantage for five actions after a vine state, PPO with a critic for the others",
        credit=SetCredit(window=5),
        regularize=(ValueLoss(coefficient=0.5), KLPenalty(beta=0.01)),
    ),
}

# On a language model: the start is the only vine state, sets hold whole answers, and no critic is needed.
FOR_DOMAIN = {
    "language": METHOD.but(
        domain="language",
        base=None,
        select=UniformPrompts(group_size=8),
        rollout=VineRollout(states=1),
        credit=SetCredit(gamma=1.0),
        regularize=(KLPenalty(beta=0.01),),
        update=GradientSteps(epochs=2, minibatches=2),
    )
}
