"""A bandit whose reward nobody writes down: answers to "which of the two actions is better?" are all there is, and a reward is learned from them.

The learned reward is linear in features that cannot express the true one. Several independent copies run side by side, one a prompt.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt


def preference_objective(reward: Float[Tensor, "... A"], policy: Float[Tensor, "... A"], preference: Float[Tensor, "... A A"]) -> Tensor:
    """Expected log-likelihood [...] that a reward gives to preferences between two actions of the policy; -log 2 for a constant reward."""
    log_chance = nn.functional.logsigmoid(reward[..., :, None] - reward[..., None, :])
    each = preference * log_chance + (1 - preference) * log_chance.mT
    return (policy[..., :, None] * policy[..., None, :] * each).sum((-2, -1))


class AlignedPolicy(Policy):
    """A softmax of `theta` [B,A] over actions, and a reward `features @ nu` with parameters `nu` [B,k]; both 0 at the start.

    Of a row's action: `score` [N,T,A] and `curvature` [N,T,A,A], gradient and Hessian of its log-probability in theta; `learned_reward` [N,T] and its
    `reward_gradient` [N,T,k]. Of all actions: `table` [B,A], the probabilities, and `learned_table` [B,A].
    """

    provides = frozenset({"logp", "entropy", "score", "curvature", "learned_reward", "reward_gradient", "table", "learned_table"})
    learning_rate = 0.5
    optimizer = "sgd"

    def __init__(self, features: Float[Tensor, "B A k"]) -> None:
        super().__init__()
        self.register_buffer("features", features, persistent=False)
        self.theta = nn.Parameter(features.new_zeros(features.shape[:2]))
        self.nu = nn.Parameter(features.new_zeros(features.shape[0], features.shape[2]))

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.theta], "role": "policy"}, {"params": [self.nu], "role": "reward"}]

    @property
    def table(self) -> Float[Tensor, "B A"]:
        """Probabilities of the actions."""
        return self.theta.softmax(-1)

    @property
    def learned_table(self) -> Float[Tensor, "B A"]:
        """The learned reward of every action."""
        return (self.features @ self.nu[..., None])[..., 0]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        table, learned = self.table, self.learned_table
        signals = {"table": table, "learned_table": learned}
        if needs - signals.keys():
            copy = batch.signals["prompt_id"]
            place = (copy[:, None], batch.action)
            log_table = self.theta.log_softmax(-1)
            one_hot = nn.functional.one_hot(batch.action, table.shape[1]).to(table)
            spread = torch.diag_embed(table) - table[:, :, None] * table[:, None, :]
            signals |= {
                "logp": log_table[place],
                "entropy": -(table * log_table).sum(-1)[copy][:, None].expand(batch.mask.shape),
                "score": one_hot - table[copy][:, None],
                "curvature": -spread[copy][:, None].expand(*batch.mask.shape, -1, -1),
                "learned_reward": learned[place],
                "reward_gradient": self.features[place],
            }
        return Signals({name: signals[name] for name in needs})


class PreferenceBandit:
    """One action a row. True rewards [B,A] are normal with deviation `spread`, reward features [B,A,k] standard normal; action a is preferred to b with
    probability sigmoid(true_a - true_b).

    `signals` of its batches: `prompt_id` [N] (the copy). Its score is the true reward, for looking on and for utility feedback.
    """

    name = "preference_bandit"
    objectives: tuple[str, ...] = ("reward",)

    def __init__(self, actions: int = 6, features: int = 2, *, copies: int = 6, spread: float = 2.0, seed: int = 0) -> None:
        """Copy i is the problem of seed `seed + i`. Raises ValueError for a size below 1, or a single action."""
        if actions < 2 or features < 1 or copies < 1:
            raise ValueError(
                f"a preference bandit has 2 or more actions, 1 or more features and copies, not {actions}, {features} and {copies}"
            )
        self.prompts_per_step = copies
        drawn = [
            torch.randn(actions, features + 1, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64)
            for i in range(copies)
        ]
        self.features, self.true_reward = torch.stack(drawn)[..., :-1], spread * torch.stack(drawn)[..., -1]
        self.preference = (self.true_reward[:, :, None] - self.true_reward[:, None, :]).sigmoid()  # [B,A,A]

    def policy(self) -> AlignedPolicy:
        return AlignedPolicy(self.features)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """The copies, in order. Raises ValueError when another number is asked for."""
        if count != self.prompts_per_step:
            raise ValueError(
                f"this task has {self.prompts_per_step} copies, each a prompt; set the task's option copies instead of select.prompts"
            )
        return [Prompt(id=i, content=i) for i in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        copy = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        group = torch.tensor([i for i, p in enumerate(prompts) for _ in range(p.samples)])
        log_table = run.policy.theta.detach().log_softmax(-1)[copy]
        action = torch.multinomial(log_table.exp(), 1, generator=run.generator)
        every = torch.ones(len(copy), 1, dtype=torch.bool)
        return Batch(
            action=action, mask=every, logp=log_table.gather(1, action), group=group, context=copy, terminated=every[:, 0],
            truncated=~every[:, 0], version=torch.full((len(copy),), run.version), signals={"prompt_id": copy},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        return self.true_reward[batch.signals["prompt_id"], batch.action[:, 0]]

    def ask(self, batch: Batch, first: Int[Tensor, " M"], second: Int[Tensor, " M"], generator: torch.Generator) -> Float[Tensor, " M"]:
        """1 where somebody prefers row `first` to row `second` (of one copy), else 0."""
        chance = self.preference[batch.signals["prompt_id"][first], batch.action[first, 0], batch.action[second, 0]]
        return torch.bernoulli(chance, generator=generator)

    @torch.no_grad()
    def measure(self, policy: AlignedPolicy) -> dict[str, Tensor]:
        """For each copy [B], exactly: the true return, the `best_return`, and how well the learned reward explains preferences."""
        return {
            "return": (policy.table * self.true_reward).sum(-1),
            "best_return": self.true_reward.amax(-1),
            "preference_objective": preference_objective(policy.learned_table, policy.table, self.preference),
        }

    def evaluate(self, run: Run) -> dict[str, float]:
        """Means over the copies."""
        return {name: float(value.mean()) for name, value in self.measure(run.policy).items()}  # type: ignore[arg-type]


TASKS: dict[str, Any] = {"preference_bandit": PreferenceBandit}
