"""What the tests of methods share: random rows, and a few steps of a method on token_bandit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.run import Run


@dataclass
class Rows:
    """Random log-probs [N,T] near one another, a ragged mask, advantages [N], rewards [N] and groups [N] in no order."""

    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    mask: Tensor
    advantages: Tensor
    reward: Tensor
    group: Tensor


def random_rows(seed: int = 0, rows: int = 8, horizon: int = 5, spread: float = 0.3, ragged: bool = True) -> Rows:
    """`spread`: standard deviation of the log-ratios. With `ragged` row 0 is full, row 1 has one action and the others something between."""
    g = torch.Generator().manual_seed(seed)
    noise = [torch.randn(rows, horizon, generator=g, dtype=torch.float64) for _ in range(3)]
    old = -noise[0].abs() - 0.1
    length = torch.randint(1, horizon + 1, (rows,), generator=g)
    length[0], length[1] = horizon, 1
    mask = torch.arange(horizon) < length[:, None] if ragged else torch.ones(rows, horizon, dtype=torch.bool)
    return Rows(
        logp=old + spread * noise[1],
        old_logp=old,
        ref_logp=old + spread * noise[2],
        mask=mask,
        advantages=torch.randn(rows, generator=g, dtype=torch.float64),
        reward=torch.randn(rows, generator=g, dtype=torch.float64),
        group=torch.randperm(rows, generator=g) % 3,
    )


def gradient(loss: Any, *inputs: Tensor) -> list[Tensor]:
    """Gradients of a scalar, or of the `loss` field of a named tuple."""
    return list(torch.autograd.grad(getattr(loss, "loss", loss), inputs))


def trained(method: Method, steps: int, seed: int = 0, out: Path | None = None, **task: Any) -> Run:
    """A run of `steps` on a small token_bandit; with `out` it checkpoints every 2 steps and continues what it finds there."""
    problem = TokenBandit(**({"prompts": 4} | task))
    run = Run(method, problem.policy(scale=0.1), problem, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def assert_trains(method: Method, steps: int = 4, **task: Any) -> Run:
    """A few steps end with finite parameters that moved, and with finite numbers in the log."""
    run = trained(method, steps, **task)
    start = TokenBandit(**({"prompts": 4} | task)).policy(scale=0.1)
    assert torch.isfinite(run.policy.logits).all()
    assert not torch.equal(run.policy.logits, start.logits)
    for record in run.history:
        assert all(torch.isfinite(torch.tensor(v)) for v in record.values() if isinstance(v, float))
    return run


def assert_resumes(method: Method, folder: Path, **task: Any) -> None:
    """Four steps equal two steps, a checkpoint, and two more."""
    whole = trained(method, 4, out=folder / "whole", **task)
    trained(method, 2, out=folder / "halves", **task)
    halves = trained(method, 4, out=folder / "halves", **task)
    assert torch.equal(whole.policy.logits, halves.policy.logits)
    assert [r["reward"] for r in whole.history] == [r["reward"] for r in halves.history]


def assert_continues(run_to: Callable[[Path, int], Run], folder: Path, column: str = "reward") -> None:
    """`run_to(out, upto)` makes a run of four steps that checkpoints every 2 into `out`, resumes what is there and goes on to step `upto`: four steps
    equal two, a checkpoint, and two more."""
    whole = run_to(folder / "whole", 4)
    run_to(folder / "parts", 2)
    parts = run_to(folder / "parts", 4)
    assert all(torch.equal(a, b) for a, b in zip(whole.policy.parameters(), parts.policy.parameters(), strict=True))
    assert [r[column] for r in whole.history] == [r[column] for r in parts.history]


def trained_on_cartpole(method: Method, steps: int, seed: int = 0, out: Path | None = None) -> Run:
    """A run of `steps` on four CartPoles, 32 actions each a step; with `out` it checkpoints every 2 steps and continues what it finds there."""
    from anypo.domains.control.setup import build

    policy, task = build("CartPole-v1", None, seed=seed, envs=4, horizon=32, hidden=(16, 16))
    run = Run(method, policy, task, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def assert_resumes_on_cartpole(method: Method, folder: Path) -> None:
    """Four steps equal two steps, a checkpoint, and two more; the numbers are finite and the policy moved."""
    whole = trained_on_cartpole(method, 4, out=folder / "whole")
    trained_on_cartpole(method, 2, out=folder / "halves")
    halves = trained_on_cartpole(method, 4, out=folder / "halves")
    start = trained_on_cartpole(method, 0)
    assert not torch.equal(next(whole.policy.parameters()), next(start.policy.parameters()))
    for mine, theirs in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs)
    assert [r["reward"] for r in whole.history] == [r["reward"] for r in halves.history]


def parameter_pair(shape: Any, seed: int = 0, steps: int = 6) -> tuple[list[torch.nn.Parameter], list[Tensor]]:
    """Two equal parameters for two optimizers, and random gradients."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=g)
    return [torch.nn.Parameter(start.clone()) for _ in range(2)], [torch.randn(shape, generator=g) for _ in range(steps)]


def side_by_side(optimizers: Any, pair: list[torch.nn.Parameter], gradients: list[Tensor]) -> None:
    """Both optimizers take the same gradients."""
    for gradient in gradients:
        for parameter, optimizer in zip(pair, optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
