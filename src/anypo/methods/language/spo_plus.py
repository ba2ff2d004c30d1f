"""SPO++: action-token-measure normalization.

SPO whitens one advantage a trajectory, but its loss is a mean over tokens: where length goes with the outcome, advantages centred over rows push
all tokens up or down together. SPO++ centres and scales them with every row counted as often as it has trained tokens, the measure of the loss. And
what is known about a prompt is ordered by the policy version that produced each result, not by the order of arrival: late results join their own
version, results of one version are exchangeable, and no trajectory is judged by its own event. Against SPO it changes the credit, which also keeps
the evidence. Both changes from the abstract; equations 1-2 are its direct reading, equation 4 is [reconstructed]. Left out: forgetting by KL.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.spo_single import METHOD as SPO
from anypo.methods.language.spo_single import TRACKER, Tracker, reward_in_unit
from anypo.seams.groups import broadcast, standardize

if TYPE_CHECKING:
    from anypo.run import Run

EVIDENCE = (
    "prompt_evidence"  # run.state: prompt id -> {"prior": [alpha, beta], "base": version, "counts": {version: [successes, failures]}}
)
MEASURES = ("token", "trajectory")
Rows = Float[Tensor, " N"]


class Standardized(NamedTuple):
    mean: Tensor  # scalar, of the raw advantages under the token measure
    std: Tensor  # scalar, population
    advantages: Tensor  # [N], 0 for rows without action tokens
    token_sum: Tensor  # scalar, sum of the advantages over all action tokens


class Residual(NamedTuple):
    advantages: Tensor  # [N]
    token_mean: Tensor  # scalar, what centring over trajectories leaves in a token mean


def advantages(reward: Rows, value: Rows, mask: Tensor, eps: float = 1e-8) -> Standardized:
    """Equations 1-2: reward minus value, standardized with weight n_i = action tokens of row i. Constant raw advantages give exactly 0."""
    raw, tokens = reward - value, mask.bool().sum(1).to(reward.dtype)
    total, written = tokens.sum().clamp(min=1), tokens > 0
    mean = (tokens * raw).sum() / total
    std = ((tokens * (raw - mean) ** 2).sum() / total).sqrt()
    if not bool(written.any()) or bool(raw[written].amax() == raw[written].amin()):
        nothing = torch.zeros_like(raw)
        return Standardized(mean, torch.zeros_like(std), nothing, nothing.sum())
    found = torch.where(written, (raw - mean) / (std + eps), torch.zeros_like(raw))
    return Standardized(mean, std, found, (tokens * found).sum())


def spo_residual(reward: Rows, value: Rows, mask: Tensor, eps: float = 1e-8) -> Residual:
    """SPO's whitening over trajectories (ddof 0), for comparison: its token mean is Cov(n, A) / mean(n)."""
    raw, tokens = reward - value, mask.bool().sum(1).to(reward.dtype)
    found = standardize(raw, torch.zeros(len(raw), dtype=torch.int64), 0, eps)
    return Residual(found, (tokens * found).sum() / tokens.sum().clamp(min=1))


def event_value(
    version: Int[Tensor, " E"], reward: Float[Tensor, " E"], query: Int[Tensor, " Q"], alpha0: float = 0.5, beta0: float = 0.5,
    lam: float = 0.9, base: int = 0,
) -> Tracker:  # fmt: skip
    """Equation 4 for one prompt: the log of its results in any order -> the tracker [Q] that trajectories of the versions `query` are judged by."""
    count, log = len(query), len(version)
    prior = torch.tensor([[alpha0, beta0]], dtype=torch.float64).expand(count, 2)
    counts = torch.stack([reward, 1 - reward], 1).double().repeat(count, 1)
    return evidence(
        torch.arange(count).repeat_interleave(log), version.repeat(count), counts, query, prior, torch.full((count,), base), lam
    )


def evidence(
    row: Int[Tensor, " E"], version: Int[Tensor, " E"], counts: Float[Tensor, "E 2"], query: Int[Tensor, " Q"], prior: Float[Tensor, "Q 2"],
    base: Int[Tensor, " Q"], lam: float,
) -> Tracker:  # fmt: skip
    """Equation 4 for Q queries at once: results (successes, failures) of query `row[e]` count when their version is below the query's.

    The value is found relative to the youngest weight, so that it is finite however long ago a prompt was last seen.
    """
    age = query[row] - 1 - version
    row, age, counts = row[age >= 0], age[age >= 0], counts[age >= 0]
    start = (query - base).clamp(min=0)
    youngest = start.scatter_reduce(0, row, age, "amin")
    weight = torch.full((), lam, dtype=torch.float64)
    kept = prior * (weight ** (start - youngest))[:, None]
    kept = kept.index_add(0, row, counts * (weight ** (age - youngest[row]))[:, None])
    alpha, beta = (kept * (weight**youngest)[:, None]).unbind(1)
    return Tracker(alpha, beta, kept[:, 0] / kept.sum(1))


