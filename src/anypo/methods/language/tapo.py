"""TAPO: trait-aware policy optimization for multi-trait essay scoring (arXiv:2605.25731).

A model that writes one score a trait ("content 4, organization 3") learns little from one reward for the whole string. TAPO takes the reward apart: what
concerns the sample (agreement of the overall level, preserved differences between traits, valid format) is one advantage for all its tokens, and the
accuracy of each trait is an advantage of its own, normalized by itself, for the tokens that write this trait's score. Prompts hold the question and a
description of every trait. Against GRPO it changes reward and credit. The four parts and their two axes are from the abstract; every formula is
[reconstructed], as the simplest bounded term.

A task says by signals what was scored: `trait_pred`, `trait_gold`, `trait_low`, `trait_high` [N,K], `trait_valid` [N] and `trait_segment` [N,T] (-1
where no score is written). Text is parsed where its problems have a column `traits`: {name: {"score", "low", "high"}}. On other tasks the reward is the
task's own and TAPO is GRPO.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, standardize
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.seams.steps import spread

if TYPE_CHECKING:
    from anypo.run import Run

SAMPLE_TERMS = ("consistency", "dependency", "format")
NUMBER = r"(-?\d{1,6}(?:\.\d{1,6})?)"
Traits = Mapping[str, Mapping[str, Any]]  # name -> score, low, high and possibly description


class Terms(NamedTuple):
    """Accuracy of every trait [N,K] and the sample's terms [N], each in [0,1] and 0 for invalid rows."""

    trait: Tensor
    consistency: Tensor
    dependency: Tensor
    format: Tensor


class Scores(NamedTuple):
    """What was scored: predictions, right scores and ranges [N,K], valid rows [N] and the trait whose score each token writes [N,T]."""

    pred: Tensor
    gold: Tensor
    low: Tensor
    high: Tensor
    valid: Tensor
    segment: Tensor


def rewards(pred: Float[Tensor, "N K"], gold: Float[Tensor, "N K"], lo: Tensor, hi: Tensor, valid: Tensor) -> Terms:
    """Equations 1-4. Ranges [K] or [N,K]. Predictions of rows that are not valid may be anything, NaN included. Raises ValueError for empty ranges."""
    if bool((hi <= lo).any()):
        raise ValueError("a trait's highest score must be above its lowest; check the trait ranges")
    ok = valid.bool()
    right = (gold - lo) / (hi - lo)
    given = torch.where(ok[:, None], (pred - lo) / (hi - lo), right)
    error = given - right
    traits = error.shape[1]
    first, second = torch.triu_indices(traits, traits, 1, device=error.device)
    moved = (error[:, first] - error[:, second]).abs().sum(1) / max(traits * (traits - 1), 1)
    by_row = (1 - error.mean(1).abs(), 1 - moved, torch.ones_like(moved))
    return Terms(torch.where(ok[:, None], 1 - error**2, 0.0), *(torch.where(ok, term, 0.0) for term in by_row))


