"""SMEPO: semantic masked expert policy optimization (arXiv:2605.25198).

Against GRPO the prompt of a hard problem also shows an expert's whole solution in which what earns the reward is hidden: numbers in mathematics,
code blocks in programming, answer-related entities in search. Plan and procedure stay visible, so the policy may follow the route, but cannot be
paid for copying. Reward and objective are GRPO's, with the authors' clip range; evaluation shows no solution. Text operators and truncation follow
the authors' code, but signs are absorbed only where they are unary [ours]; masking of entities is [reconstructed]; a hint in which the answer is
still to be read, or no word is left, is not shown [ours]. Left out: the authors' learning rate, its schedule and weight decay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout, Stage
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, token_ratio
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

LABELS = "step|case|part|subcase|problem|example|exercise|lemma|theorem|claim|stage|round"
LABEL = rf"\b(?:{LABELS})[ \t]+\d+\b(?!\.\d)"
NUMBER = r"(?:(?<![\w)\]}.])[+-])?(?:\d+\.\d+|\d+|\.\d+)"  # a sign belongs to a number only where nothing stands before it
DIGITS = r"[^{}\[\]]*\d[^{}\[\]]*"
SPANS = re.compile(
    "|".join([
        rf"(?P<label>{LABEL})", rf"\\[dt]?frac\{{{DIGITS}\}}\{{{DIGITS}\}}", rf"\\sqrt(?:\[{DIGITS}\])?\{{{DIGITS}\}}",
        rf"{NUMBER}[ ]*\\times[ ]*10\^\{{[+-]?\d+\}}", rf"{NUMBER}[ ]*/[ ]*{NUMBER}", rf"{NUMBER}%", rf"{NUMBER}e[+-]?\d+", NUMBER,
    ]),
    re.IGNORECASE,
)  # fmt: skip
BLOCK = re.compile(r"```([^\n`]*)\n.*?(?:```|\Z)", re.DOTALL)  # a block that is never closed reaches to the end
PLACEHOLDER = re.compile(r"\[(?:NUMBER|CODE|ENTITY)\]")
TRACES = ("trace", "solution", "completion")  # columns of a problem that may hold an expert's solution


def mask_math(text: str) -> str:
    """Equation 1: every numeric span as [NUMBER], the first alternative that matches from the left; "Step 3" and its like stay."""
    return SPANS.sub(lambda found: found.group() if found.group("label") else "[NUMBER]", text)


def mask_code(text: str) -> str:
    """Equation 2: the inside of every fenced block as [CODE]; its language stays."""
    return BLOCK.sub(lambda found: f"```{found.group(1).strip()}\n[CODE]\n```", text)


def mask_entities(text: str, entities: Iterable[str]) -> str:
    """Equation 3: every entity as [ENTITY], the longest first; whole words, whatever their case."""
    names = [re.escape(name) for name in sorted(entities, key=len, reverse=True) if name]
    return re.sub(rf"(?<!\w)(?:{'|'.join(names)})(?!\w)", "[ENTITY]", text, flags=re.IGNORECASE) if names else text


def prefix_tokens(tokens: Sequence[int] | Tensor, newline: int, ratio: float = 1.0, room: int | None = None) -> list[int]:
    """Equation 4: the first min(floor(ratio n), room) of n tokens; where a newline is among them, up to and with the last one."""
    tokens = [int(token) for token in tokens]
    kept = tokens[: max(0, min(int(ratio * len(tokens)), len(tokens) if room is None else room))]
    return kept[: len(kept) - kept[::-1].index(newline)] if newline in kept else kept


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], mask: Tensor,
    clip_low: float = 0.0, clip_high: float = 5.0,
) -> Float[Tensor, ""]:  # fmt: skip
    """Equation 7: the clipped surrogate, mean over a row's tokens and then over rows."""
    return aggregate(-clipped(token_ratio(logp, old_logp, mask), advantages, 1 - clip_low, 1 + clip_high), mask, "seq_mean")


def shows(hint: str, answer: Any) -> bool:
    """Whether an answer is to be read in a hint, as a whole word or number outside labels such as "Step 3"."""
    text = str(answer).strip()
    rest = re.sub(LABEL, "", hint, flags=re.IGNORECASE)
    return bool(text) and re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)", rest) is not None


def _entities(text: str, columns: dict[str, Any]) -> str:
    known = columns.get("entities", ())
    return mask_entities(text, [*map(str, known), str(columns.get("answer", ""))])


HIDE: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "math": lambda text, columns: mask_math(text),
    "code": lambda text, columns: mask_code(text),
    "entities": _entities,
    "nothing": lambda text, columns: text,
}


