"""toy_roles: characters that answer in scenes, each with words of its own, and a nameless voice that is the average of them all.

A response is T tokens, each drawn given the one before. Two rewards: `task` is 1 when the scene's token occurs, `style` is the share of tokens from
the character's lexicon (neighbouring characters share a word). Prompt `role * scenes + scene` has a character; `roles * scenes + scene` is the same
scene without one, answered from the mean of the characters' tables. Success, style and token shares are found exactly by a forward recursion.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt, Task

LEXICON = 2  # words of a character


class RoleTokens(TabularTokens):
    """Autoregressive logits [roles * scenes, T, V+1, V], and without a character their mean over the roles."""

    def __init__(self, roles: int, scenes: int, vocabulary: int, horizon: int, *, scale: float = 0.0, seed: int = 0) -> None:
        super().__init__(roles * scenes, vocabulary, horizon, autoregressive=True, scale=scale, seed=seed)
        self.roles, self.scenes = roles, scenes
        self.values = nn.Parameter(torch.zeros((roles + 1) * scenes, horizon, dtype=torch.float64))

    def action_logits(self, prompt: Int[Tensor, " N"], action: Int[Tensor, "N T"]) -> Float[Tensor, "N T V"]:
        """Logits of every position, given the tokens before it."""
        anonymous = self.logits.unflatten(0, (self.roles, self.scenes)).mean(0)
        table = torch.cat([self.logits, anonymous])
        previous = torch.cat([torch.full_like(action[:, :1], self.vocabulary), action[:, :-1]], dim=1)
        return table[prompt[:, None], torch.arange(action.shape[1])[None], previous]


class ToyRoles(TokenBandit):
    """The task. Prompts carry the columns `role` and `generic` (the prompt without the character), batches the signal `role` [N]."""

    name = "toy_roles"

    def __init__(self, roles: int = 6, scenes: int = 4, vocabulary: int = 12, horizon: int = 6, *, seed: int = 0) -> None:
        """Raises ValueError when the vocabulary has no room for a token of every scene and the characters' words."""
        if vocabulary < scenes + roles + LEXICON - 1:
            raise ValueError(f"{roles} roles in {scenes} scenes need a vocabulary of at least {scenes + roles + LEXICON - 1} tokens")
        super().__init__(roles * scenes, vocabulary, horizon, seed=seed, objectives=("task", "style"))
        self.roles, self.scenes = roles, scenes
        token = torch.arange(vocabulary) - scenes - torch.arange(roles)[:, None]
        self.lexicon = (token >= 0) & (token < LEXICON)  # [roles, V]

    def policy(self, **options: Any) -> RoleTokens:
        return RoleTokens(self.roles, self.scenes, self.vocabulary, self.horizon, **options)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        def placed(prompt: Prompt) -> Prompt:
            role, scene = divmod(prompt.id, self.scenes)
            return prompt.but(columns={"role": role, "generic": self.count + scene})

        return [placed(prompt) for prompt in super().prompts(count, rng)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = super().collect(prompts, run)
        batch.signals["role"] = torch.tensor([p.columns["role"] for p in prompts])[batch.group]
        batch.signals["prompt_id"] = torch.tensor([p.id for p in prompts])[batch.group]
        return batch

    def continue_rows(self, batch: Batch, rows: Int[Tensor, " M"], depth: Int[Tensor, " M"], run: Run) -> Batch:
        """New endings of rows of a batch; see `anypo.task.Resumable`."""
        endings = super().continue_rows(batch, rows, depth, run)
        endings.signals |= {name: batch.signals[name][rows] for name in ("role", "prompt_id")}
        return endings

    def score(self, batch: Batch, run: Run) -> Float[Tensor, "N 2"]:
        task = (batch.action == (batch.context % self.scenes)[:, None]).any(1)
        style = self.lexicon[batch.signals["role"][:, None], batch.action].double().mean(1)
        return torch.stack([task.double(), style], dim=1)

    def token_shares(self, policy: RoleTokens) -> Float[Tensor, "P V"]:
        """Exact expected share of every token in the responses to every prompt with a character."""
        with torch.no_grad():
            chances = policy.logits.softmax(-1)
            now = torch.cat([chances.new_zeros(self.count, self.vocabulary), chances.new_ones(self.count, 1)], dim=1)
            shares = []
            for t in range(self.horizon):
                following = torch.einsum("pu,puv->pv", now, chances[:, t])
                shares.append(following)
                now = torch.cat([following, torch.zeros_like(now[:, :1])], dim=1)
            return torch.stack(shares).mean(0)

    def expected_success(self, policy: Any) -> float:
        """Exact chance that the scene's token occurs, mean over prompts with a character."""
        with torch.no_grad():
            other = torch.arange(self.vocabulary) != (torch.arange(self.count) % self.scenes)[:, None]
            chances = policy.logits.softmax(-1) * other[:, None, None]
            missing = chances[:, 0, self.vocabulary]
            for t in range(1, self.horizon):
                missing = torch.einsum("pu,puv->pv", missing, chances[:, t, : self.vocabulary])
            return float(1 - missing.sum(1).mean())

    def expected_style(self, policy: RoleTokens) -> float:
        """Exact mean share of tokens from the character's own lexicon."""
        own = self.lexicon.double().repeat_interleave(self.scenes, dim=0)
        return float((self.token_shares(policy) * own).sum(1).mean())

    def distinctiveness(self, policy: RoleTokens) -> float:
        """Mean over pairs of characters of the total variation between their token shares (over all scenes), in [0,1]."""
        shares = self.token_shares(policy).unflatten(0, (self.roles, self.scenes)).mean(1)
        apart = 0.5 * (shares[:, None] - shares[None]).abs().sum(-1)
        return float(apart.sum() / (self.roles * (self.roles - 1)))

    def evaluate(self, run: Run) -> dict[str, float]:
        policy: Any = run.policy
        return {
            "pass@1": self.expected_success(policy),
            "style": self.expected_style(policy),
            "distinctiveness": self.distinctiveness(policy),
        }


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    toy = ToyRoles(seed=seed, **options)
    policy = toy.policy()
    policy.learning_rate = float(toy.prompts_per_step)  # an SGD step of 1 for each prompt
    return policy, toy
