"""Conditional models as policies of one action: a Gaussian over vectors, a categorical over classes. A batch's context is the inputs [N,D]."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.distance import mahalanobis, reward_table
from anypo.domains.tabular.path_policy import perceptron
from anypo.policy import Policy, Signals


class Draw(NamedTuple):
    action: Tensor  # [N,1,n] or [N,1]
    logp: Tensor  # [N,1]
    noise: Tensor | None  # [N,1,n] standard normal numbers that made a vector


class GaussianModel(Policy):
    """N(mean(x), L L^T): a network gives the mean and L, lower triangular with an exponential diagonal, diagonal unless `full`.

    `mean` [N,1,n], `scale` [N,1,n,n] = L, and `sample` [N,1,n] = mean + L noise with the batch's signal `noise`, differentiable. Log-probabilities
    and entropies are joint ones, sums over the n numbers.
    """

    provides = frozenset({"logp", "entropy", "mean", "scale", "sample"})
    learning_rate = 1e-3
    optimizer = "adam"

    def __init__(self, inputs: int, outputs: int, *, hidden: tuple[int, ...] = (64, 64), full: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.outputs, self.full = outputs, full
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = perceptron(inputs, hidden, 2 * outputs + (outputs * (outputs - 1) // 2 if full else 0)).double()

    def parts(self, x: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N n"], Float[Tensor, "N n n"]]:
        """Mean and L."""
        n = self.outputs
        raw = self.network(x)
        scale = torch.diag_embed(raw[:, n : 2 * n].exp())
        if self.full:
            below = torch.tril_indices(n, n, -1)
            lower = torch.zeros_like(scale)
            lower[:, below[0], below[1]] = raw[:, 2 * n :]
            scale = scale + lower
        return raw[:, :n], scale

    def log_prob(self, x: Float[Tensor, "N D"], y: Float[Tensor, "N n"]) -> Float[Tensor, " N"]:
        return _gaussian_log_prob(*self.parts(x), y)

    def entropy(self, x: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        return _gaussian_entropy(self.parts(x)[1])

    def expected_reward(self, x: Float[Tensor, "N D"], y: Float[Tensor, "N n"], matrix: Float[Tensor, "n n"]) -> Float[Tensor, " N"]:
        """Mean over the model's guesses of their Mahalanobis reward, exactly: -(tr(U L L^T) + (mean - y)^T U (mean - y))."""
        mean, scale = self.parts(x)
        return mahalanobis(mean, y, matrix) - ((matrix @ scale) * scale).sum((-2, -1))

    @torch.no_grad()
    def draw(self, x: Float[Tensor, "N D"], generator: torch.Generator) -> Draw:
        mean, scale = self.parts(x)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        action = mean + (scale @ noise[..., None])[..., 0]
        return Draw(action[:, None], _gaussian_log_prob(mean, scale, action)[:, None], noise[:, None])

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        mean, scale = self.parts(batch.context)
        signals = Signals(mean=mean[:, None], scale=scale[:, None])
        if "sample" in needs:
            signals["sample"] = signals["mean"] + (signals["scale"] @ batch.signal("noise")[..., None])[..., 0]
        if "logp" in needs:
            signals["logp"] = _gaussian_log_prob(mean, scale, batch.action[:, 0])[:, None]
        if "entropy" in needs:
            signals["entropy"] = _gaussian_entropy(scale)[:, None]
        return Signals({name: signals[name] for name in needs})


class CategoricalModel(Policy):
    """Softmax of a network's outputs over classes. `logits` [N,1,C]."""

    provides = frozenset({"logp", "entropy", "logits"})
    learning_rate = 1e-3
    optimizer = "adam"

    def __init__(self, inputs: int, classes: int, *, hidden: tuple[int, ...] = (64, 64), seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = perceptron(inputs, hidden, classes).double()

    def log_probs(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        return self.network(x).log_softmax(-1)

    def log_prob(self, x: Float[Tensor, "N D"], y: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        return self.log_probs(x).gather(-1, y[:, None])[:, 0]

    def entropy(self, x: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        log_probs = self.log_probs(x)
        return -(log_probs.exp() * log_probs).sum(-1)

    def expected_reward(self, x: Float[Tensor, "N D"], y: Int[Tensor, " N"], matrix: Float[Tensor, "C C"]) -> Float[Tensor, " N"]:
        """Mean over the model's guesses of their Mahalanobis reward, exactly: p . R[:, y]."""
        return (self.log_probs(x).exp() * reward_table(matrix).T[y]).sum(-1)

    @torch.no_grad()
    def draw(self, x: Float[Tensor, "N D"], generator: torch.Generator) -> Draw:
        log_probs = self.log_probs(x)
        action = torch.multinomial(log_probs.exp(), 1, generator=generator)
        return Draw(action, log_probs.gather(-1, action), None)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        log_probs = self.log_probs(batch.context)
        signals = {
            "logp": log_probs.gather(-1, batch.action),
            "entropy": -(log_probs.exp() * log_probs).sum(-1, keepdim=True),
            "logits": log_probs[:, None],
        }
        return Signals({name: signals[name] for name in needs})


def _gaussian_log_prob(mean: Float[Tensor, "N n"], scale: Float[Tensor, "N n n"], y: Float[Tensor, "N n"]) -> Float[Tensor, " N"]:
    white = torch.linalg.solve_triangular(scale, (y - mean)[..., None], upper=False)[..., 0]
    return -0.5 * (white**2).sum(-1) - _log_diagonal(scale) - 0.5 * y.shape[-1] * math.log(2 * math.pi)


def _gaussian_entropy(scale: Float[Tensor, "N n n"]) -> Float[Tensor, " N"]:
    return _log_diagonal(scale) + 0.5 * scale.shape[-1] * math.log(2 * math.pi * math.e)


def _log_diagonal(scale: Float[Tensor, "... n n"]) -> Float[Tensor, ...]:
    return scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
