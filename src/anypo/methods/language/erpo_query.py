"""ERPO: environment-regularized policy optimization, Query-KL (arXiv:2608.23311).

GRPO's KL to a reference holds the responses back; without it nothing bounds the drift. ERPO regularizes the input side instead: the same network also
gives the training queries a likelihood, and a Query-KL keeps that near its value before training. Its gradient goes through the queries' own tokens
alone. Besides, a query's advantages are weighted by how typical the query is under the reference. Against GRPO it changes rollout, credit and
regularize; the inner credit and the objective may be any. Equations from a detailed summary of the paper and from the authors' core file.

Query log-probs come out of the pass that evaluates the responses (the signal `prompt_logp`), those of the reference are computed once a query. A
batch that does not fit one pass is evaluated once more before its gradient, as any second epoch is. Left out: aggregations of the KL other than the
mean over a query's tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.method import Credit, Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import aggregate, kl_estimate
from anypo.seams.regression import sequence_log_ratio
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

TABLE = "query_reference"  # run.state: prompt id -> [L-1] log-probs of the query's tokens under the reference
SMALLEST_NLL = 1e-8  # a query that is certain under the reference must not divide by 0


def first_rows(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " D"], Int[Tensor, " N"]]:
    """The first row of each of the D groups, and each row's place among the groups."""
    distinct, place = torch.unique(group, return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    return rows.new_zeros(len(distinct)).scatter_reduce(0, place, rows, "amin", include_self=False), place


def qkl(
    q_logp: Float[Tensor, "N L"], q_ref_logp: Float[Tensor, "N L"], q_mask: Tensor, group: Int[Tensor, " N"], estimator: str = "k3"
) -> Tensor:  # fmt: skip
    """Equation 2, a scalar differentiable in `q_logp`; each group's query counts once. "k3": mean over queries of the mean over tokens of
    exp(d) - d - 1, d = reference - current in [-20,20]. "seq_k2": mean of half the squared log-ratio of whole queries, whose gradient is that of
    equation 1. Queries without tokens do not count. Raises ValueError for another estimator."""
    rows, _ = first_rows(group)
    logp, reference, mask = q_logp[rows], q_ref_logp[rows], q_mask[rows].bool()
    if estimator == "k3":
        return aggregate(kl_estimate(logp, reference, mask), mask, "seq_mean")
    if estimator == "seq_k2":
        return masked_mean(0.5 * sequence_log_ratio(logp, reference, mask) ** 2, mask.any(1))
    raise ValueError(f"unknown estimator '{estimator}' of the Query-KL; use k3 or seq_k2")


def query_weights(q_ref_logp: Float[Tensor, "D L"], q_mask: Tensor, w_max: float = 2.0) -> Float[Tensor, " D"]:
    """Equation 3: the mean negative log-likelihood of the queries over a query's own, in [0, w_max]; 1 for a query without tokens. No gradient."""
    mask = q_mask.bool()
    nll = -torch.where(mask, q_ref_logp.detach(), q_ref_logp.new_zeros(())).sum(1)
    exists = mask.any(1)
    weight = (masked_mean(nll, exists) / nll.clamp(min=SMALLEST_NLL)).clamp(0, w_max)
    return torch.where(exists, weight, torch.ones_like(weight))


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], mask: Tensor, query_weight: Float[Tensor, " N"], std: bool = True, ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equation 4: group-relative advantages times the weight of the row's query."""
    return broadcast(query_weight * group_relative(reward, group, std, ddof, eps), mask)


