"""zeroth_order_queue: policy optimization from average costs alone, under a back-pressure guard.

Scheduling a queueing network whose queues have no bound. No value, no advantage and no score function is learned or used: the feedback is one number, the
estimated long-run average cost of a policy. Its slope is estimated from runs under a few randomly perturbed weights, in pairs of opposite
perturbations that meet the same arrivals and services, or from single runs. A guard keeps all of them stable: beyond a number of jobs in all, back-pressure
decides (`threshold` of the domain's QueuePolicy).
Only the abstract was at hand: scalar feedback, zeroth-order steps and the back-pressure guard are the paper's; the features of the rule, the
estimators' form, the networks and all sizes are the standard ones [reconstructed]. Equations 1-5 are the domain's, in
domains/combinatorial/queues.py. The rollout serves every task: where one cannot run rows under different weights, they are run one after
another from the same random state. Left out: the step sizes of the convergence theorem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial import queues as network_of_queues
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import NoCredit
from anypo.seams.groups import masked_mean
from anypo.seams.natural import assign, flatten, policy_parameters
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

KINDS = ("two_point", "one_point", "residual")
QUERIES = "zeroth_order.queries"  # in the run's state: the costs of the step before

Directions = Float[Tensor, "M P"]
Costs = Float[Tensor, " M"]


class BackPressure(NamedTuple):
    action: Tensor  # [n,S] int64, the class that each server serves, -1 where it idles
    weight: Tensor  # [n,C]


class Simulated(NamedTuple):
    average_cost: float
    trajectory: Tensor  # [T+1,C]


class Probability(NamedTuple):
    probability: Tensor  # [S,C], a row of zeros where a server idles


class Slope(NamedTuple):
    gradient: Tensor  # [P]


def _network(lam: Tensor, mu: Tensor, server: Tensor, nxt: Tensor, cost: Tensor) -> network_of_queues.QueueNetwork:
    return network_of_queues.from_lists(lam.tolist(), mu.tolist(), server.tolist(), nxt.tolist(), cost.tolist())


def backpressure(queues: Float[Tensor, "n C"], lam: Tensor, mu: Tensor, server: Tensor, nxt: Tensor, cost: Tensor) -> BackPressure:
    """Equation 1: every server serves the waiting class with the largest positive weight, the first of equals. The network's data are [C] each."""
    network, jobs = _network(lam, mu, server, nxt, cost), queues.double().numpy()
    nothing = torch.zeros(*queues.shape, network_of_queues.FEATURES).numpy()
    chosen = []
    for allowed in network.allowed:
        weight = network_of_queues.weights(network, jobs, nothing, allowed[None].repeat(len(jobs), 0), -1.0)
        chosen.append(torch.from_numpy(weight.argmax(1)).where(torch.from_numpy(weight.any(1)), -1))
    return BackPressure(torch.stack(chosen, dim=1), torch.from_numpy(network_of_queues.pressure(network, jobs)))


def policy(
    queues: Float[Tensor, " C"], theta: Float[Tensor, "C 4"], lam: Tensor, mu: Tensor, server: Tensor, nxt: Tensor, cost: Tensor,
    threshold: float,
) -> Probability:  # fmt: skip
    """Equations 2 and 3: probability of each class at each server under the guarded rule."""
    network = _network(lam, mu, server, nxt, cost)
    jobs, points = queues.double()[None].numpy(), theta.double()[None].numpy()
    weight = torch.cat(
        [torch.from_numpy(network_of_queues.weights(network, jobs, points, row[None], threshold)) for row in network.allowed]
    )
    return Probability(weight / weight.sum(1, keepdim=True).clamp(min=1e-300))


def simulate(
    theta: Float[Tensor, "C 4"], queues: Float[Tensor, " C"], uniforms: Float[Tensor, "T 2"], lam: Tensor, mu: Tensor, server: Tensor,
    nxt: Tensor, cost: Tensor, threshold: float,
) -> Simulated:  # fmt: skip
    """Equations 4 and 5: one uniformized chain from given queues, and its average cost."""
    network = _network(lam, mu, server, nxt, cost)
    points, start, drawn = (x.double()[None].numpy() for x in (theta, queues, uniforms))
    paths = network_of_queues.simulate_chain(network, points, start, drawn, threshold)
    return Simulated(float(network_of_queues.average_cost(network, paths)[0]), torch.from_numpy(paths.queues[0]))


