"""PARA-GRPO: parseability-anchored, ratio-gated GRPO for parallel tool calls (ParaVT, arXiv:2605.20342).

A model whose pre-training taught it to use tools loses, under sampling, the tags that hold its turns together, and stops calling the tool where it can
do without. Two remedies against GRPO: a format reward anchored at the closing of the thinking, whose advantage goes to the tokens of the tags alone, and
a budget of overview frames drawn for each prompt, so that on some prompts the tool pays. Rewards and budgets are those of the authors' code; the placement
`sequence` is theirs too, `structural` is [reconstructed] from the abstract's words. Changes select, reward and credit.

Several calls in one turn are the task's business: its environment answers all calls of a reply together. The forced first tag is the end of a task's
prompt, hence never trained. The frames of a prompt go to the environment as the column `frames`. Where a task's responses are no text, format and tool
rewards are 0 and this is GRPO. Left out: helper agents that look at the crops.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, standardize
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

KINDS = ("think", "tool_call", "tool_response", "answer")
TAG = re.compile(rf"</?(?:{'|'.join(KINDS)})>")
THINK = re.compile(r"<think>(?:(.*?)</think>|(.*?)(?=<(?:think|tool_call|tool_response|answer)>|\Z))", re.DOTALL)
REWARDS = ("task", "format")


class Parts(NamedTuple):
    """What a response has of the structure <think> <tool_call> <answer>."""

    think: bool  # a first thought of enough characters, closed or not
    closed: bool  # </think> is there
    opened: bool  # <think> is there
    answer: bool  # a closed answer that is not blank
    tool: bool  # a call that can be read
    thought_first: bool  # the first thought before the first call
    balanced: bool  # as many openings as closings of every tag


def parts(text: str, min_chars: int = 10) -> Parts:
    """Equation 2."""
    thought = THINK.search(text)
    body = "" if thought is None else (thought[1] if thought[1] is not None else thought[2])
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    call = text.find("<tool_call>")
    return Parts(
        think=len(body.strip()) >= min_chars,
        closed="</think>" in text,
        opened="<think>" in text,
        answer=any(answer.strip() for answer in answers),
        tool=any(map(_is_call, re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL))),
        thought_first=0 <= text.find("<think>") < call,
        balanced=all(text.count(f"<{kind}>") == text.count(f"</{kind}>") for kind in KINDS),
    )


def _is_call(body: str) -> bool:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(call, dict) and "name" in call


def format_reward(text: str, answer_suffix: bool = True, anchor_weight: float = 0.5, min_chars: int = 10) -> float:
    """Equation 3, at most 1: thought and answer, the anchor at </think>, a call after a thought, balanced tags where anything was earned."""
    p = parts(text, min_chars)
    first, second, third = (0.2, 0.3, 0.2) if answer_suffix else (0.3, 0.2, 0.1)
    anchor = 0.4 * (p.closed and p.think) + 0.3 * (p.closed and p.think and p.answer) - 0.3 * (p.opened and not p.closed)
    score = first * p.think + (second + third) * p.answer + anchor_weight * anchor + 0.3 * (p.think and p.tool and p.thought_first)
    return min(1.0, score + 0.1 * (score > 0 and p.balanced))


def tool_reward(text: str, acc: float) -> float:
    """Equation 4, in [0,1]: for a call that can be read, more if it was answered, more if the final answer earned something."""
    if not parts(text).tool:
        return 0.0
    return min(1.0, (0.3 if "<tool_response>" in text else 0.1) + 0.5 * (acc > 0))


def frame_budget(u: Float[Tensor, " P"], choices: Tensor | tuple[int, ...]) -> Int[Tensor, " P"]:
    """Equation 1: the frames of each prompt for one uniform draw in [0,1) each."""
    options = torch.as_tensor(choices)
    return options[(u * len(options)).long().clamp(max=len(options) - 1)]


def tool_gap(p_see: Tensor, acc_see: float, acc_blind: float, acc_tool: float, bonus: float = 0.0) -> Tensor:
    """Equation 8: what calling earns over skipping when the overview shows the event with probability p_see."""
    return acc_tool + bonus - (p_see * acc_see + (1 - p_see) * acc_blind)


def advantages(
    task_reward: Float[Tensor, " N"], format_reward: Float[Tensor, " N"], group: Int[Tensor, " N"], structural: Tensor, mask: Tensor,
    placement: str = "structural", weight: float = 1.0, eps: float = 1e-6,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equation 6: the format's advantage on the tokens of the tags alone (`structural` [N,T]), or in one with the rest on all ("sequence").
    Raises ValueError for another placement."""
    if placement == "sequence":
        return broadcast(standardize(task_reward + weight * format_reward, group, 0, eps), mask)
    if placement != "structural":
        raise ValueError(f"credit.placement is 'structural' or 'sequence', not '{placement}'")
    tags = structural.bool() & mask.bool()
    whole = broadcast(standardize(task_reward, group, 0, eps), mask)
    return whole + weight * broadcast(standardize(format_reward, group, 0, eps), tags)


