"""Directions as prompts: a plane in which the prompt is an angle, told to the model as an embedding that varies smoothly with it.

A learned flow puts samples at the prompt's angle on a circle; the reward asks for a point turned a little further, so that a model has to move what
every prompt means. Neighbouring embeddings mean neighbouring directions, which is what perturbing an embedding is about.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.diffusion.tasks import DenoisingTask
from anypo.report import plots
from anypo.run import Run


def _features(angle: Float[Tensor, " N"]) -> Float[Tensor, "N 4"]:
    return torch.stack([angle.cos(), angle.sin(), (2 * angle).cos(), (2 * angle).sin()], dim=-1)


class Ring(DenoisingTask):
    """A prompt a degree; the reward is minus the distance to the point at the prompt's angle plus `turn` on the circle of radius 2."""

    name, size, count, prompts_per_step = "ring", 2, 360, 16
    RADIUS, STD, EMBEDDING = 2.0, 0.15, 8

    def __init__(self, *, turn: float = 0.5, evaluation_samples: int = 720, **options: Any) -> None:
        """`turn`: radians between where the model was trained to put samples and where the reward wants them."""
        super().__init__(evaluation_samples=evaluation_samples, **options)
        self.turn = turn
        self.reward = lambda x, prompt: -(x - self.point(self.angle(prompt) + self.turn)).norm(dim=-1)

    @classmethod
    def angle(cls, prompt: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """In radians."""
        return prompt * (2 * math.pi / cls.count)

    @classmethod
    def point(cls, angle: Float[Tensor, " N"]) -> Float[Tensor, "N 2"]:
        """On the circle."""
        return cls.RADIUS * torch.stack([angle.cos(), angle.sin()], dim=-1)

    @classmethod
    def embedding(cls, angle: Float[Tensor, " N"]) -> Float[Tensor, "N 8"]:
        """W [cos, sin, cos 2x, sin 2x] / 2 with one fixed random W."""
        mixing = torch.randn(cls.EMBEDDING, 4, generator=torch.Generator().manual_seed(0))
        return _features(angle) @ mixing.T / 2

    @classmethod
    def data(cls, count: int, generator: torch.Generator) -> tuple[Float[Tensor, "N 2"], Float[Tensor, "N 8"]]:
        """Points and the embeddings of their angles: what the model is pre-trained on."""
        angle = 2 * math.pi * torch.rand(count, generator=generator)
        return cls.point(angle) + cls.STD * torch.randn(count, 2, generator=generator), cls.embedding(angle)

    def condition(self, prompt: Tensor) -> Tensor:
        return self.embedding(self.angle(prompt))[:, None]

    def measures(self, x: Tensor, prompt: Tensor) -> dict[str, Tensor]:
        """`on_circle`: whether the point lies within 0.3 of the circle."""
        return {"on_circle": ((x.norm(dim=-1) - self.RADIUS).abs() < 2 * self.STD).float()}

    def figures(self, run: Run) -> list[tuple[str, Any]]:
        """The samples of twelve prompts in the plane, and where the reward wants them."""
        from matplotlib.figure import Figure

        prompt = torch.arange(360) % 12 * 30
        x, wanted = self.samples(run.policy, prompt), self.point(self.angle(torch.arange(12) * 30) + self.turn)  # type: ignore[arg-type]
        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.scatter(x[:, 0].numpy(), x[:, 1].numpy(), s=6, alpha=0.5, color=plots.color(0))
        axes.scatter(wanted[:, 0].numpy(), wanted[:, 1].numpy(), marker="x", s=40, color=plots.color(1))
        axes.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
        return [("Samples of twelve prompts, and the rewarded points as crosses", figure)]
