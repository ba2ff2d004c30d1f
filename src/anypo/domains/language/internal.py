"""Internal policies: what a language model would say after some of its layers, or by a single layer's contribution alone (arXiv:2512.19673).

The residual stream of a pre-norm transformer is a sum, h^l = h^(l-1) + attn^l + ffn^l, so the unembedding applied to any part of it is a policy of
its own. Policies that can compute it provide the signal `layer_logp_<l>` [N,T], l = 1 ... number of layers: the log-probs of the batch's actions under
softmax(W h^l / temperature). As in the authors' code there is no norm on the layers in between, and the model's own final norm on the last one. Left
out: the final norm on layers in between (the "logit lens").
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.seams.groups import masked_mean

PREFIX = "layer_logp_"


class InternalPolicy(NamedTuple):
    logp: Tensor  # [N,T] of the actions, 0 where masked
    entropy: Tensor  # [N,T], 0 where masked
    mean_entropy: Tensor  # scalar, over the unmasked actions


class LayerEntropy(NamedTuple):
    layer: Tensor  # [Y+1], of h^0 ... h^Y
    attn: Tensor  # [Y]
    ffn: Tensor  # [Y]


def signal_of(layer: int) -> str:
    """The name of the signal of internal policy `layer`."""
    return f"{PREFIX}{layer}"


def signals_of(layers: int) -> frozenset[str]:
    """What a policy of so many layers provides."""
    return frozenset(signal_of(layer) for layer in range(1, layers + 1))


def layers_in(needs: Set[str]) -> list[int]:
    """The layers whose signals are asked for."""
    return sorted(int(name.removeprefix(PREFIX)) for name in needs if name.startswith(PREFIX))


def internal_policy(
    hidden: Float[Tensor, "N T D"],
    unembed: Float[Tensor, "V D"],
    action: Int[Tensor, "N T"],
    mask: Tensor,
    temperature: float | Tensor = 1.0,
) -> InternalPolicy:
    """Equations 1-3: the policy softmax(W h / temperature) at states before the actions, whichever part of the stream they hold. Differentiable.
    `temperature` > 0, a number or one a row [N]."""
    heat = temperature[:, None, None] if isinstance(temperature, Tensor) else temperature
    table = (hidden @ unembed.T / heat).log_softmax(-1)
    inside = mask.bool()
    zero = table.new_zeros(())
    entropy = torch.where(inside, -(table.exp() * table).sum(-1), zero)
    logp = torch.where(inside, table.gather(-1, action[..., None])[..., 0], zero)
    return InternalPolicy(logp, entropy, masked_mean(entropy, inside))


def layer_entropy(
    h0: Float[Tensor, "*B D"], attn: Float[Tensor, "Y *B D"], ffn: Float[Tensor, "Y *B D"], unembed: Float[Tensor, "V D"]
) -> LayerEntropy:
    """Equations 1-3: entropies of the layer policies softmax(W h^l), the embedding's first, and of the modules' own. Leading dimensions B stay."""

    def entropy(states: Tensor) -> Tensor:
        table = (states @ unembed.T).log_softmax(-1)
        return -(table.exp() * table).sum(-1)

    stream = torch.cat([h0[None], h0 + (attn + ffn).cumsum(0)])
    return LayerEntropy(entropy(stream), entropy(attn), entropy(ffn))
