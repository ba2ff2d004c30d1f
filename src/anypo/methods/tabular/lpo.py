"""LPO: low-switching policy optimization with general function approximation (arXiv:2306.09554).

Policy gradient with global exploration. Of the visited pairs only a small importance-weighted subset is kept (online sensitivity sampling); the
width of the critic class on that subset is an exploration bonus; bonus and policy are recomputed only when the subset grew, O(d log N) times instead
of N. Between two changes the same data serve an inner loop of natural policy gradient steps. The abstract states idea and result; sensitivity,
width and bonus are recalled, their closed forms for linear critics derived, the rounding of the keep probability [reconstructed]. Left out: the
regression on importance-weighted Monte Carlo returns, in whose place the critic knows the task's transitions and evaluates exactly the rewards
of kept pairs plus the bonus; ensembles for the width of deep critics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.lock import discounted_q
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run
    from anypo.task import Prompt

COVER = "cover"  # the named policy that rolls in
Gram = Float[Tensor, "... d d"]  # sum of copies * feature feature^T, plus the ridge
PerAction = Float[Tensor, "... S A"]


class Sensitivity(NamedTuple):
    sensitivity: Tensor  # [...] in (0,1]


class Subsample(NamedTuple):
    sensitivity: Tensor  # [n] when the point arrived
    probability: Tensor  # [n] of being kept, 1/m
    kept: Tensor  # [n] bool
    copies: Tensor  # [kept points] m


class Bonus(NamedTuple):
    width: Tensor  # [...,S,A]
    bonus: Tensor  # [...,S,A]
    known: Tensor  # [...,S] bool


class MirrorStep(NamedTuple):
    logits: Tensor  # [...,S,A]
    policy: Tensor  # [...,S,A]


class Schedule(NamedTuple):
    update: Tensor  # [n] bool


def gram_matrix(data: Float[Tensor, "n d"], copies: Float[Tensor, " n"], reg: float, size: int) -> Float[Tensor, "d d"]:
    """Item 4's A of kept features; without any (`data` [0]) the ridge alone."""
    rows = data.reshape(-1, size).double()
    return rows.T @ (copies[:, None] * rows) + reg * torch.eye(size, dtype=torch.float64)


def leverage(gram: Gram, features: Float[Tensor, "... n d"]) -> Float[Tensor, "... n"]:
    """phi^T A^-1 phi >= 0."""
    return (features * torch.linalg.solve(gram, features.mT).mT).sum(-1)


def sensitivity_of(lev: Tensor, beta: float, cap: float) -> Tensor:
    """Items 1 and 4: min{1, 1 / (min(1/lev, cap) + beta)}."""
    return (1 / ((1 / lev).clamp(max=cap) + beta)).clamp(max=1)


def sensitivity(
    data: Float[Tensor, "n d"], copies: Float[Tensor, " n"], queries: Float[Tensor, "Q d"], reg: float, beta: float, cap: float
) -> Sensitivity:
    """How much a query could change what the critics agree on, given the kept points."""
    return Sensitivity(sensitivity_of(leverage(gram_matrix(data, copies, reg, queries.shape[-1]), queries), beta, cap))


def copies_of(sens: Tensor, scale: float) -> Tensor:
    """Item 2: the integer m = floor(1 / min(1, scale * sens)), >= 1, under which a point is kept with probability 1/m."""
    return (1 / (scale * sens).clamp(max=1)).floor()


def online_subsample(
    stream: Float[Tensor, "n d"], uniforms: Float[Tensor, " n"], C: float, reg: float, beta: float, cap: float
) -> Subsample:
    """Item 2 in order of arrival: each kept point enters with its copies before the next one is judged."""
    gram, rows = reg * torch.eye(stream.shape[-1], dtype=torch.float64), []
    for point, luck in zip(stream.double(), uniforms, strict=True):
        sens = sensitivity_of(leverage(gram, point[None])[0], beta, cap)
        m = copies_of(sens, C)
        rows.append((sens, 1 / m, (luck < 1 / m).double(), m))
        gram = gram + rows[-1][2] * m * point[:, None] * point
    sens, probability, kept, m = torch.tensor(rows, dtype=torch.float64).T
    return Subsample(sens, probability, kept.bool(), m[kept.bool()])


def bonus_of(width: PerAction, beta: float, gamma: float) -> Bonus:
    """Item 5: twice the width where the widths of all actions are below `beta`; elsewhere 1/(1 - gamma) for the actions at or above it, 0 for the
    others."""
    known = (width < beta).all(-1)
    beyond = (width >= beta).to(width) / (1 - gamma)
    return Bonus(width, torch.where(known[..., None], 2 * width, beyond), known)


