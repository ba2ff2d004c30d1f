"""Shared-backbone PPO: shared-backbone PPO for a UAV swarm with graph aggregation (arXiv:2605.17999).

PPO in which actor and critic are small heads on one trunk, so that both losses train the representation, and in which agents that can hear each other
pass messages: each adds the mean of its neighbours' features to its own before the heads. All agents of a swarm run the same network on their own
observation and earn the team's reward. Against PPO it changes the policy, normalizes rewards so that the critic does not rule the trunk, adds an entropy
bonus, and draws minibatches of whole teams. Equations 1 to 4 and all sizes are [reconstructed]: the abstract alone was at hand. The swarm is
`domains/control/uav_swarm.py`; on an ordinary environment a team has one agent and what remains is the shared trunk.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.perceptron import Network
from anypo.domains.control.policy import ACTOR_SIGNALS, ControlPolicy
from anypo.domains.control.tasks import RewardScale
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, LossFunction, Signals
from anypo.seams.credit import per_action_ends
from anypo.seams.regularize import EntropyBonus, ValueLoss
from anypo.seams.update import GradientSteps, flatten_actions

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Hidden = Float[Tensor, "*B U h"]
Adjacency = Float[Tensor, "*B U U"]
Weight = Float[Tensor, "h h"]
AGGREGATIONS = ("mean", "attention", "none")


def mean_weights(adj: Adjacency) -> Adjacency:
    """Each row of the adjacency over its sum; an agent without neighbours has zeros."""
    return adj / adj.sum(-1, keepdim=True).clamp(min=1)


def attention_weights(hidden: Hidden, adj: Adjacency, query: Weight, key: Weight) -> Adjacency:
    """Softmax over neighbours j of (q_i . k_j) / sqrt(h), with q = hidden @ query and k = hidden @ key; zeros without neighbours."""
    score = (hidden @ query) @ (hidden @ key).transpose(-1, -2) / hidden.shape[-1] ** 0.5
    score = (score - score.detach().amax(-1, keepdim=True)).exp() * adj
    return score / score.sum(-1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)


def combine(hidden: Hidden, weights: Adjacency, w_self: Weight, w_neigh: Weight, bias: Float[Tensor, " h"]) -> Hidden:
    """relu(h W_s + m W_n + b) with the messages m = weights @ h."""
    return torch.relu(hidden @ w_self + weights @ hidden @ w_neigh + bias)


def aggregate(hidden: Hidden, adj: Adjacency, w_self: Weight, w_neigh: Weight, bias: Float[Tensor, " h"]) -> Hidden:
    """Equation 2 [reconstructed]: the message is the mean of the neighbours' features, 0 for an isolated agent."""
    return combine(hidden, mean_weights(adj.to(hidden.dtype)), w_self, w_neigh, bias)


class Aggregation(nn.Module):
    """One round of messages."""

    def __init__(self, size: int, attention: bool) -> None:
        super().__init__()
        names = ("w_self", "w_neigh", *(("query", "key") if attention else ()))
        for name in names:
            self.register_parameter(name, nn.Parameter(nn.init.orthogonal_(torch.empty(size, size))))
        self.bias = nn.Parameter(torch.zeros(size))
        self.attention = attention

    def forward(self, hidden: Hidden, adj: Adjacency) -> Hidden:
        weights = attention_weights(hidden, adj, self.query, self.key) if self.attention else mean_weights(adj)  # type: ignore[arg-type]
        return combine(hidden, weights, self.w_self, self.w_neigh, self.bias)  # type: ignore[arg-type]


