"""V0: generalist value model at state zero (arXiv:2602.03584).

A critic must be trained along with the policy, a group mean costs rollouts. V0 predicts how well any policy does on an unseen prompt before any
rollout, without an update of its own: pairs of prompt and performance of that policy are the context that a head reads. Here it decides how many
attempts each prompt of a GRPO step gets (`METHOD`), and which of several models answers a prompt (`route`). Adapter, class weights and loss follow
the authors' code as the row's specification gives it, with one attention head and without dropout; [reconstructed] are the kernel head, the budget
and the router. Left out: the pretrained embedding backbone and tabular head, which are weights of others (features are hashed n-grams, or what the
task says; heads are the kernel, without training, and `InContextHead`), prototypes of the support set, and the baseline of lone rollouts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import group_mean
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

PerQuery = Float[Tensor, " Q"]


class LossValue(NamedTuple):
    pairwise: Tensor
    ce: Tensor
    combined: Tensor  # scalars, differentiable in the logits


def adapter(
    hidden: Float[Tensor, "L H"], mask: Tensor, static: Float[Tensor, "M E"], w1: Float[Tensor, "H B"], b1: Float[Tensor, " B"],
    w2: Float[Tensor, "B ME"], b2: Float[Tensor, " ME"], p_kv: Float[Tensor, "H E"],
) -> Float[Tensor, " ME"]:  # fmt: skip
    """Equation 1: queries, static ones plus those the last token asks for, read the token states. With `w2` and `b2` 0 they are static alone.

    Raises ValueError for a mask [L] without tokens.
    """
    inside = mask.bool()
    if not inside.any():
        raise ValueError("a prompt without tokens has no features; give it at least one token")
    tokens = hidden[inside]
    asked = F.layer_norm(tokens[-1] @ w1 + b1, b1.shape)
    queries = static + (F.gelu(asked, approximate="tanh") @ w2 + b2).view_as(static)
    keys = tokens @ p_kv
    return ((queries @ keys.T / keys.shape[1] ** 0.5).softmax(-1) @ keys).flatten()


def value(
    x_support: Float[Tensor, "S D"], y_support: Float[Tensor, " S"], x_query: Float[Tensor, "Q D"], tau: float = 0.2, prior: float = 0.5,
    strength: float = 1.0,
) -> PerQuery:  # fmt: skip
    """Equation 3 [reconstructed]: mean of the support's labels in [0,1], weighted by cosine similarity, and of `prior`, weighted by `strength`."""
    if not len(y_support):
        return x_query.new_full((len(x_query),), prior)
    weight = ((F.normalize(x_query, dim=1) @ F.normalize(x_support, dim=1).T - 1) / tau).exp()
    return (weight @ y_support + strength * prior) / (weight.sum(1) + strength)


def class_weights(y_support: Float[Tensor, " S"], y: Float[Tensor, " Q"]) -> PerQuery:
    """Equation 4: n / (2 n_class) with the support's counts, for the class of each query (label at least 0.5 or not); 1 where a class is missing."""
    positive = int((y_support >= 0.5).sum())
    negative = len(y_support) - positive
    if not positive or not negative:
        return torch.ones_like(y)
    return torch.where(y >= 0.5, len(y_support) / (2 * positive), len(y_support) / (2 * negative)).to(y)


def loss(logits: Float[Tensor, "... Q 2"], y: Float[Tensor, "... Q"], weight: Float[Tensor, "... Q"], alpha: float = 0.5) -> LossValue:
    """Equation 4: queries come as positive, negative, positive, ...; every pair is ranked, every label fitted."""
    score = logits[..., 1] - logits[..., 0]
    pairwise = F.softplus(score[..., 1::2] - score[..., 0::2]).mean()
    ce = (weight * (logits.logsumexp(-1) - (1 - y) * logits[..., 0] - y * logits[..., 1])).mean()
    return LossValue(pairwise, ce, alpha * pairwise + (1 - alpha) * ce)


