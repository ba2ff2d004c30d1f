"""Stand-ins for tests of tasks: a policy that writes what a function says, and a run around it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from anypo.domains.language.sampler import Samples

END = 0


class ScriptedPolicy:
    """One token a character, 0 ends. `reply(text so far, draw)` writes each completion; `draw` in [0,1) comes from the generator."""

    def __init__(self, reply: Callable[[str, float], str], context_limit: int = 256, ends: bool = True) -> None:
        self.reply, self.context_limit, self.ends, self.temperature = reply, context_limit, ends, 1.0
        self.calls: list[dict[str, Any]] = []

    def encode(self, prompt: Any) -> torch.Tensor:
        text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
        return torch.tensor([ord(c) for c in text], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(chr(t) for t in tokens.tolist() if t != END)

    def tokenizer(self, text: str, add_special_tokens: bool = True) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def sample(self, prompts, samples, *, max_tokens, temperature, generator, stop=None, want_entropy=False):
        self.calls.append({"prompts": [self.decode(p) for p in prompts], "max_tokens": max_tokens, "temperature": temperature})
        rows, source, finished = [], [], []
        for i, prompt in enumerate(prompts):
            for _ in range(samples[i]):
                text = self.reply(self.decode(prompt), float(torch.rand(1, generator=generator)))
                tokens = [*map(ord, text), *([END] if self.ends else [])]
                whole = False
                for length in range(1, len(tokens) + 1):
                    ended = stop is not None and bool(stop(torch.tensor([tokens[:length]]), torch.tensor([i]))[0])
                    if ended or tokens[length - 1] == END:
                        tokens, whole = tokens[:length], True
                        break
                finished.append(whole and len(tokens) <= max_tokens[i])
                rows.append(tokens[: max_tokens[i]])
                source.append(i)
        width = max(map(len, rows), default=0)
        valid = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
        tokens = torch.zeros_like(valid, dtype=torch.int64)
        for row, written in zip(tokens, rows, strict=True):
            row[: len(written)] = torch.tensor(written, dtype=torch.int64)
        logp = torch.where(valid, -0.5, 0.0)
        return Samples(tokens, valid, logp, logp.abs() if want_entropy else None, torch.tensor(finished), torch.tensor(source))


def make_run(policy: Any, needs: frozenset[str] = frozenset(), seed: int = 0) -> Any:
    """What tasks read of a run."""
    return SimpleNamespace(
        policy=policy,
        generator=torch.Generator().manual_seed(seed),
        rng=np.random.default_rng(seed),
        version=3,
        method=SimpleNamespace(needs=lambda: needs),
    )
