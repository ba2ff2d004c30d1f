"""The alignment of latent actions: a variational stage that gives their roles a meaning, from targets that exist in training alone.

A posterior sees the targets, and the flow learns to draw from its latents; the latent policy learns to come close to the posterior without the
targets; decoders keep the targets in the latents; the halting head learns when the plan is good. Source: LAC, equation 4 [reconstructed].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.nn import functional

from anypo.domains.diffusion.latent_flow import LatentFlow, gaussian_kl
from anypo.seams.groups import masked_mean


class Pairs(NamedTuple):
    """Training data of the alignment: prompts, the targets of their slots padded to the widest, and images where there are any."""

    words: Float[Tensor, "N W"]
    target: Float[Tensor, "N J Y"]
    image: Float[Tensor, "N D"] | None


def alignment_loss(
    policy: LatentFlow, images: Pairs, layouts: Pairs, generator: Generator, *, beta_kl: float = 0.05, w_rec: float = 1.0, w_halt: float = 0.1,
    threshold: float = 0.05,
) -> Tensor:  # fmt: skip
    """Equation 4. Image pairs carry the flow matching, with latents of the posterior; layout pairs the KL to the prior, the reconstruction, and the
    halting labels: 1 where the plan that the policy itself would draw, decoded, has a mean squared error below `threshold`."""
    assert images.image is not None
    noise, level = torch.randn(images.image.shape, generator=generator), torch.rand(len(images.image), 1, generator=generator)
    c = policy.encoder(images.words)
    ones = torch.ones(len(c), policy.slots)
    if policy.slots:
        mean, log_std = policy.latent_posterior(c, images.target)
        z = mean + log_std.exp() * torch.randn(mean.shape, generator=generator)
    else:
        z = c.new_zeros(len(c), 0, policy.d)
    velocity = policy.velocity((1 - level) * images.image + level * noise, level[:, 0], policy.conditioned(c, z, ones))
    matching = ((velocity - (noise - images.image)) ** 2).mean()
    if not policy.slots:
        return matching
    c = policy.encoder(layouts.words)
    mean, log_std = policy.latent_posterior(c, layouts.target)
    z = mean + log_std.exp() * torch.randn(mean.shape, generator=generator)
    kl = gaussian_kl(mean, log_std, *policy.latent_prior(c, z), torch.ones(z.shape[:2])).sum(1).mean()
    numbers = policy.used.sum(1)[policy.role]
    reconstruction = (((policy.decode(z) - layouts.target) ** 2).sum(-1) / numbers).sum(1).mean()
    return matching + beta_kl * kl + w_rec * reconstruction + w_halt * halting_loss(policy, layouts, generator, threshold)


def halting_loss(policy: LatentFlow, layouts: Pairs, generator: Generator, threshold: float) -> Tensor:
    """The halting term of equation 4: binary cross-entropy at the slots that decide and are reached; 0 without any."""
    c = policy.encoder(layouts.words).detach()
    thought = policy.latents(c, generator)
    label = (plan_error(policy, thought.z, layouts.target[:, 0]) < threshold).float()
    logit = policy.halt_logit(c, thought.z)
    loss = functional.binary_cross_entropy_with_logits(logit, label[:, None].expand_as(logit), reduction="none")
    return masked_mean(loss, thought.mask & policy.decides)


@torch.no_grad()
def plan_error(policy: LatentFlow, z: Float[Tensor, "N J d"], layout: Float[Tensor, "N Y"]) -> Float[Tensor, " N"]:
    """Mean squared error of the decoded plan."""
    return ((policy.decode(z)[:, 0] - layout) ** 2).sum(-1) / policy.used[0].sum()


def align(
    policy: LatentFlow, draw: Callable[[int, Generator, bool], Pairs], steps: int, *, batch: int = 256, rate: float = 2e-3, seed: int = 0, **weights: float
) -> LatentFlow:  # fmt: skip
    """The alignment stage, in place: `draw(count, generator, with_images)` gives pairs; the learning rate falls to 0 along a cosine."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = alignment_loss(policy, draw(batch, generator, True), draw(batch, generator, False), generator, **weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return policy
