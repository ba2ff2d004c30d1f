"""IIB-LPO: latent policy optimization via iterative information bottleneck (arXiv:2601.05870).

The responses that GRPO compares are near copies of one another. Here each is continued again from a position of high entropy, under latent codes
that a conditional variational autoencoder (CVAE) draws for the beginning, so that branches differ in structure and not in single tokens. An
information-bottleneck score, the mean of advantage times entropy, chooses the branches that stay, rewards right responses, and enters the loss:
entropy is raised where the advantage is positive and lowered elsewhere. Branch positions, the score and its term in the loss follow the paper and its
code as the row's specification gives them. [reconstructed]: the filter's rule, the self-reward, the sizes, and here: the embeddings (last hidden
state of the beginning, mean over the rest), each distinct right rollout counted once for the CVAE, the injection's weights fitted with it before
training (frozen policy, posterior codes), and no KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.latents import Codes, latent
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast, standardize
from anypo.seams.objective import aggregate
from anypo.seams.reward import weighted_sum
from anypo.seams.rollout import OnPolicy, as_roots, continue_rows
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

PerRow = Float[Tensor, " N"]
CODES = "iib_lpo.codes"  # where the run keeps the CVAE's weights


def candidate_mask(entropy: Float[Tensor, "N T"], mask: Tensor, frac: float = 0.05) -> Bool[Tensor, "N T"]:
    """Equation 1: the ceil(frac * length) actions of highest entropy in each row, the earlier of equals first."""
    inside = mask.bool()
    order = torch.where(inside, entropy, -math.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(entropy.shape[1]).expand_as(order))
    wanted = (frac * inside.sum(1).double() - 1e-9).ceil()  # 0.3 of 10 is 3
    return inside & (rank < wanted[:, None])


def branch_candidates(entropy: Float[Tensor, "N T"], mask: Tensor, frac: float = 0.05) -> list[list[int]]:
    """Equation 1, as positions in ascending order."""
    return [row.nonzero().flatten().tolist() for row in candidate_mask(entropy, mask, frac)]


def ib_score(entropy: Float[Tensor, "N T"], advantage: Float[Tensor, "N T"], mask: Tensor) -> PerRow:
    """Equation 6: the row's mean of advantage times entropy; 0 for a row without actions."""
    inside = mask.bool()
    return torch.where(inside, advantage * entropy, 0.0).sum(1) / inside.sum(1).clamp(min=1)


def kept(ib_score: PerRow, group: Int[Tensor, " N"], base: Tensor, n_keep: int) -> Bool[Tensor, " N"]:
    """Equation 7: in each group all base rows, and then those of highest score, the earlier of equals first, up to `n_keep` in all."""
    order = ib_score.argsort(descending=True, stable=True)
    order = order[base.bool()[order].long().argsort(descending=True, stable=True)]
    order = order[group[order].argsort(stable=True)]
    place = torch.arange(len(group)) - torch.searchsorted(group[order].contiguous(), group[order].contiguous())
    return torch.empty_like(base, dtype=torch.bool).scatter_(0, order, place < n_keep) | base.bool()


def shaped_reward(reward: PerRow, ib_score: PerRow, group: Int[Tensor, " N"], eta: float = 0.1) -> PerRow:
    """Equation 8: rows with a positive reward gain or lose by their score relative to the group's (sample std); others are never lifted."""
    return torch.where(reward > 0, reward + eta * standardize(ib_score, group, 1, 1e-6), reward)


def ib_term(entropy: Float[Tensor, "N T"], advantage: Float[Tensor, "N T"], mask: Tensor, agg: str = "seq_mean") -> Tensor:
    """Equation 9: what is added to the objective, times alpha. Differentiable in the entropy alone."""
    inside = mask.bool()
    return aggregate(torch.where(inside, advantage.detach(), 0.0) * torch.where(inside, entropy, 0.0), mask, agg)


def branch_points(batch: Batch, share: float, run: Run) -> Int[Tensor, " N"]:
    """A position drawn uniformly from each row's candidates; 0 for a row without actions."""
    run.prepare_signals(batch, {"old_entropy"})
    chosen = candidate_mask(batch.signal("old_entropy"), batch.mask, share)
    return (torch.rand(chosen.shape, generator=run.generator, dtype=torch.float64) * chosen).argmax(1)


