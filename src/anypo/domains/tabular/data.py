"""Data without rewards: pairs (x, y), of which a datum is a prompt and generations are guesses of y. Gaussian vectors, tables of classes, Pendulum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.models import CategoricalModel, GaussianModel
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt


class Pairs(NamedTuple):
    x: Tensor  # [M,D]
    y: Tensor  # [M,n] vectors, or [M] classes

    def take(self, rows: Any) -> Pairs:
        return Pairs(self.x[rows], self.y[rows])

    @property
    def size(self) -> int:
        return len(self.x)


class PairData:
    """Training, validation and test pairs. `signals` of its batches: `prompt_id` and `target` [N] or [N,n], and for vectors `noise` [N,1,n].

    Its own score is minus the squared distance to the target, classes as one-hot vectors (0 or -2).
    """

    objectives: tuple[str, ...] = ("reward",)

    def __init__(self, name: str, parts: Sequence[Pairs], make: Callable[[], GaussianModel | CategoricalModel], batch: int = 64) -> None:
        """`parts`: training, validation and test pairs; `make` builds an untrained model."""
        self.train, self.validation, self.test = parts
        self.name, self.make = name, make
        self.prompts_per_step = min(batch, self.train.size)

    def policy(self) -> GaussianModel | CategoricalModel:
        return self.make()

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Training pairs without repetition. Raises ValueError when there are fewer."""
        if count > self.train.size:
            raise ValueError(f"{self.name} has {self.train.size} training pairs; set select.prompts to at most that")
        return [Prompt(id=int(i), content=int(i)) for i in rng.choice(self.train.size, count, replace=False)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        ids = torch.tensor([p.id for p in prompts]).repeat_interleave(torch.tensor([p.samples for p in prompts]))
        group = torch.arange(len(prompts)).repeat_interleave(torch.tensor([p.samples for p in prompts]))
        x, target = self.train.take(ids)
        drawn = run.policy.draw(x, run.generator)
        extra = {"noise": drawn.noise} if drawn.noise is not None else {}
        return Batch(
            action=drawn.action, mask=torch.ones(len(ids), 1, dtype=torch.bool), logp=drawn.logp, group=group, context=x,
            signals={"prompt_id": ids, "target": target, **extra},
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        guess, target = batch.action[:, 0], batch.signal("target")
        if target.dim() == 1:
            return -2.0 * (guess != target).double()
        return -((guess - target) ** 2).sum(-1)

    @torch.no_grad()
    def measure(self, policy: Policy) -> dict[str, Tensor]:
        """Log-likelihood of each test pair; for classes whether the likeliest one is right, for vectors the squared error of the mean."""
        x, y = self.test
        found = {"log_likelihood": policy.log_prob(x, y)}
        if y.dim() == 1:
            found["accuracy"] = (policy.log_probs(x).argmax(-1) == y).double()
        else:
            found["squared_error"] = ((policy.parts(x)[0] - y) ** 2).sum(-1)
        return found

    def evaluate(self, run: Run) -> dict[str, float]:
        """Means over the test pairs."""
        return {name: float(values.mean()) for name, values in self.measure(run.policy).items()}


def pairs_of(run: Run) -> PairData:
    """The run's task. Raises ValueError when it is not of pairs."""
    if not isinstance(run.task, PairData):
        raise ValueError(
            f"{run.method.name} learns from pairs (x, y), which the task '{run.task.name}' does not have; use gaussian_data, wine, breast_cancer or "
            "pendulum_model"
        )
    return run.task


def gaussian_data(points: int = 500, correlation: float = 0.8, ratio: float = 4.0, full: bool = True, seed: int = 0) -> PairData:
    """Vectors of two numbers from one Gaussian, nothing to condition on (x = 1): variances `ratio` and 1, a mean of (1,-1). The model is a mean and a
    covariance, full or diagonal. Raises ValueError for a correlation outside (-1,1) or a ratio that is not positive."""
    if not -1 < correlation < 1 or not ratio > 0:
        raise ValueError(f"correlation lies in (-1,1) and ratio above 0, not {correlation} and {ratio}")
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([[ratio, correlation * ratio**0.5], [correlation * ratio**0.5, 1.0]], dtype=torch.float64)
    parts = []
    for count in (points, points, 2000):
        noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        y = torch.tensor([1.0, -1.0]).double() + noise @ torch.linalg.cholesky(spread).T
        parts.append(Pairs(torch.ones(count, 1, dtype=torch.float64), y))
    return PairData("gaussian_data", parts, lambda: GaussianModel(1, 2, hidden=(), full=full, seed=seed))


def _classes(name: str, hidden: int, seed: int) -> PairData:
    try:
        from sklearn import datasets
    except ImportError:
        raise ValueError(f"the task '{name}' needs the data sets of scikit-learn: pip install scikit-learn") from None
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    cuts = [int(0.5 * len(x)), int(0.7 * len(x))]
    rows = np.split(order, cuts)
    middle, spread = x[rows[0]].mean(0), x[rows[0]].std(0) + 1e-9
    parts = [Pairs(torch.tensor((x[r] - middle) / spread), torch.tensor(y[r])) for r in rows]
    sizes = (hidden, hidden) if hidden else ()
    return PairData(name, parts, lambda: CategoricalModel(x.shape[1], int(y.max()) + 1, hidden=sizes, seed=seed))


def wine(hidden: int = 64, seed: int = 0) -> PairData:
    """scikit-learn's wines: 13 measurements, 3 cultivars; half to train, a fifth to validate. `hidden` 0: a linear model."""
    return _classes("wine", hidden, seed)


def breast_cancer(hidden: int = 64, seed: int = 0) -> PairData:
    """scikit-learn's tumours: 30 measurements, benign or not; split as the wines."""
    return _classes("breast_cancer", hidden, seed)


def pendulum_steps(count: int, rng: np.random.Generator) -> tuple[Float[Tensor, "M 4"], Float[Tensor, "M 2"]]:
    """Random states and torques of the Pendulum (mass and length 1, gravity 10, 0.05 s, torque and speed within 2 and 8), and the change of angle and
    speed: (cos, sin, speed, torque) -> (angle, speed)."""
    angle, speed, torque = rng.uniform(-np.pi, np.pi, count), rng.uniform(-8, 8, count), rng.uniform(-2, 2, count)
    following = np.clip(speed + 0.05 * (15 * np.sin(angle) + 3 * torque), -8, 8)
    x = np.stack([np.cos(angle), np.sin(angle), speed / 8, torque / 2], axis=1)
    return torch.tensor(x), torch.tensor(np.stack([0.05 * following, following - speed], axis=1))


def pendulum_model(transitions: int = 200, hidden: int = 64, noise: float = 0.1, full: bool = False, seed: int = 0) -> PairData:
    """One-step model of the Pendulum from `transitions`: changes in units of their standard deviations, seen with noise of that deviation."""
    rng = np.random.default_rng(seed)
    x, y = pendulum_steps(2 * transitions + 1000, rng)
    y = (y - y[:transitions].mean(0)) / y[:transitions].std(0) + noise * torch.tensor(rng.standard_normal(y.shape))
    parts = [Pairs(x[r], y[r]) for r in (slice(transitions), slice(transitions, 2 * transitions), slice(2 * transitions, None))]
    return PairData("pendulum_model", parts, lambda: GaussianModel(4, 2, hidden=(hidden, hidden), full=full, seed=seed))


TASKS: dict[str, Any] = {
    "gaussian_data": gaussian_data,
    "wine": wine,
    "breast_cancer": breast_cancer,
    "pendulum_model": pendulum_model,
}
