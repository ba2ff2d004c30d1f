"""Digits by prompt "draw a 3", "draw a thin 3", "draw a bold 7": forty prompts in four categories, and a model that starts out deaf to the stroke.

The shipped digit model gets four more inputs whose weights are 0, so it draws its usual digits whatever stroke is asked for: prompts for any stroke
are mastered from the start, those for a regular one nearly so, and thin and bold digits come about by chance at first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.diffusion import builtin
from anypo.domains.diffusion.network import VelocityNetwork
from anypo.domains.diffusion.policy import FlowPolicy
from anypo.domains.diffusion.rewards import digit_probability, ink
from anypo.domains.diffusion.tasks import Digits, pictures
from anypo.report import plots
from anypo.run import Run
from anypo.task import Prompt

STROKES = ("any", "thin", "regular", "bold")
BRIGHTNESS = (0.0, 0.22, 0.31, 0.40)  # mean brightness asked for; most of the model's digits have 0.2 to 0.4
CLOSE, FAR = 0.04, 0.08  # a brightness off by less is full marks, one off by more earns nothing


class StyledDigits(Digits):
    """Prompt 4 d + s asks for digit d with stroke s; the reward in [0,1] is the digit's probability times how well the stroke fits.

    A prompt's column `category` is its stroke.
    """

    count, prompts_per_step = 40, 10

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.name, self.reward = "styled_digits", self.styled

    def styled(self, x: Float[Tensor, "N 64"], prompt: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The reward."""
        picture, asked = pictures(x), prompt // 4
        right = digit_probability(picture, self.classifier).gather(1, asked[:, None])[:, 0]
        off = (ink(picture, asked) - torch.tensor(BRIGHTNESS)[prompt % 4]).abs()
        fit = ((FAR - off) / (FAR - CLOSE)).clamp(0, 1)
        return right * torch.where(prompt % 4 == 0, torch.ones_like(fit), fit)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [p.but(columns={"category": STROKES[p.id % 4]}) for p in super().prompts(count, rng)]

    def condition(self, prompt: Tensor) -> Tensor:
        one_hot = torch.nn.functional.one_hot
        return torch.cat([one_hot(prompt // 4, 10), one_hot(prompt % 4, 4)], dim=-1).float()[:, None]

    def measures(self, x: Tensor, prompt: Tensor) -> dict[str, Tensor]:
        return super().measures(x, prompt // 4)

    def figures(self, run: Run) -> list[tuple[str, Any]]:
        """Each digit with each stroke."""
        asked = (4 * torch.arange(10) + torch.arange(4)[:, None]).flatten()
        drawn = pictures(self.samples(run.policy, asked)).view(4, 10, 8, 8)  # type: ignore[arg-type]
        grid = plots.image_grid(drawn.numpy(), column_names=[str(d) for d in range(10)])  # type: ignore[arg-type]
        return [("Digits drawn with any stroke, thin, regular and bold", grid)]


def styled_flow() -> FlowPolicy:
    """The shipped digit model with four more inputs that it ignores so far."""
    plain = builtin.flow("digits").network
    wide = VelocityNetwork(plain.size, condition=plain.condition + len(STROKES), hidden=plain.hidden)
    weights = plain.state_dict()
    weights["layers.0.weight"] = torch.nn.functional.pad(weights["layers.0.weight"], (0, len(STROKES)))
    wide.load_state_dict(weights)
    return FlowPolicy(wide, "builtin:styled_digits")
