"""LRPO: language-routed policy optimization (arXiv:2605.25360).

GRPO on multilingual questions writes every response in the question's own language. In LRPO the response language is chosen rollout by rollout, so that
a group compares languages with one another; rewards are made comparable across pairs of languages, and a contextual bandit (the router), with a value
for every topic and language and, for regional questions, for every region and language, learns from them which languages to try. Equations from the
authors' released code. Languages are those of `rollout.languages` or of the task; with neither, this is GRPO with ddof 1 on the task's own reward.
Columns of a problem that are read: `language`, `topics`, `regions`, `reference_language`, `reference`. Left out: the sentence encoder, which a reward
function brings (`similarity="ngrams"` is a stand-in for texts of one script), the language identifier and the measurement of the pairs' means.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import reference_agreement, row_reward, weighted_sum
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

ROUTER = "router"  # where the run keeps the router's values, buffer and number of reward steps
NORMS = ("zscore", "center", "none")


def calibrated_reward(
    sim: Float[Tensor, " N"], pair: Int[Tensor, " N"], pair_mean: Float[Tensor, " P"], pair_count: Float[Tensor, " P"], lang_ok: Tensor,
    k_shrink: float = 0.0,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equations 2-3: scores in [-1,1] less what their language pair lies above the mean pair, as rewards in [0,1]; exactly 0 where `lang_ok` [N] is
    0. `pair` -1 is an unknown pair: its score stays as it is."""
    if len(pair_mean):
        centre = (pair_count * pair_mean).sum() / pair_count.sum().clamp(min=1e-12)
        shift = pair_count / (pair_count + k_shrink).clamp(min=1e-12) * (pair_mean - centre)
        sim = (sim - torch.where(pair >= 0, shift[pair.clamp(min=0)], 0.0)).clamp(-1, 1)
    return ((sim + 1) / 2).clamp(0, 1) * lang_ok


def ngram_cosine(response: list[str], reference: list[str], size: int = 3, buckets: int = 4096) -> float:
    """Equation 1 with a stand-in for the encoder: cosine in [0,1] of hashed counts of character n-grams; 0 where one of the texts has no character."""
    first, second = (_ngrams(" ".join(words), size, buckets) for words in (response, reference))
    norm = math.sqrt(sum(n * n for n in first.values()) * sum(n * n for n in second.values()))
    return sum(n * second[key] for key, n in first.items()) / norm if norm else 0.0


def _ngrams(text: str, size: int, buckets: int) -> Counter[int]:
    return Counter(zlib.crc32(text[i : i + size].encode()) % buckets for i in range(max(len(text) - size + 1, min(len(text), 1))))


def prior_values(weights: Float[Tensor, " L"]) -> Float[Tensor, " L"]:
    """Initial values: the log of a prior mix of languages, floored at 1e-6."""
    return weights.clamp(min=1e-6).log()


def router_probs(
    q_topic: Float[Tensor, "K L"], q_region: Float[Tensor, "R L"], topics: Int[Tensor, " k"], regions: Int[Tensor, " r"], regional: bool = False,
    temperature: float = 1.0, epsilon: float = 0.0,
) -> Float[Tensor, " L"]:  # fmt: skip
    """Equation 4: tempered softmax of the values added over the question's topics (and regions, if `regional`), mixed with the uniform."""
    logits = q_topic[topics].sum(0) + (q_region[regions].sum(0) if regional else 0.0)
    return (1 - epsilon) * (logits / temperature).softmax(-1) + epsilon / q_topic.shape[1]


def schedule(step: Int[Tensor, " n"], init: float, floor: float, decay: float) -> Float[Tensor, " n"]:
    """Equation 5: init * decay^step, at least `floor`."""
    return (init * torch.as_tensor(decay, dtype=torch.float64) ** step).clamp(min=floor)


