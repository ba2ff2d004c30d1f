"""Rewards of digit pictures. Each is a function (pictures [N,8,8] in [0,1], digit asked for [N]) -> [N] in [0,1]; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.diffusion.builtin import Classifier

DigitReward = Callable[[Tensor, Tensor], Tensor]
REWARDS = ("ink", "symmetry", "classifier", "classifier:<digit>")


def ink(picture: Float[Tensor, "N 8 8"], digit: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Mean brightness: strokes grow bold."""
    return picture.mean((1, 2))


def symmetry(picture: Float[Tensor, "N 8 8"], digit: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """1 minus the mean difference from the mirror image, left to right."""
    return 1 - (picture - picture.flip(2)).abs().mean((1, 2))


def digit_probability(picture: Float[Tensor, "N 8 8"], classifier: Classifier) -> Float[Tensor, "N 10"]:
    """The classifier's probabilities of the ten digits."""
    return torch.as_tensor(classifier(picture.flatten(1))).softmax(-1)


def digit_reward(name: str, classifier: Classifier) -> DigitReward:
    """A reward by name: `classifier` is the probability of the digit asked for, `classifier:7` that of a 7 whatever was asked for.

    Raises ValueError for an unknown name.
    """
    kind, _, digit = name.partition(":")
    if kind == "classifier" and digit == "":
        return lambda picture, asked: digit_probability(picture, classifier).gather(1, asked[:, None])[:, 0]
    if kind == "classifier" and digit.isdigit() and int(digit) < 10:
        return lambda picture, asked: digit_probability(picture, classifier)[:, int(digit)]
    plain: dict[str, DigitReward] = {"ink": ink, "symmetry": symmetry}
    if name not in plain:
        raise ValueError(f"unknown reward '{name}' for digits; there are {', '.join(REWARDS)}")
    return plain[name]