def bonus(
    features: Float[Tensor, "S A d"], data: Float[Tensor, "n d"], copies: Float[Tensor, " n"], reg: float, epsilon: float, beta: float, gamma: float
) -> Bonus:  # fmt: skip
    """Items 3-5 for kept points: width sqrt(epsilon * leverage)."""
    lev = leverage(gram_matrix(data, copies, reg, features.shape[-1]), features.flatten(0, -2))
    return bonus_of((epsilon * lev).sqrt().view(features.shape[:-1]), beta, gamma)


def npg_step(logits: PerAction, q: PerAction, width: PerAction, eta: float, beta: float) -> MirrorStep:
    """Item 8: logits + eta q in known states; in unknown ones the logits stay and the policy is uniform over the unknown actions."""
    unknown = width >= beta
    known = ~unknown.any(-1, keepdim=True)
    logits = torch.where(known, logits + eta * q, logits)
    uniform = unknown / unknown.sum(-1, keepdim=True).clamp(min=1)
    return MirrorStep(logits, torch.where(known, logits.softmax(-1), uniform.to(logits)))


def switch_schedule(kept_counts: Int[Tensor, " n"]) -> Schedule:
    """Item 9: recompute at the first episode and whenever the count differs from that of the episode before (no growth, no recomputation)."""
    changed = kept_counts[1:] != kept_counts[:-1]
    return Schedule(torch.cat([torch.ones_like(kept_counts[:1], dtype=torch.bool), changed]))


@dataclass
class CoverRollIn:
    """Item 6: the newest policy of each copy's cover, or a uniform member of it. The cover begins with the run's policy."""

    newest: float = 0.5  # probability of the newest, in [0,1]
    cover: list[list[Tensor]] = field(default_factory=list, init=False, repr=False)  # by copy, tables [S,A]

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        policy = run.named_policy(COVER)
        if not self.cover:
            self.cover = [[table] for table in run.policy.table[:, 0]]  # type: ignore[index]
        luck = torch.rand(len(self.cover), 2, generator=run.generator).tolist()
        chosen = [
            members[-1 if first < self.newest else int(second * len(members))]
            for (first, second), members in zip(luck, self.cover, strict=True)
        ]
        policy.assign(torch.stack(chosen)[:, None])
        return run.collect(prompts, COVER)

    def add(self, copy: int, table: Float[Tensor, "S A"]) -> None:
        self.cover[copy].append(table)

    def state_dict(self) -> dict[str, Any]:
        return {"cover": self.cover}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cover = [list(members) for members in state["cover"]]


@dataclass
class SensitivitySampling:
    """Item 2: what each collected pair counts, its copies when it is kept and 0 when not, [N,1].

    Signals: `gram` [B,d,d] with the new points in it, and `kept_reward` [B,S,A], the rewards of kept pairs and 0 elsewhere. Asks for one
    roll-in of every copy of a problem with `features`.
    """

    scale: float = 1.5  # C, > 0; infinite keeps every pair
    reg: float = 1.0  # ridge, > 0, for features of norm 1
    beta: float = 1.0  # > 0
    cap: float | None = None  # > 0; None = 4 times the run's steps
    gram: Tensor | None = field(default=None, init=False, repr=False)
    reward: Tensor | None = field(default=None, init=False, repr=False)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        features = getattr(run.task, "features", None)
        if features is None or not torch.equal(batch.signals["prompt_id"], torch.arange(run.task.prompts_per_step)):
            raise ValueError(
                f"{run.method.name} plays one roll-in of every copy of a problem with features a step; use select.group_size=1 and the task "
                "combination_lock"
            )
        if self.gram is None or self.reward is None:
            self.gram = self.reg * torch.eye(features.shape[-1], dtype=features.dtype).repeat(len(batch), 1, 1)
            self.reward = torch.zeros(len(batch), *features.shape[:2], dtype=features.dtype)
        state, action = batch.context[:, 0], batch.action[:, 0]
        point = features[state, action]
        cap = 4 * run.total_steps if self.cap is None else self.cap
        m = copies_of(sensitivity_of(leverage(self.gram, point[:, None])[:, 0], self.beta, cap), self.scale)
        luck = torch.rand(len(batch), generator=run.generator, dtype=m.dtype)
        kept = luck < 1 / m
        copies = torch.where(kept, m, torch.zeros_like(m))
        self.gram = self.gram + copies[:, None, None] * point[:, :, None] * point[:, None, :]
        place = (torch.arange(len(batch)), state, action)
        self.reward[place] = torch.where(kept, dense_reward(batch)[:, 0].to(m), self.reward[place])
        batch.signals |= {"gram": self.gram, "kept_reward": self.reward.clone()}
        return copies[:, None]

    def state_dict(self) -> dict[str, Any]:
        return {"gram": self.gram, "reward": self.reward}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gram, self.reward = state["gram"], state["reward"]


