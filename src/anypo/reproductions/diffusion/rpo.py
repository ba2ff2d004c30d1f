"""Claims of RPO on digits drawn by a small transformer; rewards are the probability of the digit asked for, of dense ODE samples with 20 steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.diffusion.denoise import ode_schedule
from anypo.domains.diffusion.sample import sample
from anypo.domains.diffusion.setup import build
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.rpo import METHOD, route
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

SEEDS = (0, 1, 2)
TRAINED = METHOD.set("select.prompts", 20)  # two pairs for each digit


def _same_routes(method: Method) -> Evidence:
    """One update of 20 pairs: the largest difference inside pairs and from the ODE's own sampler, and the norm of the gradient."""
    policy, task = build("patches:classifier", None)
    run = Run(method.set("select.prompts", 20), policy, task, steps=1, seed=0)
    batch = step(run)
    ode = sample(policy, batch.context[:, 0], batch.signal("condition")[:, :1], ode_schedule(task.levels(10)))[:, 1:]  # type: ignore[attr-defined, arg-type]
    found = {
        "inside pairs": float((batch.action[0::2] - batch.action[1::2]).abs().max()),
        "from the ODE": float((batch.action - ode).abs().max()),
        "gradient": run.history[0]["grad_norm"],
    }
    return Evidence(found, "all exactly 0", not any(found.values()))


@claim("routes that keep all give bit-identical pairs, which are the samples of the original ODE sampler, and no gradient")
def same_routes() -> Evidence:
    return _same_routes(METHOD.set("rollout.keep", 4))


@ablation(same_routes, "routes that keep half of the blocks")
def other_routes() -> Evidence:
    return _same_routes(METHOD)


def _draws(native: bool) -> Evidence:
    """Chi-square of the block drawn next to the own one (K=2), 5000 draws for each of 4 query blocks: 8 degrees of freedom."""
    generator = torch.Generator().manual_seed(0)
    M = torch.rand(4, 4, generator=generator, dtype=torch.float64).softmax(-1) ** 2
    M = M / M.sum(-1, keepdim=True)
    u, dense = torch.rand(5000, 4, 4, generator=generator, dtype=torch.float64), torch.ones(5000, 4)
    off = ~torch.eye(4, dtype=torch.bool)
    drawn = route(M if native else torch.ones_like(M), u.view(-1, 4, 4), dense, 2, 0.25).expand(5000, 4, 4).sum(0)[off].view(4, 3)
    wanted = M[off].view(4, 3) / M[off].view(4, 3).sum(1, keepdim=True) * 5000
    found = float(((drawn - wanted) ** 2 / wanted).sum())
    return Evidence(round(found, 2), "below 26.1, the 99.9% point of chi-square with 8 degrees of freedom", found < 26.1)


@claim("a query block draws the other blocks in proportion to the attention that the dense network gives them")
def draws_follow_mass() -> Evidence:
    return _draws(native=True)


@ablation(draws_follow_mass, "blocks drawn evenly")
def even_draws() -> Evidence:
    return _draws(native=False)


@cache
def _rise(shuffled: bool, seed: int) -> tuple[float, float]:
    """Reward before and after 40 updates of 20 pairs."""
    policy, task = build("patches:classifier", None, evaluation_steps=20)
    run = Run(TRAINED.but(credit=ShuffledCredit(TRAINED.credit)) if shuffled else TRAINED, policy, task, steps=40, seed=seed)
    before = task.evaluate(run)["reward"]
    train(run)
    return before, task.evaluate(run)["reward"]


def _rises(shuffled: bool, seeds: tuple[int, ...]) -> Evidence:
    found = [tuple(round(value, 3) for value in _rise(shuffled, seed)) for seed in seeds]
    return Evidence(found, "at least 0.1 more in 40 updates, on each seed", all(after >= before + 0.1 for before, after in found))


@claim("what was learned with routing stays without it: dense ODE samples show the digit asked for more surely", slow=True)
def survives_removal() -> Evidence:
    return _rises(False, SEEDS)


@ablation(survives_removal, "the advantages dealt to the wrong rows")
def shuffled() -> Evidence:
    return _rises(True, SEEDS[:1])


def _evaluations(method: Method) -> int:
    """Chains times network passes of one update of 10 prompts, a pass with a gradient counted once."""
    policy, task = build("patches:classifier", None)
    counted: list[int] = []
    policy.register_forward_hook(lambda module, inputs, output: counted.append(len(inputs[0])))
    run = Run(method.set("select.prompts", 10), policy, task, steps=1, seed=0)
    step(run)
    return sum(counted)


def _cost(method: Method) -> Evidence:
    plain: Any = FLOW_GRPO.but(select=UniformPrompts(group_size=8), regularize=METHOD.regularize, update=GradientSteps(unit="row"))
    found = {method.name: _evaluations(method), plain.name: _evaluations(plain)}
    return Evidence(found, "at least 4 times fewer than Flow-GRPO with groups of 8", 4 * found[method.name] <= found[plain.name])


@claim("an update takes at least 4 times fewer network passes than one of Flow-GRPO on groups of 8")
def cheap() -> Evidence:
    return _cost(METHOD)


@ablation(cheap, "eight rollouts a prompt, as four pairs")
def eight_rollouts() -> Evidence:
    return _cost(METHOD.set("select.group_size", 8))