def embeddings(batch: Batch, at: Int[Tensor, " N"], run: Run) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N d"]]:
    """Of every row's beginning, before position `at`, and of the rest: last hidden states, and their mean. No gradient."""
    seen = run.score(batch, {"hidden"})
    states = torch.cat([seen.prompt_hidden[:, None], seen.hidden], 1)
    rest = batch.mask & (torch.arange(batch.horizon) >= at[:, None])
    mean = (seen.hidden * rest[..., None]).sum(1) / rest.sum(1).clamp(min=1)[:, None]
    return states[torch.arange(len(batch)), at].float(), mean.float()


@dataclass
class LearnCodes:
    """Before training: right rollouts, a CVAE of them, and weights of the injection under which codes lead to their own rest."""

    rounds: int = 4  # batches of rollouts to learn from, >= 1
    steps: int = 300  # of Adam for the CVAE, >= 0
    injection_steps: int = 100  # of Adam for the injection's weights, >= 0
    beta_kl: float = 0.1  # >= 0
    learning_rate: float = 3e-3  # > 0; that of the injection is as large
    hidden: int = 64  # width of the CVAE's layers
    top_share: float = 0.05  # of a response, in (0,1]: where it may be divided

    needs = frozenset({"latent", "hidden", "entropy"})

    def __call__(self, run: Run) -> None:
        batch = self.right_rollouts(run)
        codes = Codes(batch.signals["prefix"].shape[1], run.policy.latent, self.hidden, run.seed)
        run.log(right_rollouts=len(batch))
        if len(batch):
            self.fit(codes, batch, run)
            self.fit_injection(codes, batch, run)
        run.state[CODES] = {name: value.clone() for name, value in codes.state_dict().items()}

    def right_rollouts(self, run: Run) -> Batch:
        """Each distinct right one once, with the signals `at`, `prefix` and `rest`."""
        batch = Batch.concat([run.collect(run.method.select(run.task, run)) for _ in range(self.rounds)])
        at = branch_points(batch, self.top_share, run)
        prefix, rest = embeddings(batch, at, run)
        batch.signals |= {"at": at, "prefix": prefix, "rest": rest}
        key = torch.cat([batch.signal("prompt_id")[:, None], batch.action * batch.mask], 1)
        _, number = torch.unique(key, dim=0, return_inverse=True)
        rows = torch.arange(len(batch))
        first = torch.full((int(number.max()) + 1,), len(batch)).scatter_reduce(0, number, rows, "amin")
        return batch[torch.isin(rows, first) & (weighted_sum(run.score_rewards(batch)) > 0)]

    def fit(self, codes: Codes, batch: Batch, run: Run) -> None:
        optimizer = torch.optim.Adam(codes.parameters(), lr=self.learning_rate)
        for _ in range(self.steps):
            eps = torch.randn(len(batch), run.policy.latent, generator=run.generator)
            loss = codes.loss(batch.signals["prefix"], batch.signals["rest"], eps, self.beta_kl)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def fit_injection(self, codes: Codes, batch: Batch, run: Run) -> None:
        """The policy's other weights stay as they are."""
        weights = run.policy.injection_parameters()
        optimizer = torch.optim.Adam(weights, lr=self.learning_rate)
        mean, log_variance = codes.posterior(torch.cat([batch.signals["prefix"], batch.signals["rest"]], 1)).detach().chunk(2, 1)
        rest = batch.mask & (torch.arange(batch.horizon) >= batch.signals["at"][:, None])
        for _ in range(self.injection_steps):
            eps = torch.randn(mean.shape, generator=run.generator)
            batch.signals |= {"latent": latent(mean, log_variance, eps), "has_latent": torch.ones(len(batch), dtype=torch.bool)}
            loss = -(run.policy.evaluate(batch, {"logp"}).logp * rest).sum() / rest.sum()
            for parameter, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                parameter.grad = gradient
            optimizer.step()
        for parameter in weights:
            parameter.grad = None
        run.advance_version()