def allocate(success: PerQuery, budget: int, n_min: int = 2, n_max: int = 16) -> Int[Tensor, " Q"]:
    """Equation 5 [reconstructed]: attempts per prompt that maximize the expected number of groups with both outcomes, `budget` in all (less when
    every prompt has `n_max`). What one more attempt adds falls with their number, so the largest additions are the optimum; ties: lowest index.

    Raises ValueError for a budget below `n_min` a prompt, or unless 1 <= n_min <= n_max.
    """
    if not 1 <= n_min <= n_max:
        raise ValueError(f"attempts a prompt need 1 <= n_min <= n_max; got {n_min} and {n_max}")
    extra = budget - n_min * len(success)
    if extra < 0:
        raise ValueError(f"{budget} attempts are too few for {len(success)} prompts of at least {n_min}; raise the budget or lower n_min")
    n, p = torch.arange(n_min, n_max), success.double()[:, None]
    adds = (p**n * (1 - p) + (1 - p) ** n * p).flatten()
    chosen = adds.argsort(descending=True, stable=True)[:extra]
    return n_min + torch.bincount(chosen // max(n_max - n_min, 1), minlength=len(success))


def route(value: Float[Tensor, "Q M"], cost: Float[Tensor, " M"], lam: float = 0.0) -> Int[Tensor, " Q"]:
    """Equation 7 [reconstructed]: the model with the largest predicted value minus `lam` >= 0 times its cost; ties: the first."""
    return (value - lam * cost).argmax(1)


def frontier(
    value: Float[Tensor, "Q M"], truth: Float[Tensor, "Q M"], cost: Float[Tensor, " M"], lams: Float[Tensor, " K"]
) -> Float[Tensor, "K 2"]:
    """(accuracy, mean cost) of the router for every price `lam`."""
    points = []
    for lam in lams:
        chosen = route(value, cost, float(lam))
        points.append(torch.stack([truth.gather(1, chosen[:, None]).mean(), cost[chosen].mean()]))
    return torch.stack(points)


class InContextHead(nn.Module):
    """A small transformer that reads a support set and predicts for queries, each by itself. Trained with `loss` on tasks of other policies."""

    def __init__(self, features: int, width: int = 32, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.point, self.label = nn.Linear(features, width), nn.Embedding(2, width)
        self.start = nn.Parameter(torch.zeros(width))  # always there to be attended to, so that an empty support is possible
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.read = nn.Linear(width, 2)

    def forward(
        self, x_support: Float[Tensor, "B S D"], y_support: Float[Tensor, "B S"], x_query: Float[Tensor, "B Q D"]
    ) -> Float[Tensor, "B Q 2"]:
        """Logits of failure and success; labels count as success from 0.5 on (equation 2)."""
        known = self.point(x_support) + self.label((y_support >= 0.5).long())
        rows = torch.cat([self.start.expand(len(known), 1, -1), known, self.point(x_query)], dim=1)
        hidden = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.bool)
        hidden[:, known.shape[1] + 1 :] = True  # nobody looks at queries
        return self.read(self.body(rows, mask=hidden)[:, known.shape[1] + 1 :])


@dataclass
class PromptFeatures:
    """Features of prompts before any rollout: the column `features` where the task gives one, else hashed character n-grams of the text."""

    size: int = 256  # buckets, >= 1
    longest: int = 3  # characters of an n-gram, >= 1

    def __call__(self, prompts: list[Prompt]) -> Float[Tensor, "Q D"]:
        if all("features" in p.columns for p in prompts):
            return torch.stack([torch.as_tensor(p.columns["features"], dtype=torch.float64) for p in prompts])
        return torch.stack([self.of_text(str(p.content)) for p in prompts])

    def of_text(self, text: str) -> Float[Tensor, " D"]:
        grams = [text[i : i + n] for n in range(1, self.longest + 1) for i in range(len(text) - n + 1)]
        places = torch.tensor([zlib.crc32(gram.encode()) % self.size for gram in grams], dtype=torch.int64)
        return torch.bincount(places, minlength=self.size).double()


@dataclass
class PredictedBudget:
    """Fresh prompts, `group_size` attempts each on average, given where V0 expects groups with both outcomes; `RecordSupport` must follow the step."""

    prompts: int | None = None  # prompts a step, >= 1; None = the task's own default
    group_size: int = 8  # attempts at a prompt on average, >= n_min
    n_min: int = 2  # attempts, >= 1; a lone attempt teaches nothing
    n_max: int = 16  # attempts, >= n_min
    tau: float = 0.2  # width of the kernel in cosine similarity, > 0
    prior: float = 0.5  # p0, success expected without context, in [0,1]
    strength: float = 1.0  # s, pairs that the prior is worth, >= 0
    margin: float = 0.02  # predictions stay in [margin, 1 - margin], so that no prompt is given up
    features: Callable[[list[Prompt]], Any] = field(default_factory=PromptFeatures)

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        drawn = task.prompts(self.prompts or task.prompts_per_step, run.rng)
        x, support = self.features(drawn), run.state.get("v0", {})
        predicted = value(support.get("x", x[:0]), support.get("y", x[:0, 0]), x, self.tau, self.prior, self.strength)
        samples = allocate(predicted.clamp(self.margin, 1 - self.margin), self.group_size * len(drawn), self.n_min, self.n_max)
        run.state["v0"] = support | {"drawn": x, "predicted": predicted}
        return [prompt.but(samples=int(n)) for prompt, n in zip(drawn, samples, strict=True)]


@dataclass
class RecordSupport:
    """After the step: its prompts and their groups' mean rewards, clipped to [0,1], join the support set, which keeps the last `window` pairs."""

    window: int = 256  # pairs, >= 1

    def __call__(self, batch: Batch, run: Run) -> None:
        support = run.state["v0"]
        label = torch.full_like(support["predicted"], torch.nan)
        label[batch.group] = group_mean(batch.outcome, batch.group).to(label).clamp(0, 1)
        seen = ~label.isnan()  # not a prompt whose rows were all dropped
        run.log(prediction_error=float((label - support["predicted"])[seen].abs().mean()))
        new = {"x": support["drawn"][seen], "y": label[seen]}
        run.state["v0"] = {k: torch.cat([support[k], v] if k in support else [v])[-self.window :] for k, v in new.items()}


METHOD = GRPO.but(
    name="v0_value",
    paper=Paper("V0: generalist value model at state zero", "2602.03584", 2026),
    kind="component",
    summary="predicts each prompt's success from the policy's recent results, and gives attempts to prompts whose groups should be mixed",
    select=PredictedBudget(),
    control=RecordSupport(),
)