def structural_tokens(pieces: list[str]) -> list[bool]:
    """Which tokens, given by their texts in order, write a part of a tag."""
    inside, at = [], 0
    spans = [found.span() for found in TAG.finditer("".join(pieces))]
    for piece in pieces:
        inside.append(any(start < at + len(piece) and at < end for start, end in spans))
        at += len(piece)
    return inside


def structural(batch: Batch, run: Run) -> Bool[Tensor, "N T"]:
    """The tokens of tags that the policy wrote; none for a policy that does not decode."""
    found = torch.zeros_like(batch.mask)
    decode = getattr(run.policy, "decode", None)
    if decode is None or "completion" not in batch.signals:
        return found
    text = {token: decode(torch.tensor([token])) for token in torch.unique(batch.action[batch.attended]).tolist()}
    for i, (row, here) in enumerate(zip(batch.action, batch.attended, strict=True)):
        found[i, here] = torch.tensor(structural_tokens([text[token] for token in row[here].tolist()]), dtype=torch.bool)
    return found & batch.mask


def judged_texts(batch: Batch) -> list[str]:
    """The responses, each behind the tag that its prompt forced."""
    forced = ["<think>" if prompt.endswith("<think>") else "" for prompt in batch.signals["prompt_text"]]
    return [tag + text for tag, text in zip(forced, batch.signals["completion"], strict=True)]


@dataclass
class BudgetedPrompts:
    """Fresh prompts, each with one budget of overview frames that all its attempts share."""

    prompts: int | None = None  # prompts a step, >= 1; None = the task's own default
    group_size: int = 8  # attempts at each prompt, >= 1
    choices: tuple[int, ...] = (4, 8, 16, 32, 64)  # frames, equally likely; one choice = a fixed budget

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        drawn = task.prompts(self.prompts or task.prompts_per_step, run.rng)
        frames = frame_budget(torch.from_numpy(run.rng.random(len(drawn))), self.choices).tolist()
        return [p.but(samples=self.group_size, columns=p.columns | {"frames": k}) for p, k in zip(drawn, frames, strict=True)]


@dataclass
class AnchoredReward:
    """Accuracy and tool use as one reward, the format as another; in all, equation 5."""

    anchor_weight: float = 0.5  # lambda, >= 0
    answer_suffix: bool = True  # the weights of the code's variant with it
    min_chars: int = 10  # of a thought
    tool_weight: float = 1.0  # of the tool reward, >= 0

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        scored = run.score_rewards(batch)
        task = scored if scored.dim() == 1 else scored.sum(dim=1)
        form = torch.zeros_like(task)
        if "completion" in batch.signals and "prompt_text" in batch.signals:
            texts = judged_texts(batch)
            form = task.new_tensor([format_reward(t, self.answer_suffix, self.anchor_weight, self.min_chars) for t in texts])
            use = task.new_tensor([tool_reward(text, acc) for text, acc in zip(texts, task.tolist(), strict=True)])
            task = task + self.tool_weight * use
        batch.objectives = REWARDS
        return torch.stack([task, form], dim=1)


@dataclass
class AnchoredCredit:
    """Advantages of task and format, the format's where `placement` says; of another reward, GRPO's."""

    placement: str = "structural"  # or sequence: both on all tokens
    weight: float = 1.0  # w_f of the format reward, >= 0
    eps: float = 1e-6  # > 0, added to the standard deviation

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        if batch.objectives == REWARDS:
            task, form = batch.reward.unbind(1)
        else:
            task = row_reward(batch)
            form = torch.zeros_like(task)
        return advantages(task, form, batch.group, structural(batch, run), batch.mask, self.placement, self.weight, self.eps)


METHOD = GRPO.but(
    name="para_grpo",
    paper=Paper("ParaVT and PARA-GRPO: parseability-anchored, ratio-gated parallel tool calls", "2605.20342", 2026),
    summary="a format reward anchored at closing tags whose advantage goes to the tags' tokens, and a random frame budget a prompt, so that tools pay",
    select=BudgetedPrompts(),
    reward=AnchoredReward(),
    credit=AnchoredCredit(),
    regularize=KLPenalty(beta=0.01),
    task="event_video",
)
VARIANTS = {
    "sequence": METHOD.but(
        name="para_grpo.sequence",
        summary="PARA-GRPO as in the authors' code: one advantage of all rewards on all tokens",
        credit=AnchoredCredit(placement="sequence"),
    )
}
