"""Views of rotating point clouds: a small stand-in for camera-controlled video, where small camera moves are easy and large ones are not.

A video is F = 4 frames of P = 6 points in space with a slow rigid drift; seen from angle th, a point (x, y, z) is at (x cos th + z sin th, y,
-x sin th + z cos th), the last number being its depth. `generate(view, angle)` is a flow conditioned on a view [72] and a camera move, which
draws every point alike, as real models draw patches. The model that ships was trained on moves of at most 20 degrees, and saw no pair beyond.
Left out: pictures; what a real model would be rewarded by perceptually is measured here on the points themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.domains.diffusion.network import VelocityNetwork
from anypo.domains.diffusion.policy import Condition, DenoisingPolicy
from anypo.domains.diffusion.sample import sample
from anypo.domains.diffusion.tasks import EVALUATION_SEED, DenoisingTask
from anypo.run import Run
from anypo.task import Prompt

FRAMES, POINTS = 4, 6
SIZE = FRAMES * POINTS * 3
TRUSTED = 20.0  # degrees: the largest camera move that the model was trained on
MOVES = 6  # sizes of camera moves that the network tells apart, a trusted one (20 degrees) from the next
NEAR = 0.2  # a point is hidden behind another that lies so near it in the image plane
PEAK = 2.0  # coordinates mostly lie within +-2


def turned(points: Float[Tensor, "*N 3"], angle: float | Tensor) -> Float[Tensor, "*N 3"]:
    """The points seen from `angle` (radians) further on; a tensor broadcasts against [*N]."""
    angle = torch.as_tensor(angle, dtype=points.dtype)
    x, y, z = points.unbind(-1)
    return torch.stack([x * angle.cos() + z * angle.sin(), y.expand_as(x), z * angle.cos() - x * angle.sin()], dim=-1)


class Rotated(NamedTuple):
    direct: Float[Tensor, "P 3"]
    accumulated: Float[Tensor, "P 3"]


def rotate(pts: Float[Tensor, "P 3"], theta: float, increments: Sequence[float]) -> Rotated:
    """The exact world after one camera move of `theta` radians, and after the increments in turn."""
    view = pts
    for increment in torch.as_tensor(increments).tolist():
        view = turned(view, increment)
    return Rotated(turned(pts, theta), view)


def as_points(video: Float[Tensor, "N 72"]) -> Float[Tensor, "N F P 3"]:
    """A flat video as its points."""
    return video.view(-1, FRAMES, POINTS, 3)


def look(video: Float[Tensor, "N 72"], degrees: Float[Tensor, " N"]) -> Float[Tensor, "N 72"]:
    """What the exact world shows of a video after a camera move."""
    return turned(as_points(video), torch.deg2rad(degrees)[:, None, None]).flatten(1)


def visible(video: Float[Tensor, "N 72"]) -> Bool[Tensor, "N F P"]:
    """Points that no point of smaller depth covers."""
    points = as_points(video)
    apart = (points[..., :, None, :2] - points[..., None, :, :2]).norm(dim=-1)
    in_front = points[..., None, :, 2] < points[..., :, None, 2]
    return ~((apart < NEAR) & in_front).any(-1)


def masked_psnr(y: Tensor, y_ref: Tensor, mask: Tensor, peak: float) -> Tensor:
    """10 log10(peak^2 / mean squared error over the mask): decibels, a scalar."""
    inside = mask.to(y.dtype)
    return 10 * torch.log10(peak**2 * inside.sum().clamp(min=1) / ((y - y_ref) ** 2 * inside).sum())


def camera_angle(video: Float[Tensor, "N 72"], source: Float[Tensor, "N 72"]) -> Float[Tensor, " N"]:
    """By how many degrees a video is turned against its source, in (-180, 180]."""
    (x, _, z), (x_new, _, z_new) = as_points(source).unbind(-1), as_points(video).unbind(-1)
    return torch.rad2deg(torch.atan2((z * x_new - x * z_new).sum((1, 2)), (x * x_new + z * z_new).sum((1, 2))))


def view_levels(video: Float[Tensor, "N 72"], source: Float[Tensor, "N 72"], degrees: Float[Tensor, " N"]) -> Float[Tensor, "N 4"]:
    """How good a video is as the view of `source` after a camera move, at four levels, each better when higher.

    quality: minus the mean over frames of the rms change of the distances between points (<= 0); pair: mean likeness of adjacent frames; view:
    likeness of the video turned back with the source, where the source's points are visible (both in (0,1], exp(-rms)); camera: minus the error
    of the angle over the angle (<= 0; angles are compared around the circle).
    """
    points, original = as_points(video), as_points(source)
    distances, before = (torch.cdist(p.contiguous(), p.contiguous()) for p in (points, original))
    quality = -((distances - before) ** 2).mean((2, 3)).sqrt().mean(1)
    pair = (-((points[:, 1:] - points[:, :-1]) ** 2).mean((2, 3)).sqrt()).exp().mean(1)
    seen = visible(source)[..., None].to(video.dtype).expand_as(points)
    error = ((as_points(look(video, -degrees)) - original) ** 2 * seen).sum((1, 2, 3)) / seen.sum((1, 2, 3)).clamp(min=1)
    off = (camera_angle(video, source) - degrees + 180) % 360 - 180
    return torch.stack([quality, pair, (-error.sqrt()).exp(), -off.abs() / degrees], dim=1)


def random_videos(count: int, generator: torch.Generator) -> Float[Tensor, "N 72"]:
    """Six points at random, which turn by up to 4 degrees a frame around the line of sight and move on a little."""
    points = 0.8 * torch.randn(count, 1, POINTS, 3, generator=generator)
    frame = torch.arange(FRAMES, dtype=torch.float32)[None, :, None]
    spin = math.radians(4.0) * (2 * torch.rand(count, 1, 1, generator=generator) - 1) * frame
    x, y, z = points.expand(-1, FRAMES, -1, -1).unbind(-1)
    turning = torch.stack([x * spin.cos() - y * spin.sin(), x * spin.sin() + y * spin.cos(), z], dim=-1)
    drift = 0.05 * torch.randn(count, 1, 1, 3, generator=generator) * frame[..., None]
    return (turning + drift).flatten(1)


def view_condition(source: Float[Tensor, "N 72"], degrees: Float[Tensor, " N"]) -> Float[Tensor, "N 1 73"]:
    """What `generate` is told: the view to start from, and the camera move in units of the trusted one."""
    return torch.cat([source, degrees[:, None] / TRUSTED], dim=1)[:, None]


class ViewFlow(DenoisingPolicy):
    """Velocities of single points [3] that see the same point of the source view; a video is 24 of them.

    One small network for each size of camera move (0, 20, ... 100 degrees), interpolated for the sizes between. Those beyond the trusted size are
    untrained copies of the one at 20 degrees.
    """

    def __init__(self, hidden: tuple[int, ...] = (64, 64), name: str = "views", seed: int = 0) -> None:
        super().__init__()
        self.hidden, self.name = tuple(hidden), name
        self.networks = nn.ModuleList(VelocityNetwork(3, condition=3, hidden=hidden, seed=seed) for _ in range(MOVES))

    def forward(self, points: Float[Tensor, "*N 3"], level: Float[Tensor, "*N"], told: Float[Tensor, "*N 4"]) -> Float[Tensor, "*N 3"]:
        """`told`: the point in the source view, and the camera move in trusted units."""
        source, move = told[..., :-1], told[..., -1:]
        found = torch.zeros_like(points)
        for k, network in enumerate(self.networks):
            share = (1 - (move - k).abs()).clamp(min=0)
            if bool((share > 0).any()):
                found = found + share * network(points, level, source)
        return found

    def velocity(self, x: Float[Tensor, "N T 72"], level: Float[Tensor, "N T"], condition: Condition) -> Float[Tensor, "N T 72"]:
        assert isinstance(condition, Tensor)
        points, source = x.unflatten(-1, (-1, 3)), condition[..., :-1].unflatten(-1, (-1, 3))
        told = torch.cat([source, condition[..., None, -1:].expand(*source.shape[:-1], 1)], dim=-1)
        return self(points, level[..., None], told.expand(*points.shape[:-1], 4)).flatten(-2)

    def extend(self) -> ViewFlow:
        """Give the sizes beyond the trusted one its weights, in place."""
        for network in self.networks[2:]:
            network.load_state_dict(self.networks[1].state_dict())
        return self

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and sizes in a folder, which `load_views` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "policy.safetensors")
        (folder / "policy.json").write_text(
            json.dumps({"kind": "views", "name": self.name, "size": SIZE, "hidden": list(self.hidden)}, indent=1)
        )


def load_views(folder: Path) -> ViewFlow:
    """A policy that `save_pretrained` wrote."""
    sizes = json.loads((folder / "policy.json").read_text())
    policy = ViewFlow(tuple(sizes["hidden"]), sizes["name"])
    policy.load_state_dict({k: v.float() for k, v in load_file(folder / "policy.safetensors").items()})
    return policy


class Views(DenoisingTask):
    """Prompt i: a source video and a camera move of 60 to 90 degrees. Rewards [N,4]: `view_levels`. Held-out videos are asked for at `test_angle`."""

    name, size, prompts_per_step = "views", SIZE, 4
    objectives = ("quality", "pair", "view", "camera")
    count, held = 256, 64  # videos to train on, and others to test by

    def __init__(self, *, low: float = 60.0, high: float = 90.0, test_angle: float = 80.0, **options: Any) -> None:
        """`low`, `high`: range of the camera moves asked for, in degrees. Raises ValueError when it is empty or not above 0."""
        if not 0 < low <= high < 180:
            raise ValueError(f"camera moves lie between 0 and 180 degrees, low first, not {low} to {high}")
        super().__init__(**({"evaluation_samples": self.held} | options))
        generator = torch.Generator().manual_seed(0)
        self.videos = random_videos(self.count + self.held, generator)
        self.angles = low + (high - low) * torch.rand(self.count + self.held, generator=generator)
        self.angles[self.count :] = test_angle
        self.reward = lambda x, prompt: view_levels(x, *self.asked(prompt))

    @classmethod
    def data(cls, count: int, generator: torch.Generator) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "N 4"]]:
        """Single points after a trusted camera move, and what the network is told of each: what the model is pre-trained on."""
        videos = random_videos(math.ceil(count / (FRAMES * POINTS)), generator)
        degrees = TRUSTED * torch.rand(len(videos), generator=generator)
        told = torch.cat([as_points(videos), (degrees / TRUSTED)[:, None, None, None].expand(-1, FRAMES, POINTS, 1)], dim=-1)
        return as_points(look(videos, degrees)).reshape(-1, 3)[:count], told.reshape(-1, 4)[:count]

    def asked(self, prompt: Int[Tensor, " N"]) -> tuple[Float[Tensor, "N 72"], Float[Tensor, " N"]]:
        """Source video and camera move, in degrees."""
        return self.videos[prompt], self.angles[prompt]

    def condition(self, prompt: Int[Tensor, " N"]) -> Tensor:
        return view_condition(*self.asked(prompt))

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [p.but(columns={"angle": float(self.angles[p.id])}) for p in super().prompts(count, rng)]

    def accumulated(self, policy: Any, prompt: Int[Tensor, " N"], seed: int = EVALUATION_SEED) -> Float[Tensor, "N 72"]:
        """The asked-for view by as few even moves of at most 20 degrees as reach it, each by the ODE."""
        view, angle = self.asked(prompt)
        stages = math.ceil(float(angle.max()) / TRUSTED)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(stages):
            start = torch.randn(view.shape, generator=generator)
            view = sample(policy, start, view_condition(view, angle / stages), self.evaluation_schedule)[:, -1]
        return view

    def psnr(self, video: Float[Tensor, "N 72"], prompt: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Of every video against the exact view, where the exact view's points are visible."""
        exact = look(*self.asked(prompt))
        mask = visible(exact)[..., None].expand(-1, -1, -1, 3).flatten(1)
        return torch.stack([masked_psnr(a, b, m, PEAK) for a, b, m in zip(video, exact, mask, strict=True)])

    def held_out(self, policy: Any, count: int, seed: int = EVALUATION_SEED) -> dict[str, Tensor]:
        """Of the held-out videos: `jump`, the PSNR of the large move in one go, and `accumulated`, by small moves."""
        prompt = self.count + torch.arange(min(count, self.held))
        videos = {"jump": self.samples(policy, prompt, seed), "accumulated": self.accumulated(policy, prompt, seed)}
        return {name: self.psnr(video, prompt) for name, video in videos.items()}

    def figures(self, run: Run) -> list[tuple[str, Any]]:
        """The first frame of four held-out videos: exact, and in one jump."""
        from matplotlib.figure import Figure

        from anypo.report import plots

        prompt = self.count + torch.arange(4)
        made, exact = self.samples(run.policy, prompt), look(*self.asked(prompt))  # type: ignore[arg-type]
        figure = Figure(figsize=(9, 2.4), layout="constrained")
        for i, axes in enumerate(figure.subplots(1, 4)):
            for number, video in enumerate((made, exact)):
                points = as_points(video)[i, 0]
                axes.scatter(points[:, 0].numpy(), points[:, 1].numpy(), s=18, color=plots.color(number))
            axes.set(xlim=(-2.5, 2.5), ylim=(-2.5, 2.5), aspect="equal")
        return [("Four views 80 degrees away: drawn in one jump, and as they are (second colour)", figure)]
