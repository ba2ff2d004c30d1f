"""What a completion answers: one spelling for equal answers, and numbers for equal ones in a batch."""

from __future__ import annotations

import re
from fractions import Fraction

import torch
from jaxtyping import Int
from torch import Tensor

from anypo.batch import Batch

NO_ANSWER = "none"  # the class of all completions in which no answer is found
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:/\d+)?"


def canonical(answer: str) -> str:
    """One spelling for equal answers: numbers as fractions in lowest terms ("42.0" and "42" alike), other text lower-cased with single spaces."""
    text = " ".join(answer.split()).rstrip(".").lower()
    digits = text.replace(",", "")
    if len(digits) <= 100 and re.fullmatch(r"[+-]?\d+(\.\d+|/0*[1-9]\d*)?", digits):
        return str(Fraction(digits))
    return text or NO_ANSWER


def answer_of(completion: str) -> str:
    """The canonical final answer: what is boxed, what follows the last "####" or "=", the text itself when it is one word, else its last number."""
    text = completion.strip()
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if boxed:
        return canonical(boxed[-1])
    for marker in ("####", "="):
        if marker in text:
            return canonical(text.rpartition(marker)[2])
    if len(text.split()) == 1:
        return canonical(text)
    numbers = re.findall(NUMBER, text)
    return canonical(numbers[-1]) if numbers else NO_ANSWER


def answer_keys(batch: Batch) -> Int[Tensor, " N"]:
    """Equal numbers for equal answers: the signal `answer_key` [N] where a task gives it, else the completions' answers, else whole token rows."""
    if "answer_key" in batch.signals:
        return batch.signals["answer_key"]
    if "completion" in batch.signals:
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(answer_of(text), len(numbers)) for text in batch.signals["completion"]], dtype=torch.int64)
    mask = batch.mask.reshape(*batch.mask.shape, *[1] * (batch.action.dim() - 2))  # actions of some domains are vectors
    written = torch.where(mask, batch.action, torch.full_like(batch.action, -1))
    return torch.unique(written, dim=0, return_inverse=True)[1]
