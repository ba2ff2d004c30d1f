"""Sampler: batched decoding from any prefixes, with the log-prob and entropy of what was drawn.

Each distinct prompt is read once, packed with the others, and its keys and values are copied to the slots of its samples. Slots are
preallocated and written in place; a finished row gives its slot to the last running one, so that every step computes running rows only. Prompts
of different lengths end in the same column. Sampling from a prefix of an earlier trajectory is the same call with that prefix as the prompt.
Left out: speculative decoding, beams, and refilling slots while others run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from anypo.domains.language.cache import prefill, survivors
from anypo.domains.language.network import Network

CACHE_BYTES = 4 << 30  # keys and values held at once; more samples than that are drawn in waves
BLOCK = 256  # vocabulary entries that are summed before one is drawn


@dataclass
class Samples:
    """N completions, the samples of one prompt after another."""

    tokens: Int64[Tensor, "N T"]  # padded after the end
    valid: Bool[Tensor, "N T"]  # what was drawn, the end token included
    logp: Float[Tensor, "N T"]  # under the tempered distribution, 0 where not valid
    entropy: Float[Tensor, "N T"] | None  # of that distribution
    finished: Bool[Tensor, " N"]  # ended by an end token or by `stop`, not by the limit
    source: Int64[Tensor, " N"]  # index of the prompt


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Tensor],
    samples: int | Sequence[int],
    *,
    max_tokens: int | Sequence[int],
    generator: torch.Generator,
    eos_ids: Sequence[int],
    temperature: float | Sequence[float] = 1.0,
    stop: Callable[[Tensor, Tensor], Tensor] | None = None,
    want_entropy: bool = False,
    top_p: float = 1.0,
    greedy: bool = False,
    pad: int = 0,
) -> Samples:
    """Draw `samples[i]` completions of up to `max_tokens[i]` tokens from `prompts[i]` (1-D int64, one token or more).

    `model` is a Hugging Face causal LM or a Network. `stop(tokens [n,t], source [n]) -> [n] bool` is called after every step with the running
    rows and ends those it names. `top_p` in (0,1] narrows what may be drawn and `greedy` takes the likeliest token; the recorded log-prob and
    entropy are those of the whole tempered distribution, which is what a policy evaluates. Equal generators give equal samples.
    """
    network = model if isinstance(model, Network) else Network(model)
    counts, limits, heats = (_each(x, len(prompts)) for x in (samples, max_tokens, temperature))
    _check(prompts, heats, top_p)
    source = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    limit = torch.tensor(limits, dtype=torch.int64)[source]
    width = max([0, *limit.tolist()])
    out = Samples(
        tokens=torch.full((len(source), width), pad),
        valid=torch.zeros((len(source), width), dtype=torch.bool),
        logp=torch.zeros((len(source), width)),
        entropy=torch.zeros((len(source), width)) if want_entropy else None,
        finished=torch.zeros(len(source), dtype=torch.bool),
        source=source,
    )
    draw = _Draw(torch.tensor(heats, dtype=torch.float32)[source], generator, top_p, greedy, want_entropy)
    running = limit.nonzero().flatten()
    while len(running):
        wave = _wave_size(network, prompts, source[running], limit[running])
        _decode(network, prompts, running[:wave], limit, draw, tuple(eos_ids), stop, out)
        running = running[wave:]
    longest = int(out.valid.sum(dim=1).max()) if out.valid.numel() else 0
    out.tokens, out.valid, out.logp = out.tokens[:, :longest], out.valid[:, :longest], out.logp[:, :longest]
    out.entropy = out.entropy[:, :longest] if out.entropy is not None else None
    return out


def _each(value: Any, count: int) -> list[Any]:
    return [value] * count if isinstance(value, int | float) else list(value)


def _check(prompts: Sequence[Tensor], temperatures: list[float], top_p: float) -> None:
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty; sampling needs at least one token to start from")
    if any(t <= 0 for t in temperatures):
        raise ValueError(f"temperatures must be positive, not {min(temperatures)}; for the likeliest tokens use greedy=True")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0,1], not {top_p}")


def _wave_size(network: Network, prompts: Sequence[Tensor], source: Tensor, limit: Tensor) -> int:
    """How many of the rows have room in the cache together; at least one."""
    config = network.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 4 if network.device.type == "cpu" else network.head.weight.element_size()  # of a number: decoding in C is float32
    a_token = 2 * config.num_hidden_layers * heads * width * size
    columns = max(len(prompts[i]) for i in source.tolist()) + int(limit.max())
    return max(1, min(len(source), CACHE_BYTES // (a_token * columns)))


def _decode(
    network: Network, prompts: Sequence[Tensor], rows: Tensor, limit: Tensor, draw: _Draw, eos_ids: tuple[int, ...], stop: Any, out: Samples
) -> None:
    """Fill `out` for the given rows."""
    device = network.device
    ends = torch.tensor(eos_ids, dtype=torch.int64)
    lengths = torch.tensor([len(p) for p in prompts])[out.source]
    cache, hidden = prefill(network, [prompts[i] for i in out.source[rows].tolist()], int(limit[rows].max()))
    for t in range(int(limit[rows].max())):
        token, logp, entropy = draw(cache.logits(hidden), rows)
        out.tokens[rows, t], out.logp[rows, t], out.valid[rows, t] = token, logp, True
        if out.entropy is not None:
            out.entropy[rows, t] = entropy  # type: ignore[assignment]
        ended = torch.isin(token, ends)
        if stop is not None:
            ended |= stop(out.tokens[rows, : t + 1], out.source[rows])
        out.finished[rows] = ended
        order = survivors(~ended & (t + 1 < limit[rows]))
        if len(order) == 0:
            return
        if len(order) < len(rows):
            cache.keep(order.to(device))
            rows, token = rows[order], token[order]
        hidden = cache.step(token.to(device), (lengths[rows] + t).to(device))


class _Draw:
    """Draws one token a row from float32 logits, which it overwrites, with the log-prob and the entropy."""

    def __init__(
        self, temperature: Float[Tensor, " N"], generator: torch.Generator, top_p: float, greedy: bool, want_entropy: bool
    ) -> None:
        self.temperature, self.generator, self.top_p, self.greedy, self.want_entropy = temperature, generator, top_p, greedy, want_entropy
        self.room = torch.empty(
            0
        )  # for the weights of one step, written again at the next: fresh megabytes cost more than the exponentials

    def __call__(self, logits: Float[Tensor, "n V"], rows: Int64[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor | None]:
        heat = self.temperature[rows].to(logits.device)
        centred = logits / heat[:, None] if bool((heat != 1).any()) else logits
        centred = centred.sub_(centred.amax(dim=1, keepdim=True))
        if len(self.room) < len(rows) or self.room.shape[1:] != logits.shape[1:] or self.room.device != logits.device:
            self.room = torch.empty_like(logits)
        weight = torch.exp(centred, out=self.room[: len(rows)])
        total = weight.sum(dim=1)
        if self.greedy:
            token = centred.argmax(dim=1)
        else:
            uniform = torch.rand(len(rows), generator=self.generator, dtype=torch.float64, device=self.generator.device).to(logits.device)
            token = draw_by_weight(weight if self.top_p == 1 else nucleus(weight, self.top_p), uniform)
        logp = centred.gather(1, token[:, None])[:, 0] - total.log()
        entropy = (total.log() - (weight * centred).sum(dim=1) / total).cpu() if self.want_entropy else None
        return token.cpu(), logp.cpu(), entropy


def draw_by_weight(weight: Float[Tensor, "n V"], uniform: Float[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """One index a row with probability proportional to its weight >= 0, by inversion of `uniform` in [0,1): first a block, then in the block."""
    count, vocabulary = weight.shape
    filler = -vocabulary % BLOCK
    padded = (torch.nn.functional.pad(weight, (0, filler)) if filler else weight).view(count, -1, BLOCK)
    block, rest = _invert(padded.sum(dim=2).double(), uniform)
    inside, _ = _invert(padded[torch.arange(count, device=weight.device), block].double(), rest)
    return block * BLOCK + inside


def _invert(weight: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(index, where in [0,1) `uniform` lies inside that index's share)."""
    reach = weight.cumsum(dim=1)
    target = (uniform * reach[:, -1])[:, None]
    index = torch.searchsorted(reach, target, right=True).clamp(max=weight.shape[1] - 1)
    share = weight.gather(1, index)
    inside = 1 - (reach.gather(1, index) - target) / share
    return index[:, 0], inside[:, 0].clamp(0, 1 - 1e-12)


def nucleus(weight: Float[Tensor, "n V"], top_p: float) -> Float[Tensor, "n V"]:
    """The weights with all but the heaviest set to zero: the smallest set that holds `top_p` of each row's total."""
    ranked, order = weight.sort(dim=1, descending=True)
    before = ranked.cumsum(dim=1) - ranked
    return weight.scatter(1, order, ranked.masked_fill(before >= top_p * weight.sum(dim=1, keepdim=True), 0.0))
