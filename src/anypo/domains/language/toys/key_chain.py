"""key_chain: an episode of D steps in which every step must be right, restorable to any visited state.

Q prompts, D steps, four actions, hidden right actions for every (prompt, step); the state is (prompt, step) and whether the chain is still
intact, and the reward is 1 at the end only if every action was right. The policy is a softmax table over (prompt, step), so success is a
product of probabilities, known exactly. It stands in for multi-turn agents whose environment can be reset to a node. A training step takes a
few milliseconds. Left out: observations with tokens of their own.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

ACTIONS = 4


class ChainState(NamedTuple):
    """Where M episodes are; all that is needed to go on from there."""

    prompt: Tensor  # [M] int64
    step: Tensor  # [M] int64, number of actions taken, in [0,D]
    intact: Tensor  # [M] bool: every action so far was right


class ChainEnvironment:
    """M episodes side by side: `reset`, `step`, `save`, `restore`. Counts every action it executes in `steps_taken`."""

    def __init__(self, right: Bool[Tensor, "Q D A"]) -> None:
        self.right = right
        self.steps_taken = 0
        self.state = ChainState(*(torch.zeros(0, dtype=kind) for kind in (torch.int64, torch.int64, torch.bool)))

    def reset(self, prompt: Int[Tensor, " M"]) -> ChainState:
        """Start one episode for every entry of `prompt`."""
        self.state = ChainState(prompt.clone(), torch.zeros_like(prompt), torch.ones_like(prompt, dtype=torch.bool))
        return self.state

    @property
    def done(self) -> Bool[Tensor, " M"]:
        return self.state.step >= self.right.shape[1]

    def step(self, action: Int[Tensor, " M"]) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
        """Reward and whether the episode is over, for each; episodes that were over ignore their action and pay nothing."""
        prompt, step, intact = self.state
        active = ~self.done
        self.steps_taken += int(active.sum())
        right = self.right[prompt, step.clamp(max=self.right.shape[1] - 1), action]
        self.state = ChainState(prompt, step + active, intact & (right | ~active))
        return (active & self.done & self.state.intact).double(), self.done

    def save(self) -> ChainState:
        """The present states, to be given to `restore` any number of times."""
        return ChainState(*(part.clone() for part in self.state))

    def restore(self, state: ChainState) -> None:
        """Go on from saved states; executes no step."""
        self.state = ChainState(*(part.clone() for part in state))


class ChainPolicy(Policy):
    """A softmax table: logits [Q,D,4], and values [Q,D] when asked for."""

    optimizer = "sgd"

    def __init__(self, right: Bool[Tensor, "Q D A"], *, bias: float = 1.0, scale: float = 0.1, value: bool = False, seed: int = 0) -> None:
        """Logits drawn from N(0, `scale`), plus `bias` on the right actions. The default learning rate Q D makes a mean over rows and
        steps of the whole batch a step of 1.0 on every prompt's own sum over steps."""
        super().__init__()
        self.vocabulary = ACTIONS
        self.learning_rate = float(right.shape[0] * right.shape[1])
        noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.logits = nn.Parameter(scale * noise + bias * right)
        self.values = nn.Parameter(torch.zeros(right.shape[:2], dtype=torch.float64)) if value else None
        provided = {"logp", "entropy", "logits"}
        self.provides = frozenset(provided | {"value"}) if value else frozenset(provided)

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = [{"params": [self.logits], "role": "policy"}]
        return groups if self.values is None else [*groups, {"params": [self.values], "role": "value"}]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """Signals [N,T] and `logits` [N,T,4], of the tempered policy where the batch carries `temperature` [N]. The context is the prompt [N]."""
        logits = self.logits[batch.context, : batch.horizon]
        temperature = batch.signals.get("temperature")
        if temperature is not None:
            logits = logits / temperature[:, None, None]
        log_probs = logits.log_softmax(-1)
        signals = Signals()
        if "logp" in needs:
            logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
            signals["logp"] = torch.where(batch.mask, logp, torch.zeros_like(logp))
        if "entropy" in needs:
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "logits" in needs:
            signals["logits"] = logits
        if "value" in needs:
            assert self.values is not None
            signals["value"] = self.values[batch.context, : batch.horizon]
        return signals

    @torch.no_grad()
    def act(self, prompt: Int[Tensor, " M"], step: Int[Tensor, " M"], temperature: Tensor, generator: torch.Generator) -> Int[Tensor, " M"]:
        """One action for every (prompt, step) pair."""
        probabilities = (self.logits[prompt, step] / temperature[:, None]).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


