"""Claims of BGPO: the bound, its gradient and memory, what more masks do for the estimate, and learning on split_sum.

The built-in model with masks after the block (`tail="mask"`), as the ELBO's states have it; blocks of two tokens, one pass a block, so that the
accuracy of sampled decoding is exact. An answer of four tokens has 15 masks, so the ELBO's estimate and its gradient are exact too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.states import with_hidden
from anypo.domains.masked.tasks import exact_accuracy, make_split_sum
from anypo.method import Method
from anypo.methods.masked.bgpo import METHOD as BGPO
from anypo.methods.masked.bgpo import SampleBySample, bgpo, draw_masks, elbo_objective, elbo_weight
from anypo.reproductions.common import ShuffledCredit, train_on
from anypo.run import Run

BLOCK = 2
EARLY, STEPS = 8, 12
SEEDS = (0, 1, 2, 3)
MANY = 16
TABLE = torch.tensor(list(product((False, True), repeat=4))[1:])  # [15,4], all masks of an answer
Terms = Callable[[Tensor, Tensor, Tensor], Tensor]  # l_new, l_old [N,n], adv [N] -> g [N,n]


# ---- the bound


def _bound(terms: Terms) -> Evidence:
    g = torch.Generator().manual_seed(0)
    old = -5 * torch.rand(10_000, 4, generator=g, dtype=torch.float64)
    adv = torch.randn(10_000, generator=g, dtype=torch.float64)
    spread = torch.randn(10_000, 4, generator=g, dtype=torch.float64)
    level = spread[:, :1].expand(-1, 4)

    def gap(d: Tensor) -> Tensor:
        """How far the bound stays below the ELBO objective, row by row."""
        return adv * d.mean(1).exp() - terms(old + d, old, adv).mean(1)

    positive, negative = adv > 0.01, adv < -0.01
    over = float(-gap(spread).min())
    touching = max(float(gap(0 * spread).abs().max()), float(gap(level)[negative].abs().max()))
    away = min(float(gap(0.1 + level.abs())[positive].min()), float(gap(spread)[negative].min()))
    measured = {"largest excess": over, "where it should touch": touching, "smallest distance elsewhere": away}
    return Evidence(measured, "never above; equal to 1e-9 at d = 0, or at equal d where A < 0; strictly below elsewhere",
                    over <= 1e-9 and touching < 1e-9 and away > 0)  # fmt: skip


@claim("the objective is a lower bound of the ELBO objective, tight at d = 0 and, for a negative advantage, at equal d")
def lower_bound() -> Evidence:
    return _bound(lambda new, old, adv: bgpo(new, old, adv).terms)


@ablation(lower_bound, "the tangent for negative and the exponential for positive advantages")
def sides_exchanged() -> Evidence:
    return _bound(lambda new, old, adv: -bgpo(new, old, -adv).terms)


# ---- one sample at a time


def _moved(samples: int, seed: int = 0, moved: bool = True) -> tuple[Run, Batch]:
    """A batch of 32 answers with advantages and masks, and a policy that has left the one that wrote them."""
    policy, task = load_policy(tail="mask"), make_split_sum(block=BLOCK)
    run = Run(BGPO.set("update.samples", samples).set("select.prompts", 4), policy, task, steps=1, seed=seed)
    batch = run.collect(run.method.select(task, run))
    batch.advantage = torch.randn(len(batch), 1, generator=run.generator) * batch.mask
    batch = run.method.update.draw(batch, run)  # type: ignore[attr-defined]
    if moved:
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.005 * torch.randn(p.shape, generator=run.generator))
        run.advance_version()
    return run, batch


def _elbos(run: Run, view: Batch) -> tuple[Tensor, Tensor]:
    """l_new with its graph, and l_old, of one sample [N]."""
    logp = run.policy.evaluate(view, {"logp"}).logp
    return view.signals["elbo_weight"] * logp.sum(1), view.signals["elbo_weight"] * view.logp.sum(1)


def _views(run: Run, batch: Batch) -> list[Batch]:
    update: Any = run.method.update
    return [update.sample(batch, j) for j in range(update.samples)]


def _one_graph(run: Run, batch: Batch, objective: Callable[..., Tensor]) -> None:
    """The gradient of minus an objective of all samples at once."""
    pairs = [_elbos(run, view) for view in _views(run, batch)]
    assert batch.advantage is not None
    (-objective(torch.stack([new for new, _ in pairs], 1), torch.stack([old for _, old in pairs], 1), batch.advantage[:, 0])).backward()


def _summed(run: Run, batch: Batch, objective: Callable[..., Tensor]) -> None:
    """The mean over samples of the gradients of the objective of each alone."""
    assert batch.advantage is not None
    for view in _views(run, batch):
        new, old = _elbos(run, view)
        (-objective(new[:, None], old[:, None], batch.advantage[:, 0]) / run.method.update.samples).backward()  # type: ignore[attr-defined]


def _component(run: Run, batch: Batch) -> None:
    run.method.update.backward(batch, run.loss_fn, run)  # type: ignore[attr-defined]


def _gradient(run: Run, backward: Callable[[], None]) -> Tensor:
    run.policy.zero_grad()
    backward()
    return torch.cat([p.grad.flatten() for p in run.policy.parameters() if p.grad is not None]).double()


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _bound_of(new: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    return bgpo(new, old, adv).objective


@claim("the gradient accumulated over samples is that of the objective of all samples in one graph")
def accumulates() -> Evidence:
    run, batch = _moved(MANY)
    off = _distance(_gradient(run, lambda: _component(run, batch)), _gradient(run, lambda: _one_graph(run, batch, _bound_of)))
    return Evidence(off, "a relative distance below 1e-5, the policy having moved", off < 1e-5)


@ablation(accumulates, "the ELBO objective instead of its linear bound")
def elbo_does_not() -> Evidence:
    run, batch = _moved(MANY)
    found, wanted = (_gradient(run, lambda f=f: f(run, batch, elbo_objective)) for f in (_summed, _one_graph))  # type: ignore[misc]
    off = _distance(found, wanted)
    return Evidence(off, "a relative distance below 1e-5, the policy having moved", off < 1e-5)


class Kept:
    """A tensor that a graph holds, counted while it lives."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Kept.now += tensor.numel()
        Kept.most = max(Kept.most, Kept.now)

    def __del__(self) -> None:
        Kept.now -= self.tensor.numel()


