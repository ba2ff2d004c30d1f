"""Claims of SRPO (sample-routed) on token_bandit: 32 prompts, V=6, T=5, G=8, logits N(0, 0.5) plus 1 on the right tokens.

The teacher is the same table plus 4 on the demonstration's token, a bias to copy. SGD with step 2 on the sum over prompts of the mean over responses
of the sum over tokens, which is 320 on the token mean. Six seeds. SDPO's late collapse does not appear in independent tables, and is no claim here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.srpo_routed import METHOD, SampleRouted, loss, routes
from anypo.methods.language.srpo_routed import SDPO as PLAIN_SDPO
from anypo.reproductions.common import plain_sgd, steps_to, train_on
from anypo.run import Run

SEEDS = range(6)
STEP = 2.0 * 32 * 5


@dataclass
class CopyBias:
    """The policy's own table, drawn to the demonstration's tokens; a share `blind` of the tokens gets the uniform distribution instead."""

    bias: float = 4.0  # added to the logit
    blind: float = 0.0  # in [0,1]

    def can_show(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        return torch.ones(len(rows), dtype=torch.bool)

    def __call__(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        logits = run.score(batch[rows], {"logits"}).logits.clone()
        shown = batch.action[demo][..., None]
        logits.scatter_add_(-1, shown, torch.full(shown.shape, self.bias, dtype=logits.dtype))
        unseen = torch.rand(shown.shape, generator=run.generator) < self.blind
        return torch.where(unseen, torch.zeros_like(logits), logits)


SRPO = plain_sgd(METHOD.but(credit=SampleRouted(teacher=CopyBias()), control=()), STEP)
SDPO = plain_sgd(PLAIN_SDPO.but(credit=SampleRouted(route_all=True, teacher=CopyBias()), control=()), STEP)
PLAIN = plain_sgd(GRPO.but(objective=METHOD.objective, regularize=()), STEP)
METHODS = {"srpo": SRPO, "sdpo": SDPO, "grpo": PLAIN, "srpo without distillation": SRPO.set("regularize.0.lam", 0.0)}


def _problem(seed: int) -> tuple[TokenBandit, TabularTokens]:
    task = TokenBandit(32, 6, 5, seed=seed)
    policy = task.policy(scale=0.5, seed=seed)
    with torch.no_grad():
        right = task.targets[:, 0, :, None]
        policy.logits.scatter_add_(-1, right, torch.ones(right.shape, dtype=torch.float64))
    return task, policy


def _routing(lam: float, everything: bool) -> Evidence:
    """Which rows of a mixed batch receive a gradient through the log-probs, and which through the distributions."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 8, 5, 6, generator=generator, dtype=torch.float64)
    old = -torch.rand(8, 5, generator=generator, dtype=torch.float64)
    reward, group = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0]).double(), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    logp = old.clone().requires_grad_(True)
    student.requires_grad_(True)
    mask = torch.ones(8, 5, dtype=torch.bool)
    threshold = 1.5 if everything else 1.0  # nobody is a success: all rows go to GRPO
    value = loss(student, teacher, logp, old, mask, reward, group, lam=lam, threshold=threshold).loss
    by_policy, by_teacher = torch.autograd.grad(value, [logp, student])
    found = {
        "policy gradient": by_policy.abs().sum(1).nonzero().flatten().tolist(),
        "distilled": by_teacher.flatten(1).abs().sum(1).nonzero().flatten().tolist(),
    }
    route = routes(reward, group)
    expected = {"policy gradient": route.grpo.nonzero().flatten().tolist(), "distilled": route.distill.nonzero().flatten().tolist()}
    return Evidence(found, f"exactly {expected}", found == expected)


@claim("successes get the policy gradient and nothing else, failures with a correct sibling the distillation and nothing else")
def routing() -> Evidence:
    return _routing(1.0, False)


@ablation(routing, "no routes: all rows to GRPO")
def no_routes() -> Evidence:
    return _routing(1.0, True)