class KeyChain:
    """The task. Success needs every action of an episode to be right.

    `right`: which actions are right, [Q,D,4] bool with at least one a step; several make a step at which any of them will do. None draws one a
    step with `seed`. `environment_steps` counts the steps of `collect` and `continue_from`; those up to a restored state are free.
    """

    name = "key_chain"
    objectives = ("reward",)

    def __init__(self, prompts: int = 16, steps: int = 4, *, right: Bool[Tensor, "Q D A"] | None = None, seed: int = 0) -> None:
        if right is None:
            generator = torch.Generator().manual_seed(seed + 1000)
            right = nn.functional.one_hot(torch.randint(ACTIONS, (prompts, steps), generator=generator), ACTIONS).bool()
        if not right.any(-1).all():
            raise ValueError("every step of a key chain needs at least one right action; check `right` [Q,D,4]")
        self.right = right
        self.count, self.horizon = right.shape[:2]
        self.prompts_per_step = self.count
        self.environment_steps = 0

    def policy(self, **options: Any) -> ChainPolicy:
        """A policy of this task's sizes."""
        return ChainPolicy(self.right, **options)

    def environment(self) -> ChainEnvironment:
        """A fresh environment of this task, with a step counter of its own."""
        return ChainEnvironment(self.right)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """All prompts in order when `count` is their number, else a draw without replacement (with it, when more are wanted)."""
        chosen = np.arange(count) if count == self.count else rng.choice(self.count, size=count, replace=count > self.count)
        return [Prompt(id=int(i), content=int(i)) for i in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        samples = torch.tensor([p.samples for p in prompts])
        group = torch.repeat_interleave(torch.arange(len(prompts)), samples)
        temperature = None
        if any(p.temperature for p in prompts):
            temperature = torch.tensor([p.temperature or 1.0 for p in prompts], dtype=torch.float64)[group]
        return self._roll(torch.tensor([p.content for p in prompts])[group], group, run, None, None, temperature)

    def continue_from(
        self,
        prompt: Int[Tensor, " M"],
        group: Int[Tensor, " M"],
        run: Run,
        prefix: Int[Tensor, "M d"],
        depth: Int[Tensor, " M"] | None = None,
        parent: Int[Tensor, " M"] | None = None,
        temperature: Float[Tensor, " M"] | None = None,
    ) -> Batch:
        """Restore the state after `prefix[i, :depth[i]]` (`depth` None: all of it) and play on to the end, as whole trajectories.

        All log-probs, the prefix's too, are the present policy's. `branch_at` is the depth, `parent` [M] the rows branched from (None: -1).
        Raises ValueError for a depth that is no step of the prefix or of the chain.
        """
        depth = torch.full_like(prompt, prefix.shape[1]) if depth is None else depth
        if bool((depth < 0).any()) or int(depth.max()) > min(prefix.shape[1], self.horizon):
            raise ValueError(f"depth must lie between 0 and {min(prefix.shape[1], self.horizon)}, the actions given by the prefix")
        batch = self._roll(prompt, group, run, prefix, depth, temperature)
        return batch.but(parent=torch.full_like(prompt, -1) if parent is None else parent, branch_at=depth)

    def continue_rows(self, batch: Batch, rows: Int[Tensor, " M"], depth: Int[Tensor, " M"], run: Run) -> Batch:
        """New endings of rows of a batch, row `rows[i]` from the state after its first `depth[i]` actions; see `anypo.task.Resumable`."""
        old = batch[rows]
        return self.continue_from(old.context, old.group, run, old.action, depth, rows, old.signals.get("temperature"))

    def state_after(self, prompt: Int[Tensor, " M"], prefix: Int[Tensor, "M d"], depth: Int[Tensor, " M"]) -> ChainState:
        """The state that `prefix[i, :depth[i]]` leads to."""
        right = self.right[prompt[:, None], torch.arange(prefix.shape[1]), prefix]
        return ChainState(prompt, depth, (right | (torch.arange(prefix.shape[1]) >= depth[:, None])).all(1))

    def _roll(
        self, prompt: Tensor, group: Tensor, run: Run, prefix: Tensor | None, depth: Tensor | None, temperature: Tensor | None
    ) -> Batch:
        """Play to the end from the state after the prefix."""
        rows, policy = len(prompt), cast(ChainPolicy, run.policy)
        environment = self.environment()
        environment.reset(prompt)
        action = torch.zeros(rows, self.horizon, dtype=torch.int64)
        if prefix is not None and depth is not None:
            environment.restore(self.state_after(prompt, prefix, depth))
            taken = torch.arange(prefix.shape[1]) < depth[:, None]
            action[:, : prefix.shape[1]] = torch.where(taken, prefix, torch.zeros_like(prefix))[:, : self.horizon]
        heat = torch.ones(rows, dtype=torch.float64) if temperature is None else temperature
        while not environment.done.all():
            going = (~environment.done).nonzero().flatten()
            step = environment.state.step[going]
            action[going, step] = policy.act(prompt[going], step, heat[going], run.generator)
            environment.step(action.gather(1, environment.state.step.clamp(max=self.horizon - 1)[:, None])[:, 0])
        self.environment_steps += environment.steps_taken
        mask = torch.ones(rows, self.horizon, dtype=torch.bool)
        signals: dict[str, Any] = {"prompt_id": prompt}
        if temperature is not None:
            signals["temperature"] = temperature
        batch = Batch(
            action=action,
            mask=mask,
            logp=torch.zeros(rows, self.horizon, dtype=torch.float64),
            group=group,
            context=prompt,
            segment=torch.arange(self.horizon).expand(rows, -1).clone(),
            terminated=torch.ones(rows, dtype=torch.bool),
            truncated=torch.zeros(rows, dtype=torch.bool),
            version=torch.full((rows,), run.version),
            signals=signals,
        )
        seen = policy.observe(batch, {"logp", "entropy"})
        batch.logp, batch.signals["old_entropy"] = seen.logp, seen.entropy
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """1 for an episode whose every action was right, else 0, [N]. Executes no step."""
        return self.state_after(batch.context, batch.action, batch.lengths).intact.double()

    def success_probabilities(self, policy: ChainPolicy) -> Float[Tensor, " Q"]:
        """Exact and differentiable: the product over the steps of the probability of a right action."""
        return (policy.logits.softmax(-1) * self.right).sum(-1).prod(-1)

    def expected_success(self, policy: ChainPolicy) -> float:
        """Exact success probability, mean over the prompts."""
        with torch.no_grad():
            return float(self.success_probabilities(policy).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        return {"pass@1": self.expected_success(cast(ChainPolicy, run.policy))}

    def state_dict(self) -> dict[str, Any]:
        return {"environment_steps": self.environment_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.environment_steps = state["environment_steps"]


def make_key_chain(prompts: int = 16, steps: int = 4, *, seed: int = 0, value: bool = False) -> tuple[ChainPolicy, KeyChain]:
    """The problem at its usual sizes: bias 1.0 on the right action at 4 steps, 1.2 at 6 (0.1 a step more or less elsewhere)."""
    task = KeyChain(prompts, steps, seed=seed)
    return task.policy(bias=0.6 + 0.1 * steps, value=value, seed=seed), task


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    chain = KeyChain(seed=seed, **options)
    return chain.policy(), chain
