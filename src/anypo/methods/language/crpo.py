"""CRPO: character-centric GRPO for role play (arXiv:2605.25511).

GRPO on role play rewards what is useful in the scene, and every character drifts to one style. Against GSPO, its base, CRPO normalizes the rewards of
task and style apart, style first by the role's own running statistics; puts generic answers, sampled without the character, into the group, so
that a reply as bland as they are falls below its mean; and lets every role have a KL coefficient that follows the reference's entropy for it.
Formulas from the authors' released code, two oddities kept (see `kl_controller`). Left out: BLEU, ROUGE and attribute rewards, which a task brings,
named style..., bleu... or rouge... for the style stream. [ours]: with one stream alone, that stream is the advantage; several anchors' log-probs are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.gspo import METHOD as GSPO
from anypo.methods.language.gspo import LossValue, ratio, token_form
from anypo.policy import Loss, Signals
from anypo.seams.credit import sequence_score
from anypo.seams.groups import broadcast, group_mean, group_sum, masked_mean, standardize
from anypo.seams.objective import aggregate, clipped, kl_estimate, ratio_metrics
from anypo.seams.reward import objectives
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

STYLE = ("style", "bleu", "rouge")  # how the names of style rewards begin
ROLE_KL = "role_kl"  # where the run keeps the coefficients and entropies of the roles


class ScaledStyle(NamedTuple):
    scaled: Tensor  # [N,S]
    mean: Tensor  # [R,S]
    var: Tensor  # [R,S]


class Coefficients(NamedTuple):
    coef: list[float]  # by role
    factor: list[float]  # by role


class KLStep(NamedTuple):
    coef: float
    entropy: float | None = None  # running, of the role
    overall: float | None = None  # running, of all roles
    factor: float = 1.0  # in [0.5,2], of the role's KL target


def role_scaler(
    style: Float[Tensor, "B N S"], role: Int[Tensor, "B N"], gamma: float = 0.99, mean: Tensor | None = None, var: Tensor | None = None
) -> ScaledStyle:
    """Equation 1: B batches in order update the roles' running mean and population variance [R,S] (from 0 and 1, or from those given); the last
    one is scaled by the result. A role without rows keeps its statistics."""
    roles = int(role.max()) + 1
    mean = style.new_zeros(roles, style.shape[-1]) if mean is None else mean
    var = style.new_ones(roles, style.shape[-1]) if var is None else var
    for now, who in zip(style, role, strict=True):
        member = one_hot(who, roles).to(now)
        count = member.sum(0)[:, None]
        centre = member.T @ now / count.clamp(min=1)
        spread = member.T @ (now - centre[who]) ** 2 / count.clamp(min=1)
        mean = torch.where(count > 0, gamma * mean + (1 - gamma) * centre, mean)
        var = torch.where(count > 0, gamma * var + (1 - gamma) * spread, var)
    return ScaledStyle((style[-1] - mean[role[-1]]) / (var[role[-1]] + 1e-8).sqrt(), mean, var)


def advantages(
    task: Float[Tensor, " N"], style: Float[Tensor, " N"], group: Int[Tensor, " N"], b_task: float = 0.5, b_style: float = 0.5, ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equation 3: both streams normalized in their group, anchors included, then added. A lone member has 0."""
    return b_task * standardize(task, group, ddof, eps) + b_style * standardize(style, group, ddof, eps)


def identity_weight(role_logp: Float[Tensor, " N"], generic_logp: Float[Tensor, " N"], kappa: float = 0.02) -> Float[Tensor, " N"]:
    """Equation 4: 1 - kappa H(p), p = e^a / (e^a + e^b), detached; smallest, 1 - kappa ln 2, where role and generic answer are equally likely."""
    gap = (role_logp - generic_logp).detach()
    chance = gap.sigmoid()
    return 1 + kappa * (chance * logsigmoid(gap) + (1 - chance) * logsigmoid(-gap))


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, token_advantages: Float[Tensor, "N T"], clip_low: float = 0.2,
    clip_high: float = 0.3, dual_clip: float | None = 3.0,
) -> LossValue:  # fmt: skip
    """Equation 5 without its KL: GSPO-token ratios, clipped, bounded for negative advantages, averaged over all tokens of the batch."""
    value = clipped(token_form(logp, old_logp, mask), token_advantages, 1 - clip_low, 1 + clip_high, dual_clip)
    return LossValue(aggregate(-value, mask, "token_mean"))


