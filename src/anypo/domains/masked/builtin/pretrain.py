"""Pre-training of the built-in masked model: `python -m anypo.domains.masked.builtin.pretrain --out DIR --target A`.

Masked diffusion as published for language (a share t of the tokens, uniform in (0,1], is masked; cross-entropy on them, weighted by 1/t) on right
answers to the training prompts of split_sum. Half of the texts keep their prompt whole, the others mask everywhere, so that the model also knows
states in which prompt and answer are hidden in part. Held-out prompts are never seen. Training stops early, once sampled decoding in blocks of two,
one pass each, is right on the target share of the training prompts (0.4 for the shipped model, about half a minute of one core), which leaves room
for reinforcement learning; going on it would come to 0.8 and more.

Left out: a schedule of the learning rate, resuming.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from anypo.domains.masked.network import Bidirectional
from anypo.domains.masked.policy import Characters, MaskedPolicy
from anypo.domains.masked.tasks import SplitSum, exact_accuracy

ALPHABET = "0123456789+="
BLOCK = 2  # tokens, of the decoding that decides when to stop
INTERVAL, LIMIT = 25, 4000  # steps between two looks at the accuracy, and at the most
LEAST_SHARE = 0.05  # of masked tokens, in the weight alone: bounds 1/t


def masked_loss(policy: MaskedPolicy, ids: Tensor, prompt: int, generator: torch.Generator) -> Tensor:
    """The weighted cross-entropy of texts [B,L] whose first `prompt` tokens are the prompt."""
    share = 1 - torch.rand(len(ids), 1, generator=generator)
    masked = torch.rand(ids.shape, generator=generator) < share
    masked[: len(ids) // 2, :prompt] = False
    logits = policy.network(torch.where(masked, policy.mask_id, ids), torch.ones_like(masked))
    entropy = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    return (entropy * masked / share.clamp(min=LEAST_SHARE)).sum() / ids.numel()


def pretrain(
    target: float = 0.4, seed: int = 0, rows: int = 256, learning_rate: float = 2e-3, width: int = 64, layers: int = 2
) -> MaskedPolicy:
    """A fresh model, trained until its accuracy reaches the target. Raises ValueError when it does not within `LIMIT` steps."""
    tokenizer = Characters(ALPHABET)
    policy = MaskedPolicy(Bidirectional(len(ALPHABET) + 1, width=width, layers=layers, seed=seed), tokenizer)
    source, rng, generator = SplitSum(), np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    for step in range(LIMIT):
        if step % INTERVAL == 0 and exact_accuracy(policy, BLOCK, source.trained) >= target:
            return policy
        texts = [prompt + answer for prompt, answer in source.demonstrations(rows, rng)]
        ids = torch.stack([policy.encode(text) for text in texts])
        loss = masked_loss(policy, ids, len(source.trained[0].content), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise ValueError(f"the accuracy stayed below {target:.2f} for {LIMIT} steps; lower the target")


def main() -> None:
    parser = argparse.ArgumentParser(description="pre-train the built-in masked model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--target", type=float, default=0.4, help="accuracy at which training stops, in (0,1)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = pretrain(arguments.target, arguments.seed)
    policy.save_pretrained(arguments.out)
    source = SplitSum()
    for name, prompts in (("training", source.trained), ("held-out", source.kept)):
        found = {f"block {block}": round(exact_accuracy(policy, block, prompts), 3) for block in (1, 2, 4)}
        print(f"accuracy of sampled decoding, one pass a block, {name} prompts: {json.dumps(found)}")


if __name__ == "__main__":
    main()
