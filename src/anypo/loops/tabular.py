"""The tabular loop: policies that are tables over a finite problem, at the same seams. It knows no method and no domain.

Two things differ from the on-policy loop. What adapts (learning rates, exploration) is a function of the episode just played and takes effect in
the very step that learns from it, so `control` runs before `update`. And the loss is a function of the whole table of probabilities (the signal
`table`), of which `update` makes the next table in closed form or by its own rule; no optimizer is involved.
"""

from __future__ import annotations

from anypo.batch import Batch
from anypo.run import Run


def train(run: Run) -> Run:
    """Run all remaining steps. Raises ValueError for what the user can mend."""
    while not run.finished:
        step(run)
    return run


def step(run: Run) -> Batch:
    """One iteration: select, rollout, reward, credit, control, update. Returns the batch, for those who want to look at it."""
    method = run.begin_step()
    batch = method.rollout(method.select(run.task, run), run)
    batch.reward = method.reward(batch, run)
    run.prepare_signals(batch, method.needs("credit", "objective", "regularize", "update"))
    batch.advantage = method.credit(batch, run)
    for component in method.control:
        component(batch, run)
    metrics = method.update(batch, run.loss_fn, run)
    run.finish_step(batch, metrics)
    return batch