def kl_step(
    coef: float, running: float | None, overall: float | None, kl: float, entropy: float, *, target: float, horizon: float, n_steps: int,
    sign: int, exponent: float,
) -> KLStep:  # fmt: skip
    """Equation 6 for one role; None where there is no running entropy yet."""
    running = entropy if running is None else 0.95 * running + 0.05 * entropy
    overall = entropy if overall is None else 0.99 * overall + 0.01 * entropy
    factor = min(max((overall / (running + 1e-6)) ** exponent, 0.5), 2.0)
    error = min(max(kl / (target * factor) - 1, -0.2), 0.2)
    return KLStep(coef * (1 + sign * error * n_steps / horizon), running, overall, factor)


def kl_controller(
    role: Int[Tensor, " L"], kl: Float[Tensor, " L"], entropy: Float[Tensor, " L"], init: float = 0.01, target: float = 0.1,
    horizon: float = 5000, n_steps: int = 64, sign: int = -1, exponent: float = 1.5,
) -> Coefficients:  # fmt: skip
    """Equation 6, one role after another. As released, `sign` is -1 (a KL above its target lowers the coefficient; +1 is the usual controller) and
    `exponent` 1.5 (roles of high entropy get a smaller target; -1.5 a larger one, as the code's comment has it)."""
    last: dict[int, KLStep] = {}
    overall = None
    for who, distance, uncertainty in zip(role.tolist(), kl.tolist(), entropy.tolist(), strict=True):
        before = last.get(who, KLStep(init))
        last[who] = kl_step(
            before.coef, before.entropy, overall, distance, uncertainty, target=target, horizon=horizon, n_steps=n_steps, sign=sign,
            exponent=exponent,
        )  # fmt: skip
        overall = last[who].overall
    found = [last.get(who, KLStep(init)) for who in range(int(role.max()) + 1)]
    return Coefficients([step.coef for step in found], [step.factor for step in found])


def roles_of(batch: Batch) -> tuple[list[str], Int[Tensor, " N"]]:
    """The roles of a batch by name and each row's number among them: the signal `role` [N], else the column `role`; else all rows are one."""
    if "role" in batch.signals:
        rows = [str(role) for role in batch.signals["role"].tolist()]
    else:
        rows = [str(row.get("role", "")) for row in batch.signals.get("columns", [{}] * len(batch))]
    names = sorted(set(rows))
    return names, torch.tensor([names.index(row) for row in rows], dtype=torch.int64)


@dataclass
class GenericAnchors:
    """Attempts at every prompt, and beside them answers to its column `generic`, the prompt without the character, in the same group. Prompts
    without that column have no anchors. Leaves the signal `is_anchor` [N]."""

    anchor_n: int = 1  # anchors a prompt, >= 0
    in_loss: bool = True  # anchors are trained on too, under the generic prompt (as released); else they only count in the statistics

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        owners = [i for i, p in enumerate(prompts) if self.anchor_n and p.columns.get("generic") is not None]
        plain = [prompts[i].but(content=prompts[i].columns["generic"], samples=self.anchor_n) for i in owners]
        batch = run.collect([*prompts, *plain])
        anchor = batch.group >= len(prompts)
        batch.signals["is_anchor"] = anchor
        keep = None if self.in_loss else batch.mask & ~anchor[:, None]
        return batch.but(group=torch.tensor([*range(len(prompts)), *owners])[batch.group], keep=keep)


@dataclass
class CharacterCredit:
    """Task and style normalized apart, style first by the role's running statistics, weighted by how sure the reply is not the generic one."""

    b_task: float = 0.5  # >= 0, of the task stream
    b_style: float = 0.5  # >= 0, of the style stream
    kappa: float = 0.02  # in [0,1]; 0 = no identity weight
    gamma: float = 0.99  # in [0,1), memory of the roles' statistics
    weights: tuple[float, ...] | None = None  # of the K rewards inside their streams; None = all 1
    ddof: int = 1  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0
    statistics: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)  # role -> mean and variance [2,S]

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = objectives(batch)
        if self.weights is not None and len(self.weights) != reward.shape[1]:
            raise ValueError(f"{len(self.weights)} weights for {reward.shape[1]} rewards; give one weight for each reward")
        weights = reward.new_tensor(self.weights or (1.0,) * reward.shape[1])
        of_style = torch.tensor([name.startswith(STYLE) for name in batch.objectives] or [False])
        task = reward[:, ~of_style] @ weights[~of_style]
        style = self.scaled(reward[:, of_style], *roles_of(batch)) @ weights[of_style]
        both = bool(of_style.any()) and not bool(of_style.all())
        shares = (self.b_task, self.b_style) if both else (0.0, 1.0) if bool(of_style.any()) else (1.0, 0.0)
        total = advantages(task, style, batch.group, *shares, self.ddof, self.eps)
        return broadcast(total * self.identity(batch), batch.mask)

    def scaled(self, style: Float[Tensor, "N S"], names: list[str], role: Int[Tensor, " N"]) -> Float[Tensor, "N S"]:
        """Equation 1 with the statistics kept from step to step."""
        fresh = torch.stack([style.new_zeros(style.shape[1]), style.new_ones(style.shape[1])])
        kept = torch.stack([self.statistics.get(name, fresh) for name in names])
        found = role_scaler(style[None], role[None], self.gamma, kept[:, 0], kept[:, 1])
        self.statistics.update({name: torch.stack([found.mean[i], found.var[i]]) for i, name in enumerate(names)})
        return found.scaled

    def identity(self, batch: Batch) -> Float[Tensor, " N"]:
        """Equation 4; 1 for prompts without an anchor."""
        mean_logp = sequence_score(batch.logp, batch.mask, "mean")
        anchor = batch.signals.get("is_anchor", torch.zeros(len(batch), dtype=torch.bool)).to(mean_logp)
        anchors = group_sum(anchor, batch.group)
        generic = group_sum(anchor * mean_logp, batch.group) / anchors.clamp(min=1)
        return torch.where(anchors > 0, identity_weight(mean_logp, generic, self.kappa), torch.ones_like(mean_logp))

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": dict(self.statistics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.statistics = dict(state["statistics"])


