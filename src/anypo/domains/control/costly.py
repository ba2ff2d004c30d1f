"""A soft actor-critic that also knows costs: an ensemble of cost critics with their targets, and a learned multiplier of the cost.

The members of the ensemble differ by their first weights alone. Their spread over the same action says how little is known of its cost.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from anypo.domains.control.envs import Spaces
from anypo.domains.control.soft import SquashedGaussianActorCritic, TwinCritic

SEED_OF_COSTS = 1_000_003  # between the seeds of a policy's two sets of critics


class CostAwareActorCritic(SquashedGaussianActorCritic):
    """Beside the signals of its base: [N,T,E] `cost_q` of the stored actions and `cost_q_new` of fresh ones, [N,T,E] `next_cost_q` of the target
    ensemble, [N,T] `log_multiplier`."""

    provides = SquashedGaussianActorCritic.provides | {"cost_q", "cost_q_new", "next_cost_q", "log_multiplier"}

    def __init__(self, spaces: Spaces, *, cost_critics: int = 4, initial_multiplier: float = 0.6931, seed: int = 0, **options: Any) -> None:
        """`cost_critics`: members E of the ensemble, >= 1. `initial_multiplier`: > 0. Raises ValueError for others, and as the base does."""
        if cost_critics < 1 or initial_multiplier <= 0:
            raise ValueError(
                f"cost_critics must be at least 1 and initial_multiplier above 0, not {cost_critics} and {initial_multiplier}; set the options anew"
            )
        super().__init__(spaces, seed=seed, **options)
        self.cost_critics, self.initial_multiplier = cost_critics, initial_multiplier
        sizes = (spaces.observation_size + spaces.action_size, *self.hidden_sizes, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + SEED_OF_COSTS)
            self.cost_critic = TwinCritic(sizes, cost_critics)
        self.target_cost_critic = TwinCritic(sizes, cost_critics).requires_grad_(False)
        self.target_cost_critic.load_state_dict(self.cost_critic.state_dict())
        self.log_multiplier = nn.Parameter(torch.tensor(math.log(initial_multiplier)))

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {"cost_critics": self.cost_critics, "initial_multiplier": self.initial_multiplier}

    def judges(self) -> dict[str, tuple[TwinCritic, TwinCritic]]:
        return super().judges() | {"cost_q": (self.cost_critic, self.target_cost_critic)}

    def scalars(self) -> dict[str, nn.Parameter]:
        return super().scalars() | {"log_multiplier": self.log_multiplier}
