"""Generation as a task: prompts are conditions, an attempt is a chain from noise to a sample, the reward looks at the sample alone.

`Digits` draws 8x8 digits, `Gaussians` points of the plane; `PicturePrompts` in pipelines.py uses the same base for real image models.
Training may use few noisy steps and evaluation many steps of the ODE, so the numbers of `evaluate` are those of the sampler people use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.builtin import Classifier, classifier
from anypo.domains.diffusion.denoise import Schedule, ode_schedule, sde_schedule, uniform_levels
from anypo.domains.diffusion.policy import Condition, DenoisingPolicy
from anypo.domains.diffusion.rewards import REWARDS, DigitReward, digit_probability, digit_reward
from anypo.domains.diffusion.sample import as_batch, chains, final, sample
from anypo.report import plots
from anypo.run import Run
from anypo.task import Prompt

Reward = Callable[[Tensor, Tensor], Tensor]  # (samples [N,D], prompt index [N]) -> [N]
EVALUATION_SEED = 1_000_000  # of the noise that held-out samples start from


class DenoisingTask:
    """What all generation tasks share. Subclasses set `name`, `size` (D) and `count` (number of prompts) and implement `condition` and `reward`."""

    name: str
    domain = "diffusion"
    objectives: tuple[str, ...] = ("reward",)
    prompts_per_step = 8
    size: int
    count: int
    reward: Reward

    def __init__(self, *, denoising_steps: int = 10, noise: float = 0.7, evaluation_steps: int = 40, evaluation_samples: int = 400) -> None:
        """`denoising_steps`, `noise`: the SDE that training samples come from, unless the method's rollout chooses another `schedule`."""
        self.schedule: Schedule = sde_schedule(self.levels(denoising_steps), noise)
        self.evaluation_schedule = ode_schedule(self.levels(evaluation_steps))
        self.evaluation_samples = evaluation_samples

    def levels(self, steps: int) -> Float[Tensor, " T+1"]:
        """The levels that a sampler with so many steps visits."""
        return uniform_levels(steps)

    def condition(self, prompt: Int[Tensor, " N"]) -> Condition:
        """What the policy is told about prompts, by their index: [N,1,C], N texts, or None."""
        return None

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Each prompt once, in random order, before any comes again."""
        rounds = [rng.permutation(self.count) for _ in range(math.ceil(count / self.count))]
        return [Prompt(id=int(i), content=int(i)) for i in np.concatenate(rounds)[:count]]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        return chains(prompts, run, self.schedule)

    def continue_rows(self, batch: Batch, rows: Tensor, depth: Tensor, run: Run) -> Batch:
        """New endings of the chains `rows` after their first `depth` steps, whole chains each (see `anypo.task.Resumable`)."""
        policy: DenoisingPolicy = run.policy  # type: ignore[assignment]
        prompt_id = batch.signal("prompt_id")[rows]
        condition, x = self.condition(prompt_id), torch.cat([batch.context[:, :1], batch.action], dim=1)[rows].clone()
        for d in torch.unique(depth).tolist():
            if d == batch.horizon:
                continue
            mine = (depth == d).nonzero().flatten()
            rest = Schedule(self.schedule.level[d:], *(part[d:] for part in self.schedule[1:]))
            x[mine, d:] = sample(policy, x[mine, d], _rows(condition, mine), rest, run.generator)
        again = as_batch(policy, x, condition, self.schedule, batch.group[rows], prompt_id)
        return again.but(parent=rows, branch_at=depth, version=torch.full_like(rows, run.version))

    def score(self, batch: Batch, run: Run) -> Tensor:
        return self.reward(final(batch), batch.signal("prompt_id"))

    def samples(self, policy: DenoisingPolicy, prompt: Int[Tensor, " N"], seed: int = EVALUATION_SEED) -> Float[Tensor, "N D"]:
        """Samples by the ODE of `evaluation_steps` steps, from noise that depends on `seed` alone."""
        start = torch.randn(len(prompt), self.size, generator=torch.Generator().manual_seed(seed))
        return sample(policy, start, self.condition(prompt), self.evaluation_schedule)[:, -1]

    def held_out(self, policy: DenoisingPolicy, count: int, seed: int = EVALUATION_SEED) -> dict[str, Tensor]:
        """[count] values of the reward, and of what else is worth knowing, for samples of the prompts in turn."""
        prompt = torch.arange(count) % self.count
        x = self.samples(policy, prompt, seed)
        return {"reward": self.reward(x, prompt)} | self.measures(x, prompt)

    def measures(self, x: Float[Tensor, "N D"], prompt: Int[Tensor, " N"]) -> dict[str, Tensor]:
        """What a run's report should know of samples beside their reward, [N] each."""
        return {}

    def evaluate(self, run: Run) -> dict[str, float]:
        """Means over held-out noise, the reward first."""
        return {name: float(v.mean()) for name, v in self.held_out(run.policy, self.evaluation_samples).items()}  # type: ignore[arg-type]


def _rows(condition: Condition, index: Tensor) -> Condition:
    return [condition[i] for i in index.tolist()] if isinstance(condition, list) else None if condition is None else condition[index]