class SharedBackbonePolicy(ControlPolicy):
    """A trunk, rounds of messages inside a team, and two heads. Provides what `ControlPolicy` does, and `value` under the name `shared_value` too; rows
    are whole teams, one agent after another."""

    learning_rate = 3e-4
    memoryless = False  # an agent's output depends on the rows of its team

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (128, 128), normalize_observations: bool | None = None, initial_log_std: float = 0.0,
        shared: bool = True, aggregation: str = "mean", rounds: int = 1, reach: float = 0.4, team_value: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        """`shared`: one trunk; otherwise the critic has its own, with messages of its own. `aggregation`: mean, attention or none. `reach`: agents hear
        each other when their first two observations, their position, differ by at most this length. `team_value`: one value for the team, from the mean
        of its features. Weights depend on `seed` alone.

        Raises ValueError for an unknown aggregation, or fewer rounds than 0.
        """
        if aggregation not in AGGREGATIONS or rounds < 0:
            raise ValueError(f"aggregation is one of {', '.join(AGGREGATIONS)}, with 0 or more rounds; not '{aggregation}' with {rounds}")
        super().__init__(spaces, hidden=hidden, normalize_observations=normalize_observations, initial_log_std=initial_log_std, seed=seed)
        self.shared, self.aggregation, self.rounds, self.reach, self.team_value = shared, aggregation, rounds, reach, team_value
        count, size = (0 if aggregation == "none" else rounds), self.hidden_sizes[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            made = lambda n: nn.ModuleList(Aggregation(size, aggregation == "attention") for _ in range(n))  # noqa: E731
            self.messages = made(count)
            self.critic_messages = made(0 if shared else count)
            if shared:
                self.critic_network = Network((size, 1), scale=1.0)
        self.provides |= {"shared_value"}

    @property
    def configuration(self) -> dict[str, Any]:
        own = ("shared", "aggregation", "rounds", "reach", "team_value")
        return super().configuration | {name: getattr(self, name) for name in own}

    def parameter_groups(self) -> list[dict[str, Any]]:
        actor, critic = super().parameter_groups()
        return [
            actor | {"params": [*actor["params"], *self.messages.parameters()]},
            critic | {"params": [*critic["params"], *self.critic_messages.parameters()]},
        ]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        output, value, features = self._heads(
            batch.context, not needs.isdisjoint(ACTOR_SIGNALS), not needs.isdisjoint({"value", "shared_value"})
        )
        signals = self._signals(output, value, batch, needs, Signals({"hidden": features} if "hidden" in needs else {}))
        if "shared_value" in needs:
            signals["shared_value"] = signals["value"] if "value" in needs else signals.pop("value")
        return signals

    def backward(self, batch: Batch, needs: Set[str], loss_fn: LossFunction, recorded: Signals | None = None) -> Loss:
        """Always by a forward pass of all rows: a row left out would be missing in its team."""
        return super(ControlPolicy, self).backward(batch, needs, loss_fn)

    def values(self, observation: Tensor) -> Tensor:
        value = self._heads(observation, False, True)[1]
        assert value is not None
        return value.squeeze(-1)

    def actor(self) -> Any:
        deviation = None if self.log_std is None else self.log_std.detach().exp().numpy()

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            with torch.no_grad():
                output = self._heads(torch.from_numpy(observation)[:, None], True, False)[0]
            assert output is not None
            found = output[:, 0].numpy()
            if deviation is None:
                return (found + (0 if noise is None else noise)).argmax(-1)
            return found + (0 if noise is None else noise * deviation)

        return act

    def _heads(self, observation: Tensor, act: bool, judge: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Raw observations [N,T,O] -> outputs of the actor [N,T,A or D] and the critic [N,T,1], and the actor's features [N,T,H]."""
        x, adj = self.normalize(observation), self._hearing(observation)
        features = self._features(self.actor_network, self.messages, x, adj) if act or self.shared else None
        output = value = None
        if act:
            assert features is not None
            last = self.actor_network.layers[-1]
            output = nn.functional.linear(features, last.weight, last.bias)  # type: ignore[arg-type]
        if judge:
            judged = features if self.shared else self._features(self.critic_network, self.critic_messages, x, adj)
            assert judged is not None
            if self.team_value:
                judged = judged.unflatten(0, (-1, self.spaces.team_size)).mean(1).repeat_interleave(self.spaces.team_size, 0)
            last = self.critic_network.layers[-1]
            value = nn.functional.linear(judged, last.weight, last.bias)  # type: ignore[arg-type]
        return output, value, features

    def _hearing(self, observation: Tensor) -> Tensor:
        """Equation 1: who hears whom, [N/U,T,U,U]."""
        team = self.spaces.team_size
        place = observation[..., :2].unflatten(0, (-1, team)).transpose(1, 2)
        near = torch.linalg.vector_norm(place[..., :, None, :] - place[..., None, :, :], dim=-1) <= self.reach
        return (near & ~torch.eye(team, dtype=torch.bool)).to(next(self.parameters()).dtype)

    def _features(self, trunk: Network, messages: nn.ModuleList, x: Tensor, adj: Tensor) -> Tensor:
        hidden = trunk.hidden(x)
        if not len(messages):
            return hidden
        hidden = hidden.unflatten(0, (-1, self.spaces.team_size)).transpose(1, 2)
        for message in messages:
            hidden = message(hidden, adj)
        return hidden.transpose(1, 2).flatten(0, 1)


@dataclass
class SharedValueLoss(ValueLoss):
    """Critic regression by a head of the shared trunk."""

    needs = frozenset({"shared_value"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return super().__call__(batch, Signals(value=new.shared_value), run)


@dataclass
class NormalizedReward:
    """The task's reward over the running standard deviation of its discounted sum: the critic's error must not rule the trunk."""

    gamma: float = 0.99  # discount, in [0,1]

    def __post_init__(self) -> None:
        self.scale = RewardScale()

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = run.score_rewards(batch)
        ended = torch.stack(per_action_ends(batch)).any(0)
        self.scale.update(reward.double().numpy(), ended.numpy(), self.gamma)
        return reward / self.scale.divisor

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.load_state_dict(state)


def by_moment(batch: Batch) -> Batch:
    """The batch as rows of one action, the agents of a team at one moment after one another; each such moment is a group."""
    moment = batch.group[:, None] * batch.horizon + torch.arange(batch.horizon)
    rows = flatten_actions(batch.but(signals=batch.signals | {"moment": moment}))
    found = rows.signals["moment"].flatten()
    return rows.but(group=found)[found.argsort(stable=True)]


@dataclass
class TeamSteps(GradientSteps):
    """Gradient steps whose minibatches are moments: whole teams, each at one time."""

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        return super().__call__(by_moment(batch), loss_fn, run)


METHOD = PPO.but(
    name="shared_backbone_ppo",
    paper=Paper("Shared-backbone PPO for a UAV swarm with graph aggregation", "2605.17999", 2026),
    summary="PPO with actor and critic as heads of one trunk, in which agents within reach pass messages",
    task="UavSwarm-v0",
    reward=NormalizedReward(),
    regularize=(SharedValueLoss(coefficient=0.5), EntropyBonus(coefficient=0.01)),
    update=TeamSteps(epochs=4, minibatches=4, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5, unit="group"),
)
