"""DR-RPO: distributionally robust regularized policy optimization (arXiv:2510.14246).

Episodes in the training model, a policy that is good in the worst model near it: every factor of a linear Markov decision process may be moved in
total variation. Each step estimates robust backups by ridge regression on all episodes so far, adds an upper confidence bonus, and takes a mirror step
towards the optimistic Q with a KL to a reference policy, so that the policy stays softmax. Against optimistic policy optimization the worst case is
new (radius 0 leaves it out), against robust value iteration the mirror step. Equation numbers are the specification's: 1 and 2 are standard, 3 is
recalled from the same authors' line of work with its form [reconstructed], 6 is the abstract's softmax class and reference with the form of the step
[reconstructed]. The features and the rewards are known; the fail state's value is 0. Left out: features of large state spaces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.policy import at_states
from anypo.domains.tabular.robust_mdp import FLOOR, FailState, regularized_value
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Table = Float[Tensor, "... S A"]
VALUE_MIN = 0.0  # of the fail state


class Weights(NamedTuple):
    weights: Tensor  # [...,d] robust mean of the next value, a factor each
    inverse: Tensor  # [...,d,d] of the regularized Gram matrix


class Bonus(NamedTuple):
    bonus: Tensor  # [...,S,A]


class Update(NamedTuple):
    policy: Tensor  # [...,S,A]


class Optimistic(NamedTuple):
    q: Tensor  # [...,H,S,A]
    value: Tensor  # [...,H,S]
    policy: Tensor  # [...,H,S,A] after the mirror step


def gram_inverse(features: Float[Tensor, "M d"], counts: Float[Tensor, "... M"], reg: float) -> Float[Tensor, "... d d"]:
    """(sum of count phi phi^T + reg I)^-1. Needs `reg` > 0."""
    return torch.linalg.inv((counts[..., None] * features).mT @ features + reg * torch.eye(features.shape[-1]).to(features))


def robust_estimate(
    features: Float[Tensor, "M d"], next_values: Float[Tensor, "... M"], reg: float, radius: float, value_min: float = VALUE_MIN,
    counts: Float[Tensor, "... M"] | None = None,
) -> Weights:  # fmt: skip
    """Equation 3: for each coordinate on its own, the largest over truncation levels alpha of the ridge estimate of min(V, alpha) minus its price.
    The levels are the observed next values and `value_min`. `counts`: how often each row was observed; None = once each."""
    counts = torch.ones_like(next_values) if counts is None else counts
    inverse = gram_inverse(features, counts, reg)
    observed = torch.where(counts > 0, next_values, torch.full_like(next_values, value_min))
    levels = torch.cat([observed, torch.full_like(observed[..., :1], value_min)], -1)  # [...,L]
    cut = torch.minimum(next_values[..., None, :], levels[..., :, None])  # [...,L,M]
    ridge = (cut * counts[..., None, :]) @ features @ inverse  # [...,L,d]; the inverse is symmetric
    return Weights((ridge - radius * (levels - value_min)[..., None]).amax(-2), inverse)


def bonus(features: Float[Tensor, "S A d"], inverse: Float[Tensor, "... d d"], scale: float) -> Bonus:
    """Equation 4: the doubt about each factor, weighted by the features."""
    return Bonus(scale * torch.einsum("sad,...d->...sa", features, inverse.diagonal(dim1=-2, dim2=-1).sqrt()))


def policy_update(policy: Table, reference: Table, q: Table, eta: float, beta: float) -> Update:
    """Equation 6. Raises ValueError unless 0 <= eta * beta <= 1."""
    if not 0 <= eta * beta <= 1 + 1e-12:
        raise ValueError(f"a mirror step has eta between 0 and 1/beta, not {eta} with beta {beta}")
    old, ref = (x.clamp(min=FLOOR).log() for x in (policy, reference))
    return Update(((1 - eta * beta) * old + eta * beta * ref + eta * q).softmax(-1))


def optimistic_backup(
    features: Float[Tensor, "S A d"], reward: Float[Tensor, "H S A"], counts: Float[Tensor, "... H S A S"], policy: Float[Tensor, "... H S A"],
    reference: Float[Tensor, "... H S A"], fail: int, *, radius: float, scale: float, reg: float, eta: float, beta: float,
) -> Optimistic:  # fmt: skip
    """Equations 3-7 from the last step to the first. `counts`: observed transitions; `fail`: the state whose value is fixed to 0."""
    horizon, states = len(reward), features.shape[0]
    rows = features[:, :, None].expand(*features.shape[:2], states, -1).flatten(0, 2)  # one a transition
    alive = torch.arange(states) != fail
    qs, values, policies = list[Tensor](), list[Tensor](), list[Tensor]()
    for h in range(horizon - 1, -1, -1):
        seen = counts[..., h, :, :, :].flatten(-3)
        after = values[-1] if values else torch.zeros_like(policy[..., h, :, 0])
        found = robust_estimate(rows, after.repeat(*[1] * (after.dim() - 1), len(rows) // states), reg, radius, VALUE_MIN, seen)
        q = reward[h] + torch.einsum("sad,...d->...sa", features, found.weights) + bonus(features, found.inverse, scale).bonus
        q = q.clamp(0, horizon - h) * alive[:, None]
        new = policy_update(policy[..., h, :, :], reference[..., h, :, :], q, eta, beta).policy
        values.append(regularized_value(new, reference[..., h, :, :], q, beta).value.clamp(min=0) * alive)
        qs.append(q)
        policies.append(new)
    return Optimistic(torch.stack(qs[::-1], dim=-3), torch.stack(values[::-1], dim=-2), torch.stack(policies[::-1], dim=-3))


@dataclass
class RobustOptimism:
    """The optimistic robust Q of every state as the signal `optimistic_q` [B,H,S,A]; at what was played, its excess over the value as the advantage.

    The backup goes through the policy that the mirror step will make, so it looks up that step's rate and the KL's weight.
    """

    radius: float = 0.3  # of the adversary in total variation, in [0,1]; 0 = not robust
    scale: float = 2.0  # of the bonus, >= 0
    reg: float = 1.0  # of the ridge regression, > 0
    counts: Tensor | None = field(default=None, init=False, repr=False)  # [B,H,S,A,S] transitions so far

    needs = frozenset({"old_table", "ref_table"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        task = run.task
        if not isinstance(task, FailState):
            raise ValueError(
                f"{run.method.name} needs a linear problem with a fail state, which the task '{task.name}' is not; use fail_state"
            )
        copies, horizon, states, actions = task.shape
        if self.counts is None:
            self.counts = torch.zeros(copies, horizon, states, actions, states, dtype=torch.float64)
        steps = torch.arange(horizon).expand_as(batch.action)
        place = (batch.signal("prompt_id")[:, None].expand_as(steps), steps, batch.context, batch.action, batch.signal("next_state"))
        self.counts = self.counts.index_put(place, torch.ones(()).double(), accumulate=True)
        rate, weight = mirror_settings(run)
        found = optimistic_backup(
            task.features, task.reward_table, self.counts, batch.signal("old_table"), batch.signal("ref_table"), task.fail, radius=self.radius,
            scale=self.scale, reg=self.reg, eta=rate, beta=weight,
        )  # fmt: skip
        batch.signals["optimistic_q"] = found.q
        q = at_states(found.q, batch).gather(-1, batch.action[..., None])[..., 0]
        return q - at_states(found.value, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


@dataclass
class ExpectedQ:
    """Minus the expectation of the optimistic Q under the table, summed over all steps and states."""

    needs = frozenset({"table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return Loss(-(batch.signal("optimistic_q") * new.table).sum())


@dataclass
class TableKL:
    """KL(table || reference), summed over all steps and states."""

    coefficient: float = 0.05  # beta > 0

    needs = frozenset({"table", "ref_table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        surprise = new.table.clamp(min=FLOOR).log() - batch.signal("ref_table").clamp(min=FLOOR).log()
        kl = (new.table * surprise).sum()
        return Loss(self.coefficient * kl, {"kl": float(kl.detach())})


@dataclass
class MirrorStep:
    """Exponentiated gradient on the table: with the two losses above, equation 6."""

    rate: float | None = None  # eta in (0, 1/beta]; None = 1/beta, which forgets the old policy

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if loss_fn.needs - {"table"}:
            raise ValueError(
                f"{run.method.name} follows losses that are functions of the signal 'table', not of {', '.join(sorted(loss_fn.needs))}"
            )
        rate, _ = mirror_settings(run)
        table = run.policy.table.requires_grad_()  # type: ignore[operator,union-attr]
        loss = loss_fn(batch, Signals(table=table))
        slope = torch.autograd.grad(loss.value, table)[0]
        run.policy.assign((table.detach().clamp(min=FLOOR).log() - rate * slope).softmax(-1))  # type: ignore[operator]
        run.advance_version()
        return {"loss": float(loss.value.detach()), **loss.metrics}


def mirror_settings(run: Run) -> tuple[float, float]:
    """Rate of the mirror step and weight of the KL. Raises ValueError for a method without one of them, or a rate outside (0, 1/beta]."""
    weight = next((part.coefficient for part in run.method.regularize if isinstance(part, TableKL)), 0.0)
    if not isinstance(run.method.update, MirrorStep) or weight <= 0:
        raise ValueError(f"{run.method.name} plans with a mirror step and a KL to the reference; set regularize.0.coefficient above 0")
    rate = run.method.update.rate if run.method.update.rate is not None else 1 / weight
    if not 0 < rate <= 1 / weight + 1e-9:
        raise ValueError(f"update.rate lies in (0, 1/regularize.0.coefficient = {1 / weight:g}], not {rate}")
    return rate, weight


METHOD = Method(
    name="dr_rpo",
    paper=Paper(
        "Policy Regularized Distributionally Robust Markov Decision Processes with Linear Function Approximation", "2510.14246", 2025
    ),
    domain="tabular",
    summary="optimistic policy optimization against the worst transitions near the training model, with a KL to a reference",
    task="fail_state",
    select=UniformPrompts(group_size=1),
    rollout=OnPolicy(),
    reward=TaskReward(),
    credit=RobustOptimism(),
    objective=ExpectedQ(),
    regularize=(TableKL(0.05),),
    update=MirrorStep(),
)
