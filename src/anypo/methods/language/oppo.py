"""OPPO: oracle-prompted policy optimization, Bayesian token credit (arXiv:2605.21851).

GRPO gives every token the response's advantage; on-policy distillation scores each token by how much likelier it is for one who has seen the answer,
but each alone. OPPO reads these log-ratios as Bayes factors for "this response will be right": added up from the log-odds of the prompt's success
rate they give the probability of success after every token, and its differences are the token advantages. No critic and no further responses, one
forward pass with the answer in the prompt. Against GRPO it changes the credit; wider upper clip, token mean, no KL. The recursion, the prior and the
evidence clip are the paper's; the clip's size, the prior's bounds, where the outcome is closed, the anchoring rule and the scale are [reconstructed].
The practical ratio has the plain policy in its denominator where the exact factor has the responses that fail. The scorer must be able to use the
answer: the log compares the squared error of the final value (`brier`) with that of the prior, and where it is above, training does harm, as it does
with the small built-in model as its own oracle.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import last_action
from anypo.seams.groups import group_mean
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import row_reward
from anypo.seams.teachers import AnswerShown

if TYPE_CHECKING:
    from anypo.run import Run

logger = logging.getLogger("anypo")
MUCH_WORSE = 1.5  # times the prior's squared error: the oracle misleads; chance alone stays below


class Tree(NamedTuple):
    """Success probabilities of a tree of two actions, and the advantages of its actions."""

    V0: Tensor  # scalar
    V1: Tensor  # [A]
    A1: Tensor  # [A]
    A2: Tensor  # [A,B]


def evidence(oracle_logp: Float[Tensor, "N T"], base_logp: Float[Tensor, "N T"], mask: Tensor, clip: float = 2.0) -> Float[Tensor, "N T"]:
    """Equation 1: the detached log-ratio within +-`clip` nats; 0 outside the mask, where the inputs may be anything."""
    inside, zero = mask.bool(), oracle_logp.new_zeros(())
    ratio = torch.where(inside, oracle_logp.detach(), zero) - torch.where(inside, base_logp.detach().to(oracle_logp), zero)
    return ratio.clamp(-clip, clip)


def prior(success: Float[Tensor, " N"], group: Tensor, p0: float = 0.05) -> Float[Tensor, " N"]:
    """Equation 2: the share of the group that is right, within [p0, 1 - p0]. Raises ValueError unless p0 is in (0, 1/2]."""
    if not 0 < p0 <= 0.5:
        raise ValueError(f"p0 bounds the prior success rate away from 0 and 1 and must be in (0, 0.5], not {p0}")
    return group_mean(success, group).clamp(p0, 1 - p0)


def values(
    oracle_logp: Float[Tensor, "N T"], base_logp: Float[Tensor, "N T"], mask: Tensor, prior: Float[Tensor, " N"], clip: float = 2.0
) -> Float[Tensor, "N T"]:
    """Equation 3: the probability of success after each action, from `prior` in (0,1); it stands still outside the mask."""
    found = evidence(oracle_logp, base_logp, mask, clip)
    return torch.sigmoid(torch.logit(prior)[:, None].to(found) + found.cumsum(1))


def advantages(
    oracle_logp: Float[Tensor, "N T"], base_logp: Float[Tensor, "N T"], mask: Tensor, prior: Float[Tensor, " N"], reward: Float[Tensor, " N"],
    clip: float = 2.0, close: bool = True, anchor: bool = True, first_order: bool = False, state_weight: bool = True,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 4-6, before scaling; `reward` in {0,1}.

    The steps V_t - V_{t-1} of the value; with `first_order` V_{t-1} (1 - V_{t-1}) e_t, without `state_weight` the evidence e_t itself (the
    distillation reward). `close` puts reward - V_T on the row's last action, so that the steps add up to reward - prior; `anchor` then drops
    entries below 0 of right rows and above 0 of wrong ones.
    """
    found = evidence(oracle_logp, base_logp, mask, clip)
    value = values(oracle_logp, base_logp, mask, prior, clip)
    before = torch.cat([prior[:, None].to(value), value], dim=1)[:, :-1]
    if not state_weight:
        step = found
    elif first_order:
        step = before * (1 - before) * found
    else:
        step = torch.where(mask.bool(), value - before, torch.zeros_like(value))
    if close and step.shape[1]:
        step = step + last_action(mask) * (reward.to(value)[:, None] - value[:, -1:])
    if anchor:
        step = torch.where((reward > 0)[:, None], step.clamp(min=0), step.clamp(max=0))
    return step


