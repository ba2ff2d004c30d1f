"""token_bandit: strings over a tiny alphabet, a table of logits, and every expectation in closed form.

P prompts, each with target strings of T tokens over V symbols. The policy is a table of independent logits theta[p,t,v], or an autoregressive
one theta[p,t,previous,v]. All V^T strings can be enumerated while V^T is small, so claims compare with exact success, exact gradients and exact
KL instead of samples. A step takes about a millisecond.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.steerable import Steerable
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

ENUMERATION_LIMIT = 300_000  # strings


class TabularTokens(Steerable, Policy):
    """A softmax table over tokens: logits [P,T,V], or [P,T,V+1,V] when each token sees the one before it (index V = start)."""

    provides = frozenset({"logp", "entropy", "logits", "value", "hidden"})
    learning_rate = 1.0
    optimizer = "sgd"

    def __init__(
        self, prompts: int, vocabulary: int, horizon: int, *, autoregressive: bool = False, scale: float = 0.0, seed: int = 0
    ) -> None:
        """`scale`: standard deviation of the initial logits; 0 starts uniform."""
        super().__init__()
        shape = (prompts, horizon, vocabulary + 1, vocabulary) if autoregressive else (prompts, horizon, vocabulary)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.logits = nn.Parameter(scale * noise)
        self.values = nn.Parameter(torch.zeros(prompts, horizon, dtype=torch.float64))
        self.autoregressive = autoregressive

    @property
    def vocabulary(self) -> int:
        return self.logits.shape[-1]

    @property
    def horizon(self) -> int:
        return self.logits.shape[1]

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.logits], "role": "policy"}, {"params": [self.values], "role": "value"}]

    def action_logits(self, prompt: Int[Tensor, " N"], action: Int[Tensor, "N T"]) -> Float[Tensor, "N T V"]:
        """Logits of every position, given the tokens before it."""
        length = action.shape[1]
        if not self.autoregressive:
            return self.logits[prompt, :length]
        previous = torch.cat([torch.full_like(action[:, :1], self.vocabulary), action[:, :-1]], dim=1)
        return self.logits[prompt[:, None], torch.arange(length)[None], previous]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        logits = self.action_logits(batch.context, batch.action)
        temperature = batch.signals.get("temperature")
        scaled = logits if temperature is None else logits / temperature[:, None, None]
        log_probs = scaled.log_softmax(-1)
        signals = Signals()
        if "logp" in needs:
            logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
            signals["logp"] = torch.where(batch.mask, logp, torch.zeros_like(logp))
        if "entropy" in needs:
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "logits" in needs:
            signals["logits"] = scaled
        if "hidden" in needs:
            signals["hidden"] = logits
        if "value" in needs:
            signals["value"] = self.values[batch.context, : batch.horizon]
        return signals

    @torch.no_grad()
    def sample(
        self, prompt: Int[Tensor, " N"], generator: torch.Generator, prefix: Tensor | None = None, temperature: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probs and entropies [N,T] of strings that start with `prefix` [N,t] (None = from nothing)."""
        rows = len(prompt)
        action = torch.zeros(rows, self.horizon, dtype=torch.int64)
        done = 0 if prefix is None else prefix.shape[1]
        if prefix is not None:
            action[:, :done] = prefix
        scale = torch.ones(rows, dtype=torch.float64) if temperature is None else temperature
        if not self.autoregressive:
            probabilities = (self.pushed(self.logits[prompt, done:]) / scale[:, None, None]).softmax(-1)
            if probabilities.numel():
                action[:, done:] = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator).view(rows, -1)
        else:
            for t in range(done, self.horizon):
                logits = self.pushed(self.action_logits(prompt, action)[:, t]) / scale[:, None]
                action[:, t] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        log_probs = (self.pushed(self.action_logits(prompt, action)) / scale[:, None, None]).log_softmax(-1)
        logp = log_probs.gather(-1, action[..., None])[..., 0]
        return action, logp, -(log_probs.exp() * log_probs).sum(-1)

    def all_strings(self) -> Int[Tensor, "S T"]:
        """Every string, in lexicographic order. Raises ValueError when there are too many to enumerate."""
        if self.vocabulary**self.horizon > ENUMERATION_LIMIT:
            raise ValueError(f"{self.vocabulary}^{self.horizon} strings are too many to enumerate; use fewer symbols or a shorter horizon")
        return torch.tensor(list(itertools.product(range(self.vocabulary), repeat=self.horizon)))

    def string_logp(self, prompt: int, strings: Int[Tensor, "S T"]) -> Float[Tensor, " S"]:
        """Differentiable log-probability of whole strings (every position counts, also those after an end token)."""
        logits = self.action_logits(torch.full((len(strings),), prompt), strings)
        return logits.log_softmax(-1).gather(-1, strings[..., None])[..., 0].sum(1)


RewardFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # (prompt [N], action [N,T], mask [N,T]) -> [N] or [N,K]