@dataclass
class SwitchOnGrowth:
    """Item 9: which copies recompute their policy now (`switch` [N] bool), and with which `width` and `bonus` [N,S,A]."""

    epsilon: float = 1.0  # squared radius of the critics that agree, > 0
    beta: float = 0.3  # width from which an action is unknown, > 0
    explore: bool = True  # False: no bonus, and every state is known
    switches: Tensor | None = field(default=None, init=False, repr=False)  # [B] recomputations so far

    def __call__(self, batch: Batch, run: Run) -> None:
        assert batch.advantage is not None
        grown = batch.advantage[:, 0] > 0
        if self.switches is None:
            self.switches, grown = torch.zeros(len(batch), dtype=torch.int64), torch.ones_like(grown)
        self.switches = self.switches + grown
        last = run.step + 1 == run.total_steps
        run.log(switches=float(self.switches.double().mean()))
        batch.signals["switch"] = grown
        if grown.any() or last:
            features = run.task.features  # type: ignore[attr-defined]
            lev = leverage(batch.signal("gram"), features.flatten(0, 1).expand(len(batch), -1, -1)).view(-1, *features.shape[:2])
            found = bonus_of((self.epsilon * lev).sqrt(), self.beta, run.task.gamma)  # type: ignore[attr-defined]
            run.log(known=float(found.known.double().sum(-1).mean()))
            off = torch.zeros_like(lev)
            batch.signals |= {"width": found.width if self.explore else off, "bonus": found.bonus if self.explore else off}

    def state_dict(self) -> dict[str, Any]:
        return {"switches": self.switches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.switches = state["switches"]


@dataclass
class OptimisticCritic:
    """Minus the sum over states and actions of Q times probability, Q the exact critic of the present table for kept rewards plus bonus: linear in
    the table, so that its slope is -Q."""

    needs = frozenset({"table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        reward = batch.signal("kept_reward") + batch.signal("bonus")
        q = discounted_q(run.task.transition, reward, new.table.detach()[:, 0], run.task.gamma)  # type: ignore[attr-defined]
        return Loss(-(q * new.table[:, 0]).sum())


@dataclass
class InnerNaturalSteps:
    """Item 8 from the uniform policy, for the copies that switch; the result joins their cover. The run's last step goes on to exploit: the same
    loop without bonus, all states known, so that what is saved is the policy found and not the one that explores."""

    steps: int = 30  # K, >= 1
    eta: float = 0.5  # > 0
    beta: float = 0.3  # width from which an action is unknown, > 0; that of the control
    exploit: int = 500  # steps without bonus at the run's end, >= 0

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if loss_fn.needs - {"table"} or not hasattr(run.method.rollout, "add"):
            raise ValueError(
                f"{run.method.name} follows losses that are functions of the signal 'table' and rolls in with a cover; use its own objective and rollout"
            )
        switch = batch.signal("switch")
        if switch.any():
            table = self.solve(batch, loss_fn, batch.signal("width"), self.steps)
            run.policy.assign(torch.where(switch[:, None, None], table, run.policy.table[:, 0])[:, None])  # type: ignore[operator,index]
            for copy in switch.nonzero().flatten().tolist():
                run.method.rollout.add(copy, table[copy])  # type: ignore[attr-defined]
            run.advance_version()
        if self.exploit and run.step + 1 == run.total_steps:
            plain = batch.but(signals={**batch.signals, "bonus": torch.zeros_like(batch.signal("bonus"))})
            run.policy.assign(self.solve(plain, loss_fn, torch.zeros_like(batch.signal("width")), self.exploit)[:, None])  # type: ignore[operator]
            run.advance_version()
        return {}

    def solve(self, batch: Batch, loss_fn: MethodLoss, width: Float[Tensor, "B S A"], steps: int) -> Float[Tensor, "B S A"]:
        """The policy after so many steps."""
        logits = torch.zeros_like(width)
        table = npg_step(logits, logits, width, self.eta, self.beta).policy
        for _ in range(steps):
            leaf = table[:, None].requires_grad_()
            slope = torch.autograd.grad(loss_fn(batch, Signals(table=leaf)).value, leaf)[0][:, 0]
            logits, table = npg_step(logits, -slope, width, self.eta, self.beta)
        return table


METHOD = Method(
    name="lpo",
    paper=Paper("Low-Switching Policy Gradient with Exploration via Online Sensitivity Sampling", "2306.09554", 2023),
    domain="tabular",
    summary="exploration by the critic's width on a small kept subset of the data; bonus and policy change only when the subset grows",
    task="combination_lock",
    select=UniformPrompts(group_size=1),
    rollout=CoverRollIn(),
    reward=TaskReward(),
    credit=SensitivitySampling(),
    objective=OptimisticCritic(),
    control=(SwitchOnGrowth(),),
    update=InnerNaturalSteps(),
    loop="tabular",
)

VARIANTS = {
    "every_episode": METHOD.but(
        name="lpo.every_episode",
        summary="the baseline that switches all the time: every pair is kept, bonus and policy are recomputed at every episode",
        credit=SensitivitySampling(scale=float("inf")),
    ),
}