def scaled(advantages: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Equation 7: over the root mean square of the entries that are not 0; all zeros stay."""
    count = (advantages != 0).sum()
    size = (advantages.square().sum() / count.clamp(min=1)).sqrt()
    return torch.where(size > 0, advantages / size.clamp(min=torch.finfo(advantages.dtype).tiny), advantages)


def exact_tree(first: Float[Tensor, " A"], second: Float[Tensor, "A B"], success: Tensor) -> Tree:
    """By enumeration: the values and true advantages Q - V of a policy that acts twice; `success` [A,B] is 0 or 1."""
    outcome = success.to(second)
    after = (second * outcome).sum(1)
    start = first @ after
    return Tree(start, after, after - start, outcome - after[:, None])


class Opinion(NamedTuple):
    """Log-probs [N,T] of the batch's own actions by one scorer, with the answer before its eyes and without."""

    oracle_logp: Tensor
    base_logp: Tensor


class Oracle(Protocol):
    def __call__(self, batch: Batch, run: Run) -> Opinion: ...


@dataclass
class AnswerInPrompt(AnswerShown):
    """The policy itself reads the prompt with its answer and the prompt again (self-oracle), or a frozen stronger model does (teacher-oracle)."""

    teacher: str = ""  # name or path of a model with the policy's vocabulary; empty: the policy itself
    loaded: Any = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, batch: Batch, run: Run) -> Opinion:
        told = batch.but(context=self.contexts(batch, run))
        if self.teacher:
            scorer = self.scorer(run)
            return Opinion(scorer.observe(told, {"logp"}).logp, scorer.observe(batch, {"logp"}).logp)
        mine = batch.logp if written_now(batch, run) else run.score(batch, {"logp"}).logp
        return Opinion(run.score(told, {"logp"}).logp, mine)

    def scorer(self, run: Run) -> Any:
        """The teacher, loaded once. Raises ValueError when its tokens are not the policy's."""
        if self.loaded is None:
            from anypo.domains.language.models import load_companion  # transformers, which few runs of this method need

            self.loaded = load_companion(self.teacher, run.policy, "teacher")
        return self.loaded


def written_now(batch: Batch, run: Run) -> bool:
    """Whether the policy as it is now wrote the batch, so that `batch.logp` is its own."""
    return "sampled_elsewhere" not in batch.signals and batch.version is not None and bool((batch.version == run.version).all())


@dataclass
class OracleValue:
    """The steps of the success probability along each response, as the oracle's evidence moves it."""

    oracle: Oracle = field(default_factory=AnswerInPrompt)
    clip: float = 2.0  # largest evidence of one token, nats, > 0
    p0: float = 0.05  # the prior stays in [p0, 1 - p0], in (0, 1/2]
    close: bool = True  # what the evidence left undecided goes to the last token
    anchor: bool = True  # no token of a wrong response is reinforced, none of a right one suppressed
    first_order: bool = False  # the linearized step
    state_weight: bool = True  # off: the evidence itself, as in on-policy distillation
    rms: bool = True  # scale to root mean square 1 over the batch
    threshold: float = 0.5  # a response is right when its reward is above this
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        success = (reward > self.threshold).to(batch.logp)
        start = prior(success, batch.group, self.p0)
        with run.timed("score"):
            opinion = Opinion(*(logp.to(batch.logp) for logp in self.oracle(batch, run)))
        found = advantages(
            *opinion, batch.mask, start, success, self.clip, self.close, self.anchor, self.first_order, self.state_weight
        )  # fmt: skip
        if batch.horizon:
            value = values(*opinion, batch.mask, start, self.clip)[:, -1]
            brier, of_prior = (float((guess - success).square().mean()) for guess in (value, start))
            run.log(brier=brier, brier_prior=of_prior)
            if run.step == 0 and brier > MUCH_WORSE * of_prior:
                logger.warning(
                    "%s: with the answer in its prompt the model foretells success worse than the success rate does (squared error %.2f against "
                    "%.2f), and training on such evidence does harm; try another credit.oracle.template, a credit.oracle.teacher or a larger model",
                    run.method.name, brier, of_prior,
                )  # fmt: skip
        return scaled(found) if self.rms else found


METHOD = GRPO.but(
    name="oppo",
    paper=Paper("OPPO: Bayesian Value Recursion for Token-Level Credit Assignment in LLM Reasoning", "2605.21851", 2026),
    summary="a token's advantage is the change in the probability of success, from how much likelier the answer makes the token",
    credit=OracleValue(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
)

VARIANTS = {
    "distillation": METHOD.but(
        name="oppo.distillation",
        summary="on-policy distillation: every token's evidence alone, whatever came before it and whether the response was right",
        credit=OracleValue(state_weight=False, close=False, anchor=False),
    )
}
