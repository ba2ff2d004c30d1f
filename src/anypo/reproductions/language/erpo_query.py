"""Claims of ERPO (Query-KL) on toy_arith: where its gradient goes, drift of the queries, exploration, and what it costs.

The stand-in's warm start writes answers alone; 100 more supervised steps on queries and answers together make the GRU a model of both, as a
pre-trained one is. All comparisons are at the policy's own optimizer and step size, with 16 queries of 8 responses a step. Means over the training
queries and success at a temperature are exact.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith, forced_batch, make_toy_arith
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.language.erpo_query import METHOD as ERPO
from anypo.methods.language.erpo_query import QueryKL
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import masked_mean
from anypo.seams.regularize import KLPenalty

SEEDS = (0, 1, 2)
STEPS = 300
HEATS = (0.5, 0.75, 1.0, 1.25, 1.5)
FREE = GRPO.but(credit=GroupRelative(ddof=1), regularize=())
POLICY_KL = FREE.but(regularize=(KLPenalty(beta=QueryKL().alpha),))
STRONG, SOON = 0.5, 100  # a coefficient that is felt soon, and the steps after which it is looked at
METHODS: dict[str, Method] = {
    "query kl": ERPO,
    "no kl": FREE,
    "policy kl": POLICY_KL,
    "strong query kl": ERPO.set("regularize.0.alpha", STRONG),
    "strong policy kl": POLICY_KL.set("regularize.0.beta", STRONG),
}


class Outcome(NamedTuple):
    drift: float  # mean over queries' tokens of log-prob minus the reference's
    success: float  # exact
    entropy: float  # of the responses, mean over the last 20 steps
    heated: float  # exact success, mean over HEATS


@cache
def _weights(seed: int) -> dict[str, Tensor]:
    policy, task = make_toy_arith(seed=seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    rng = np.random.default_rng(seed)
    for _ in range(100):
        batch = forced_batch(policy, task.demonstrations(64, rng, task.noise))
        seen = policy.evaluate(batch, {"logp", "prompt_logp"})
        loss = -seen.logp.sum() / batch.mask.sum() - masked_mean(seen.prompt_logp, seen.prompt_mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.clone() for name, value in policy.state_dict().items()}


def _start(seed: int) -> tuple[GruPolicy, ToyArith]:
    """A model of queries and answers, and its task."""
    policy, task = make_toy_arith(seed=seed)
    policy.load_state_dict(_weights(seed))
    policy.zero_grad(set_to_none=True)
    return policy, task


def _queries(policy: GruPolicy, task: ToyArith) -> tuple[Tensor, Tensor]:
    """Log-probs [P,L] of all queries' tokens, and which exist."""
    seen = policy.observe(forced_batch(policy, [(p.content, "") for p in task.problems]), {"prompt_logp"})
    return seen.prompt_logp, seen.prompt_mask


def _success(policy: GruPolicy, task: ToyArith, temperature: float) -> float:
    batch = forced_batch(policy, [(p.content, p.columns["solution"]) for p in task.problems])
    batch.signals["temperature"] = torch.full((len(batch),), temperature)
    return float(policy.observe(batch, {"logp"}).logp.double().sum(1).exp().mean())


@cache
def _trained(name: str, seed: int, steps: int) -> Outcome:
    policy, task = _start(seed)
    before, mask = _queries(policy, task)

    def entropy(run: Run, batch: Batch) -> float:
        return float(masked_mean(batch.signals["old_entropy"], batch.mask))

    seen = train_on(METHODS[name].set("select.prompts", 16), policy, task, steps=steps, seed=seed, watch=entropy)
    drift = masked_mean(_queries(policy, task)[0] - before, mask)
    return Outcome(float(drift), task.expected_success(policy), fmean(seen[-20:]), fmean(_success(policy, task, t) for t in HEATS))


# -- 1: where the gradient goes ----------------------------------------------------------------------------------------------------------------------


def _pressure(name: str) -> Evidence:
    """Norm of the regularizer's gradient in the logits that predict query tokens and in those that predict response tokens, after 3 steps."""
    policy, task = _start(SEEDS[0])
    run = Run(METHODS[name], policy, task, steps=4)
    for _ in range(3):
        step(run)
    regularizer = run.method.regularize[0]
    needs = frozenset(getattr(regularizer, "needs", ()))
    batch = run.collect([p.but(samples=4) for p in task.prompts(8, run.rng)])
    run.prepare_signals(batch, needs)
    logits: list[Tensor] = []
    hook = policy.output.register_forward_hook(lambda module, inputs, output: logits.append(output))
    seen = policy.evaluate(batch, frozenset({"logp", "prompt_logp"}))  # reads the logits of responses, then those of queries
    hook.remove()
    found = torch.autograd.grad(regularizer(batch, seen, run).value, logits, allow_unused=True)
    on_response, on_query = (0.0 if gradient is None else float(gradient.norm()) for gradient in found)
    return Evidence({"response": on_response, "query": on_query}, "exactly 0 on responses, above 0 on queries", on_response == 0 < on_query)