def _localized(name: str) -> Evidence:
    """One step on a failed response with a single wrong token, beside a right one: the change of the failed tokens' probabilities."""
    task, policy = _problem(0)
    right = task.targets[0, 0]
    failed = right.clone()
    failed[2] = (failed[2] + 1) % 6
    with torch.no_grad():
        before = policy.logits[0].softmax(-1).gather(-1, failed[:, None])[:, 0]
    logits = policy.logits.detach()[0].clone().requires_grad_(True)
    log_probs = logits.log_softmax(-1)
    logp = torch.stack([log_probs.gather(-1, tokens[:, None])[:, 0] for tokens in (right, failed)])
    reward, group = torch.tensor([1.0, 0.0]).double(), torch.zeros(2, dtype=torch.int64)
    teacher = log_probs.detach() + 4.0 * torch.nn.functional.one_hot(right, 6)
    threshold = 1.0 if name == "srpo" else 1.5
    mask = torch.tensor([[False], [True]]).expand(2, 5)  # the step is on the failed row alone
    value = loss(log_probs.expand(2, 5, 6), teacher.expand(2, 5, 6), logp, logp.detach(), mask, reward, group, threshold=threshold).loss
    moved = logits - 0.5 * torch.autograd.grad(value, logits)[0]
    change = moved.detach().softmax(-1).gather(-1, failed[:, None])[:, 0] - before
    lowered = (change < 0).nonzero().flatten().tolist()
    return Evidence(
        {"lowered": lowered, "change": [round(v, 4) for v in change.tolist()]}, "only place 2, the wrong one, is lowered", lowered == [2]
    )


@claim("a step on a failed response lowers its one wrong token and none of the four right ones")
def localized() -> Evidence:
    return _localized("srpo")


@ablation(localized, "GRPO's step on the same response")
def not_localized() -> Evidence:
    return _localized("grpo")


@functools.cache
def _curve(name: str, seed: int) -> list[float]:
    task, policy = _problem(seed)
    return train_on(METHODS[name], policy, task, steps=200, seed=seed)


def _as_fast(name: str) -> Evidence:
    found = {n: fmean(steps_to(_curve(n, seed), 0.5) for seed in SEEDS) for n in (name, "grpo")}
    return Evidence({n: round(v, 1) for n, v in found.items()}, "at most 10% later than GRPO", found[name] <= 1.1 * found["grpo"])


@claim("SRPO reaches success 0.5 at most 10% later than GRPO, although failures get no policy gradient", slow=True)
def as_fast() -> Evidence:
    return _as_fast("srpo")


@ablation(as_fast, "nothing is distilled (lambda 0)")
def slower() -> Evidence:
    return _as_fast("srpo without distillation")


def _stable(name: str) -> Evidence:
    end = {n: fmean(_curve(n, seed)[-1] for seed in SEEDS) for n in (name, "sdpo", "grpo")}
    lost = fmean(max(_curve(name, seed)) - _curve(name, seed)[-1] for seed in SEEDS)
    holds = end[name] >= end["sdpo"] + 0.01 and lost <= 0.02
    found = {n: round(v, 3) for n, v in end.items()} | {"below its peak": round(lost, 4)}
    return Evidence(found, "at least 0.01 above SDPO and at most 0.02 below its own peak after 200 steps", holds)


@claim("after 200 steps SRPO is above SDPO and at its own peak", slow=True)
def stable() -> Evidence:
    return _stable("srpo")


@ablation(stable, "all rows are distilled (SDPO)")
def sdpo_itself() -> Evidence:
    return _stable("sdpo")


def _weighted(blind: float) -> Evidence:
    found = {}
    for beta in (1.0, 0.0):
        method: Method = SRPO.set("credit.teacher.blind", blind).set("regularize.0.beta_w", beta)
        success = []
        for seed in SEEDS:
            task, policy = _problem(seed)
            success.append(train_on(method, policy, task, steps=80, seed=seed)[-1])
        found[f"beta_w {beta:.0f}"] = fmean(success)
    gain = found["beta_w 1"] - found["beta_w 0"]
    return Evidence({k: round(v, 3) for k, v in found.items()}, "at least 0.03 above beta_w 0 after 80 steps", gain >= 0.03)


@claim("with a teacher that knows nothing at 30% of the tokens, weighting by its sureness helps", slow=True)
def weighted() -> Evidence:
    return _weighted(0.3)


@ablation(weighted, "a teacher that is nowhere blind has no unsure tokens to suppress")
def weighted_sure_teacher() -> Evidence:
    return _weighted(0.0)
