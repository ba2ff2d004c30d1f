"""Linear Markov decision processes that an adversary may perturb: worst cases in total variation, robust planning, a problem with a fail state.

H steps, features phi [S,A,d] in the simplex; rewards phi . theta_h, transitions mixtures of d factors [H,d,S]. The adversary moves each factor on its own
within a ball of `radius` in total variation (half of the L1 distance, so in [0,1]). The last step has no transition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.mdp import evaluate
from anypo.domains.tabular.policy import TabularPolicy
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt

FLOOR = 1e-300  # of probabilities in logarithms
Table = Float[Tensor, "... S A"]


class Worst(NamedTuple):
    value: Tensor  # [...]
    dual: Tensor  # [...]
    worst: Tensor  # [...,S]


class Regularized(NamedTuple):
    value: Tensor  # [...,S]
    optimum: Tensor  # [...,S]


class Plan(NamedTuple):
    q: Tensor  # [...,H,S,A]
    value: Tensor  # [...,H,S]
    policy: Tensor  # [...,H,S,A]


def tv_worst(nominal: Float[Tensor, "... S"], values: Float[Tensor, "... S"], radius: float) -> Worst:
    """Equation 2: the distribution within `radius` of `nominal` with the least mean value, which moves mass from the largest values to the smallest;
    and the same minimum by its dual. Raises ValueError for a radius outside [0,1]."""
    if not 0 <= radius <= 1:
        raise ValueError(f"the radius is a total variation distance in [0,1], not {radius}")
    values = values.expand(nominal.shape)
    order = torch.argsort(values, dim=-1, descending=True, stable=True)
    mass = nominal.gather(-1, order)
    taken = torch.minimum((radius - (mass.cumsum(-1) - mass)).clamp(min=0), mass)
    worst = nominal - torch.zeros_like(nominal).scatter(-1, order, taken)
    worst = worst.scatter_add(-1, values.argmin(-1, keepdim=True), taken.sum(-1, keepdim=True))
    least = values.amin(-1)
    cut = (nominal[..., None, :] * torch.minimum(values[..., None, :], values[..., :, None])).sum(-1)
    return Worst((worst * values).sum(-1), (cut - radius * (values - least[..., None])).amax(-1), worst)


def regularized_value(policy: Table, reference: Table, q: Table, beta: float) -> Regularized:
    """Equation 1: mean of Q minus `beta` >= 0 times KL(policy || reference); and the largest such value of any policy."""
    surprise = policy.clamp(min=FLOOR).log() - reference.clamp(min=FLOOR).log()
    optimum = beta * (reference.clamp(min=FLOOR).log() + q / beta).logsumexp(-1) if beta > 0 else q.amax(-1)
    return Regularized((policy * (q - beta * surprise)).sum(-1), optimum)


def robust_q(
    features: Float[Tensor, "S A d"], weights: Float[Tensor, " d"], factors: Float[Tensor, "d S"], after: Float[Tensor, "... S"] | None, radius: float
) -> Table:  # fmt: skip
    """Equation 1: Q of a step when `after` is the value of the next states, None at the last step."""
    if after is None:
        return features @ weights
    worst = tv_worst(factors.expand(*after.shape[:-1], *factors.shape), after[..., None, :], radius).value
    return torch.einsum("sad,...d->...sa", features, weights + worst)


def robust_dp(
    features: Float[Tensor, "S A d"], reward_weights: Float[Tensor, "H d"], factors: Float[Tensor, "H d S"], reference: Float[Tensor, "H S A"],
    radius: float, beta: float,
) -> Plan:  # fmt: skip
    """Equation 8: the best regularized policy against the adversary."""
    return _backward(features, reward_weights, factors, reference, None, radius, beta)


def robust_evaluation(
    features: Float[Tensor, "S A d"], reward_weights: Float[Tensor, "H d"], factors: Float[Tensor, "H d S"], reference: Float[Tensor, "H S A"],
    policy: Float[Tensor, "... H S A"], radius: float, beta: float,
) -> Plan:  # fmt: skip
    """Equation 1: what a policy is worth against the adversary."""
    return _backward(features, reward_weights, factors, reference, policy, radius, beta)


def _backward(
    features: Tensor, reward_weights: Tensor, factors: Tensor, reference: Tensor, policy: Tensor | None, radius: float, beta: float
) -> Plan:
    qs, values, policies = list[Tensor](), list[Tensor](), list[Tensor]()
    for h in range(len(reward_weights) - 1, -1, -1):
        q = robust_q(features, reward_weights[h], factors[h], values[-1] if values else None, radius)
        if policy is None:
            values.append(regularized_value(reference[h], reference[h], q, beta).optimum)
            policies.append((reference[h].clamp(min=FLOOR).log() + q / beta).softmax(-1))
        else:
            policies.append(policy[..., h, :, :])
            values.append(regularized_value(policies[-1], reference[h], q, beta).value)
            q = q.expand_as(policies[-1])
        qs.append(q)
    return Plan(torch.stack(qs[::-1], dim=-3), torch.stack(values[::-1], dim=-2), torch.stack(policies[::-1], dim=-3))


class FailState:
    """Safe and risky ways through three steps, one of which may end in a state from which nothing is earned any more.

    States: start, good, mid, fail. `copies` independent learners side by side, each a prompt. `signals` of its batches: `prompt_id` [N] the copy,
    `next_state` [N,T]. The context is the states [N,T].
    """

    name = "fail_state"
    objectives: tuple[str, ...] = ("reward",)
    fail = 3

    def __init__(self, copies: int = 1, radius: float = 0.3, seed: int = 0) -> None:
        """`radius`: of the worst case that `measure` reports. Raises ValueError for one outside [0,1], or no copy."""
        if copies < 1 or not 0 <= radius <= 1:
            raise ValueError(f"copies is at least 1 and radius in [0,1], not {copies} and {radius}")
        unit = torch.eye(5, dtype=torch.float64)
        half = (unit + unit[2]) / 2  # half of the way to fail
        pairs = [unit[0], unit[1], unit[3], half[3], unit[4], half[4], unit[2], unit[2]]
        self.features = torch.stack(pairs).reshape(4, 2, 5)
        self.reward_weights = torch.tensor([0.9, 0, 0, 1, 0.4], dtype=torch.float64).expand(3, 5)
        self.copies, self.radius, self.prompts_per_step = copies, radius, copies
        self.factors = self.perturbed(0.0)
        self.start = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
        self.reward_table = torch.einsum("sad,hd->hsa", self.features, self.reward_weights)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Copies, horizon, states, actions."""
        return self.copies, 3, 4, 2

    @staticmethod
    def perturbed(q: float) -> Float[Tensor, "3 5 4"]:
        """Factors [H,d,S] when the good ways fail with probability 0.05 + q."""
        fails = 0.05 + q
        rows = [[0, 0, 1, 0], [0, 1 - fails, 0, fails], [0, 0, 0, 1], [0, 1 - fails, 0, fails], [0, 0, 1, 0]]
        return torch.tensor(rows, dtype=torch.float64).expand(3, 5, 4)

    def policy(self) -> TabularPolicy:
        return TabularPolicy(*self.shape)

    def transition(self, factors: Float[Tensor, "3 5 4"]) -> Float[Tensor, "3 4 2 4"]:
        return torch.einsum("sad,hdt->hsat", self.features, factors)

    def returned(self, table: Float[Tensor, "... H S A"], q: float = 0.0) -> Float[Tensor, ...]:
        """Exact expected return in a perturbed model."""
        return evaluate(self.transition(self.perturbed(q)), table, self.reward_table.expand_as(table)).v[..., 0, :] @ self.start

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """The copies, in order. Raises ValueError when another number is asked for."""
        if count != self.copies:
            raise ValueError(f"this task has {self.copies} copies, each a prompt; set the task's option copies instead of select.prompts")
        return [Prompt(id=i, content=i) for i in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """Episodes in the nominal model."""
        table: Tensor = run.policy.table  # type: ignore[assignment]
        transition = self.transition(self.factors)
        copy = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        states, actions = [torch.full_like(copy, int(self.start.argmax()))], []
        for h in range(len(transition)):
            actions.append(torch.multinomial(table[copy, h, states[-1]], 1, generator=run.generator)[:, 0])
            states.append(torch.multinomial(transition[h, states[-1], actions[-1]], 1, generator=run.generator)[:, 0])
        path, action = torch.stack(states, dim=1), torch.stack(actions, dim=1)
        ends = torch.zeros_like(action, dtype=torch.bool)
        ends[:, -1] = True
        steps = torch.arange(len(transition))[None]
        return Batch(
            action=action, mask=torch.ones_like(ends), logp=table[copy[:, None], steps, path[:, :-1], action].log(), group=copy,
            context=path[:, :-1], terminated=ends, truncated=torch.zeros_like(ends), signals={"prompt_id": copy, "next_state": path[:, 1:]},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T]."""
        return self.reward_table[torch.arange(batch.horizon)[None], batch.context, batch.action]

    def measure(self, policy: Policy) -> dict[str, Tensor]:
        """Exact returns of each copy: in the nominal model, in three perturbed ones, and in the worst one."""
        table: Tensor = policy.table  # type: ignore[assignment]
        found = {"return" if q == 0 else f"return_failing_{q}_more": self.returned(table, q) for q in (0, 0.1, 0.3, 0.5)}
        worst = robust_evaluation(self.features, self.reward_weights, self.factors, torch.full_like(table[0], 0.5), table, self.radius, 0.0)
        return {**found, "worst_return": worst.value[..., 0, :] @ self.start}

    def evaluate(self, run: Run) -> dict[str, float]:
        """Means over the copies."""
        return {name: float(values.mean()) for name, values in self.measure(run.policy).items()}


TASKS: dict[str, Any] = {"fail_state": FailState}