def assign_languages(group: Int[Tensor, " N"], orig: Int[Tensor, " N"], routed: Int[Tensor, " N"], keep: int = 2) -> Int[Tensor, " N"]:
    """Equation 6: the first `keep` members of every group in the question's own language, the others as routed."""
    order = group.argsort(stable=True)
    place = torch.arange(len(group)) - torch.searchsorted(group[order], group[order])
    return torch.where(place.index_copy(0, order, place) < keep, orig, routed)


def cell_values(
    cell: Int[Tensor, " B"], lang: Int[Tensor, " B"], reward: Float[Tensor, " B"], shape: tuple[int, int], norm: str = "zscore", eps: float = 1e-6
) -> tuple[Float[Tensor, "C L"], Bool[Tensor, "C L"]]:  # fmt: skip
    """Equation 7: mean reward of every cell and language, normalized over the languages seen in the cell, and which were seen. Rows of language
    -1 are skipped. A cell with one language has 0 (unless `norm` is "none"). Raises ValueError for an unknown norm."""
    if norm not in NORMS:
        raise ValueError(f"unknown router norm '{norm}'; use one of {', '.join(NORMS)}")
    rows = one_hot(cell, shape[0]).to(reward)
    columns = one_hot(lang.clamp(min=0), shape[1]).to(reward) * (lang >= 0)[:, None]
    count = rows.T @ columns
    mean, seen = (rows.T @ (columns * reward[:, None])) / count.clamp(min=1), count > 0
    if norm == "none":
        return mean, seen
    several = seen.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(seen, mean - mean.sum(1, keepdim=True) / several, 0.0)
    if norm == "center":
        return centred, seen
    return centred / (((centred**2).sum(1, keepdim=True) / several).sqrt() + eps), seen


def router_update(
    q_topic: Float[Tensor, "K L"], topic: Int[Tensor, " B"], lang: Int[Tensor, " B"], reward: Float[Tensor, " B"], alpha: float = 0.1,
    norm: str = "zscore", eps: float = 1e-6,
) -> Float[Tensor, "K L"]:  # fmt: skip
    """Equation 7: the values seen in the buffer move by `alpha` towards their normalized mean reward, the others stay."""
    value, seen = cell_values(topic, lang, reward, (q_topic.shape[0], q_topic.shape[1]), norm, eps)
    return torch.where(seen, (1 - alpha) * q_topic + alpha * value, q_topic)


def advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], eps: float = 1e-6, ddof: int = 1) -> Float[Tensor, " N"]:
    """Equation 8: relative to all responses to the question, whatever their language."""
    return group_relative(reward, group, True, ddof, eps)


