"""MaskedPolicy: a masked-diffusion language model as a policy over tokens.

The likelihood of a block that was denoised in several passes is a sum over reveal orders. What stands in for it is the block's prefix-block state:
prompt and finished blocks visible, the block masked, one call of the network, one log-prob a token. A method that hides more of the prompt and of
the finished blocks puts a view into the batch's signals (see `states.py`). Left out: value heads, LoRA, caches between blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from safetensors.torch import save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.masked.decode import Decoded, Decoder
from anypo.domains.masked.states import TAILS, VIEW_ANSWER, VIEW_ORDER, VIEW_PROMPT, block_states, canvas, logits_of
from anypo.policy import Policy, Signals

NEVER = -1e9  # logit of the mask token, which is no answer


class Samples(NamedTuple):
    """What a policy of text returns from sampling (see `anypo.domains.language.sampler`), and how it was decoded."""

    tokens: Tensor  # [N,T] int64
    valid: Tensor  # [N,T] bool: up to and with the first end token
    logp: Tensor  # [N,T] in the prefix-block states, 0 where not valid
    entropy: Tensor  # [N,T]
    finished: Tensor  # [N] bool: an end token was written, or, for a model without one, the limit was reached
    source: Tensor  # [N] int64: index of the prompt
    decoded: Decoded


class Characters:
    """One token a character of the alphabet, after which comes the mask token. `end`: characters that end a text."""

    def __init__(self, alphabet: str, end: str = "") -> None:
        self.alphabet, self.end = alphabet, end
        self.mask_id, self.eos_ids = len(alphabet), tuple(alphabet.index(c) for c in end)

    def encode(self, text: str) -> Int64[Tensor, " L"]:
        """Tokens of a text. Raises ValueError for a character outside the alphabet."""
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise ValueError(
                f"the character '{unknown[0]}' is not in this model's alphabet '{self.alphabet}'; choose another task or model"
            )
        return torch.tensor([self.alphabet.index(c) for c in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text before the first end token; a mask token shows as an underscore."""
        text = "".join((self.alphabet + "_")[t] for t in tokens.tolist())
        for c in self.end:
            text = text.split(c)[0]
        return text