@dataclass
class QueryTable:
    """The inner rollout, and with it `ref_prompt_logp` [N,L] of its queries, each scored under the reference when it first appears and then kept."""

    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = self.inner(prompts, run)
        if "ref_prompt_logp" not in run.method.needs():
            return batch
        table, ids = run.state.setdefault(TABLE, {}), batch.signal("prompt_id").tolist()
        fresh = {prompt: row for row, prompt in enumerate(ids) if prompt not in table}
        if fresh:
            found = run.score(_opening(batch[torch.tensor(list(fresh.values()))]), {"prompt_logp"}, "reference")
            table.update({prompt: logp[mask] for prompt, logp, mask in zip(fresh, found.prompt_logp, found.prompt_mask, strict=True)})
        known = [table[prompt] for prompt in ids]
        lengths = torch.tensor([len(logp) for logp in known])
        place = torch.arange(int(lengths.max()) + 1)
        mask = (place > 0) & (place <= lengths[:, None])
        batch.signals["ref_prompt_logp"] = nn.functional.pad(nn.utils.rnn.pad_sequence(known, batch_first=True), (1, 0))
        batch.signals["ref_prompt_mask"] = mask.to(known[0].device)
        return batch


def _opening(batch: Batch) -> Batch:
    """Prompts with the first action alone: all that scoring the queries takes."""
    first = [x[:, :1] for x in (batch.action, batch.mask, batch.logp, batch.attended)]
    return Batch(action=first[0], mask=first[1], logp=first[2], group=batch.group, context=batch.context, valid=first[3])


@dataclass
class QueryWeighted:
    """The inner credit's advantages times the weight of the row's query."""

    inner: Credit = field(default_factory=lambda: GroupRelative(ddof=1))
    w_max: float = 2.0  # largest weight, > 0; the released code has no limit
    source: str = "reference"  # whose likelihood makes a query typical: reference (paper), or current as in the released code

    def __post_init__(self) -> None:
        if self.source not in ("reference", "current"):
            raise ValueError(f"credit.source must be reference or current, not '{self.source}'")

    @property
    def prefix(self) -> str:
        return "ref_" if self.source == "reference" else "old_"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.prefix + "prompt_logp"}) | frozenset(getattr(self.inner, "needs", ()))

    @property
    def compares_group(self) -> bool:
        return getattr(self.inner, "compares_group", False)

    @property
    def gives(self) -> frozenset[str]:
        return getattr(self.inner, "gives", frozenset())

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        rows, place = first_rows(batch.group)
        logp, mask = (batch.signal(f"{self.prefix}prompt_{name}")[rows] for name in ("logp", "mask"))
        weight = query_weights(logp, mask, self.w_max)
        run.log(query_weight_max=float(weight.max()), query_weight_min=float(weight.min()))
        advantage = self.inner(batch, run)
        return weight[place].to(advantage)[:, None] * advantage


@dataclass
class QueryKL:
    """alpha times the Query-KL of the batch's queries, each counted once; it is not weighted."""

    alpha: float = 0.01  # >= 0; the paper also has 0.005 and 0.05; 0 switches it off
    estimator: str = "k3"  # k3 or seq_k2

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_logp", "ref_prompt_logp"}) if self.alpha else frozenset()

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not self.alpha:
            return Loss(batch.logp.new_zeros(()))
        logp, mask = new.prompt_logp, new.prompt_mask
        reference = batch.signal("ref_prompt_logp")[:, : logp.shape[1]].to(logp)  # a minibatch may lack the longest query
        value = qkl(logp, reference, mask, batch.group, self.estimator)
        rows, _ = first_rows(batch.group)
        drift = masked_mean((logp.detach() - reference)[rows], mask[rows])
        return Loss(self.alpha * value, {"qkl": float(value.detach()), "query_drift": float(drift)})


METHOD = GRPO.but(
    name="erpo_query",
    paper=Paper("ERPO: environment-regularized policy optimization (Query-KL)", "2608.23311", 2026),
    summary="a KL on the queries' likelihood in place of the one on the responses, and more weight for typical queries",
    rollout=QueryTable(),
    credit=QueryWeighted(),
    regularize=(QueryKL(),),
)

CODE = METHOD.but(
    name="erpo_query.code",
    summary="as released: weights from the current model's likelihood, without a limit",
    credit=QueryWeighted(w_max=math.inf, source="current"),
)

VARIANTS = {"code": CODE}