class Digits(DenoisingTask):
    """8x8 digits by prompt "draw a 0" ... "draw a 9"; a sample is 64 numbers, about in [-1,1]."""

    size, count, prompts_per_step = 64, 10, 10

    def __init__(self, reward: str | DigitReward = "ink", **options: Any) -> None:
        """`reward`: a name from `rewards.REWARDS`, or a function (pictures [N,8,8] in [0,1], digit asked for [N]) -> [N].

        Raises ValueError for an unknown name.
        """
        super().__init__(**options)
        self.name = f"digits:{reward}" if isinstance(reward, str) else f"digits:{getattr(reward, '__name__', 'reward')}"
        self.classifier: Classifier = classifier()
        self._reward = digit_reward(reward, self.classifier) if isinstance(reward, str) else reward
        self.reward = lambda x, prompt: self._reward(pictures(x), prompt)

    def condition(self, prompt: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(prompt, self.count).float()[:, None]

    def measures(self, x: Tensor, prompt: Tensor) -> dict[str, Tensor]:
        """`recognized`: whether the classifier sees the digit that was asked for, so that a spoiled picture is noticed."""
        return {"recognized": (digit_probability(pictures(x), self.classifier).argmax(-1) == prompt).float()}

    def figures(self, run: Run) -> list[tuple[str, str]]:
        """Three pictures of each digit, from the same noise before and after."""
        drawn = pictures(self.samples(run.policy, torch.arange(30) % 10)).view(3, 10, 8, 8)  # type: ignore[arg-type]
        return [("Digits drawn for each prompt", plots.image_grid(drawn.numpy(), column_names=[str(d) for d in range(10)]))]  # type: ignore[arg-type]


def pictures(x: Float[Tensor, "N 64"]) -> Float[Tensor, "N 8 8"]:
    """Samples as pictures with values in [0,1]."""
    return ((x + 1) / 2).clamp(0, 1).view(-1, 8, 8)


class Gaussians(DenoisingTask):
    """Eight Gaussians on a circle of radius 2 in the plane; the reward is minus the distance to one chosen mode."""

    size, count, prompts_per_step = 2, 1, 16
    RADIUS, STD = 2.0, 0.1

    def __init__(self, mode: int = 0, **options: Any) -> None:
        """Raises ValueError for a mode that is none of 0 to 7."""
        if mode not in range(8):
            raise ValueError(f"there are Gaussians 0 to 7, not {mode}")
        super().__init__(**options)
        self.name, self.mode = f"gaussians:{mode}", self.modes()[mode]
        self.reward = lambda x, prompt: -(x - self.mode).norm(dim=-1)

    @classmethod
    def modes(cls) -> Float[Tensor, "8 2"]:
        """The centres."""
        angle = torch.arange(8) * (math.pi / 4)
        return cls.RADIUS * torch.stack([angle.cos(), angle.sin()], dim=-1)

    @classmethod
    def data(cls, count: int, generator: torch.Generator) -> Float[Tensor, "N 2"]:
        """Points of the mixture, what the model is pre-trained on."""
        centre = cls.modes()[torch.randint(8, (count,), generator=generator)]
        return centre + cls.STD * torch.randn(count, 2, generator=generator)

    def measures(self, x: Tensor, prompt: Tensor) -> dict[str, Tensor]:
        """`at_mode`: whether the point lies within five standard deviations of the chosen mode."""
        return {"at_mode": ((x - self.mode).norm(dim=-1) < 5 * self.STD).float()}

    def figures(self, run: Run) -> list[tuple[str, Any]]:
        """The samples in the plane."""
        from matplotlib.figure import Figure

        x = self.samples(run.policy, torch.zeros(500, dtype=torch.int64)).numpy()  # type: ignore[arg-type]
        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.scatter(x[:, 0], x[:, 1], s=6, alpha=0.5, color=plots.color(0))
        axes.scatter(float(self.mode[0]), float(self.mode[1]), marker="x", s=60, color=plots.color(1))
        axes.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
        return [("Samples, and the rewarded mode as a cross", figure)]


def make_task(name: str, **options: Any) -> DenoisingTask:
    """`digits:` or `patches:<reward>`, `gaussians:<mode>`, `styled_digits`, `attributes`, `ring`, `scenes`, `views`; else raises ValueError."""
    from anypo.domains.diffusion.attributes import AttributeModes
    from anypo.domains.diffusion.patch_flow import PatchDigits
    from anypo.domains.diffusion.ring import Ring
    from anypo.domains.diffusion.scenes import Scenes
    from anypo.domains.diffusion.styled_digits import StyledDigits
    from anypo.domains.diffusion.views import Views

    kind, _, rest = name.partition(":")
    plain: dict[str, type[DenoisingTask]] = {
        "attributes": AttributeModes,
        "ring": Ring,
        "scenes": Scenes,
        "styled_digits": StyledDigits,
        "views": Views,
    }
    if name in plain:
        return plain[name](**options)
    if kind == "digits":
        return Digits(rest or "ink", **options)
    if kind == "patches":
        return PatchDigits(rest or "classifier", **options)
    if kind == "gaussians" and (rest or "0").isdigit():
        return Gaussians(int(rest or 0), **options)
    known = ", ".join(f"digits:{reward}" for reward in REWARDS)
    raise ValueError(
        f"unknown diffusion task '{name}'; there are {known}, the same with patches:, gaussians:<0 to 7>, styled_digits, attributes, ring, scenes, views and "
        "pictures:<file with a prompt a line>"
    )
