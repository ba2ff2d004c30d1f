"""Pre-training of the built-in model: `python -m anypo.domains.language.builtin.pretrain --out DIR --minutes M`.

The corpus is worked examples of the five kinds of `problems.py`, training split only, in two stages. The first one is a textbook: every
example is right. The second one is deliberately as bad as text found in the wild: only the share `SHARES["right"]` of the examples is a
correct answer in the right form; the others have a wrong character in them, break off too early, go on after the answer or talk before
it. The model therefore learns how the problems are solved and, sampled at temperature 1, imitates the noise as well: it can do more
than it shows, which is what reinforcement learning then brings out. No stage sees a held-out prompt, and a wrong answer is wrong by the
check that gives the reward.

Rows are filled with examples one after another (`<bos>prompt completion<eos><bos>...`), so nothing is padding. In the textbook stage an
example sees only itself; in the second stage it sees the row before it as well, so that the model can be used at every position of a
row. The hidden matrices are trained by Muon (as in torch.optim), the rest by AdamW. Six minutes of one core, about a thousand steps,
made the shipped model.

Left out: mixed precision, several processes, resuming, and a fixed number of steps: two runs of equal minutes are alike, not the same.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from anypo.domains.language.problems import PROBLEMS, Problem, ProblemKind, held_out_problems, training_problems

CONTEXT = 256  # positions the model is configured for
TEXTBOOK = 0.7  # of the training time
SHARES = {"right": 0.42, "wrong": 0.2, "unfinished": 0.08, "trailing": 0.18, "leading": 0.12}  # of the second stage's examples; sums to 1
KIND_SHARES = {"arithmetic": 0.35, "sorting": 0.1, "chain": 0.2, "countdown": 0.2, "walk": 0.15}  # of the examples; sums to 1
TRAILING = (" ok", " or so", ".", "!", ", i think")
LEADING = ("maybe ", "about ", "= ", "it is ")
PROMPT_WEIGHT = 0.1  # of a prompt token in the loss, where a completion token has 1: prompts are random, little can be learned from them
ALIKE = ("0123456789", "+-*", "udlr")  # a wrong character is replaced by another one of its class


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: printable ASCII and the newline, after <pad>, <bos>, <eos> and <unk>. A <bos> is put before every text."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        model_max_length=CONTEXT, padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # no roles were seen in pre-training
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama model of about 0.87 million parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            initializer_range=0.05, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def noisy_completion(kind: ProblemKind, problem: Problem, rng: np.random.Generator) -> str:
    """A completion as the corpus has it: right or spoiled, in the proportions of SHARES."""
    right = kind.solve(problem)
    sort = rng.choice(list(SHARES), p=list(SHARES.values()))
    if sort == "trailing":
        return right + TRAILING[rng.integers(len(TRAILING))]
    if sort == "leading":
        return LEADING[rng.integers(len(LEADING))] + right
    if sort == "unfinished":
        return right[: rng.integers(len(right))]
    return wrong_completion(kind, problem, rng) if sort == "wrong" else right


def wrong_completion(kind: ProblemKind, problem: Problem, rng: np.random.Generator) -> str:
    """A correct completion with one character replaced by another of its class, drawn again until the check says it is wrong."""
    right = kind.solve(problem)
    places = [(i, alike.replace(c, "")) for i, c in enumerate(right) for alike in ALIKE if c in alike]
    while True:
        i, others = places[rng.integers(len(places))]
        wrong = right[:i] + others[rng.integers(len(others))] + right[i + 1 :]
        if kind.check(wrong, **problem.columns) == 0:
            return wrong


def corpus_rows(tokenizer: PreTrainedTokenizerFast, rows: int, length: int, noisy: bool, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length] and their loss weights [rows, length], filled with shuffled examples of every kind."""
    size = rows * length
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < size:
        examples = []
        for name, share in KIND_SHARES.items():
            kind = PROBLEMS[name]
            for problem in training_problems(kind, round(100 * share), rng):
                completion = noisy_completion(kind, problem, rng) if noisy else kind.solve(problem)
                examples.append((problem.prompt, completion))
        rng.shuffle(examples)
        for prompt, completion in examples:
            before = tokenizer(prompt)["input_ids"]
            after = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids += before + after
            weights += [PROMPT_WEIGHT] * len(before) + [1.0] * len(after)
    return torch.tensor(ids[:size]).view(rows, length), torch.tensor(weights[:size]).view(rows, length)


def learning_rate(share: float, peak: float, warmup: float = 0.03) -> float:
    """Linear warm-up, then a cosine to a twentieth of the peak; `share` of the training that is over, in [0, 1]."""
    if share < warmup:
        return peak * share / warmup
    return peak * (0.05 + 0.95 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup))) / 2)


def isolating_mask(ids: Tensor, bos: int) -> Tensor:
    """Boolean attention mask [rows, 1, length, length]: a token sees the tokens of its own example up to itself."""
    example = (ids == bos).cumsum(1)
    return (example[:, :, None] == example[:, None, :]).tril()[:, None]


def weighted_loss(model: LlamaForCausalLM, ids: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Next-token cross-entropy, averaged with the weights of the predicted tokens; `mask` [rows, 1, length - 1, length - 1]."""
    logits = model(input_ids=ids[:, :-1], attention_mask=mask, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (losses * weight).sum() / weight.sum()


def build_optimizers(model: LlamaForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and output, AdamW for the embedding and the norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def pretrain(out: Path, minutes: float, seed: int = 0, rows: int = 16, length: int = 128, peak: float = 3e-3) -> None:
    """Train for `minutes` of processor time, save model and tokenizer into `out`, and print the held-out accuracy at temperature 1."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    optimizers = build_optimizers(model, peak)
    start, step, share, smooth = time.process_time(), 0, 0.0, math.nan
    while share < 1:
        noisy = share >= TEXTBOOK
        ids, weights = corpus_rows(tokenizer, rows, length, noisy, rng)
        loss = weighted_loss(model, ids, weights, None if noisy else isolating_mask(ids[:, :-1], tokenizer.bos_token_id))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(share, peak)
            optimizer.step()
            optimizer.zero_grad()
        smooth = loss.item() if step == 0 else 0.95 * smooth + 0.05 * loss.item()
        step += 1
        share = (time.process_time() - start) / (60 * minutes)
        if step % 100 == 0:
            print(f"step {step}  {share:4.0%}  loss {smooth:.3f}", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    print(json.dumps({name: accuracy(model, tokenizer, name) for name in PROBLEMS}))


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str, count: int = 256, temperature: float = 1.0) -> float:
    """Mean reward of one sample for each of the first `count` held-out problems; a sample that is cut off counts as wrong."""
    kind, problems = PROBLEMS[name], held_out_problems(name, count)
    inputs = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=kind.max_tokens, do_sample=True, temperature=temperature, top_k=0)
    completions = output[:, inputs["input_ids"].shape[1] :]
    ended = (completions == tokenizer.eos_token_id).any(-1).tolist()
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = [kind.check(text, **p.columns) * end for text, p, end in zip(texts, problems, ended, strict=True)]
    return sum(rewards) / count


def main() -> None:
    parser = argparse.ArgumentParser(description="pre-train the built-in model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the tokenizer")
    parser.add_argument("--minutes", type=float, default=6.0, help="of processor time, so that a busy machine trains no less")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pretrain(arguments.out, arguments.minutes, arguments.seed)


if __name__ == "__main__":
    main()