def _memory(backward: Callable[[Run, Batch], None]) -> Evidence:
    """The most numbers that graphs hold at a time, by the number of samples."""
    most = {}
    for samples in (2, 4, 8):
        run, batch = _moved(samples)
        Kept.now = Kept.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            backward(run, batch)
        most[samples] = Kept.most
    growth = most[8] / most[2]
    return Evidence({f"n={n}": m for n, m in most.items()} | {"growth": round(growth, 3)}, "at most 1.3 times as many for 8 samples as for 2",
                    growth < 1.3)  # fmt: skip


@claim("the memory that graphs take does not grow with the number of samples")
def constant_memory() -> Evidence:
    return _memory(_component)


@ablation(constant_memory, "the ELBO objective, which needs all samples in one graph")
def growing_memory() -> Evidence:
    return _memory(lambda run, batch: _one_graph(run, batch, elbo_objective))


def _on_policy(same: bool) -> Evidence:
    """Bound against ELBO objective before the first step; without `same` the old terms are those of other masks."""
    run, batch = _moved(MANY, moved=False)
    if not same:
        other = run.method.update.draw(batch, run)  # type: ignore[attr-defined]
        batch.signals["elbo_old_logp"] = other.signals["elbo_old_logp"] * other.signals["elbo_weight"][..., None]
        batch.signals["elbo_old_logp"] /= batch.signals["elbo_weight"][..., None]
    pairs = [_elbos(run, view) for view in _views(run, batch)]
    new, old = (torch.stack(side, 1).detach() for side in zip(*pairs, strict=True))
    assert batch.advantage is not None
    values = [float(f(new, old, batch.advantage[:, 0])) for f in (_bound_of, elbo_objective)]
    found, wanted = (_gradient(run, lambda f=f: _one_graph(run, batch, f)) for f in (_bound_of, elbo_objective))  # type: ignore[misc]
    off, apart = _distance(found, wanted), abs(values[0] - values[1])
    return Evidence({"gradient": off, "value": apart}, "a relative distance of gradients below 1e-4, values equal to 1e-5",
                    off < 1e-4 and apart < 1e-5)  # fmt: skip


@claim("on-policy, value and gradient of the bound are those of the ELBO objective")
def equivalent() -> Evidence:
    return _on_policy(same=True)


@ablation(equivalent, "old terms under masks of their own")
def other_masks() -> Evidence:
    return _on_policy(same=False)


# ---- what more samples are good for


@cache
def _every_mask() -> tuple[Tensor, Tensor]:
    """ELBO terms [N,15] of 32 answers under each mask, and the gradient [15,D] of the on-policy objective from that mask alone."""
    run, batch = _moved(1, moved=False)
    terms, gradients = [], []
    assert batch.advantage is not None
    for mask in TABLE:
        view = with_hidden(batch, mask.expand_as(batch.mask))
        term = run.policy.evaluate(view, {"logp"}).logp.sum(1) * elbo_weight(mask, 4, "count")
        gradients.append(_gradient(run, lambda t=term: (t * batch.advantage[:, 0]).mean().backward()))  # type: ignore[misc,index]
        terms.append(term.detach().double())
    return torch.stack(terms, 1), torch.stack(gradients)


def _drawn(rows: int, samples: int, independent: bool) -> Tensor:
    """Numbers of the masks in the table, [rows,samples]."""
    generator = torch.Generator().manual_seed(samples)
    masks = draw_masks(torch.ones(rows, 4, dtype=torch.bool), samples, generator).masked
    number = (masks.long() * torch.tensor([8, 4, 2, 1])).sum(-1) - 1
    return number if independent else number[:, :1].expand(-1, samples)