@dataclass
class SequenceRatioClip:
    """Clipped surrogate of the length-normalized sequence ratio with per-token advantages, averaged over tokens."""

    clip_low: float = 0.2  # the ratio may fall to 1 - clip_low, in [0,1]
    clip_high: float = 0.3  # and rise to 1 + clip_high, >= 0
    dual_clip: float | None = 3.0  # > 1, bound for negative advantages; None = off

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        value = loss(new.logp, batch.logp, mask, batch.advantage, self.clip_low, self.clip_high, self.dual_clip).loss
        return Loss(value, ratio_metrics(ratio(new.logp, batch.logp, mask), 1 - self.clip_low, 1 + self.clip_high, mask.any(1)))


@dataclass
class RoleKL:
    """The k3 KL to the reference, averaged over tokens, with each role's own coefficient (see `AdaptRoleKL`)."""

    initial: float = 0.01  # > 0, coefficient of a role not met before

    needs = frozenset({"logp", "ref_logp", "ref_entropy"})  # the entropy is the controller's

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        names, role = roles_of(batch)
        known = run.state.setdefault(ROLE_KL, {"coef": {}, "entropy": {}, "overall": None})["coef"]
        coefficient = new.logp.new_tensor([known.setdefault(name, self.initial) for name in names])[role]
        kl = kl_estimate(new.logp, batch.signal("ref_logp"), batch.counted)
        mean = float(masked_mean(kl.detach(), batch.counted))
        return Loss(masked_mean(coefficient[:, None] * kl, batch.counted), {"kl": mean})


@dataclass
class AdaptRoleKL:
    """Moves the coefficients of `RoleKL` by equation 6, from the KL and the reference's entropy of each role's rows."""

    target: float = 0.1  # > 0, KL a token of a role of average entropy
    horizon: float = 5000.0  # > 0, rows
    sign: int = -1  # -1 as released: a KL above its target lowers the coefficient; +1 raises it
    exponent: float = 1.5  # as released: roles of higher entropy have smaller targets; -1.5 for larger ones

    def __call__(self, batch: Batch, run: Run) -> None:
        names, role = roles_of(batch)
        kl = sequence_score(kl_estimate(batch.logp, batch.signal("ref_logp"), batch.mask), batch.mask, "mean")
        entropy = sequence_score(batch.signal("ref_entropy"), batch.mask, "mean")
        by_role = torch.stack([group_mean(kl, role), group_mean(entropy, role)], dim=1)
        state = run.state[ROLE_KL]
        for i, name in enumerate(names):
            if name not in state["coef"]:  # none of its rows was trained on
                continue
            here = by_role[role == i][0]
            found = kl_step(
                state["coef"][name], state["entropy"].get(name), state["overall"], float(here[0]), float(here[1]), target=self.target,
                horizon=self.horizon, n_steps=len(batch), sign=self.sign, exponent=self.exponent,
            )  # fmt: skip
            state["coef"][name], state["entropy"][name], state["overall"] = found.coef, found.entropy, found.overall
        run.log(role_kl=sum(state["coef"].values()) / len(state["coef"]))


METHOD = GSPO.but(
    name="crpo",
    paper=Paper("CRPO: character-centric GRPO for role play", "2605.25511", 2026),
    summary="task and style rewards normalized apart, generic answers as negative anchors, a KL coefficient for every role",
    select=UniformPrompts(group_size=7),
    rollout=GenericAnchors(),
    credit=CharacterCredit(),
    objective=SequenceRatioClip(),
    regularize=RoleKL(),
    control=AdaptRoleKL(),
)
