"""Combination locks: a discounted chain in which one action a state leads on, the others back to the start, and all reward lies at the end.

Several independent copies of the lock run side by side, one a prompt. A roll-in stops with probability 1 - gamma at every step; the batch holds the
state and the action of that moment alone, a sample of the policy's discounted visits. Left out: random moves.
"""

from __future__ import annotations

import math
from bisect import bisect
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.mdp import expected_next
from anypo.domains.tabular.policy import TabularPolicy
from anypo.run import Run
from anypo.task import Prompt


def discounted_q(
    transition: Float[Tensor, "... S A S"], reward: Float[Tensor, "... S A"], policy: Float[Tensor, "... S A"], gamma: float
) -> Float[Tensor, "... S A"]:  # fmt: skip
    """Exact Q of a stationary policy; `gamma` in [0,1)."""
    chain = (policy[..., None] * transition).sum(-2)
    eye = torch.eye(chain.shape[-1]).to(chain)
    value = torch.linalg.solve(eye - gamma * chain, (policy * reward).sum(-1, keepdim=True))[..., 0]
    return reward + gamma * expected_next(transition, value)


class CombinationLock:
    """States 0 to `length`, S = length + 1. Below `length` one random action leads to the next state, the others to 0; in the last all lead to 0.

    Reward 1 for the right action in state length - 1, `distractor` for one wrong action in state 0. One-hot `features` [S,A,d]. `signals` of its
    batches: `prompt_id` [N] (the copy); context [N,1] the state.
    """

    name = "combination_lock"
    objectives: tuple[str, ...] = ("reward",)

    def __init__(
        self, length: int = 10, actions: int = 3, *, copies: int = 6, gamma: float = 0.95, distractor: float = 0.05, seed: int = 0
    ) -> None:
        """Raises ValueError for sizes without a wrong action or a discount outside (0,1)."""
        if length < 2 or actions < 2 or copies < 1 or not 0 < gamma < 1:
            raise ValueError(
                f"a lock has length and actions of at least 2, copies of at least 1, gamma in (0,1), not {length}, {actions}, {copies}, {gamma}"
            )
        generator = torch.Generator().manual_seed(seed)
        self.gamma, self.prompts_per_step = gamma, copies
        self.right = torch.randint(actions, (copies, length), generator=generator)
        wrong = (self.right[:, 0] + 1 + torch.randint(actions - 1, (copies,), generator=generator)) % actions
        chain, rows = torch.arange(length), torch.arange(copies)
        following = torch.zeros(copies, length + 1, actions, dtype=torch.int64)
        following[rows[:, None], chain[None], self.right] = chain + 1
        self.following: list[Any] = following.tolist()
        self.transition = torch.nn.functional.one_hot(following, length + 1).double()  # [B,S,A,S]
        self.reward = torch.zeros(copies, length + 1, actions, dtype=torch.float64)  # [B,S,A]
        self.reward[rows, length - 1, self.right[:, -1]] = 1.0
        self.reward[rows, 0, wrong] = distractor
        self.features = torch.eye((length + 1) * actions, dtype=torch.float64).view(length + 1, actions, -1)

    def policy(self) -> TabularPolicy:
        """Stationary: a table of one step."""
        copies, states, actions = self.reward.shape
        return TabularPolicy(copies, 1, states, actions)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """The copies, in order. Raises ValueError when another number is asked for."""
        if count != self.prompts_per_step:
            raise ValueError(
                f"this task has {self.prompts_per_step} copies, each a prompt; set the task's option copies instead of select.prompts"
            )
        return [Prompt(id=i, content=i) for i in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """One roll-in for each sample of each prompt."""
        table = run.policy.table[:, 0]  # type: ignore[index]
        copies = [p.id for p in prompts for _ in range(p.samples)]
        luck = 1 - torch.rand(len(copies), generator=run.generator, dtype=torch.float64)  # in (0,1]
        waits = (luck.log() / math.log(self.gamma)).floor().long().tolist()
        draws = torch.rand(len(copies), max(waits) + 1, generator=run.generator, dtype=torch.float64).tolist()
        edges = table.cumsum(-1)[..., :-1].tolist()
        found = [self._roll(copy, wait, draw, edges[copy]) for copy, wait, draw in zip(copies, waits, draws, strict=True)]
        copy = torch.tensor(copies)
        state, action = torch.tensor(found).T
        every = torch.ones(len(copies), 1, dtype=torch.bool)
        return Batch(
            action=action[:, None], mask=every, logp=table[copy, state, action].log()[:, None], group=copy, context=state[:, None],
            terminated=every, truncated=~every, signals={"prompt_id": copy},
        )  # fmt: skip

    def _roll(self, copy: int, wait: int, draws: list[float], edges: list[list[float]]) -> tuple[int, int]:
        """State and action after `wait` steps from state 0; plain numbers, as a tensor operation a step would cost far more."""
        moves, state = self.following[copy], 0
        for t in range(wait):
            state = moves[state][bisect(edges[state], draws[t])]
        return state, bisect(edges[state], draws[wait])

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,1] of the collected pairs."""
        return self.reward[batch.signals["prompt_id"][:, None], batch.context, batch.action]

    def returns(self, table: Float[Tensor, "B S A"]) -> Float[Tensor, " B"]:
        """Exact discounted return from state 0 of every copy."""
        q = discounted_q(self.transition, self.reward, table, self.gamma)
        return (table * q).sum(-1)[:, 0]

    def measure(self, policy: TabularPolicy) -> dict[str, Tensor]:
        """`return` [B], and `best_return` [B] of the policy that opens the lock again and again or stays with the distractor."""
        copies, states, actions = self.reward.shape
        opening = torch.nn.functional.one_hot(torch.nn.functional.pad(self.right, (0, 1)), actions).double()
        staying = opening.clone()
        staying[:, 0] = torch.nn.functional.one_hot(self.reward[:, 0].argmax(-1), actions).double()
        return {"return": self.returns(policy.table[:, 0]), "best_return": torch.maximum(self.returns(opening), self.returns(staying))}

    def evaluate(self, run: Run) -> dict[str, float]:
        """Means over the copies."""
        return {name: float(value.mean()) for name, value in self.measure(run.policy).items()}  # type: ignore[arg-type]


TASKS: dict[str, Any] = {"combination_lock": CombinationLock}