def _spread(independent: bool) -> Evidence:
    terms, _ = _every_mask()
    found = {}
    for n in (1, 4, 16):
        number = _drawn(4000, n, independent)
        found[n] = float(terms[:, number].mean(-1).var(1).mean())
    quarter, sixteenth = found[1] / found[4], found[1] / found[16]
    measured = {f"n={n}": round(v, 4) for n, v in found.items()}
    return Evidence(measured, "within 10% of a quarter at n = 4 and of a sixteenth at n = 16",
                    abs(quarter / 4 - 1) < 0.1 and abs(sixteenth / 16 - 1) < 0.1)  # fmt: skip


@claim("the variance of the ELBO's estimate falls as 1/n")
def variance_falls() -> Evidence:
    return _spread(independent=True)


@ablation(variance_falls, "one mask, repeated n times")
def variance_of_one_mask() -> Evidence:
    return _spread(independent=False)


def _cosine(independent: bool) -> Evidence:
    """Mean cosine of the estimated gradient to the exact one, when all answers of a batch have the same n masks, over 400 draws."""
    _, gradients = _every_mask()
    size = TABLE.sum(1)
    chance = 1 / (4 * torch.tensor([4.0, 6.0, 4.0, 1.0])[size - 1]).double()
    exact = chance @ gradients
    found = {}
    for n in (1, 4, 16):
        share = torch.zeros(400, 15, dtype=torch.float64).scatter_add(1, _drawn(400, n, independent), torch.full((400, n), 1 / n).double())
        found[n] = float(torch.cosine_similarity(share @ gradients, exact[None]).mean())
    return Evidence({f"n={n}": round(c, 3) for n, c in found.items()}, "at least 0.1 more at n = 4 than at 1, and 0.05 more at 16 than at 4",
                    found[4] - found[1] > 0.1 and found[16] - found[4] > 0.05)  # fmt: skip


@claim("the gradient comes closer to that of infinitely many masks as n grows")
def closer_gradient() -> Evidence:
    return _cosine(independent=True)


@ablation(closer_gradient, "one mask, repeated n times")
def gradient_of_one_mask() -> Evidence:
    return _cosine(independent=False)


# ---- learning


@cache
def _start() -> float:
    return exact_accuracy(load_policy(tail="mask"), BLOCK)


def _train(method: Method, seed: int, steps: int = STEPS) -> list[float]:
    """Exact accuracy after EARLY steps, and its mean over the last three, of 16 prompts with 8 answers each a step."""
    policy, task, late = load_policy(tail="mask"), make_split_sum(block=BLOCK), []
    early = 0.0

    def watch(run: Run, batch: Batch) -> None:
        nonlocal early
        if run.step == EARLY:
            early = exact_accuracy(policy, BLOCK)
        if run.step > steps - 3:
            late.append(exact_accuracy(policy, BLOCK))

    train_on(method.set("update.learning_rate", 1e-3), policy, task, steps=steps, seed=seed, watch=watch)
    return [early, fmean(late)]


@cache
def _curve(samples: int, seed: int) -> list[float]:
    return _train(BGPO.set("update.samples", samples), seed)


def _learns(after: list[float]) -> Evidence:
    measured = {"before": round(_start(), 3), "after": [round(a, 3) for a in after]}
    return Evidence(measured, "before within 0.2 and 0.5, and at least 0.1 more on the worst seed",
                    0.2 <= _start() <= 0.5 and min(after) >= _start() + 0.1)  # fmt: skip


@claim("eight updates with 16 masks raise the accuracy of sampled block decoding by at least 0.1", slow=True)
def learns() -> Evidence:
    return _learns([_curve(MANY, seed)[0] for seed in SEEDS])


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns([_train(BGPO.but(credit=ShuffledCredit(BGPO.credit)), seed, EARLY)[0] for seed in SEEDS[:3]])


@dataclass
class OneMask(SampleBySample):
    """An ablation: all samples of an answer are its first one."""

    def draw(self, batch: Batch, run: Run) -> Batch:
        drawn = super().draw(batch, run)
        repeated = {n: v[:, :1].expand_as(v) for n, v in drawn.signals.items() if n.startswith("elbo_") and n != "elbo_length"}
        return drawn.but(signals=drawn.signals | repeated)


def _more_masks(many: Callable[[int], float]) -> Evidence:
    after, single = [many(seed) for seed in SEEDS], [_curve(1, seed)[-1] for seed in SEEDS]
    gain = fmean(after) - fmean(single)
    measured = {"many": [round(a, 3) for a in after], "one": [round(a, 3) for a in single], "gain": round(gain, 3)}
    wins = sum(a >= s for a, s in zip(after, single, strict=True))
    return Evidence(measured, "no less on 3 of 4 seeds, and 0.1 more on average", wins >= len(SEEDS) - 1 and gain > 0.1)


@claim("with as many updates, 16 masks an answer leave a higher accuracy than one", slow=True)
def more_masks() -> Evidence:
    return _more_masks(lambda seed: _curve(MANY, seed)[-1])


@ablation(more_masks, "all masks of an answer are the same one")  # two of them: the mean of 16 equal terms is the same number
def same_mask() -> Evidence:
    return _more_masks(lambda seed: _train(BGPO.but(update=OneMask(samples=2)), seed)[-1])
