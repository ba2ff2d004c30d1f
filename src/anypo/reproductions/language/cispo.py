"""Claims of CISPO on token_bandit (P=16, V=6, T=3) with a rare pivotal first token; 8 gradient steps a batch, token mean, SGD step 5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.method import Method, Objective
from anypo.methods.language.cispo import METHOD as CISPO
from anypo.methods.language.cispo import ClippedWeight, masked_loss
from anypo.policy import Loss, Signals
from anypo.reproductions.common import pivotal_bandit, plain_sgd, rounds_to_half, train_on
from anypo.reproductions.language.dapo import rounds_with_clip
from anypo.run import Run
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy


@dataclass
class MaskedWeight:
    """Equation 4: instead of clipping the weight, drop the tokens outside the band 0.8 to 1.28."""

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(masked_loss(new.logp, batch.logp, batch.counted, batch.advantage, 0.2, 0.28).loss)


def objective_alone(objective: Objective) -> Method:
    """CISPO without DAPO's resampling and shaping, so that only the objective differs."""
    return CISPO.but(objective=objective, reward=TaskReward(), rollout=OnPolicy())


@cache
def _rounds(masked: bool) -> float:
    return rounds_to_half(objective_alone(MaskedWeight() if masked else ClippedWeight()))


def _order(masked: bool) -> Evidence:
    rounds = {"cispo": _rounds(masked), "dapo": rounds_with_clip(0.28), "grpo": rounds_with_clip(0.2)}
    found = {name: round(value, 2) for name, value in rounds.items()}
    holds = rounds["cispo"] <= rounds["dapo"] - 1 and rounds["dapo"] <= rounds["grpo"] - 1
    return Evidence(found, "cispo < dapo < grpo, each by at least 1 round (mean of 6 seeds)", holds)


@claim(
    "CISPO brings the rare token to probability 0.5 in fewer rounds than DAPO's clip-higher, and that in fewer than GRPO's clip", slow=True
)
def order_of_rounds() -> Evidence:
    return _order(masked=False)


@ablation(order_of_rounds, "tokens outside the band are dropped instead of keeping a bounded weight")
def order_with_masked_tokens() -> Evidence:
    return _order(masked=True)


@dataclass
class CountSilenced:
    """An objective that also counts, at every gradient step, the tokens with an advantage and no gradient."""

    inner: Objective
    silenced: int = 0
    seen: int = 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        loss = self.inner(batch, new, run)
        (gradient,) = torch.autograd.grad(loss.value, new.logp, retain_graph=True)
        meant = (batch.advantage != 0) & batch.counted
        self.silenced += int((meant & (gradient == 0)).sum())
        self.seen += int(meant.sum())
        run.log(silenced=self.silenced, seen=self.seen)
        return loss


def _silenced(objective: Objective) -> Evidence:
    task, policy = pivotal_bandit(0)
    method = plain_sgd(objective_alone(CountSilenced(objective)), 5.0, epochs=8)
    counts: list[tuple[int, int]] = []
    train_on(method, policy, task, steps=15, watch=lambda run, batch: counts.append((run.history[-1]["silenced"], run.history[-1]["seen"])))
    silenced, seen = counts[-1]
    return Evidence({"silenced": silenced, "with an advantage": seen}, "none of them has a zero gradient", silenced == 0 and seen > 0)


@claim("no token that has an advantage loses its gradient")
def nothing_is_silenced() -> Evidence:
    return _silenced(ClippedWeight())


@ablation(nothing_is_silenced, "PPO's trust region (tokens outside the band are dropped)")
def clip_silences() -> Evidence:
    return _silenced(MaskedWeight())