@dataclass
class TokenMeasure:
    """Reward minus the prompt's event-ordered value, standardized over the batch's action tokens; afterwards the rewards join the evidence.

    A prompt that SPO's sampler has profiled starts from that estimate, made under the first version seen; others from `alpha0`, `beta0` at version 0.
    """

    lam: float = 0.9  # in (0,1], what a policy version (an optimizer step) keeps of the evidence before it
    alpha0: float = 0.5  # > 0, successes of a prompt nobody knows
    beta0: float = 0.5  # > 0, its failures
    measure: str = "token"  # what counts in mean and deviation: token, or trajectory (SPO's whitening, ddof 0)
    eps: float = 1e-8  # > 0
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if self.measure not in MEASURES:
            raise ValueError(f"unknown measure '{self.measure}'; use {' or '.join(MEASURES)}")
        assert batch.version is not None
        ids, version = batch.signal("prompt_id").tolist(), batch.version
        self.open(ids, version, run)
        reward, value = reward_in_unit(batch, self.weights), self.tracked(ids, version, run).value
        trajectories = spo_residual(reward, value, batch.counted, self.eps)
        found = trajectories.advantages if self.measure == "trajectory" else advantages(reward, value, batch.counted, self.eps).advantages
        run.log(tracked_value=float(value.mean()), trajectory_residual=float(trajectories.token_mean))
        self.record(ids, version.tolist(), reward.tolist(), run)
        return broadcast(found.to(batch.logp), batch.mask)

    def open(self, ids: list[int], version: Tensor, run: Run) -> None:
        """An empty record for every prompt that has none."""
        records, profiled = run.state.setdefault(EVIDENCE, {}), run.state.get(TRACKER, {})
        for prompt in set(ids) - set(records):
            first = min(v for i, v in zip(ids, version.tolist(), strict=True) if i == prompt)
            known = prompt in profiled
            prior = list(profiled[prompt]) if known else [self.alpha0, self.beta0]
            records[prompt] = {"prior": prior, "base": first if known else 0, "counts": {}}

    def tracked(self, ids: list[int], version: Tensor, run: Run) -> Tracker:
        """What was known about each row's prompt before the row's version."""
        records = [run.state[EVIDENCE][i] for i in ids]
        sizes = torch.tensor([len(r["counts"]) for r in records], dtype=torch.int64)
        events = torch.tensor(list(chain.from_iterable(r["counts"] for r in records)), dtype=torch.int64)
        flat = chain.from_iterable(chain.from_iterable(r["counts"].values() for r in records))
        counts = torch.tensor(list(flat), dtype=torch.float64).reshape(-1, 2)
        prior = torch.tensor([r["prior"] for r in records], dtype=torch.float64).reshape(-1, 2)
        base = torch.tensor([r["base"] for r in records], dtype=torch.int64)
        return evidence(torch.arange(len(ids)).repeat_interleave(sizes), events, counts, version, prior, base, self.lam)

    def record(self, ids: list[int], version: list[int], reward: list[float], run: Run) -> None:
        """Every reward into the bin of its own version; the sampler's tracker follows."""
        records: dict[int, dict[str, Any]] = run.state[EVIDENCE]
        for prompt, event, gain in zip(ids, version, reward, strict=True):
            both = records[prompt]["counts"].setdefault(event, [0.0, 0.0])
            both[0], both[1] = both[0] + gain, both[1] + 1 - gain
        prompts = sorted(set(ids))
        now = self.tracked(prompts, torch.full((len(prompts),), max(run.version, *version) + 1), run)
        run.state.setdefault(TRACKER, {}).update(zip(prompts, torch.stack([now.alpha, now.beta], 1).tolist(), strict=True))


METHOD = SPO.but(
    name="spo_plus",
    paper=Paper("SPO++: action-token-measure normalization"),
    summary="advantages standardized over action tokens, the measure of the loss; evidence on prompts ordered by the policy version behind it",
    credit=TokenMeasure(),
    control=(),
)
