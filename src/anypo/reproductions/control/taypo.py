"""Claims of TayPO: the series of the return, its sampled terms, the second order's gradient, and CartPole with actors that lag behind."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.setup import build
from anypo.loops.on_policy import step
from anypo.methods.control.taypo import METHOD as TAYPO
from anypo.methods.control.taypo import tabular_expansion, trajectory_terms
from anypo.reproductions.common import RandomMDP, steps_to
from anypo.run import Run
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

GAMMA = 0.7
TRAJECTORIES, LENGTH = 20_000, 30  # 0.7^30 is 2e-5


def _problem(seed: int) -> tuple[RandomMDP, Tensor, Tensor]:
    """8 states and 3 actions, a behaviour policy, and another policy to mix with it."""
    problem = RandomMDP(seed, states=8, actions=3, gamma=GAMMA)
    return problem, problem.random_policy(2 * seed + 1, 0.5), problem.random_policy(2 * seed + 2)


def _mixed(behaviour: Tensor, other: Tensor, share: float | Tensor) -> Tensor:
    return behaviour + share * (other - behaviour)


def partial_sums(problem: RandomMDP, policy: Tensor, behaviour: Tensor, order: int) -> Tensor:
    """U_0 + .. + U_K for K = 0 .. order, exactly: the first deviation of a term is at the start, or all of them are inside Q."""
    q = tabular_expansion(problem.reward, problem.transition, policy, behaviour, GAMMA, order).q_orders
    inside = torch.einsum("s,sa,ksa->k", problem.start, behaviour, q)
    at_start = torch.einsum("s,sa,ksa->k", problem.start, policy - behaviour, q)
    return inside + torch.cat([torch.zeros_like(at_start[:1]), at_start[:-1]])


def _series(ratios: bool) -> Evidence:
    """Ten MDPs with a largest |eps| of 0.3 (the series converges below 0.43): errors of the orders as shares of the error of order 0."""
    worst = [0.0, 0.0, 0.0]
    for seed in range(10):
        problem, behaviour, other = _problem(seed)
        policy = _mixed(behaviour, other, 0.3 / (other / behaviour - 1).abs().max())
        sums = partial_sums(problem, behaviour + policy if ratios else policy, behaviour, 3)
        errors = (sums - problem.total(policy)).abs()
        worst = [max(w, float(e / errors[0])) for w, e in zip(worst, errors[1:], strict=True)]
    holds = all(w <= 0.3 ** (k + 1) for k, w in enumerate(worst))
    return Evidence([f"{w:.1e}" for w in worst], "order K leaves at most 0.3^K of the error of order 0, K = 1, 2, 3", holds)


@claim("The error of the expansion of the return falls geometrically with its order")
def the_series_converges() -> Evidence:
    return _series(ratios=False)


@ablation(the_series_converges, "terms of ratios in place of deviations")
def ratios_do_not_converge() -> Evidence:
    return _series(ratios=True)


def sampled(problem: RandomMDP, behaviour: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """States and actions [N,T] of trajectories under the behaviour policy."""
    g = torch.Generator().manual_seed(seed)
    state = torch.multinomial(problem.start, TRAJECTORIES, replacement=True, generator=g)
    states, actions = [], []
    for _ in range(LENGTH):
        action = torch.multinomial(behaviour[state], 1, generator=g)[:, 0]
        states.append(state)
        actions.append(action)
        state = torch.multinomial(problem.transition[state, action], 1, generator=g)[:, 0]
    return torch.stack(states, 1), torch.stack(actions, 1)


def _estimates(ratios: bool) -> Evidence:
    """Distance of the sampled U_1 and U_2 from the exact ones, in standard errors, at a mean total variation of 0.2."""
    found = []
    for seed in range(3):
        problem, behaviour, other = _problem(seed)
        policy = _mixed(behaviour, other, 0.2 / (0.5 * (other - behaviour).abs().sum(-1).mean()))
        exact = partial_sums(problem, policy, behaviour, 2).diff()
        place = sampled(problem, behaviour, seed)
        weight = (policy / behaviour)[place] - (0 if ratios else 1)
        terms = trajectory_terms(weight, problem.values(behaviour)[1][place], torch.zeros_like(weight), GAMMA, 2)
        error = terms.std(1) / TRAJECTORIES**0.5
        found += [round(float(z), 2) for z in (terms.mean(1) - exact) / error]
    return Evidence(found, "all within 3 standard errors (first and second order of 3 MDPs)", max(map(abs, found)) <= 3)


@claim("The backward recursions estimate the first and the second order of the return from trajectories of the old policy")
def recursions_are_unbiased() -> Evidence:
    return _estimates(ratios=False)


@ablation(recursions_are_unbiased, "ratios in place of deviations")
def recursions_of_ratios() -> Evidence:
    return _estimates(ratios=True)


def _gradients(order: int) -> Evidence:
    """Cosine with the exact policy gradient in the logits at a mean total variation of 0.2 from the old policy, 10 MDPs."""
    mine, first = [], []
    for seed in range(10):
        problem, behaviour, other = _problem(seed)
        policy = _mixed(behaviour, other, 0.2 / (0.5 * (other - behaviour).abs().sum(-1).mean()))
        logits = policy.log().requires_grad_()
        new = logits.softmax(-1)
        sums = partial_sums(problem, new, behaviour, 2)
        exact = (problem.start @ (new * tabular_expansion(problem.reward, problem.transition, new, behaviour, GAMMA, 0).q_pi)).sum()
        gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0].flatten() for x in (exact, sums[1], sums[order])]
        cosines = [float(torch.cosine_similarity(gradients[0], g, dim=0)) for g in gradients[1:]]
        first.append(cosines[0])
        mine.append(cosines[1])
    holds = all(1 - m <= 0.2 * (1 - f) for m, f in zip(mine, first, strict=True))
    measured = {"lowest": round(min(mine), 5), "first order's lowest": round(min(first), 5)}
    return Evidence(measured, "what lacks to 1 is at most a fifth of what the first order lacks, in each of 10 MDPs", holds)


@claim("Away from the old policy, the gradient up to second order points closer to the exact policy gradient than the first order's")
def second_order_gradient() -> Evidence:
    return _gradients(2)


@ablation(second_order_gradient, "without the pairs")
def first_order_gradient() -> Evidence:
    return _gradients(1)


@dataclass
class OldActors:
    """Trajectories of the policy as it was `delay` batches ago."""

    delay: int = 20
    kept: deque[dict[str, Any]] = field(default_factory=deque, init=False, repr=False)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        self.kept.append(copy.deepcopy(run.policy.state_dict()))
        if len(self.kept) > self.delay + 1:
            self.kept.popleft()
        run.named_policy("actors").load_state_dict(self.kept[0])
        return run.collect(prompts, "actors")


@cache
def updates_to_300(c: float, seed: int) -> float:
    """Updates, one a batch of 16 CartPoles times 20 actions, until 10 held-out episodes have a mean return of 300, looked at every 10 updates."""
    policy, task = build("CartPole-v1", None, seed=seed, envs=16, horizon=20)
    method = TAYPO.but(rollout=OldActors(), update=GradientSteps(learning_rate=3e-3, optimizer="adam", max_grad_norm=0.5, unit="row")).set(
        "objective.c", c
    )
    run = Run(method, policy, task, steps=400, seed=seed)
    curve: list[float] = []
    while not run.finished and not (curve and curve[-1] >= 300):
        step(run)
        if run.step % 10 == 0:
            curve.append(float(task.held_out(policy, 10)[0].mean()))
    return 10 * steps_to(curve, 300)


def _lagging(c: float) -> Evidence:
    found = {weight: [updates_to_300(weight, seed) for seed in range(6)] for weight in (c, 0.0)}
    no_later = sum(mine <= first for mine, first in zip(found[c], found[0.0], strict=True))
    holds = no_later >= 4 and sum(found[c]) < sum(found[0.0])
    shown = {weight: ["over 400" if n > 400 else int(n) for n in counts] for weight, counts in found.items()}
    return Evidence({"updates": shown[c], "first order": shown[0.0]}, "no later in 4 of 6 seeds, and fewer in all", holds)


# On eight other seeds the second order took 61 updates on average and the first 54, each about as often ahead; larger steps, older actors (40 batches)
# and smaller weights of the pairs (0.1, 0.3) did not favour it either.
@claim(
    "With actors 20 updates old, the second order reaches a return of 300 on CartPole no later than the first", slow=True, reproduced=False
)
def lagging_actors() -> Evidence:
    return _lagging(1.0)


@ablation(lagging_actors, "without the pairs")
def lagging_actors_without_pairs() -> Evidence:
    return _lagging(0.0)
