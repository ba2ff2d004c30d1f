"""Episodic problems with losses: random transitions, a good action in every state, and exact regret.

Several independent copies of the problem run side by side, one a prompt; each has transitions and a policy of its own, so that a run of eight
copies is eight runs. Losses are drawn (0 or 1) from mean losses that are the same all along, or whose good action moves on once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.mdp import evaluate, from_start, occupancy, optimum
from anypo.domains.tabular.policy import TabularPolicy
from anypo.run import Run
from anypo.task import Prompt


class EpisodicLosses:
    """H steps, S states a step, A actions; transitions Dirichlet(1), first state 0, one good action a state.

    `signals` of its batches: `prompt_id` [N] (the copy), `loss` [N,T] in {0,1}, `occupancy` [N,H,S] of the copy under the policy that acted.
    """

    name = "episodic_losses"
    objectives: tuple[str, ...] = ("reward",)

    def __init__(
        self, horizon: int = 2, states: int = 2, actions: int = 3, *, copies: int = 8, good: float = 0.35, others: float = 0.65,
        switch: float | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """`good`, `others`: mean losses, in [0,1]. `switch`: share of the run's steps after which the good action of every state moves on to the
        next one; None = never (stochastic losses). Raises ValueError for what is out of range."""
        if min(horizon, states, actions, copies) < 1:
            raise ValueError(f"horizon, states, actions and copies must be at least 1, not {horizon}, {states}, {actions} and {copies}")
        if not (0 <= good <= 1 and 0 <= others <= 1):
            raise ValueError(f"good and others are mean losses in [0,1], not {good} and {others}")
        if switch is not None and not 0 < switch < 1:
            raise ValueError(f"switch is a share of the run in (0,1) or None, not {switch}")
        generator = torch.Generator().manual_seed(seed)
        shape = (copies, horizon, states, actions)
        raw = (
            -torch.rand(*shape, states, generator=generator, dtype=torch.float64).clamp(min=1e-12).log()
        )  # exponential: Dirichlet(1) once normalized
        self.transition = raw / raw.sum(-1, keepdim=True)
        self.start = torch.zeros(copies, states, dtype=torch.float64)
        self.start[:, 0] = 1.0
        best = torch.randint(actions, shape[:-1], generator=generator)
        self.mean_losses = [
            torch.where(torch.nn.functional.one_hot((best + moved) % actions, actions).bool(), good, others).double() for moved in (0, 1)
        ]
        self.switch, self.prompts_per_step = switch, copies
        self.played = torch.zeros(copies, dtype=torch.float64)  # exact expected loss so far
        self.total_loss = torch.zeros(shape, dtype=torch.float64)  # sum of mean losses so far: the best fixed policy is judged by it

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Copies, horizon, states, actions."""
        return tuple(self.total_loss.shape)  # type: ignore[return-value]

    def policy(self) -> TabularPolicy:
        return TabularPolicy(*self.shape)

    def mean_loss(self, run: Run) -> Tensor:
        """[B,H,S,A] of the run's present step."""
        return self.mean_losses[int(self.switch is not None and run.step >= self.switch * run.total_steps)]

    def regret(self) -> Tensor:
        """[B]: exact expected loss of the policies played so far minus that of the best fixed policy in hindsight."""
        best = -from_start(optimum(self.transition, -self.total_loss).v, self.start)
        return self.played - best

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """The copies, in order. Raises ValueError when another number is asked for."""
        if count != self.shape[0]:
            raise ValueError(f"this task has {self.shape[0]} copies, each a prompt; set the task's option copies instead of select.prompts")
        return [Prompt(id=i, content=i) for i in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """One episode for each sample of each prompt; the exact regret goes to the log."""
        policy: TabularPolicy = run.policy  # type: ignore[assignment]
        table, mean = policy.table, self.mean_loss(run)
        copy = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        seen, step = [], []
        state = torch.multinomial(self.start[copy], 1, generator=run.generator)[:, 0]
        for h in range(self.shape[1]):
            action = torch.multinomial(table[copy, h, state], 1, generator=run.generator)[:, 0]
            seen.append(state)
            step.append(action)
            if h + 1 < self.shape[1]:
                state = torch.multinomial(self.transition[copy, h, state, action], 1, generator=run.generator)[:, 0]
        states, actions = torch.stack(seen, dim=1), torch.stack(step, dim=1)
        place = (copy[:, None], torch.arange(self.shape[1])[None], states, actions)
        visits = occupancy(self.transition, table, self.start)
        self.played += (visits[..., None] * table * mean).sum((1, 2, 3))
        self.total_loss += mean
        run.log(regret=float(self.regret().mean()))
        ends = torch.zeros_like(states, dtype=torch.bool)
        ends[:, -1] = True
        return Batch(
            action=actions, mask=torch.ones_like(ends), logp=table[place].log(), group=copy, context=states, terminated=ends,
            truncated=torch.zeros_like(ends),
            signals={"prompt_id": copy, "loss": torch.bernoulli(mean[place], generator=run.generator), "occupancy": visits[copy]},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T]: minus the losses."""
        return -batch.signal("loss")

    def evaluate(self, run: Run) -> dict[str, float]:
        """Exact numbers, means over the copies: return of the policy and of the best one under the present mean losses, and regret so far."""
        table: Tensor = run.policy.table  # type: ignore[assignment]
        reward = -self.mean_loss(run)
        mine, best = evaluate(self.transition, table, reward).v, optimum(self.transition, reward).v
        values = {"return": from_start(mine, self.start), "best_return": from_start(best, self.start), "regret": self.regret()}
        return {name: float(value.mean()) for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"played": self.played, "total_loss": self.total_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.played, self.total_loss = state["played"].clone(), state["total_loss"].clone()