@dataclass
class RoutedLanguages:
    """Every question is answered in several languages, drawn by the router. Leaves the signals `language` [N] (-1 = none of the router's),
    `asked_language`, `reference_language` and `router_cells` (lists of N)."""

    languages: tuple[str, ...] = ()  # codes such as "en" or names; () = those of the task
    keep: int = 2  # responses a question in its own language, >= 0
    temperature: float = 1.0  # > 0, of the router at the start
    temperature_floor: float = 0.3  # > 0
    temperature_decay: float = 0.999  # in (0,1], a step
    epsilon: float = 0.2  # in [0,1], uniform share at the start
    epsilon_floor: float = 0.0  # in [0,1]
    epsilon_decay: float = 0.995  # in (0,1], a step
    prior: tuple[float, ...] | None = None  # mix of languages that the values start from; None = values 0
    regional_topic: str = "Regional Knowledge"  # the topic whose questions are routed by region too

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        languages = self.languages or tuple(getattr(run.task, "languages", ()))
        if not languages:
            return run.collect(prompts)
        if self.prior is not None and len(self.prior) != len(languages):
            raise ValueError(f"{len(self.prior)} prior weights for {len(languages)} languages; give one weight for each language")
        routed = torch.cat([self.draw(prompt, len(languages), run) for prompt in prompts])
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        own = [languages.index(p.columns["language"]) if p.columns.get("language") in languages else -1 for p in prompts]
        chosen = assign_languages(group, torch.tensor(own)[group], routed, self.keep)
        asked, samples = torch.unique(torch.stack([group, chosen], 1), dim=0, return_counts=True)
        names = [languages[i] if i >= 0 else None for _, i in asked.tolist()]
        wishes = zip(asked[:, 0].tolist(), names, samples.tolist(), strict=True)
        batch = run.collect([in_language(prompts[g], name, run.task).but(samples=count) for g, name, count in wishes])
        question = asked[batch.group, 0]
        batch.signals["language"] = asked[batch.group, 1]
        batch.signals["asked_language"] = [names[i] for i in batch.group.tolist()]
        batch.signals["router_cells"] = [self.cells(prompts[i]) for i in question.tolist()]
        columns = [prompts[i].columns for i in question.tolist()]
        batch.signals["reference_language"] = [c.get("reference_language", c.get("language")) for c in columns]
        return batch.but(group=question)

    def cells(self, prompt: Prompt) -> list[tuple[str, str]]:
        """The pairs of topic and region that the question informs the router about; the region is '' but for the regional topic."""
        topics, regions = self.contexts(prompt)
        return [(topic, region) for topic in topics for region in (regions if topic == self.regional_topic and regions else [""])]

    def contexts(self, prompt: Prompt) -> tuple[list[str], list[str]]:
        """The question's topics, and its regions if it is a regional one; a question without topics has the topic ''."""
        topics = [str(t) for t in prompt.columns.get("topics") or [""]]
        regions = [str(r) for r in prompt.columns.get("regions") or []]
        return topics, regions if self.regional_topic in topics else []

    def draw(self, prompt: Prompt, languages: int, run: Run) -> Int[Tensor, " samples"]:
        """Languages for all samples of a prompt; values of what was not met before are set."""
        state = run.state.setdefault(ROUTER, {"step": 0, "topic": {}, "region": {}, "buffer": []})
        initial = torch.zeros(languages, dtype=torch.float64)
        if self.prior is not None:
            initial = prior_values(torch.tensor(self.prior, dtype=torch.float64))
        topics, regions = self.contexts(prompt)
        by_topic = torch.stack([state["topic"].setdefault(t, initial) for t in topics])
        by_region = torch.stack([state["region"].setdefault(r, initial) for r in regions]) if regions else by_topic[:0]
        step = torch.tensor(state["step"])
        heat = float(schedule(step, self.temperature, self.temperature_floor, self.temperature_decay))
        uniform = float(schedule(step, self.epsilon, self.epsilon_floor, self.epsilon_decay))
        every = torch.arange(len(topics)), torch.arange(len(regions))
        chances = router_probs(by_topic, by_region, *every, bool(regions), heat, uniform)
        return torch.multinomial(chances, prompt.samples, replacement=True, generator=run.generator)


def in_language(prompt: Prompt, language: str | None, task: Any) -> Prompt:
    """The prompt with the wish for an answer in a language: as the task's own `in_language(prompt, language)` has it, else a line at the end of the
    text or of the last message. None: the prompt as it is."""
    if language is None:
        return prompt
    if hasattr(task, "in_language"):
        return task.in_language(prompt, language)
    if not isinstance(prompt.content, str | list):
        raise ValueError(f"the task '{task.name}' cannot be asked for a language; give it a method in_language(prompt, language)")
    wish = f"\nAnswer in {language}."
    if isinstance(prompt.content, str):
        return prompt.but(content=prompt.content + wish)
    last = prompt.content[-1]
    return prompt.but(content=[*prompt.content[:-1], {**last, "content": last["content"] + wish}])