def combine(
    terms: Terms, group: Int[Tensor, " N"], trait_segment: Int[Tensor, "N T"], mask: Tensor, w_c: float = 1.0, w_d: float = 0.5, w_f: float = 0.5,
    w_t: float = 1.0, ddof: int = 0, eps: float = 1e-6,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 5-7: the sample's advantage at every token of the mask, and w_t times a trait's at the tokens of its score."""
    sample = standardize(w_c * terms.consistency + w_d * terms.dependency + w_f * terms.format, group, ddof, eps)
    return broadcast(sample, mask) + w_t * spread(standardize(terms.trait, group, ddof, eps), trait_segment, mask)


def token_advantages(
    pred: Tensor, gold: Tensor, lo: Tensor, hi: Tensor, valid: Tensor, group: Int[Tensor, " N"], trait_segment: Int[Tensor, "N T"], mask: Tensor,
    w_c: float = 1.0, w_d: float = 0.5, w_f: float = 0.5, w_t: float = 1.0, ddof: int = 0, eps: float = 1e-6,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 1-7."""
    return combine(rewards(pred, gold, lo, hi, valid), group, trait_segment, mask, w_c, w_d, w_f, w_t, ddof, eps)


def qwk(pred: Int[Tensor, " M"], gold: Int[Tensor, " M"], n: int) -> Float[Tensor, ""]:
    """Equation 10: quadratic weighted kappa (float64) of scores 0 to n-1, at most 1, 0 at chance; 0 [ours] when both always give the same one score."""
    seen = torch.bincount(gold * n + pred, minlength=n * n).view(n, n).double()
    expected = seen.sum(1)[:, None] * seen.sum(0) / seen.sum()
    scale = torch.arange(n, dtype=torch.float64)
    disagreement = (scale[:, None] - scale) ** 2
    chance = (disagreement * expected).sum()
    return 1 - (disagreement * seen).sum() / chance if chance > 0 else torch.zeros_like(chance)


def enhanced_prompt(question: str, essay: str, traits: Traits) -> str:
    """The prompt of both phases: the question, name, range and description of every trait, the essay, and the form of the answer."""
    lines = [f"{name} ({t['low']} to {t['high']}): {t.get('description', '')}".rstrip(" :") for name, t in traits.items()]
    form = ", ".join(f"{name} <score>" for name in traits)
    return "\n".join([f"Question: {question}", "Traits:", *lines, f"Essay: {essay}", f"Answer with: {form}"])


def parse(text: str, names: Sequence[str]) -> list[tuple[float, int, int]] | None:
    """Score and the span of its characters for every trait of "name score, name score"; None unless the text is all of them in this order."""
    pattern = r"\s*,\s*".join(rf"{re.escape(name)}\s*:?\s*{NUMBER}" for name in names)
    found = re.fullmatch(rf"\s*{pattern}\s*\.?\s*", text)
    return found and [(float(found[k + 1]), *found.span(k + 1)) for k in range(len(names))]


def scores_of(batch: Batch, run: Run) -> Scores | None:
    """What the batch's rows scored, from the task's signals or by parsing its text; None where neither says anything about traits.
    Raises ValueError when problems differ in the number of their traits."""
    if "trait_pred" in batch.signals:
        names = ("trait_pred", "trait_gold", "trait_low", "trait_high", "trait_valid", "trait_segment")
        return Scores(*(batch.signal(name) for name in names))
    columns = batch.signals.get("columns")
    if not columns or "completion" not in batch.signals or any("traits" not in known for known in columns):
        return None
    traits: list[Traits] = [known["traits"] for known in columns]
    if len({len(t) for t in traits}) > 1:
        raise ValueError("tapo compares the same number of traits everywhere, but the problems differ in it; train on one set of traits")
    gold, low, high = (torch.tensor([[float(t[name]) for t in row.values()] for row in traits]) for name in ("score", "low", "high"))
    pred, segment = gold.clone(), torch.full(batch.mask.shape, -1)
    valid = torch.zeros(len(batch), dtype=torch.bool)
    for i, (text, row) in enumerate(zip(batch.signals["completion"], traits, strict=True)):
        found = parse(text, list(row))
        if found is None:
            continue
        pred[i] = torch.tensor([score for score, _, _ in found])
        valid[i] = bool(((pred[i] >= low[i]) & (pred[i] <= high[i])).all())
        segment[i] = _tokens_of(batch.action[i], batch.mask[i], [span[1:] for span in found], run)
    return Scores(pred, gold, low, high, valid, segment)


def _tokens_of(action: Tensor, mask: Tensor, spans: Sequence[tuple[int, ...]], run: Run) -> Int[Tensor, " T"]:
    """For each token of a row the number of the span of characters that it writes some of, -1 for none."""
    segment, before = torch.full_like(action, -1), 0
    for t in range(int(mask.sum())):
        after = len(run.policy.decode(action[: t + 1]))
        segment[t] = next((k for k, (start, end) in enumerate(spans) if start < after and end > before), -1)
        before = after
    return segment


@dataclass
class TraitRewards:
    """The terms of the reward as objectives: consistency, dependency, format, then the accuracy of every trait. Else the task's own reward."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        scores = scores_of(batch, run)
        if scores is None:
            return run.score_rewards(batch)
        terms = rewards(*scores[:5])
        batch.signals["trait_segment"] = scores.segment
        batch.objectives = (*SAMPLE_TERMS, *(f"trait_{k}" for k in range(terms.trait.shape[1])))
        return torch.cat([torch.stack(terms[1:], dim=1), terms.trait], dim=1)


@dataclass
class TraitAware:
    """The sample's advantage at every token plus each trait's at the tokens of its score. A reward without traits is one sample reward."""

    w_c: float = 1.0  # >= 0, weight of the overall level
    w_d: float = 0.5  # >= 0, of the differences between traits
    w_f: float = 0.5  # >= 0, of the format
    w_t: float = 1.0  # >= 0, of a trait's advantage at its tokens; 0 = scalar GRPO on the sample's reward
    ddof: int = 0  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0, added to the standard deviations

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        if batch.objectives[:3] != SAMPLE_TERMS:
            plain = row_reward(batch)
            return broadcast(standardize(plain, batch.group, self.ddof, self.eps), batch.mask)
        terms = Terms(batch.reward[:, 3:], *batch.reward[:, :3].T)
        segment = batch.signal("trait_segment")
        return combine(terms, batch.group, segment, batch.mask, self.w_c, self.w_d, self.w_f, self.w_t, self.ddof, self.eps)


METHOD = GRPO.but(
    name="tapo",
    paper=Paper("Trait-Aware Policy Optimization for Autoregressive Multi-Trait Essay Scoring", "2605.25731", 2026),
    summary="one advantage for the whole set of scores, and one for each trait at the tokens that write its score",
    reward=TraitRewards(),
    credit=TraitAware(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(KLPenalty(beta=0.01, aggregation="token_mean"),),
)