class MaskedPolicy(Policy):
    """A network from `(ids [B,L], attention [B,L] bool)` to logits [B,L,V], or to an object with `.logits`, and a tokenizer with `encode`, `decode`,
    `mask_id` and `eos_ids`.

    Signals are [N,T] and zero outside the mask: `logp` and `entropy` of the tempered distribution in the prefix-block states; `logits` [N,T,V] have
    these log-probs as their log-softmax. `views` is no signal but says that the batch's views are heeded. `batch.segment` is the block of every
    place, `batch.valid` the places of blocks that were begun. The temperature is the signal `temperature` [N] where present, else the attribute.
    """

    provides = frozenset({"logp", "entropy", "logits", "views"})
    learning_rate = 3e-4  # for networks as small as the built-in one
    optimizer = "adam"
    unit = "tokens"

    def __init__(
        self, network: nn.Module, tokenizer: Any, *, tail: str = "drop", temperature: float = 1.0, context_limit: int = 32,
        token_budget: int = 65536,
    ) -> None:  # fmt: skip
        """`tail`: what a state holds after its block. `token_budget`: tokens of states in one pass, which bounds the memory. Raises ValueError for
        an unknown tail or a temperature that is not above 0."""
        super().__init__()
        if tail not in TAILS:
            raise ValueError(f"unknown tail '{tail}'; use {' or '.join(TAILS)}")
        if not temperature > 0:
            raise ValueError(f"the temperature must be positive, not {temperature}")
        self.network, self.tokenizer, self.tail = network, tokenizer, tail
        self.temperature, self.context_limit, self.token_budget = temperature, context_limit, token_budget
        self.mask_id, self.eos_ids = int(tokenizer.mask_id), tuple(tokenizer.eos_ids)

    def encode(self, prompt: str) -> Int64[Tensor, " L"]:
        """Tokens of a prompt."""
        return torch.as_tensor(self.tokenizer.encode(prompt), dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of an answer."""
        return self.tokenizer.decode(tokens)

    # -- signals -------------------------------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """Differentiable signals of the batch's actions; `batch.context` is a list of N prompts, 1-D int64. One state for each block (with a
        `view_order`: for each turn of a block) of each row that has actions. Raises ValueError for a batch without blocks."""
        if batch.segment is None:
            raise ValueError("a masked model is evaluated block by block; give the batch its `segment` [N,T], the block of every place")
        hidden = (batch.signals.get(VIEW_PROMPT), batch.signals.get(VIEW_ANSWER))
        order = batch.signals.get(VIEW_ORDER, torch.zeros_like(batch.segment))
        turns = int(order.max()) + 1 if order.numel() else 1
        segment = batch.segment * turns + order
        table = canvas(batch.context, batch.action, segment, batch.attended, self.mask_id, *hidden)
        row, place = batch.mask.nonzero(as_tuple=True)
        states, of_action = torch.unique(torch.stack([row, segment[row, place]], 1), dim=0, return_inverse=True)
        limit = batch.signals.get("limit", torch.full_like(batch.group, batch.horizon))
        ids = block_states(table, states[:, 0], states[:, 1], self.mask_id, self.tail, limit, turns)
        logits = self.read(ids, of_action, table.offset[row] + place, self._temperature(batch)[row])
        log_probs = logits.log_softmax(-1)
        signals = Signals()
        if "logp" in needs:
            signals["logp"] = _spread(log_probs.gather(-1, batch.action[row, place][:, None])[:, 0], batch.mask)
        if "entropy" in needs:
            signals["entropy"] = _spread(-(log_probs.exp() * log_probs).sum(-1), batch.mask)
        if "logits" in needs:
            signals["logits"] = _spread(logits, batch.mask)
        return signals

    def read(
        self, states: Int64[Tensor, "M L"], which: Int64[Tensor, " K"], place: Int64[Tensor, " K"], temperature: Float[Tensor, " K"]
    ) -> Float[Tensor, "K V"]:
        """Tempered float32 logits at place `place[k]` of state `which[k]`. States may be any mixture of tokens and masks, ABSENT where nothing is."""
        device = next(self.network.parameters()).device
        logits, distinct = logits_of(self.network, states.to(device))
        chosen = logits[distinct[which.to(device)], place.to(device)].float().to(states.device)
        chosen = chosen.index_fill(-1, torch.tensor([self.mask_id], device=chosen.device), NEVER)
        return chosen / temperature[:, None]

    def chunks(self, batch: Batch) -> Iterator[Tensor]:
        """Row indices of pieces of at most `token_budget` tokens of states."""
        if len(batch) == 0:
            return
        blocks = int(batch.segment.max()) + 1 if batch.segment is not None else 1
        longest = max(len(p) for p in batch.context) + batch.horizon
        yield from torch.arange(len(batch)).split(max(1, self.token_budget // (blocks * longest)))

    def _temperature(self, batch: Batch) -> Tensor:
        return batch.signals.get("temperature", torch.full((len(batch),), self.temperature)).float()

    # -- sampling ------------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Tensor], samples: Sequence[int], *, max_tokens: Sequence[int], generator: torch.Generator, block: int,
        threshold: float = 0.0, temperature: Sequence[float] | None = None, greedy: bool = False, begun: tuple[Tensor, Tensor] | None = None,
    ) -> Samples:  # fmt: skip
        """`samples[i]` answers to `prompts[i]`, block by block (see `decode.py`). `begun`: tokens [N,t] and depth [N] of answers to go on with, one a row;
        then `logp` and `entropy` have to be evaluated.

        Raises ValueError for an empty prompt or one that leaves no room in `context_limit`.
        """
        source = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(list(samples)))
        limit = torch.tensor(list(max_tokens))[source]
        for prompt, most in zip(prompts, max_tokens, strict=True):
            if len(prompt) == 0 or len(prompt) + most > self.context_limit:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens and an answer of {most} do not fit (at least 1, and {self.context_limit} of context)"
                )
        heat = torch.tensor(list(temperature) if temperature is not None else [self.temperature] * len(prompts))[source]

        def read(states: Tensor, places: Tensor, rows: Tensor) -> Tensor:
            which = torch.arange(len(states))[:, None].expand(places.shape)
            logits = self.read(states, which.flatten(), places.flatten(), heat[rows][:, None].expand(places.shape).flatten())
            return logits.log_softmax(-1).view(*places.shape, -1)

        decoder = Decoder(read, generator, block, threshold, self.mask_id, self.eos_ids, self.tail, greedy)
        found = decoder([prompts[i] for i in source.tolist()], limit, begun)
        finished = found.finished if self.eos_ids else torch.ones_like(found.finished)
        return Samples(found.tokens, found.mask, found.logp, found.entropy, finished, source, found)

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the network: by its own `save_pretrained` where it has one, else as safetensors with what rebuilds a built-in one."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        own: Any = getattr(self.network, "save_pretrained", None)
        if own is not None:
            own(folder)
            return
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in self.network.state_dict().items()}, folder / "model.safetensors"
        )
        configuration = getattr(self.network, "configuration", None)
        if configuration is not None:
            described = {"network": configuration, "alphabet": self.tokenizer.alphabet, "end": self.tokenizer.end, "tail": self.tail}
            (folder / "config.json").write_text(json.dumps(described, indent=1))


def _spread(values: Float[Tensor, "K ..."], mask: Tensor) -> Tensor:
    """The values of the masked positions at their places in [N,T,...], 0 elsewhere."""
    out = values.new_zeros((*mask.shape, *values.shape[1:]))
    return out.masked_scatter(mask.view(*mask.shape, *[1] * (values.dim() - 1)).expand_as(out), values)
