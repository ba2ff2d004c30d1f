"""The small character-level policy of `toy_arith`: embedding, one GRU layer, a linear output, and a value head when asked for.

It provides what a real language model provides, by the same protocol: signals of given completions, and sampling from any prefix. Left out:
devices, chunks (a batch is one pass), compaction of finished rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.steerable import Steerable
from anypo.policy import Policy, Signals

ALPHABET = "0123456789+=?;"


class Samples(NamedTuple):
    """What a sampler returns, N rows of T tokens."""

    tokens: Tensor  # [N,T] int64, the end token counts as an action, 0 after it
    valid: Tensor  # [N,T] bool
    logp: Tensor  # [N,T] under the sampling temperature, 0 where not valid
    entropy: Tensor | None  # [N,T], None when not asked for
    finished: Tensor  # [N] bool: the end token was written
    source: Tensor  # [N] int64: index of the prompt


class GruPolicy(Steerable, Policy):
    """Character embedding, one GRU layer, a linear output, and a value head when asked for. Token 0 is the end token."""

    learning_rate = 5e-3
    optimizer = "adamw"
    imitation_rate = 1e-2  # learning rate of a supervised warm start
    context_limit = 256
    eos = 0

    def __init__(self, *, hidden: int = 64, value_head: bool = False, alphabet: str = ALPHABET, seed: int = 0) -> None:
        """`hidden`: width of embedding and state. The weights are the same with and without the value head, which starts at 0."""
        super().__init__()
        self.alphabet = alphabet
        self.vocabulary = len(alphabet) + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(self.vocabulary, hidden)
            self.gru = nn.GRU(hidden, hidden, batch_first=True)
            self.output = nn.Linear(hidden, self.vocabulary)
            self.value_head = nn.Linear(hidden, 1) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        provided = {"logp", "entropy", "logits", "hidden", "prompt_hidden", "prompt_logp", "prompt_mask"}
        self.provides = frozenset(provided | {"value", "action_value"}) if value_head else frozenset(provided)

    def encode(self, text: str) -> Int[Tensor, " L"]:
        """Tokens of a text. Raises ValueError for a character outside the alphabet."""
        return _encode(self.alphabet, text)

    def decode(self, tokens: Tensor) -> str:
        """The text before the first end token."""
        text = []
        for token in tokens.tolist():
            if token == self.eos:
                break
            text.append(self.alphabet[token - 1])
        return "".join(text)

    def parameter_groups(self) -> list[dict[str, Any]]:
        trunk = [p for name, p in self.named_parameters() if not name.startswith("value_head")]
        groups: list[dict[str, Any]] = [{"params": trunk, "role": "policy"}]
        if self.value_head is not None:
            groups.append({"params": list(self.value_head.parameters()), "role": "value"})
        return groups

    def states(self, context: Sequence[Tensor], action: Int[Tensor, "N T"]) -> Float[Tensor, "N T+1 D"]:
        """The state before every action and, last, after all of them: one pass over prompt + completion, padded on the right."""
        return self._read(context, action)[0]

    def _read(self, context: Sequence[Tensor], action: Int[Tensor, "N T"]) -> tuple[Float[Tensor, "N T+1 D"], Float[Tensor, "N S D"]]:
        """`states`, and the states of the whole pass, one after every token."""
        lengths = self._lengths(context)
        rows, horizon = action.shape
        tokens = action.new_zeros(rows, int(lengths.max()) + horizon)
        padded = nn.utils.rnn.pad_sequence(list(context), batch_first=True)
        tokens[:, : padded.shape[1]] = padded
        tokens.scatter_(1, lengths[:, None] + torch.arange(horizon), action)
        states, _ = self.gru(self.embedding(tokens))
        where = lengths[:, None] - 1 + torch.arange(horizon + 1)
        return states.gather(1, where[..., None].expand(-1, -1, states.shape[-1])), states

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """Signals [N,T], `logits` [N,T,V], `hidden` [N,T,D] (the state after reading each action) and, with it, `prompt_hidden` [N,D] (after the
        prompt).

        `value` belongs to the state before the action, `action_value` to the one after reading it (the same head).
        `logp`, `entropy` and `logits` are those of the tempered policy where the batch carries
        the signal `temperature` [N]. `prompt_logp` [N,L]: the log-probs of the prompt's own tokens, untempered, and with it `prompt_mask` [N,L],
        False for the first token, which nothing predicts.
        """
        states, passed = self._read(batch.context, batch.action)
        before = states[:, :-1]
        signals = Signals()
        if needs & {"logp", "entropy", "logits"}:
            logits = self.logits(before)
            temperature = batch.signals.get("temperature")
            if temperature is not None:
                logits = logits / temperature.to(logits)[:, None, None]
            log_probs = logits.log_softmax(-1)
            if "logp" in needs:
                logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
                signals["logp"] = torch.where(batch.mask, logp, torch.zeros_like(logp))
            if "entropy" in needs:
                signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
            if "logits" in needs:
                signals["logits"] = logits
        if "value" in needs:
            assert self.value_head is not None
            signals["value"] = self.value_head(before)[..., 0]
        if "action_value" in needs:
            assert self.value_head is not None
            signals["action_value"] = self.value_head(states[:, 1:])[..., 0]
        if needs & {"prompt_logp", "prompt_mask"}:
            signals["prompt_logp"], signals["prompt_mask"] = self._prompt_logp(batch.context, passed)
        if "hidden" in needs:
            signals["hidden"] = states[:, 1:]
        if needs & {"hidden", "prompt_hidden"}:
            signals["prompt_hidden"] = states[:, 0]
        return signals

    def _prompt_logp(self, context: Sequence[Tensor], passed: Float[Tensor, "N S D"]) -> tuple[Tensor, Tensor]:
        prompt = nn.utils.rnn.pad_sequence(list(context), batch_first=True)
        place = torch.arange(prompt.shape[1])
        mask = (place > 0) & (place < self._lengths(context)[:, None])
        table = self.output(passed[:, : prompt.shape[1] - 1]).log_softmax(-1)
        logp = nn.functional.pad(table.gather(-1, prompt[:, 1:, None])[..., 0], (1, 0))
        return torch.where(mask, logp, torch.zeros_like(logp)), mask

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Tensor],
        samples: Sequence[int],
        *,
        max_tokens: int | Sequence[int],
        temperature: float | Sequence[float],
        generator: torch.Generator,
        greedy: bool = False,
        want_entropy: bool = True,
        stop: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Samples:
        """`samples[i]` continuations of `prompts[i]`, which may end in the beginning of a completion.

        `max_tokens` and `temperature` hold for all prompts or are given for each; T is the largest `max_tokens`. `greedy` takes the likeliest
        token. `stop(tokens so far [N,t], source [N])` says which rows end there without an end token. Raises ValueError for an empty prompt or
        one that leaves no room in `context_limit`.
        """
        count = len(prompts)
        source = torch.repeat_interleave(torch.arange(count), torch.tensor(samples))
        limit = torch.as_tensor(max_tokens).expand(count)[source]
        scale = torch.as_tensor(temperature, dtype=torch.float32).expand(count)[source]
        lengths = self._lengths(prompts)
        horizon = int(limit.max())
        if int(lengths.max()) + horizon > self.context_limit:
            raise ValueError(
                f"prompt and completion exceed the {self.context_limit} tokens of context; shorten the prompt or lower max_tokens"
            )
        state = self._begin(prompts, source, horizon)
        rows = len(source)
        tokens = torch.zeros(rows, horizon, dtype=torch.int64)
        valid = torch.zeros(rows, horizon, dtype=torch.bool)
        logp, entropy = torch.zeros(rows, horizon), torch.zeros(rows, horizon)
        finished, stopped = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
        for t in range(horizon):
            active = ~finished & ~stopped & (t < limit)
            if not active.any():
                break
            log_probs = (self.logits(self.pushed(self._last(state, active))) / scale[:, None]).log_softmax(-1)
            chosen = log_probs.argmax(-1) if greedy else torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
            chosen = torch.where(active, chosen, torch.zeros_like(chosen))
            tokens[:, t], valid[:, t] = chosen, active
            logp[:, t] = torch.where(active, log_probs.gather(-1, chosen[:, None])[:, 0], logp[:, t])
            if want_entropy:
                entropy[:, t] = torch.where(active, -(log_probs.exp() * log_probs).sum(-1), entropy[:, t])
            finished |= active & (chosen == self.eos)
            if stop is not None:
                stopped |= active & stop(tokens[:, : t + 1], source)
            state = self._advance(state, chosen)
        return Samples(tokens, valid, logp, entropy if want_entropy else None, finished, source)

    # -- what a policy with another network inside replaces ------------------------------------------------------------------------------

    def logits(self, states: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """The output, read off states."""
        return self.output(states)

    def _begin(self, prompts: Sequence[Tensor], source: Int[Tensor, " N"], horizon: int) -> Any:
        """What sampling carries from token to token, one row for each entry of `source`; up to `horizon` tokens will follow."""
        return self.states(prompts, torch.zeros(len(prompts), 0, dtype=torch.int64))[:, 0][source][None].contiguous()

    def _last(self, state: Any, active: Tensor) -> Float[Tensor, "N D"]:
        """The states that the next tokens are drawn from; rows that are not `active` [N] may hold anything."""
        return state[0]

    def _advance(self, state: Any, chosen: Int[Tensor, " N"]) -> Any:
        """After one more token a row."""
        return self.gru(self.embedding(chosen)[:, None], state)[1]

    def _lengths(self, prompts: Sequence[Tensor]) -> Tensor:
        lengths = torch.tensor([len(p) for p in prompts])
        if int(lengths.min()) == 0:
            raise ValueError(f"prompt {int(lengths.argmin())} is empty; a prompt needs at least one token")
        return lengths


@functools.lru_cache(maxsize=8192)
def _encode(alphabet: str, text: str) -> Tensor:
    unknown = sorted(set(text) - set(alphabet))
    if unknown:
        raise ValueError(f"the character '{unknown[0]}' is not in this policy's alphabet '{alphabet}'; pass GruPolicy(alphabet=...)")
    return torch.tensor([alphabet.index(c) + 1 for c in text], dtype=torch.int64)


def imitate(policy: GruPolicy, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    """One supervised step: the mean log-prob of the batch's tokens goes up."""
    loss = -policy.evaluate(batch, {"logp"}).logp.sum() / batch.mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