def zo_gradient(cost_plus: Costs, cost_minus: Costs, directions: Directions, delta: float, kind: str = "two_point") -> Slope:
    """Equation 6: estimated slope of the smoothed cost, mean over M unit directions in P numbers.

    "two_point": costs at +delta and -delta; "one_point": `cost_minus` is not read; "residual": `cost_minus` holds the costs of the step before.
    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown zeroth-order estimate '{kind}'; use {', '.join(KINDS)}")
    size = directions.shape[1]
    difference = cost_plus if kind == "one_point" else cost_plus - cost_minus
    scale = size / (2 * delta) if kind == "two_point" else size / delta
    return Slope((scale * difference[:, None] * directions).mean(0))


def on_the_sphere(count: int, size: int, generator: torch.Generator) -> Directions:
    """Unit vectors, uniform in direction."""
    drawn = torch.randn(count, size, generator=generator, dtype=torch.float64)
    return drawn / drawn.norm(dim=1, keepdim=True)


@dataclass
class PerturbedRollout:
    """Trajectories under perturbed weights. The prompts are dealt to the directions in turn; every row says its direction and sign.

    A critic's weights are left alone. Signals: `direction` [N,P], `sign` [N] (+1, -1), `delta` [N] and, of residual estimates, `previous` [N]. The
    number of the direction is the batch's group.
    """

    directions: int = 2  # M, >= 1
    delta: float = 0.5  # length of a perturbation, > 0
    kind: str = "two_point"  # two_point, one_point or residual
    common: bool = True  # the two runs of a pair meet the same randomness

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.directions < 1 or self.delta <= 0:
            raise ValueError(f"rollout.directions must be at least 1 and rollout.delta above 0, not {self.directions} and {self.delta}")
        if self.kind not in KINDS:
            raise ValueError(f"unknown rollout.kind '{self.kind}'; use {', '.join(KINDS)}")
        prompts = [prompt.but(samples=1) for prompt in prompts for _ in range(prompt.samples)]
        if len(prompts) < self.directions:
            raise ValueError(f"{self.directions} directions need as many prompts a step, not {len(prompts)}; lower rollout.directions")
        center = flatten(policy_parameters(run.policy))
        units = on_the_sphere(self.directions, len(center), run.generator).to(center)
        signs = [1.0, -1.0] if self.kind == "two_point" else [1.0]
        second = prompts if self.common or len(signs) == 1 else run.task.prompts(len(prompts), run.rng)
        arm = torch.arange(len(prompts)).remainder(self.directions).repeat(len(signs))
        sign = torch.tensor(signs, dtype=center.dtype).repeat_interleave(len(prompts))
        shifts = self.delta * sign[:, None] * units[arm]
        batch = self._collect([*prompts, *second][: len(arm)], center, shifts, arm, run)
        batch.group = arm
        batch.signals.update(direction=units[arm], sign=sign, delta=torch.full_like(sign, self.delta))
        batch.signals["sampled_elsewhere"] = torch.ones(len(arm), dtype=torch.bool)
        if self.kind == "residual" and QUERIES in run.state:  # the very first estimate has one point
            batch.signals["previous"] = torch.tensor(run.state[QUERIES], dtype=center.dtype)[arm]
        return batch

    def _collect(self, prompts: list[Prompt], center: Tensor, shifts: Float[Tensor, "N P"], arm: Tensor, run: Run) -> Batch:
        task: Any = run.task
        if hasattr(task, "collect_at"):
            return run.collect(prompts, by=lambda prompts, run: task.collect_at(prompts, center + shifts, run))
        return self._one_by_one(prompts, center, shifts, arm, run)

    def _one_by_one(self, prompts: list[Prompt], center: Tensor, shifts: Tensor, arm: Tensor, run: Run) -> Batch:
        """Rows of one point at a time; every point begins with the same random state, unless pairs are to be independent."""
        parameters, parts, order = policy_parameters(run.policy), [], []
        drawn, numbers = run.generator.get_state(), run.rng.bit_generator.state
        half = len(prompts) // 2 if self.kind == "two_point" else len(prompts)
        for first in range(0, len(prompts), half):
            for m in range(self.directions):
                rows = first + (arm[first : first + half] == m).nonzero().flatten()
                if self.common:
                    run.generator.set_state(drawn)
                    run.rng.bit_generator.state = numbers
                assign(parameters, center + shifts[rows[0]])
                parts.append(run.collect([prompts[i] for i in rows.tolist()]))
                order.append(rows)
        assign(parameters, center)
        if any(len(part) != len(rows) for part, rows in zip(parts, order, strict=True)):
            raise ValueError(
                f"the task '{run.task.name}' did not return one row a prompt, so its rows cannot be told apart by their weights"
            )
        return Batch.concat(parts)[torch.cat(order).argsort()]


@dataclass
class AverageReward:
    """One number a row: the mean of the task's dense rewards; other rewards as they are."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = run.score_rewards(batch)
        if reward.dim() != 2 or batch.objectives:
            return reward
        return torch.where(batch.mask, reward, 0.0).sum(1) / batch.mask.sum(1).clamp(min=1)