@dataclass
class LatentBranching:
    """Every response of the inner rollout is continued again under codes from one of its most uncertain positions; then the filter.

    Branches count in the loss from there on, are read under their codes, and share the group of their response. Signals: `latent` [N,m],
    `has_latent` and `base` [N], `ib_score` [N] (before the filter).
    """

    branches: int = 3  # B, codes a response, >= 0; 0 leaves the inner rollout as it is
    top_share: float = 0.05  # of a response, in (0,1]: where branches may begin
    n_keep: int | None = 8  # rows of a prompt that stay, the inner rollout's among them whatever their score, >= 1; None = all
    inner: Rollout = field(default_factory=OnPolicy)

    @property
    def needs(self) -> frozenset[str]:
        return LearnCodes.needs if self.branches else frozenset()

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = self.inner(prompts, run)
        if not self.branches:
            return batch
        joined = self.branched(as_roots(batch), run)
        reward = weighted_sum(run.score_rewards(joined))
        advantage = broadcast(group_relative(reward, joined.group), joined.counted)
        joined.signals["ib_score"] = ib_score(joined.signal("old_entropy").to(reward), advantage, joined.counted)
        if self.n_keep is None:
            return joined
        stays = kept(joined.signals["ib_score"], joined.group, joined.signals["base"], self.n_keep)
        run.log(branches_kept=float((stays & ~joined.signals["base"]).sum()) / max(int((~joined.signals["base"]).sum()), 1))
        return joined[stays]  # base rows come first and stay, so that `parent` still holds

    def branched(self, batch: Batch, run: Run) -> Batch:
        at = branch_points(batch, self.top_share, run)
        prefix, _ = embeddings(batch, at, run)
        rows = torch.arange(len(batch)).repeat_interleave(self.branches)
        mean, log_variance = Codes.of(run.state[CODES]).prior(prefix).chunk(2, 1)
        codes = latent(mean[rows], log_variance[rows], torch.randn(len(rows), mean.shape[1], generator=run.generator))
        with run.policy.injected(codes):
            new = continue_rows(batch, rows, at[rows], run)
        new.signals |= {
            "latent": codes,
            "has_latent": torch.ones(len(rows), dtype=torch.bool),
            "base": torch.zeros(len(rows), dtype=torch.bool),
        }
        new.keep = new.mask & (torch.arange(new.horizon) >= at[rows][:, None])
        run.prepare_signals(new, {"old_entropy"})
        none = torch.zeros(len(batch), dtype=torch.bool)
        batch.signals |= {"latent": codes.new_zeros(len(batch), codes.shape[1]), "has_latent": none, "base": ~none}
        return Batch.concat([batch, new])


@dataclass
class InformedReward:
    """The task's reward as one number a row, and for right responses their score's share of it."""

    eta: float = 0.1  # >= 0; 0 is the task's reward itself
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old_entropy"}) if self.eta else frozenset()

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        scored = run.score_rewards(batch)
        if not self.eta:
            return scored
        reward = weighted_sum(scored, self.weights if batch.objectives else None)
        score = batch.signals.get("ib_score")
        if score is None:
            advantage = broadcast(group_relative(reward, batch.group), batch.counted)
            score = ib_score(batch.signal("old_entropy").to(reward), advantage, batch.counted)
        return shaped_reward(reward, score.to(reward), batch.group, self.eta)


@dataclass
class InformationBonus:
    """Minus alpha times the mean of advantage times entropy: entropy up where the advantage is positive, down where it is negative."""

    alpha: float = 0.002  # >= 0; 0.001 ... 0.005 in the code
    aggregation: str = "seq_mean"  # as the policy's loss: token_mean or seq_mean

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"}) if self.alpha else frozenset()

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not self.alpha:
            return Loss(batch.logp.new_zeros(()))
        assert batch.advantage is not None
        term = ib_term(new.entropy, batch.advantage, batch.counted, self.aggregation)
        return Loss(-self.alpha * term, {"ib_term": float(term.detach())})


METHOD = GRPO.but(
    name="iib_lpo",
    paper=Paper("IIB-LPO: Latent Policy Optimization via Iterative Information Bottleneck", "2601.05870", 2026),
    summary="responses branch under latent codes where the policy is uncertain; advantage times entropy filters, rewards and regularizes",
    task="toy_arith",
    prepare=(LearnCodes(),),
    select=UniformPrompts(group_size=4),
    rollout=LatentBranching(),
    reward=InformedReward(),
    regularize=(InformationBonus(),),
)
