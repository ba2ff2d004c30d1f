"""CPO: constrained policy optimization (arXiv:1705.10528).

The return is maximized subject to a limit on the cost of an episode, nearly met at every iteration. Each step solves a local problem - linear reward,
linear cost constraint, quadratic KL region - in closed form, once two conjugate-gradient solves are known; where no point of the region meets the
constraint, a step is taken that lowers the cost alone. Against TRPO it changes the credit (a second critic, for costs) and the update. Equations of the paper,
with signs for maximizing. The cost gradient is that of an episode's cost, as the limit is. Left out: several constraints, and cost shaping by a
learned probability of becoming unsafe. The environment has to report `info["cost"]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.policy import Network
from anypo.method import Paper
from anypo.methods.control.trpo import METHOD as TRPO
from anypo.methods.control.trpo import TrustRegionStep
from anypo.seams.credit import GAE, gae, per_action_ends
from anypo.seams.groups import masked_mean
from anypo.seams.natural import BatchGeometry, conjugate_gradient, flat_gradient, line_search
from anypo.seams.objective import token_ratio

if TYPE_CHECKING:
    from anypo.run import Run

Vector = Float[Tensor, " P"]
TINY = 1e-8


class Multipliers(NamedTuple):
    lam: float  # of the trust region, >= 0
    nu: float  # of the cost constraint, >= 0
    case: str  # trust_region, dual or recovery


class LocalStep(NamedTuple):
    step: Vector
    lam: float
    nu: float
    case: str


class Bounds(NamedTuple):
    lower: Tensor
    upper: Tensor


def return_bound(
    advantages: Float[Tensor, "S A"],
    policy: Float[Tensor, "S A"],
    new_policy: Float[Tensor, "S A"],
    visits: Float[Tensor, " S"],
    gamma: float,
) -> Bounds:
    """Equation 1: bounds on J(new) - J(old) from advantages and state visits (normalized) of the old policy and the mean total variation."""
    expected = (new_policy * advantages).sum(1)
    slack = 2 * gamma * expected.abs().max() / (1 - gamma) * 0.5 * (new_policy - policy).abs().sum(1)
    return Bounds(visits @ (expected - slack) / (1 - gamma), visits @ (expected + slack) / (1 - gamma))


def worst_case_cost(d: float, delta: float, gamma: float, eps_c: float) -> float:
    """Equation 2: the cost after a step from a policy that met the limit d."""
    return d + math.sqrt(2 * delta) * gamma * eps_c / (1 - gamma) ** 2


def multipliers(q: float, r: float, s: float, c: float, delta: float) -> Multipliers:
    """Equations 5 and 6, from q = g.Hg', r = g.Hb', s = b.Hb' (H' the inverse) and the violation c: the dual of the local problem, solved exactly."""
    plain = math.sqrt(max(q, 0.0) / (2 * delta))
    if s < TINY or (c < 0 and c * c / s > 2 * delta):
        return Multipliers(max(plain, TINY), 0.0, "trust_region")
    if c > 0 and c * c / s > 2 * delta:
        return Multipliers(0.0, 0.0, "recovery")
    a, b = max(q - r * r / s, 0.0), max(2 * delta - c * c / s, 0.0)
    active = math.sqrt(a / max(b, TINY * TINY))
    border = -r / c if c else 0.0  # where lam c + r changes its sign
    if c < 0:
        regions = ((0.0, border), (max(border, 0.0), math.inf))
    elif c > 0:
        regions = ((max(border, 0.0), math.inf), (0.0, border))
    else:
        everything, nothing = (0.0, math.inf), (0.0, -1.0)
        regions = (everything, nothing) if r > 0 else (nothing, everything)

    def best(lam: float, region: tuple[float, float], value: Any) -> tuple[float, float]:
        if region[1] < region[0]:
            return -math.inf, 0.0
        lam = max(min(max(lam, region[0]), region[1]), TINY)
        return value(lam), lam

    constrained = best(active, regions[0], lambda lam: -a / (2 * lam) - lam * b / 2 + r * c / s)
    free = best(plain, regions[1], lambda lam: -(q / lam + 2 * delta * lam) / 2)
    lam = max(constrained, free)[1]
    return Multipliers(lam, max(0.0, (lam * c + r) / s), "dual")


def local_step(g_solved: Vector, b_solved: Vector, g: Vector, b: Vector, c: float, delta: float) -> LocalStep:
    """Equation 6 from the solved vectors H^-1 g and H^-1 b [P]."""
    s = float(b @ b_solved)
    lam, nu, case = multipliers(float(g @ g_solved), float(g @ b_solved), s, c, delta)
    if case == "recovery":
        return LocalStep(-math.sqrt(2 * delta / s) * b_solved, lam, nu, case)
    return LocalStep((g_solved - nu * b_solved) / lam, lam, nu, case)


def cpo_step(g: Vector, b: Vector, H: Float[Tensor, "P P"], c: float, delta: float = 0.01) -> LocalStep:
    """Equations 4 to 6: max g.x with c + b.x <= 0 and x.Hx / 2 <= delta; where that is impossible, the step that lowers b.x most."""
    return local_step(torch.linalg.solve(H, g), torch.linalg.solve(H, b), g, b, c, delta)


def accept(
    kl: Float[Tensor, " J"], cost_surrogate: Float[Tensor, " J"], reward_gain: Float[Tensor, " J"], c: float, delta: float, feasible: bool
) -> int:
    """Equation 7: the first attempt inside the region with a cost of at most max(c, 0) and, if the policy is feasible, no loss of reward; -1 for none."""
    fine = (kl <= delta) & (cost_surrogate <= max(c, 0.0))
    found = (fine & (reward_gain >= 0) if feasible else fine).nonzero()
    return int(found[0]) if len(found) else -1


@dataclass
class RewardAndCost:
    """Advantages of the reward (`inner`), and of the cost with a critic of its own: `cost_advantage` [N,T], `cost_of_episode` and `cost_scale`.

    Undiscounted costs (gamma 1) are those of an episode, so a time limit ends them; discounted ones bootstrap across it. The critic sees how far an episode
    has come, for what a cost comes to depends on the time left. Cost advantages are centred, so that their mean adds no noise to the gradient. [ours]
    """

    inner: GAE = field(default_factory=lambda: GAE(gamma=0.995, lam=0.95))
    cost_gamma: float = 1.0  # discount of costs, in (0,1]
    cost_lam: float = 0.95  # trace decay of costs, in [0,1]; the paper's 0.5 needs a better critic than small batches give
    hidden: int = 32  # units of each of the cost critic's two layers, >= 1
    epochs: int = 80  # Adam steps of the cost critic on each batch, >= 1
    learning_rate: float = 3e-3  # of these steps, > 0
    critic: Any = field(default=None, init=False, repr=False)
    running: Any = field(default=None, init=False, repr=False)  # [N,2] cost and length so far of the episodes under way
    last: list[float] = field(default_factory=list, init=False, repr=False)  # mean cost and length of the episodes that ended last

    needs = frozenset({"batch_next_context"})
    gives = frozenset({"returns", "cost_advantage"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if "cost" not in batch.signals:
            raise ValueError(
                "this method bounds a cost, and the environment reports none; give it info['cost'] at every step, or take "
                "gym:anypo.domains.control.point_circle:PointCircle-v0"
            )
        elapsed = self.note_episodes(batch)
        mean_cost, length = self.last
        policy: Any = run.policy
        observation = torch.cat([policy.normalize(batch.context), elapsed / length], dim=-1)
        following = torch.cat([policy.normalize(batch.signal("next_context")), (elapsed + 1) / length], dim=-1)
        if self.critic is None:
            self.critic = self.network(observation.shape[-1])
        with torch.no_grad():
            value, next_value = self.critic(observation).squeeze(-1), self.critic(following).squeeze(-1)
        terminated, truncated = per_action_ends(batch)
        if self.cost_gamma == 1:
            terminated = terminated | truncated
        cost = batch.signals["cost"]
        estimate = gae(cost, value, terminated, truncated, batch.mask, self.cost_gamma, self.cost_lam, next_value)
        self.fit(observation[batch.mask], estimate.returns[batch.mask])
        batch.signals["cost_advantage"] = torch.where(batch.mask, estimate.advantages - masked_mean(estimate.advantages, batch.mask), 0.0)
        scale = length if self.cost_gamma == 1 else (1 - self.cost_gamma**length) / (1 - self.cost_gamma)
        batch.signals["cost_of_episode"], batch.signals["cost_scale"] = (
            cost.new_full((len(batch),), mean_cost),
            cost.new_full((len(batch),), scale),
        )
        run.log(episode_cost=mean_cost)
        return self.inner(batch, run)

    def network(self, size: int) -> Network:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Network((size, self.hidden, self.hidden, 1), scale=1.0)

    def fit(self, observation: Tensor, target: Tensor) -> None:
        """Adam steps on the squared error over the whole batch, from new moments each time."""
        optimizer = torch.optim.Adam(self.critic.parameters(), self.learning_rate)
        for _ in range(self.epochs):
            optimizer.zero_grad()
            (self.critic(observation).squeeze(-1) - target).square().mean().backward()
            optimizer.step()

    def note_episodes(self, batch: Batch) -> Float[Tensor, "N T 1"]:
        """Notes the mean discounted cost and length of the episodes that ended in this batch; those under way are carried on. Returns how many actions
        of its episode came before each action."""
        ended = torch.stack(per_action_ends(batch)).any(0)
        if self.running is None or len(self.running) != len(batch):
            self.running = torch.zeros(len(batch), 2, dtype=torch.float64)
        finished: list[Tensor] = []
        elapsed = torch.zeros(*batch.mask.shape, 1)
        for t in range(batch.horizon):
            inside = batch.mask[:, t]
            elapsed[:, t, 0] = self.running[:, 1]
            self.running[inside, 0] += batch.signals["cost"][inside, t].double() * self.cost_gamma ** self.running[inside, 1]
            self.running[inside, 1] += 1
            finished.append(self.running[ended[:, t]].clone())
            self.running[ended[:, t]] = 0
        done = torch.cat(finished)
        if len(done):
            self.last = done.mean(0).tolist()
        elif not self.last:
            raise ValueError("no episode ended within the first step, so the cost of an episode is unknown; raise the option horizon")
        return elapsed

    def state_dict(self) -> dict[str, Any]:
        critic = dict(self.critic.state_dict()) if self.critic is not None else None
        return {"critic": critic, "running": None if self.running is None else self.running.clone(), "last": list(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.critic, self.running, self.last = None, state["running"], list(state["last"])
        if state["critic"] is not None:
            self.critic = self.network(state["critic"]["layers.0.weight"].shape[1])
            self.critic.load_state_dict(state["critic"])


@dataclass
class ConstrainedStep(TrustRegionStep):
    """One step of the policy in the region where the KL and the linear cost constraint hold (equations 3 to 7); then the critic's regression."""

    limit: float = 5.0  # of the cost of an episode
    patience: int = 25  # steps without a new lowest cost, while none met the limit, after which no policy is said to meet it, >= 1

    wants = frozenset({"cost_advantage"})

    def policy_step(self, geometry: BatchGeometry) -> dict[str, float]:
        batch, run = geometry.batch, geometry.loss_fn.run
        scale, violation = float(batch.signals["cost_scale"][0]), float(batch.signals["cost_of_episode"][0]) - self.limit
        self.refuse_impossible(violation, run)
        before, cost_before = geometry.measure(), float(geometry.mean(batch.signals["cost_advantage"]))

        def cost_surrogate() -> Tensor:
            ratio = token_ratio(geometry.signals("logp").logp, batch.logp, batch.counted)
            return scale * geometry.mean(ratio * batch.signals["cost_advantage"])

        g, b = -geometry.gradient(), flat_gradient(cost_surrogate(), geometry.parameters)
        g_solved, b_solved = (conjugate_gradient(geometry.product, vector, self.iterations) for vector in (g, b))
        found = local_step(g_solved, b_solved, g, b, violation, self.delta)
        feasible = violation <= 0  # a policy beyond the limit may have to give up reward to come back

        def acceptable(point: Tensor, fraction: float) -> bool:
            measured = geometry.measure(point)
            with torch.no_grad():
                cost = violation + float(cost_surrogate()) - scale * cost_before
            gain = before.loss - measured.loss
            kl, cost_surrogate_at, reward_gain = (torch.tensor([x], dtype=torch.float64) for x in (measured.kl, cost, gain))
            return accept(kl, cost_surrogate_at, reward_gain, violation, self.delta, feasible) == 0

        searched = line_search(geometry.start, found.step, acceptable, self.shrink, self.attempts)
        after = geometry.measure(searched.point)
        cases = {"recovery": float(found.case == "recovery"), "cost_multiplier": found.nu, "violation": violation}
        return {"kl": after.kl, "gain": before.loss - after.loss, "line_search": float(searched.index)} | cases

    def refuse_impossible(self, violation: float, run: Run) -> None:
        """Say so when the limit was never met and the cost has not fallen for `patience` steps. Raises ValueError."""
        kept = run.state.get("cpo", {"lowest": math.inf, "stuck": 0})
        lowest = min(violation, kept["lowest"])
        run.state["cpo"] = {"lowest": lowest, "stuck": 0 if violation < kept["lowest"] or lowest <= 0 else kept["stuck"] + 1}
        if run.state["cpo"]["stuck"] >= self.patience:
            raise ValueError(
                f"no policy seems to meet the cost limit of {self.limit:g} an episode: the cost has not fallen below {self.limit + lowest:.3g} for "
                f"{self.patience} steps; raise update.limit (or update.patience to go on trying)"
            )


METHOD = TRPO.but(
    name="cpo",
    paper=Paper("Constrained Policy Optimization", "1705.10528", 2017),
    summary="a trust-region step that also keeps the expected cost of an episode below a limit, or lowers it first",
    task="PointCircle-v0",
    credit=RewardAndCost(),
    update=ConstrainedStep(epochs=10, minibatches=32, learning_rate=1e-3, optimizer="adam", max_grad_norm=0.5, damping=0.01),
)