@dataclass
class ExpertHints:
    """Problems that have an expert's solution (column trace, solution or completion) are attempted with it in the prompt, parts of it hidden."""

    inner: Rollout = field(default_factory=OnPolicy)
    hide: str = "math"  # numbers (math), code blocks (code), the column `entities` and the answer (entities), or nothing
    ratio: float = 1.0  # of the solution that is shown, in [0,1]; 0: GRPO
    max_prompt: int | None = None  # tokens of a prompt with its hint, > 0; None = what the context leaves beside the response
    intro: str = "\nHere is an example solution:\n"
    tail: str = "\n"  # after the hint, where a chat template does not say whose turn it is

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.hide not in HIDE or not 0 <= self.ratio <= 1:
            raise ValueError(f"hints hide {', '.join(HIDE)} and show a ratio in [0,1], not '{self.hide}' and {self.ratio}")
        contents = [self.content(prompt, run) for prompt in prompts]
        batch = self.inner([prompt.but(content=content) for prompt, content in zip(prompts, contents, strict=True)], run)
        if "prompt" in batch.signals:  # what rewards and teachers are told
            batch.signals["prompt"] = [prompts[g].content for g in batch.group.tolist()]
        run.log(hinted=sum(content is not prompt.content for prompt, content in zip(prompts, contents, strict=True)) / len(prompts))
        return batch

    def content(self, prompt: Prompt, run: Run) -> Any:
        """What the policy reads: the problem with its hint, or the problem itself where there is none."""
        trace = next((prompt.columns[name] for name in TRACES if prompt.columns.get(name)), None)
        if trace is None or not self.ratio or not isinstance(prompt.content, str | list):
            return prompt.content
        hint = HIDE[self.hide](str(trace), prompt.columns)
        limit = self.limit(prompt, run)
        hint = truncated(hint, self.ratio, None if limit is None else limit - len(run.policy.encode(self.told(prompt.content, ""))), run)
        leaks = self.hide != "nothing" and shows(hint, prompt.columns.get("answer", ""))
        if leaks or not any(c.isalnum() for c in PLACEHOLDER.sub("", hint)):
            return prompt.content
        told = self.told(prompt.content, hint)
        return prompt.content if limit is not None and len(run.policy.encode(told)) > limit else told

    def limit(self, prompt: Prompt, run: Run) -> int | None:
        """The most tokens that a prompt may have; None where the policy sets no limit."""
        context = getattr(run.policy, "context_limit", None)
        response = prompt.max_actions or getattr(run.task, "max_tokens", None) or getattr(run.task, "max_actions", 0)
        limits = [x for x in (self.max_prompt, None if context is None else context - response) if x is not None]
        return min(limits, default=None)

    def told(self, content: Any, hint: str) -> Any:
        """Text, or messages, with the hint at the end."""
        if isinstance(content, str):
            return f"{content}{self.intro}{hint}{self.tail}"
        return [*content[:-1], content[-1] | {"content": f"{content[-1]['content']}{self.intro}{hint}"}]


def truncated(text: str, ratio: float, room: int | None, run: Run) -> str:
    """`prefix_tokens` of a text, in the policy's own tokens where its tokenizer knows where they end, else in characters."""
    tokenizer: Any = getattr(run.policy, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        return text[: len(prefix_tokens([ord(c) for c in text], ord("\n"), ratio, room))]
    ends = [end for _, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping]
    breaks = ["\n" in text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    kept = len(prefix_tokens(breaks, True, ratio, room))
    return text[: ends[kept - 1]] if kept else ""


METHOD = GRPO.but(
    name="smepo",
    paper=Paper("Semantic Masked Expert Policy Optimization", "2605.25198", 2026),
    summary="prompts show an expert's solution in which what earns the reward is hidden: numbers, code or entities",
    rollout=ExpertHints(),
    objective=ClippedSurrogate(clip_low=0.0, clip_high=5.0, aggregation="seq_mean"),
    regularize=(),
    task="copy_or_compute",
)
UNGUIDED = METHOD.but(name="smepo_unguided", summary="no solution shown: GRPO", rollout=OnPolicy())
VARIANTS = {
    "full": METHOD.but(name="smepo.full", summary="a baseline of the paper: the whole solution, nothing hidden", rollout=ExpertHints(hide="nothing")),
    "prefix": METHOD.but(
        name="smepo.prefix", summary="a baseline of the paper: the first half of the solution, nothing hidden", rollout=ExpertHints(hide="nothing", ratio=0.5)
    ),
    "then_grpo": METHOD.but(
        name="smepo.then_grpo", summary="hints in the first half of the steps, none in the second",
        stages=(Stage(METHOD, 0.5), Stage(UNGUIDED, 0.5)),
    ),
}  # fmt: skip
