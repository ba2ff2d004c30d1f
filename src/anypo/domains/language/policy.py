"""LanguagePolicy: a Hugging Face causal language model as a policy over tokens.

Rows of a batch are evaluated as packed trees (see `tree.py`), so that the prompt of a group, and every other shared prefix, is computed once;
only positions that predict an action reach the read-out (see `logprobs.py`). A model whose attention cannot take a tree mask falls back to
plain rows, which the log says once. Left out: encoder-decoder models and heads that are not linear.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language import sampler
from anypo.domains.language.internal import layers_in, signal_of, signals_of
from anypo.domains.language.logprobs import tempered_logits, token_logprobs
from anypo.domains.language.network import Network, States, pad_right
from anypo.domains.language.sampler import Samples
from anypo.domains.language.steerable import Steerable
from anypo.domains.language.tree import bins, row_lengths
from anypo.policy import Loss, LossFunction, Policy, Signals

LARGE = 50_000_000  # parameters; a larger model has the small learning rate and the small token budget


class LanguagePolicy(Steerable, Policy):
    """A causal language model with its tokenizer, optionally a value head and LoRA adapters.

    Signals are [N,T] float32 and zero outside the positions named, unless said otherwise:
    - `logp`, `entropy` (where `mask`): of the tempered distribution that the row was sampled from.
    - `value` (where `valid`): of the state before the action; `action_value`: the same head after reading it. Both need `value_head=True`.
    - `hidden` [N,T,D] (where `valid`): the state after reading the action; with it comes `prompt_hidden` [N,D], after the prompt's last token.
    - `logits` [N,T,V] (where `mask`): tempered, so that their log-softmax holds `logp`. Large: only for methods that must see them.
    - `layer_logp_<l>` (where `mask`): as `logp`, read off the state after layer l (see `internal.py`).
    - `prompt_logp` [N,L]: log-probs of the prompt's own tokens, untempered; with it comes `prompt_mask` [N,L], False for the first token, which
      nothing predicts.

    The temperature of a row is `batch.signals["temperature"]` [N] where present, else the attribute `temperature`.
    """

    unit = "tokens"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        value_head: bool = False,
        hidden_layer: int | None = None,  # index into the model's hidden states (0 = embeddings); None = the last one, after the norm
        lora_rank: int | None = None,  # None trains all weights
        temperature: float = 1.0,  # > 0
        token_budget: int | None = None,  # packed tokens in one pass, which bounds the memory; None = 1024 for a large model, else 4096
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"the temperature must be positive, not {temperature}; for the likeliest tokens sample with greedy=True")
        self.tokenizer, self.hidden_layer, self.temperature = tokenizer, hidden_layer, temperature
        size = sum(p.numel() for p in model.parameters())
        self.is_large = size > LARGE
        self.token_budget = token_budget or (1024 if self.is_large else 4096)
        self.has_lora = lora_rank is not None
        self._gradient_only = False
        self.model: Any = model.eval() if lora_rank is None else _with_lora(model, lora_rank).eval()
        self.network = Network(self.causal_lm)
        if gradient_checkpointing:
            self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # transformers checkpoints layers in training mode only
            self.network.checkpointing = True
        embeddings = self.causal_lm.get_input_embeddings().weight
        self.value_head = nn.Linear(embeddings.shape[1], 1, device=embeddings.device) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self.provides = frozenset(
            {"logp", "entropy", "hidden", "logits", "prompt_logp"}
            | ({"value", "action_value"} if value_head else set())
            | signals_of(self.network.config.num_hidden_layers)
        )
        self.learning_rate = 1e-5 if self.is_large and not self.has_lora else 1e-4

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model itself, adapters included."""
        return self.model.get_base_model() if self.has_lora else self.model

    # -- signals -------------------------------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """Differentiable signals of the batch's actions; see the class for shapes. `batch.context` is a list of N prompts, 1-D int64."""
        self.check(needs, "this evaluation")
        if not any(len(prompt) for prompt in batch.context) or batch.horizon == 0:
            raise ValueError("nothing to evaluate: the batch has no prompts or no actions")
        sequences, prompt_lengths = self._sequences(batch, whole=not needs.isdisjoint({"hidden", "action_value"}))
        internal = layers_in(needs)
        layer = self.hidden_layer if "hidden" in needs or not internal else internal[0]
        states = self.network.states(sequences, prompt_lengths, self.token_budget, layer if "hidden" in needs or internal else None)
        before, after = self._places(batch, states, prompt_lengths)
        signals = Signals()
        if "logp" in needs or "entropy" in needs:
            logp, entropy = self._logprobs(batch, states, before, "entropy" in needs)
            signals |= {"logp": logp} if "logp" in needs else {}
            signals |= {"entropy": entropy} if "entropy" in needs else {}
        for name, place in (("value", before), ("action_value", after)):
            if name in needs:
                assert self.value_head is not None  # `check` has seen to it
                value = self.value_head(states.final[place.clamp(min=0)].to(self.value_head.weight.dtype))[..., 0].float()
                signals[name] = value * (place >= 0)
        if "hidden" in needs:
            signals["hidden"] = states.chosen[after.clamp(min=0)] * (after >= 0)[..., None]
            ends = torch.tensor(prompt_lengths, device=before.device)[:, None] - 1
            signals["prompt_hidden"] = states.chosen[states.node.gather(1, ends)[:, 0]]
        if "logits" in needs:
            signals["logits"] = self._logits(batch, states, before)
        if "prompt_logp" in needs:
            signals["prompt_logp"], signals["prompt_mask"] = self._prompt_logprobs(batch, states)
        for inside in internal:
            if inside != layer:
                states = self.network.states(sequences, prompt_lengths, self.token_budget, inside)
            signals[signal_of(inside)] = self._logprobs(batch, replace(states, final=states.chosen), before, False)[0]
        return signals

    def chunks(self, batch: Batch) -> Iterator[Tensor]:
        """Row indices of pieces of at most `token_budget` packed tokens; rows of one prompt stay together where they fit."""
        sequences, prompt_lengths = self._sequences(batch, whole=False)
        if self.network.takes_trees:
            for rows in bins(sequences, self.token_budget, prompt_lengths):
                yield torch.tensor(rows)
            return
        piece: list[int] = []
        for row in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
            if piece and (len(piece) + 1) * len(sequences[row]) > self.token_budget:
                yield torch.tensor(piece)
                piece = []
            piece.append(row)
        if piece:
            yield torch.tensor(piece)

    def backward(self, batch: Batch, needs: Set[str], loss_fn: LossFunction, recorded: Signals | None = None) -> Loss:
        """As in Policy. With `recorded` values the log-probs are not computed again, only their gradient is."""
        self._gradient_only, direct = recorded is not None, self.network.direct
        if direct is not None:
            direct.in_place = True
        try:
            return super().backward(batch, needs, loss_fn, recorded)
        finally:
            self._gradient_only = False
            if direct is not None:
                direct.in_place = False

    def _sequences(self, batch: Batch, whole: bool) -> tuple[list[Tensor], list[int]]:
        """Prompt plus completion of every row, and the prompt lengths. A completion's last token predicts nothing and is left out unless `whole`."""
        lengths = row_lengths(batch.attended).tolist()
        kept = [n if whole else max(n - 1, 0) for n in lengths]
        actions = batch.action.cpu()
        sequences = [torch.cat([prompt.cpu(), actions[i, : kept[i]]]) for i, prompt in enumerate(batch.context)]
        return sequences, [len(prompt) for prompt in batch.context]

    def _places(self, batch: Batch, states: States, prompt_lengths: list[int]) -> tuple[Int64[Tensor, "N T"], Int64[Tensor, "N T"]]:
        """Where the states before and after each action lie; -1 where the action does not exist."""
        first = torch.tensor(prompt_lengths)[:, None] + torch.arange(batch.horizon)
        exists = batch.attended.to(states.node.device)
        width = states.node.shape[1]
        before, after = (
            states.node.gather(1, at.clamp(max=width - 1).to(states.node.device)).masked_fill(~exists, -1) for at in (first - 1, first)
        )
        return before, after

    def _scale(self, batch: Batch) -> Float[Tensor, " N"]:
        """Factor on the read-out of every row: the model's own over the temperature."""
        temperature = batch.signals.get("temperature")
        if temperature is None:
            temperature = torch.full((len(batch),), self.temperature)
        return self.network.scale / temperature.float().to(self.network.device)

    def _logprobs(self, batch: Batch, states: States, before: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies [N,T]. An action that several rows share (same state, token and temperature) is read once."""
        mask = batch.mask.to(before.device)
        scale = self._scale(batch)[:, None].expand(mask.shape)[mask]
        kinds, kind = scale.unique(return_inverse=True)
        key = torch.stack([before[mask], batch.action.to(before.device)[mask], kind], dim=1)
        distinct, where = key.unique(dim=0, return_inverse=True)
        hidden, weight = self.network.readout(states.final[distinct[:, 0]])
        logp, entropy = token_logprobs(hidden, weight, distinct[:, 1], kinds[distinct[:, 2]], want_entropy, self._gradient_only)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(mask.shape).masked_scatter(mask, values[where])

        return spread(logp), spread(entropy) if entropy is not None else None

    def _prompt_logprobs(self, batch: Batch, states: States) -> tuple[Float[Tensor, "N L"], Bool[Tensor, "N L"]]:
        """Log-probs of the prompts' tokens and where they exist. A token that several rows share is read once."""
        prompts, mask = (x.to(states.node.device) for x in pad_right([prompt.cpu() for prompt in batch.context]))
        mask[:, 0] = False
        before = states.node[:, : prompts.shape[1] - 1][mask[:, 1:]]
        distinct, where = torch.stack([before, prompts[mask]], dim=1).unique(dim=0, return_inverse=True)
        hidden, weight = self.network.readout(states.final[distinct[:, 0]])
        scale = hidden.new_full((len(distinct),), self.network.scale, dtype=torch.float32)
        logp, _ = token_logprobs(hidden, weight, distinct[:, 1], scale, False, self._gradient_only)
        return logp.new_zeros(mask.shape).masked_scatter(mask, logp[where]), mask

    def _logits(self, batch: Batch, states: States, before: Tensor) -> Float[Tensor, "N T V"]:
        mask = batch.mask.to(before.device)
        hidden, weight = self.network.readout(states.final[before[mask]])
        logits = tempered_logits(hidden, weight, self._scale(batch)[:, None].expand(mask.shape)[mask])
        return logits.new_zeros((*mask.shape, logits.shape[1])).masked_scatter(mask[..., None], logits)

    # -- sampling and text -----------------------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Tensor],
        samples: int | Sequence[int],
        *,
        max_tokens: int | Sequence[int],
        generator: torch.Generator,
        temperature: float | Sequence[float] | None = None,
        stop: Callable[[Tensor, Tensor], Tensor] | None = None,
        want_entropy: bool = False,
        top_p: float = 1.0,
        greedy: bool = False,
        eos_ids: Sequence[int] | None = None,
    ) -> Samples:
        """Completions of every prompt under the current weights; see `sampler.sample`. Temperature and end tokens are the policy's by default.

        A limit that would leave the context is cut to it. Raises ValueError for a prompt that fills the context by itself.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        for i, prompt in enumerate(prompts):
            room = self.context_limit - len(prompt)
            if room < 1:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens but the model's context holds {self.context_limit}; shorten the prompt"
                )
            limits[i] = min(limits[i], room)
        if self.push is not None and self.hidden_layer is not None:
            raise ValueError("sampling can be steered at the last hidden states alone; leave the policy's hidden_layer at None")
        self.network.push = self.push
        return sampler.sample(
            self.network,
            prompts,
            samples,
            max_tokens=limits,
            temperature=self.temperature if temperature is None else temperature,
            generator=generator,
            eos_ids=self.eos_ids if eos_ids is None else eos_ids,
            stop=stop,
            want_entropy=want_entropy,
            top_p=top_p,
            greedy=greedy,
            pad=self.pad_id,
        )

    def encode(self, prompt: str | list[dict[str, Any]]) -> Int64[Tensor, " L"]:
        """Tokens of a prompt. Text becomes a user's message where the tokenizer has a chat template, else it is taken as it is."""
        opening = [t for t in self.tokenizer("").input_ids if t not in self.eos_ids]  # what the tokenizer puts before every text
        if self.tokenizer.chat_template is None:
            if not isinstance(prompt, str):
                raise ValueError("this model's tokenizer has no chat template, so a prompt must be plain text, not a list of messages")
            ids = self.tokenizer(prompt, add_special_tokens=False).input_ids
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if ids[: len(opening)] != opening:
            ids = opening + ids
        if not ids:
            raise ValueError("the prompt is empty and the tokenizer has no token to begin with; write at least one character")
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, tokens: Int64[Tensor, " T"]) -> str:
        """Text of tokens, special ones skipped."""
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion, from the tokenizer and the model's generation settings."""
        settings = getattr(self.causal_lm, "generation_config", None)
        named = getattr(settings, "eos_token_id", None)
        found = [self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
        return tuple(sorted({t for t in found if t is not None}))

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.eos_ids or (0,))[0]

    @property
    def context_limit(self) -> int:
        """Tokens that prompt and completion may have together."""
        return int(getattr(self.causal_lm.config, "max_position_embeddings", None) or self.tokenizer.model_max_length)

    # -- parameters, copies, files ---------------------------------------------------------------------------------------------------------

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters with the role "lora" or "policy", and "value" for the value head."""
        groups = [{"params": [p for p in self.model.parameters() if p.requires_grad], "role": "lora" if self.has_lora else "policy"}]
        if self.value_head is not None:
            groups.append({"params": list(self.value_head.parameters()), "role": "value"})
        return groups

    def snapshot(self) -> LanguagePolicy:
        """A frozen copy. Weights that are frozen already (the base of a LoRA model) and the tokenizer are shared, not copied."""
        shared = {id(p): p for p in self.parameters() if not p.requires_grad} | {id(self.tokenizer): self.tokenizer}
        twin = copy.deepcopy(self, shared)
        twin.requires_grad_(False)
        return twin.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Model (or adapters) and tokenizer as Hugging Face files; a value head beside them as `value_head.safetensors`."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.value_head is not None:
            from safetensors.torch import save_file

            save_file(dict(self.value_head.state_dict()), Path(folder) / "value_head.safetensors")


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model with trainable adapters on all its linear layers (read-out excepted) and everything else frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError('LoRA needs the package peft: pip install "anypo[lora]"') from None
    if rank < 1:
        raise ValueError(f"lora_rank must be at least 1, not {rank}")
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