@dataclass
class CalibratedReward:
    """The score less what its language pair usually lies above others, as a reward in [0,1]; 0 for a response in another language than asked."""

    pairs: tuple[tuple[str, str, float, float], ...] | None = (
        None  # (language, language, mean score, count); None = the task's `language_pairs`
    )
    k_shrink: float = 0.0  # >= 0, pseudo-count that holds the correction back
    similarity: str = "task"  # where scores in [-1,1] come from: task (its reward) or ngrams (`ngram_cosine` with the reference)
    detect: Callable[[str], str] | None = None  # language of a text, as the router names it; None = the signal `detected_language`

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        scored = run.score_rewards(batch)
        if "asked_language" not in batch.signals:
            return scored
        if self.similarity not in ("task", "ngrams"):
            raise ValueError(f"unknown similarity '{self.similarity}'; use task or ngrams")
        score = scored.sum(1) if scored.dim() == 2 and not batch.objectives else weighted_sum(scored)
        if self.similarity == "ngrams":
            score = reference_agreement(batch, ngram_cosine).to(score)
        pairs = getattr(run.task, "language_pairs", ()) if self.pairs is None else self.pairs
        known = {frozenset(pair[:2]): i for i, pair in enumerate(pairs)}
        rows = [
            known.get(frozenset(pair), -1)
            for pair in zip(batch.signals["reference_language"], batch.signals["asked_language"], strict=True)
        ]
        means, counts = (score.new_tensor([pair[i] for pair in pairs]) for i in (2, 3))
        right = torch.tensor(self.in_asked_language(batch, run))
        run.log(wrong_language=1 - float(right.double().mean()))
        return calibrated_reward(score, torch.tensor(rows), means, counts, right.to(score), self.k_shrink)

    def in_asked_language(self, batch: Batch, run: Run) -> list[bool]:
        """Equation 3's gate; open for rows that were asked for no language."""
        if self.detect is not None and "completion" in batch.signals:
            found = [self.detect(text) for text in batch.signals["completion"]]
        elif "detected_language" in batch.signals:
            found = batch.signals["detected_language"]
        else:
            raise ValueError(
                f"{run.method.name} must know the language of a response; set reward.detect to a function from text to language, such as one of "
                "a language identifier, or let the task's batches carry the signal 'detected_language'"
            )
        return [asked is None or asked == spoken for asked, spoken in zip(batch.signals["asked_language"], found, strict=True)]


@dataclass
class LearnRouter:
    """Every few steps the router's values move towards the rewards that each language earned, topic by topic and region by region."""

    alpha: float = 0.1  # in [0,1]; 0 = a fixed router
    every: int = 5  # steps, >= 1
    norm: str = "zscore"  # zscore, center or none
    eps: float = 1e-6  # > 0

    def __call__(self, batch: Batch, run: Run) -> None:
        if "router_cells" not in batch.signals:
            return
        state, signals = run.state[ROUTER], batch.signals
        for cells, language, reward in zip(signals["router_cells"], signals["language"].tolist(), row_reward(batch).tolist(), strict=True):
            state["buffer"] += [[*cell, language, reward] for cell in cells if language >= 0]
        state["step"] += 1
        if state["step"] % self.every == 0 and state["buffer"]:
            self.learn(state)
            state["buffer"] = []

    def learn(self, state: dict[str, Any]) -> None:
        cells = sorted({(topic, region) for topic, region, _, _ in state["buffer"]})
        number = {cell: i for i, cell in enumerate(cells)}
        cell = torch.tensor([number[topic, region] for topic, region, _, _ in state["buffer"]])
        language, reward = torch.tensor([row[2] for row in state["buffer"]]), torch.tensor([row[3] for row in state["buffer"]]).double()
        size = len(state["topic"][cells[0][0]])
        value, seen = cell_values(cell, language, reward, (len(cells), size), self.norm, self.eps)
        for i, names in enumerate(cells):
            for table, name in zip((state["topic"], state["region"]), names, strict=True):
                if name in table:
                    table[name] = torch.where(seen[i], (1 - self.alpha) * table[name] + self.alpha * value[i], table[name])


METHOD = GRPO.but(
    name="lrpo",
    paper=Paper("LRPO: language-routed policy optimization (bandit language router)", "2605.25360", 2026),
    summary="a bandit chooses the language of every response; groups compare languages",
    rollout=RoutedLanguages(),
    reward=CalibratedReward(),
    credit=GroupRelative(std=True, ddof=1, eps=1e-6),
    regularize=(KLPenalty(beta=0.001, aggregation="token_mean"),),
    control=LearnRouter(),
)