@claim("the Query-KL puts no gradient on the logits of responses, exactly, and some on those of the queries")
def isolated() -> Evidence:
    return _pressure("query kl")


@ablation(isolated, "the KL on the responses instead (GRPO's Policy-KL)")
def not_isolated() -> Evidence:
    return _pressure("policy kl")


# -- 2 and 3: drift, success, exploration -------------------------------------------------------------------------------------------------------------


def _drift(name: str) -> Evidence:
    """300 steps. Success may be lower by 0.02, which is what choosing seeds spread over; there it was lower by 0.004 on average."""
    mine, free = ([_trained(n, seed, STEPS) for seed in SEEDS] for n in (name, "no kl"))
    measured = {
        label: {name: [round(getattr(o, field), 3) for o in mine], "no kl": [round(getattr(o, field), 3) for o in free]}
        for label, field in (("query drift", "drift"), ("success", "success"), ("mean over temperatures 0.5 to 1.5", "heated"))
    }
    less = all(3 * abs(a.drift) <= abs(b.drift) for a, b in zip(mine, free, strict=True))
    lost = max(
        fmean(b.success - a.success for a, b in zip(mine, free, strict=True)),
        fmean(b.heated - a.heated for a, b in zip(mine, free, strict=True)),
    )
    return Evidence(
        measured, "on every seed a third of the drift without KL or less; mean success at most 0.02 lower", less and lost < 0.02
    )


@claim(
    "with coefficient 0.01 the queries' log-probs drift a third as far as without any KL, or less, at a cost of at most 0.02 in success, also when heated",
    slow=True,
)
def drift_is_bounded() -> Evidence:
    return _drift("query kl")


@ablation(drift_is_bounded, "the same coefficient on the responses instead (GRPO's Policy-KL)")
def drift_with_policy_kl() -> Evidence:
    return _drift("policy kl")


def _freedom(name: str) -> Evidence:
    mine, free = ([_trained(n, seed, SOON) for seed in SEEDS[:2]] for n in (name, "no kl"))
    measured = {
        label: {name: [round(getattr(o, field), 3) for o in mine], "no kl": [round(getattr(o, field), 3) for o in free]}
        for label, field in (("success", "success"), ("query drift", "drift"))
    }
    lost = max(b.success - a.success for a, b in zip(mine, free, strict=True))
    less = all(5 * abs(a.drift) <= abs(b.drift) for a, b in zip(mine, free, strict=True))
    return Evidence(measured, "on every seed success at most 0.05 below that without KL, a fifth of the drift", lost <= 0.05 and less)


@claim("even with coefficient 0.5 the responses learn almost as fast as without any KL, while the queries stay where they were")
def free_to_learn() -> Evidence:
    return _freedom("strong query kl")


@ablation(free_to_learn, "the same coefficient on the responses instead (GRPO's Policy-KL)")
def held_back() -> Evidence:
    return _freedom("strong policy kl")


@claim("responses keep at least the entropy that they keep with a Policy-KL of the same coefficient", slow=True, reproduced=False)
def more_entropy() -> Evidence:
    """They do not: the reference's responses are more random than those of a policy that has learned, so staying near it is staying random."""
    runs = {"0.01": (SEEDS, STEPS, ""), "0.5": (SEEDS[:2], SOON, "strong ")}
    measured, holds = {}, True
    for coefficient, (seeds, steps, prefix) in runs.items():
        mine, other = (fmean(_trained(f"{prefix}{kl} kl", seed, steps).entropy for seed in seeds) for kl in ("query", "policy"))
        measured[coefficient] = {"query kl": round(mine, 3), "policy kl": round(other, 3)}
        holds &= mine >= other
    return Evidence(measured, "mean over seeds not below Policy-KL's, at both coefficients", holds)


# -- 4: cost -----------------------------------------------------------------------------------------------------------------------------------------


def _passes(method: Method) -> list[int]:
    """Forward passes (with or without gradient) beside sampling, in each of 4 steps on all 100 queries."""
    policy, task = _start(SEEDS[0])
    run = Run(method.set("select.prompts", len(task.training)).set("select.group_size", 2), policy, task, steps=4)
    counts: list[int] = []
    policy.gru.register_forward_pre_hook(lambda module, inputs: counts.append(inputs[0].shape[1]))
    totals = []
    for _ in range(4):
        step(run)
        totals.append(sum(length > 4 for length in counts))  # sampling reads prompts, of 4 tokens, and single tokens
        counts.clear()
    return totals


def _cost(method: Method) -> Evidence:
    mine, base = _passes(method), _passes(FREE)
    return Evidence({"passes by step": mine, "without any KL": base}, "as many from the second step on", mine[1:] == base[1:])


@claim("once every query was scored under the reference, a step takes as many forward passes as the base method's without KL")
def same_cost() -> Evidence:
    return _cost(ERPO)


@ablation(same_cost, "no table: the reference scores the queries at every step")
def without_table() -> Evidence:
    return _cost(ERPO.but(rollout=FREE.rollout))
