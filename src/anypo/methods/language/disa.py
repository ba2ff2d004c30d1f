"""DISA: decoupled importance-sampled anchoring, a frozen partition function (arXiv:2605.17295).

Matching pi*(y|x) = reference(y|x) exp(beta r) / Z(x) keeps every rewarded mode, but needs log Z. FlowRL learns it along with the policy, so its errors
leak into the update. DISA draws responses from a proposal before training, estimates log Z(x) by importance sampling, freezes it, and only then lets
the policy minimize the squared trajectory-balance residual. Against GRPO it changes prepare, select, credit and objective: the credit gives
beta r - log Z, the objective squares its distance from the log-ratio to the reference, so either goes with any partner.

The pipeline is from the abstract and from third-party digests; estimate and diagnostics are the standard forms, length normalization and the weight
of stale samples FlowRL's, the ridge head of the regressor is [reconstructed]. The proposal is the reference at one or several temperatures (an even
mixture; a very high one is the uniform proposal). Prompts that a task invents only later are estimated, from the same frozen reference, when they
first appear. Left out: rewards standardized in their group, and proposals by another model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast
from anypo.seams.objective import log_ratio
from anypo.seams.regression import row_advantage, sequence_log_ratio
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

FROZEN = "frozen_log_z"  # run.state: prompt id -> log Z(x)
HEAD = "frozen_log_z_head"  # run.state: [F] coefficients of the regressor


class Estimate(NamedTuple):
    log_z: Tensor  # [...]
    ess: Tensor  # [...] effective number of samples, in [1,M]


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def log_z(
    ref_logp_sum: Float[Tensor, "*P M"], proposal_logp_sum: Float[Tensor, "*P M"], reward: Float[Tensor, "*P M"], beta: float = 5.0,
    truncate: float | None = None,
) -> Estimate:  # fmt: skip
    """Equations 1-2 in float64: log mean exp of log w = log reference - log proposal + beta r, and (sum w)^2 / sum w^2. `truncate`: limit on the
    distance between the two log-probs."""
    distance = ref_logp_sum.double() - proposal_logp_sum.double()
    if truncate is not None:
        distance = distance.clamp(-truncate, truncate)
    weight = distance + beta * reward.double()
    total = weight.logsumexp(-1)
    return Estimate(total - math.log(weight.shape[-1]), (2 * total - (2 * weight).logsumexp(-1)).exp())


def ridge(features: Float[Tensor, "P F"], z: Float[Tensor, " P"], weights: Float[Tensor, " P"], lam: float = 1e-3) -> Float[Tensor, " F"]:
    """Equation 3: (F'WF + lam I)^-1 F'W z in float64."""
    features, weighted = features.double(), (features.double() * weights.double()[:, None]).mT
    return torch.linalg.solve(weighted @ features + lam * torch.eye(features.shape[1]).to(features), weighted @ z.double())


def regressor(
    features: Float[Tensor, "P F"], z: Float[Tensor, " P"], weights: Float[Tensor, " P"], lam: float = 1e-3
) -> Float[Tensor, " P"]:
    """The ridge fit's log Z at the prompts that it was fitted on."""
    return features.double() @ ridge(features, z, weights, lam)


def residual(
    logp: Float[Tensor, "N T"], ref_logp: Float[Tensor, "N T"], mask: Tensor, target: Float[Tensor, " N"], length_norm: bool
) -> Float[Tensor, " N"]:
    """Equation 4: the log-ratio to the reference, summed or with `length_norm` averaged over tokens, minus the target beta r - log Z (detached)."""
    length = mask.bool().sum(1).clamp(min=1) if length_norm else 1
    return sequence_log_ratio(logp, ref_logp, mask) / length - target.detach()


def staleness(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, eps: float) -> Float[Tensor, " N"]:
    """c of equation 5: the geometric mean of a row's token ratios, within [1 - eps, 1 + eps] and without gradient; 1 on-policy."""
    mean = log_ratio(logp.detach(), old_logp, mask).sum(1) / mask.bool().sum(1).clamp(min=1)
    return mean.exp().clamp(1 - eps, 1 + eps)


def loss(
    logp: Float[Tensor, "N T"], ref_logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, reward: Float[Tensor, " N"],
    log_z: Float[Tensor, " N"], beta: float = 5.0, eps: float = 0.2, length_norm: bool = True,
) -> LossValue:  # fmt: skip
    """Equation 5: mean of c D^2; its gradient in a token's log-prob is 2 c D / (length N)."""
    d = residual(logp, ref_logp, mask, beta * reward - log_z, length_norm)
    return LossValue((staleness(logp, old_logp, mask, eps) * d**2).mean())


@dataclass
class OfflinePartition:
    """Stage 1: log Z of the prompts from rewards of the proposal's responses; noted in the run's state and never changed after."""

    beta: float = 5.0  # inverse temperature of the target, >= 0, for rewards in [0,1]
    samples: int = 64  # M, responses of the proposal a prompt, at least one a temperature
    temperatures: tuple[float, ...] = (1.0,)  # > 0; the proposal is the even mixture of the reference at these, 1 = the reference itself
    truncate: float | None = None  # > 0, limit on |log reference - log proposal|; None = no limit
    prompts: int | None = None  # estimated before the first step; None = the task's own default batch
    table: bool = True  # log Z as estimated, of new prompts when first drawn; False: a regressor on what the reference makes of the prompt
    weighted: bool = True  # the regressor weights a prompt by its effective number of samples
    lam: float = 1e-3  # > 0, ridge
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logp"}) if self.table else frozenset({"ref_logp", "ref_hidden"})

    def __call__(self, run: Run) -> None:
        prompts = run.task.prompts(self.prompts or run.task.prompts_per_step, run.rng)
        if self.table:
            return self.estimate(prompts, run)
        prompts = list({p.id: p for p in prompts}.values())
        found, first = self.sample(prompts, run)
        weights = found.ess if self.weighted else torch.ones_like(found.ess)
        run.state[HEAD] = ridge(_features(first, run), found.log_z, weights, self.lam)

    def estimate(self, prompts: list[Prompt], run: Run) -> None:
        """Note log Z of those prompts that have none yet."""
        known = run.state.setdefault(FROZEN, {})
        fresh = list({p.id: p for p in prompts if p.id not in known}.values())
        if fresh:
            found, _ = self.sample(fresh, run)
            known.update(zip([p.id for p in fresh], found.log_z.tolist(), strict=True))

    def sample(self, prompts: list[Prompt], run: Run) -> tuple[Estimate, Batch]:
        """The estimates [P], and one row a prompt in the same order."""
        each, spread = divmod(self.samples, len(self.temperatures))
        if each < 1 or spread:
            raise ValueError(
                f"prepare.0.samples must be a multiple of the number of temperatures, {len(self.temperatures)}, not {self.samples}"
            )
        base: float = getattr(run.task, "temperature", None) or getattr(run.policy, "temperature", 1.0) or 1.0
        batch = run.collect([p.but(samples=each, temperature=base * t) for p in prompts for t in self.temperatures], "reference")
        batch.reward = run.score_rewards(batch)
        reward = row_reward(batch, self.weights)
        order = batch.group.argsort(stable=True)
        batch, reward = batch[order], reward[order]

        def string_logp(temperature: float) -> Tensor:
            heat = torch.full((len(batch),), base * temperature, dtype=torch.float64)
            return run.score(batch.but(signals=batch.signals | {"temperature": heat}), {"logp"}, "reference").logp.double().sum(1)

        reference = string_logp(1.0)
        mixture = torch.stack([reference if t == 1 else string_logp(t) for t in self.temperatures])
        proposal = mixture.logsumexp(0) - math.log(len(mixture))
        length = batch.lengths.clamp(min=1) if getattr(run.method.objective, "length_norm", False) else 1
        shape = len(prompts), self.samples
        found = log_z((reference / length).view(shape), (proposal / length).view(shape), reward.view(shape), self.beta, self.truncate)
        error = (1 / found.ess - 1 / self.samples).clamp(min=0).sqrt()  # delta method
        run.log(offline_actions=float(batch.mask.sum()), partition_ess=float(found.ess.mean()), partition_error=float(error.mean()))
        return found, batch[torch.arange(0, len(batch), self.samples)]

    def frozen(self, batch: Batch, run: Run) -> list[float]:
        """log Z of every row. Raises ValueError for a prompt that has none."""
        known, ids = run.state.setdefault(FROZEN, {}), batch.signal("prompt_id").tolist()
        rows = list({prompt: row for row, prompt in enumerate(ids) if prompt not in known}.values())
        if rows and HEAD not in run.state:
            raise ValueError(f"disa: no frozen log Z is known for prompt {ids[rows[0]]}; keep disa's select with its prepare")
        if rows:
            predicted = _features(batch[torch.tensor(rows)], run) @ run.state[HEAD]
            known.update(zip([ids[row] for row in rows], predicted.tolist(), strict=True))
        return [known[prompt] for prompt in ids]


def _features(batch: Batch, run: Run) -> Float[Tensor, "N F"]:
    """1 and the reference's state after reading the prompt (before the first action, for a policy that tells no other)."""
    opening = batch.but(action=batch.action[:, :1], mask=batch.mask[:, :1], logp=batch.logp[:, :1], valid=batch.attended[:, :1])
    seen = run.score(opening, {"hidden"}, "reference")
    state = seen.get("prompt_hidden", seen.hidden[:, 0]).double()
    return torch.cat([torch.ones_like(state[:, :1]), state], dim=1)


def _partition(run: Run) -> OfflinePartition:
    found = next((c for c in run.method.prepare if isinstance(c, OfflinePartition)), None)
    if found is None:
        raise ValueError("disa's credit and prompts live on a frozen log Z; keep OfflinePartition in the method's prepare")
    return found


@dataclass
class AnchoredPrompts(UniformPrompts):
    """Fresh prompts; those without a log Z get it now, from the frozen reference."""

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        drawn, partition = super().__call__(task, run), _partition(run)
        if partition.table:
            partition.estimate(drawn, run)
        return drawn


@dataclass
class PartitionAdvantage:
    """beta r - log Z, on every action."""

    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        partition = _partition(run)
        return broadcast(partition.beta * reward - reward.new_tensor(partition.frozen(batch, run)), batch.mask)


@dataclass
class TrajectoryBalance:
    """Mean of the squared residual between a response's log-ratio to the reference and its advantage, weighted for stale samples."""

    eps: float = 0.2  # in [0,1]: the weight of a stale sample is in [1 - eps, 1 + eps]
    length_norm: bool = True  # log-probs as means over tokens, here and in the estimate of log Z; False matches pi* itself

    needs = frozenset({"logp", "ref_logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        d = residual(new.logp, batch.signal("ref_logp"), mask, row_advantage(batch.advantage, mask), self.length_norm)
        weight = staleness(new.logp, batch.logp, mask, self.eps)
        return Loss((weight * d**2).mean(), {"residual": float(d.detach().pow(2).mean().sqrt())})


METHOD = GRPO.but(
    name="disa",
    paper=Paper("DISA: Offline Importance Sampling for Distribution-Matching LLM-RL", "2605.17295", 2026),
    summary="trajectory balance toward all rewarded modes, with a partition function estimated offline by importance sampling and frozen",
    prepare=(OfflinePartition(),),
    select=AnchoredPrompts(),
    credit=PartitionAdvantage(),
    objective=TrajectoryBalance(),
    regularize=(),
)
