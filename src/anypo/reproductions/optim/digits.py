"""What the claims about optimizers share: a network of 64-256-256-10 on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from statistics import fmean

import torch
from torch import Tensor, nn

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]  # of the network's parameters


@lru_cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [1400,64] in [0,1] and labels, test images and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]


def trained(optimizer: Optimizer, seed: int, epochs: int = 10) -> tuple[float, float]:
    """(test loss, test accuracy) after `epochs` in batches of 64."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    steps = optimizer(net.parameters())
    x, y, test_x, test_y = digits()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(64):
            steps.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            steps.step()
    with torch.no_grad():
        logits = net(test_x)
    return float(nn.functional.cross_entropy(logits, test_y)), float((logits.argmax(1) == test_y).float().mean())


def mean_trained(optimizer: Optimizer, seeds: Iterable[int]) -> tuple[float, float]:
    """Means of `trained` over the seeds."""
    found = [trained(optimizer, seed) for seed in seeds]
    return fmean(loss for loss, _ in found), fmean(accuracy for _, accuracy in found)
