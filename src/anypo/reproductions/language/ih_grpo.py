"""Claims of IH-GRPO: what the surrogate does to the gradient, exactly, and what delayed execution earns on `registers`.

On registers 8 problems by 8 conversations a step, 60 steps of the policy's own step size, from a policy that has imitated conversations in its own mode:
with delayed execution about one block in twenty waits for another. Rewards are means over the last 10 steps.
"""

from __future__ import annotations

import functools
from statistics import fmean

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.registers import make_registers
from anypo.methods.language.ih_grpo import METHOD as IH
from anypo.methods.language.ih_grpo import loss
from anypo.reproductions.common import train_on

SEEDS = range(2)
STEPS, LAST = 60, 10
VOCABULARY, EXECUTE = 7, 2


def _explicit(logits: Tensor, token: int, advantage: float) -> Tensor:
    """Gradient of -A log pi of a policy that decides on the execute token first and draws the others from q: by autograd, from the two factors."""
    leaf = logits.clone().requires_grad_(True)
    with torch.no_grad():
        execute = leaf.softmax(-1)[EXECUTE]
    gate = torch.logit(execute) + leaf[EXECUTE] - leaf[EXECUTE].detach()  # a Bernoulli with a logit of its own and the probability p_e
    others = leaf.masked_fill(torch.arange(VOCABULARY) == EXECUTE, -torch.inf)
    decision = torch.nn.functional.logsigmoid(gate if token == EXECUTE else -gate)
    log_prob = decision if token == EXECUTE else decision + others.log_softmax(-1)[token]
    return torch.autograd.grad(-advantage * log_prob, leaf)[0]


def _flat(logits: Tensor, tokens: Tensor, advantages: Tensor, lam: float) -> Tensor:
    """Gradient of the method's loss at ratio 1 in the logits [N,T,V]."""
    leaf = logits.clone().requires_grad_(True)
    old = leaf.detach().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    found = loss(leaf, tokens, advantages, old, torch.ones_like(tokens, dtype=torch.bool), EXECUTE)
    return torch.autograd.grad(found.pg_loss + lam * found.c_loss, leaf)[0]


def _identity(lam: float) -> Evidence:
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for token in range(VOCABULARY):
        for advantage in (1.5, -0.7):
            logits = 2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
            mine = _flat(logits[None, None], torch.tensor([[token]]), torch.tensor([[advantage]], dtype=torch.float64), lam)[0, 0]
            worst = max(worst, float((mine - _explicit(logits, token, advantage)).abs().max()))
    return Evidence(worst, "below 1e-6", worst < 1e-6)


@claim("with the surrogate at weight 1 the flat softmax has exactly the gradient of the explicit hierarchy")
def identity() -> Evidence:
    return _identity(1.0)


@ablation(identity, "no surrogate")
def no_surrogate() -> Evidence:
    return _identity(0.0)


def _drift(lam: float) -> float:
    """KL(q before || q after) of 20 updates on execute tokens whose advantages are noise."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, VOCABULARY, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([[EXECUTE]])
    others = [v for v in range(VOCABULARY) if v != EXECUTE]
    before = logits[..., others].log_softmax(-1)
    for noise in torch.randn(20, 1, 1, generator=generator, dtype=torch.float64):
        logits = logits - 0.5 * _flat(logits, tokens, noise, lam)
    after = logits[..., others].log_softmax(-1)
    return float((before.exp() * (before - after)).sum())


def _decoupled(lam: float) -> Evidence:
    found = {"full weight": _drift(lam), "weight 0.1": _drift(0.1), "weight 0": _drift(0.0)}
    holds = abs(found["full weight"]) < 1e-9 and 1e-6 < found["weight 0.1"] < found["weight 0"]
    return Evidence(found, "0 to 1e-9 at full weight, more at 0.1, most at 0", holds)


@claim(
    "at weight 1, learning when to execute leaves the distribution of the other tokens as it was; at less weight it drifts, the more the less"
)
def decoupled() -> Evidence:
    return _decoupled(1.0)


@ablation(decoupled, "weight 0.5 in the place of 1")
def half_decoupled() -> Evidence:
    return _decoupled(0.5)


def _no_advantage(weighted: bool) -> Evidence:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, VOCABULARY, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (4, 6), generator=generator)
    old, mask = torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.ones(4, 6, dtype=torch.bool)
    found = loss(logits, tokens, torch.zeros_like(old), old, mask, EXECUTE)
    value = float(found.c_loss if weighted else found.c_item.mean())
    return Evidence(value, "exactly 0", value == 0)


@claim("the surrogate is 0 where no response is better than another")
def no_advantage() -> Evidence:
    return _no_advantage(True)


@ablation(no_advantage, "c without the policy loss in it")
def unweighted() -> Evidence:
    return _no_advantage(False)


@functools.cache
def _trained(delayed: bool, seed: int) -> tuple[float, float, float]:
    """Reward at the end, and the share of the executed blocks that had waited, in the first batch and in the last ones."""
    policy, task = make_registers(delayed=delayed)
    seen = train_on(
        IH.set("rollout.delayed", delayed), policy, task, steps=STEPS, seed=seed,
        watch=lambda run, batch: (run.history[-1]["reward"], run.history[-1].get("delayed_share", 0.0)),
    )  # fmt: skip
    reward, waiting = zip(*seen, strict=True)
    return fmean(reward[-LAST:]), waiting[0], fmean(waiting[-LAST:])


def _delayed(delayed: bool) -> Evidence:
    mine = [fmean(x) for x in zip(*(_trained(delayed, seed) for seed in SEEDS), strict=True)]
    immediate = fmean(_trained(False, seed)[0] for seed in SEEDS)
    measured = {"reward": mine[0], "reward, immediate": immediate, "waiting, at first": mine[1], "waiting, at last": mine[2]}
    found = {name: round(value, 3) for name, value in measured.items()}
    holds = mine[0] > immediate + 0.1 and mine[1] < 0.1 and mine[2] > 0.5
    return Evidence(
        found, "reward 0.1 above immediate execution; the share of blocks that wait below 0.1 at first, above 0.5 at last", holds
    )


@claim("delayed execution learns to run several blocks together and earns more than running each as it is written", slow=True)
def delayed() -> Evidence:
    return _delayed(True)


@ablation(delayed, "blocks are run as they are written")
def immediate() -> Evidence:
    return _delayed(False)
