"""pass@k and maj@k of a language policy on a task's held-out problems, with 95% confidence intervals over problems."""

from __future__ import annotations

from typing import Any

import torch

from anypo.domains.language.tasks import TextTask
from anypo.policy import Policy
from anypo.report.statistics import majority_at_k, mean_with_interval, pass_at_k

RIGHT = object()  # all right answers count as one, however they are written


def evaluate_policy(policy: Policy, task: TextTask, k: tuple[int, ...] = (1,), seed: int = 0) -> dict[str, Any]:
    """`pass@k` (unbiased, from the largest k samples a problem) and, for k > 1, `maj@k` (the most frequent completion is right).

    Each is {value, low, high}; `problems` and `samples` say how many were used.
    """
    samples = max(k)
    prompts = [p.but(samples=samples) for p in task.held_out()]
    with torch.no_grad():
        batch = task.attempt(policy, prompts, torch.Generator().manual_seed(seed))
    correct = task.correct(batch).view(len(prompts), samples)
    texts = batch.signals["completion"]
    found: dict[str, Any] = {"problems": len(prompts), "samples": samples}
    for size in k:
        found[f"pass@{size}"] = _interval([pass_at_k(samples, int(row.sum()), size) for row in correct])
        if size > 1:
            answers = [
                [RIGHT if right else texts[i * samples + j].strip() for j, right in enumerate(row.tolist())]
                for i, row in enumerate(correct)
            ]
            found[f"maj@{size}"] = _interval([majority_at_k(votes, RIGHT, size) for votes in answers])
    return found


def _interval(values: list[float]) -> dict[str, float]:
    value, low, high = mean_with_interval(values)
    return {"value": value, "low": low, "high": high}
