"""What the reproductions share: training on a stand-in while watching an exact quantity, and the stand-ins that several rows use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import ChainPolicy, KeyChain
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Task


def plain_sgd(method: Method, step_size: float, epochs: int = 1, group_size: int | None = None) -> Method:
    """The method with plain SGD (no momentum, no gradient clipping) of the given step, `epochs` optimizer steps a batch."""
    changes: dict[str, Any] = {"optimizer": "sgd", "learning_rate": step_size, "max_grad_norm": None, "epochs": epochs}
    for name, value in changes.items():
        method = method.set(f"update.{name}", value)
    return method.set("select.group_size", group_size) if group_size else method


def train_on(
    method: Method, policy: Policy, task: Task, *, steps: int, seed: int = 0, watch: Callable[[Run, Batch], Any] | None = None,
    stop: Callable[[Any], bool] | None = None,
) -> list[Any]:  # fmt: skip
    """Run the on-policy loop; after every step note `watch(run, batch)` (default: the task's exact `expected_success`), until `stop` of it."""
    run = Run(method, policy, task, steps=steps, seed=seed)
    seen = []
    for _ in range(steps):
        batch = step(run)
        seen.append(watch(run, batch) if watch else task.expected_success(policy))  # type: ignore[attr-defined]
        if stop is not None and stop(seen[-1]):
            break
    return seen


def steps_to(curve: list[float], threshold: float) -> float:
    """First step (from 1) at which the curve reaches the threshold; infinity when it never does."""
    return next((i + 1 for i, value in enumerate(curve) if value >= threshold), math.inf)


def mean_over(seeds: Iterable[int], experiment: Callable[[int], float]) -> float:
    """Mean of an experiment over seeds."""
    return fmean(experiment(seed) for seed in seeds)


def share_without_signal(batch: Batch) -> float:
    """Share of groups in which every advantage is 0."""
    assert batch.advantage is not None
    _, index = torch.unique(batch.group, return_inverse=True)
    size = batch.advantage.abs().sum(1).double()
    return float((torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(0, index, size) == 0).double().mean())


@dataclass
class ShuffledCredit:
    """An ablation: the inner credit's advantages, dealt to the wrong rows, so that nothing can be learned from them."""

    inner: Any

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        return advantage[torch.randperm(len(batch), generator=run.generator)] * batch.mask


@dataclass
class CoinReward:
    """A reward drawn at random, 1 with probability `chance`, independent of the response: nothing to learn, so every drift is a bias."""

    chance: float = 0.2  # in [0,1]

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return torch.bernoulli(torch.full((len(batch),), self.chance, dtype=torch.float64), generator=run.generator)


def one_decision(prompts: int, steps: int, deciding: int) -> tuple[ChainPolicy, KeyChain]:
    """Two of four actions are right at the deciding step, drawn uniformly; elsewhere any is, with probabilities 0.97, 0.01, 0.01, 0.01."""
    right = torch.ones(prompts, steps, 4, dtype=torch.bool)
    right[:, deciding, 2:] = False
    task = KeyChain(right=right)
    policy = task.policy()
    with torch.no_grad():
        policy.logits.copy_(torch.tensor([0.97, 0.01, 0.01, 0.01]).log().expand_as(policy.logits))
        policy.logits[:, deciding] = 0
    return policy, task


def hard_chain(seed: int) -> tuple[ChainPolicy, KeyChain, Tensor]:
    """Chains of 16 steps for 8 prompts, of which 4 steps a prompt succeed with probability 0.3 and the others with 0.98; the task's policy, and the
    success of every step [8,16]."""
    task = KeyChain(8, 16, seed=seed)
    hard = torch.rand(8, 16, generator=torch.Generator().manual_seed(seed + 50)).argsort(1) < 4
    p = torch.where(hard, 0.3, 0.98).double()
    policy = task.policy(bias=0.0, scale=0.0)
    with torch.no_grad():
        policy.logits.copy_(task.right * torch.log(3 * p / (1 - p))[..., None])
    return policy, task, p


BANDIT_STEP = 16.0  # SGD step for a loss averaged over the 16 prompts of token_bandit: 1 for each prompt


def success_on_bandit(
    method: Method, *, steps: int = 300, seeds: Iterable[int] = (0, 1, 2), enough: float = 0.9, step_size: float = BANDIT_STEP, shuffled: bool = False
) -> tuple[float, float]:  # fmt: skip
    """The worst exact success over seeds after `steps` on token_bandit (P=16, V=4, T=2), and the steps of the slowest seed; a run ends once it
    has `enough`. `shuffled` deals the advantages to the wrong rows. Raises ValueError when the untrained policy is not below 0.1."""
    trained = plain_sgd(method, step_size)
    trained = trained.but(credit=ShuffledCredit(trained.credit)) if shuffled else trained
    curves = []
    for seed in seeds:
        task = TokenBandit(seed=seed)
        policy = task.policy()
        if task.expected_success(policy) >= 0.1:
            raise ValueError("the untrained policy succeeds too often for a claim about learning")
        curves.append(train_on(trained, policy, task, steps=steps, seed=seed, stop=lambda success: success > enough))
    return min(curve[-1] for curve in curves), max(len(curve) for curve in curves)


class LengthBandit(TokenBandit):
    """Strings of up to 12 tokens over three symbols, of which token 0 ends the string; no reward of its own."""

    def __init__(self, prompts: int = 16, seed: int = 0) -> None:
        super().__init__(
            prompts, 3, 12, eos=0, seed=seed, reward=lambda prompt, action, mask: torch.zeros(len(prompt), dtype=torch.float64)
        )

    def policy(self, **options: Any) -> TabularTokens:
        """End tokens have logit -1 at the start: probability 0.155, mean length 5.6."""
        policy = super().policy(**options)
        with torch.no_grad():
            policy.logits[..., 0] -= 1
        return policy


def mean_length(policy: TabularTokens) -> float:
    """Exact expected length of strings that token 0 ends: the sum over positions of the probability of reaching them."""
    going_on = 1 - policy.logits.detach().softmax(-1)[..., 0]
    reached = torch.cat([torch.ones_like(going_on[:, :1]), going_on[:, :-1]], dim=1).cumprod(1)
    return float(reached.sum(1).mean())


def pivotal_bandit(seed: int) -> tuple[TokenBandit, TabularTokens]:
    """P=16, V=6, T=3; the reward is that the first token was the rare pivotal one (token 5, probability 0.05 at the start)."""
    task = TokenBandit(16, 6, 3, seed=seed, reward=lambda prompt, action, mask: (action[:, 0] == 5).double())
    policy = task.policy()
    with torch.no_grad():
        policy.logits[:, 0, 5] = math.log(5 * 0.05 / 0.95)
    return task, policy


def rounds_to_half(method: Method, *, step_size: float = 5.0, seeds: Iterable[int] = range(6), most: int = 60) -> float:
    """Mean number of batches, 8 gradient steps each, until the pivotal token reaches probability 0.5 (exact, mean over prompts)."""
    method = plain_sgd(method, step_size, epochs=8)
    rounds = []
    for seed in seeds:
        task, policy = pivotal_bandit(seed)

        def chance(run: Run, batch: Batch, policy: TabularTokens = policy) -> float:
            return float(policy.logits.detach()[:, 0].softmax(-1)[:, 5].mean())

        curve = train_on(method, policy, task, steps=most, seed=seed, watch=chance, stop=lambda p: p >= 0.5)
        rounds.append(steps_to(curve, 0.5))
    return fmean(rounds)


def on_cartpole(method: Method, *, steps: int, seed: int, enough: float | None = None, hidden: tuple[int, ...] = (64, 64)) -> Run:
    """A run on 8 CartPoles, 128 actions each a step; it ends once the mean return of a step's finished episodes reaches `enough`."""
    from anypo.domains.control.setup import build

    policy, task = build("CartPole-v1", None, seed=seed, envs=8, horizon=128, hidden=hidden)
    run = Run(method, policy, task, steps=steps, seed=seed)
    while not run.finished:
        step(run)
        if enough is not None and run.history[-1]["reward"] >= enough:
            break
    return run


@dataclass
class RandomMDP:
    """An ergodic random MDP with exact values: transition probabilities [S,A,S] from a Dirichlet(1), rewards [S,A] in [-1,1], a uniform start."""

    seed: int = 0
    states: int = 10
    actions: int = 4
    gamma: float = 0.9

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        noise = torch.rand(self.states, self.actions, self.states, generator=g, dtype=torch.float64)
        self.transition = -noise.log() / (-noise.log()).sum(-1, keepdim=True)
        self.reward = 2 * torch.rand(self.states, self.actions, generator=g, dtype=torch.float64) - 1
        self.start = torch.full((self.states,), 1 / self.states, dtype=torch.float64)

    def _solve(self, policy: Tensor) -> Tensor:
        chain = torch.einsum("sa,sat->st", policy, self.transition)
        return torch.linalg.inv(torch.eye(self.states, dtype=torch.float64) - self.gamma * chain)

    def values(self, policy: Tensor) -> tuple[Tensor, Tensor]:
        """V [S] and Q [S,A] of a policy [S,A]."""
        value = self._solve(policy) @ (policy * self.reward).sum(-1)
        return value, self.reward + self.gamma * self.transition @ value

    def total(self, policy: Tensor) -> float:
        """Expected discounted return from the start distribution."""
        return float(self.start @ self.values(policy)[0])

    def visits(self, policy: Tensor) -> Tensor:
        """Unnormalized discounted visits [S]; they sum to 1 / (1 - gamma)."""
        return self.start @ self._solve(policy)

    def random_policy(self, seed: int, spread: float = 1.0) -> Tensor:
        """A softmax policy [S,A] of normal logits."""
        g = torch.Generator().manual_seed(seed)
        return (spread * torch.randn(self.states, self.actions, generator=g, dtype=torch.float64)).softmax(-1)
