"""The off-policy loop: replay, critics and targets, at the same seams. Offline learning is this loop with a fixed buffer. It knows no method and
no domain.

One iteration: the rollout collects a few steps and remembers them, then deals minibatches. For each, the credit says what every action is worth
(for a critic: its target), and the update makes a step on the objective and the regularizers.
"""

from __future__ import annotations

from typing import Any

from anypo.batch import Batch
from anypo.run import Run


def train(run: Run) -> Run:
    """Run all remaining iterations. Raises ValueError for what the user can mend."""
    while not run.finished:
        step(run)
    return run


def step(run: Run) -> Batch:
    """One iteration. Returns the batch that was collected; of a fixed buffer the last minibatch."""
    method = run.begin_step()
    replay: Any = method.rollout
    if not hasattr(replay, "minibatches"):
        raise ValueError(f"{method.name} runs off-policy and needs a rollout with a replay buffer, such as seams.replay.Replay")
    fixed = replay.is_fixed(run)
    if not fixed:
        batch = replay(method.select(run.task, run), run)
        batch.reward = method.reward(batch, run)
        replay.remember(batch)
    fresh = replay.steps if fixed else int(batch.mask.sum())
    loss_fn, metrics = run.loss_fn, _Mean()
    for part in replay.minibatches(run, fresh):
        run.prepare_signals(part, method.needs("objective", "regularize", "update"))
        part.advantage = method.credit(part, run)
        metrics.add(method.update(part, loss_fn, run))
        batch = part if fixed else batch
    for component in method.control:
        component(batch, run)
    run.finish_step(batch, metrics.value())
    return batch


class _Mean:
    """The mean of each metric over the minibatches of an iteration."""

    def __init__(self) -> None:
        self.totals: dict[str, list[float]] = {}

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.totals.setdefault(name, []).append(value)

    def value(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.totals.items()}