def query_costs(batch: Batch, sign: float = 1.0) -> Costs:
    """Mean of minus the outcome over the rows of each direction and sign."""
    chosen = batch.signal("sign") == sign
    return torch.stack([masked_mean(-batch.outcome, chosen & (batch.group == m)) for m in range(int(batch.group.max()) + 1)])


@dataclass
class SmoothedCost:
    """Equation 6 as a loss: the estimated slope times the weights, so that its gradient is the estimate."""

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if "direction" not in batch.signals:
            raise ValueError("this objective compares runs under perturbed weights; take the rollout of zeroth_order_queue")
        plus = query_costs(batch)
        first = torch.stack([(batch.group == m).nonzero()[0, 0] for m in range(len(plus))])
        kind, minus = "one_point", plus
        if bool((batch.signals["sign"] < 0).any()):
            kind, minus = "two_point", query_costs(batch, -1.0)
        elif "previous" in batch.signals:
            kind, minus = "residual", batch.signals["previous"][first]
        slope = zo_gradient(plus, minus, batch.signals["direction"][first], float(batch.signals["delta"][0]), kind).gradient
        weights = torch.cat([p.reshape(-1) for p in policy_parameters(run.policy)])
        return Loss(slope.to(weights) @ weights, {"query_cost": float(plus.mean()), "slope": float(slope.norm())})


@dataclass
class KeepQueries:
    """Residual estimates: what each direction cost in this step is the reference of the next."""

    def __call__(self, batch: Batch, run: Run) -> None:
        run.state[QUERIES] = query_costs(batch).tolist()


METHOD = Method(
    name="zeroth_order_queue",
    paper=Paper("Zeroth-order policy optimization for queueing networks"),
    domain="combinatorial",
    task="queue:criss_cross",
    summary="the slope of the average cost from runs under perturbed weights, all of them guarded by back-pressure",
    select=UniformPrompts(group_size=1),
    rollout=PerturbedRollout(),
    reward=AverageReward(),
    credit=NoCredit(),
    objective=SmoothedCost(),
    update=GradientSteps(epochs=1, minibatches=1, learning_rate=0.3, optimizer="sgd", max_grad_norm=1.0),
)
VARIANTS = {
    "one_point": METHOD.but(
        name="zeroth_order_queue.one_point", summary="one run a direction in place of a pair", rollout=PerturbedRollout(kind="one_point")
    ),
    "residual": METHOD.but(
        name="zeroth_order_queue.residual",
        summary="one run a direction, compared with those of the step before",
        rollout=PerturbedRollout(kind="residual"),
        control=(KeepQueries(),),
    ),
}