class TokenBandit:
    """The task: one or more target strings a prompt; reward 1 for hitting one of them, unless another reward is given.

    `eos`: a token that ends the string (positions after it are masked). `partial`: reward is the share of right tokens. `reward`: any function of
    (prompt [N], action [N,T], mask [N,T]); with several objectives it returns [N,K], named by `objectives`.
    """

    name = "token_bandit"

    def __init__(
        self,
        prompts: int = 16,
        vocabulary: int = 4,
        horizon: int = 2,
        *,
        targets: int = 1,
        seed: int = 0,
        eos: int | None = None,
        partial: bool = False,
        reward: RewardFunction | None = None,
        objectives: tuple[str, ...] = ("reward",),
        prompts_per_step: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed + 1000)
        self.count, self.vocabulary, self.horizon = prompts, vocabulary, horizon
        strings = vocabulary**horizon
        if targets > strings:
            raise ValueError(f"{targets} targets a prompt, but there are only {strings} strings; lower targets")
        if strings > ENUMERATION_LIMIT:  # too many to shuffle; two equal targets are as good as impossible
            self.targets = torch.randint(vocabulary, (prompts, targets, horizon), generator=generator)  # [P, targets, T]
        else:
            codes = torch.stack([torch.randperm(strings, generator=generator)[:targets] for _ in range(prompts)])
            powers = vocabulary ** torch.arange(horizon - 1, -1, -1)
            self.targets = codes[..., None] // powers % vocabulary
        self.eos, self.partial, self.reward_function = eos, partial, reward
        self.objectives = objectives
        self.prompts_per_step = prompts_per_step or prompts

    def policy(self, **options: Any) -> TabularTokens:
        """A policy of this task's sizes, uniform unless `scale` says otherwise."""
        return TabularTokens(self.count, self.vocabulary, self.horizon, **options)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """All prompts in order when `count` is their number, else a draw without replacement (with it, when more are wanted)."""
        if count == self.count:
            chosen = np.arange(count)
        else:
            chosen = rng.choice(self.count, size=count, replace=count > self.count)
        return [Prompt(id=int(i), content=int(i)) for i in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        rows = [p.content for p in prompts for _ in range(p.samples)]
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        temperature = None
        if any(p.temperature for p in prompts):
            temperature = torch.tensor([p.temperature or 1.0 for p in prompts for _ in range(p.samples)], dtype=torch.float64)
        return self.continue_from(torch.tensor(rows), group, run, temperature=temperature)

    def continue_from(
        self, prompt: Int[Tensor, " N"], group: Int[Tensor, " N"], run: Run, prefix: Tensor | None = None, temperature: Tensor | None = None
    ) -> Batch:
        """Complete strings that start with `prefix` [N,t] (None = the empty one), as a batch of whole trajectories."""
        action, logp, entropy = run.policy.sample(prompt, run.generator, prefix, temperature)
        mask = self.mask(action)
        signals: dict[str, Any] = {"prompt_id": prompt, "old_entropy": entropy}
        if temperature is not None:
            signals["temperature"] = temperature
        ended = mask.sum(1) < self.horizon if self.eos is not None else torch.ones(len(prompt), dtype=torch.bool)
        return Batch(
            action=action, mask=mask, logp=torch.where(mask, logp, torch.zeros_like(logp)), group=group, context=prompt,
            terminated=ended, truncated=~ended, version=torch.full((len(prompt),), run.version), signals=signals,
        )  # fmt: skip

    def continue_rows(self, batch: Batch, rows: Int[Tensor, " M"], depth: Int[Tensor, " M"], run: Run) -> Batch:
        """New endings of rows of a batch, row `rows[i]` after its first `depth[i]` tokens; see `anypo.task.Resumable`."""
        parts, order = [], []
        for shared in torch.unique(depth).tolist():
            chosen = (depth == shared).nonzero().flatten()
            old = batch[rows[chosen]]
            parts.append(self.continue_from(old.context, old.group, run, old.action[:, :shared], old.signals.get("temperature")))
            order.append(chosen)
        return Batch.concat(parts)[torch.cat(order).argsort()].but(parent=rows, branch_at=depth)

    def mask(self, action: Tensor) -> Tensor:
        """[N,T]: positions up to and including the first end token."""
        if self.eos is None:
            return torch.ones_like(action, dtype=torch.bool)
        before = (action == self.eos).cumsum(1) - (action == self.eos).long()
        return before == 0

    def rewards(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        """Rewards [N] or [N,K] of any strings."""
        if self.reward_function is not None:
            return self.reward_function(prompt, action, mask)
        right = action[:, None] == self.targets[prompt]  # [N, targets, T]
        return right.double().mean(-1).amax(-1) if self.partial else right.all(-1).any(-1).double()

    def score(self, batch: Batch, run: Run) -> Tensor:
        return self.rewards(batch.context, batch.action, batch.mask)

    def expected_reward(self, policy: TabularTokens) -> Tensor:
        """Exact, differentiable expected reward of every prompt, [P] or [P,K], by enumerating all strings."""
        strings = policy.all_strings()
        mask = self.mask(strings)
        rows = []
        for p in range(self.count):
            reward = self.rewards(torch.full((len(strings),), p), strings, mask)
            rows.append(policy.string_logp(p, strings).exp() @ reward)
        return torch.stack(rows)

    def expected_success(self, policy: TabularTokens) -> float:
        """Mean over prompts of the exact probability of hitting a target. Needs no enumeration."""
        with torch.no_grad():
            hits = [policy.string_logp(p, self.targets[p]).exp().sum() for p in range(self.count)]
        return float(torch.stack(hits).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        policy: Any = run.policy
        if self.reward_function is None and not self.partial:
            return {"pass@1": self.expected_success(policy)}
        with torch.no_grad():
            return {"reward": float(self.expected_reward(policy).mean())}


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    bandit = TokenBandit(seed=seed, **options)
    policy = bandit.policy()
    policy.learning_rate = float(bandit.count)  # an SGD step of 1 for each prompt
    return policy, bandit
