"""One RL step of SmolLM2-135M, anypo beside TRL: seconds, peak memory, and where anypo's time goes.

The same work on both sides: 2 prompts of 128 tokens (`--prompt-tokens`), 8 samples each, 64 new tokens in every sample (no end token stops one
early), a reward, one update with AdamW. Each side runs in its own process, so that its peak memory is its own. The first step of each side warms up and is not
counted. A third process samples the same prompts with anypo and with `transformers.generate`.

    python benchmarks/language.py [--dtype float32|bfloat16] [--steps 3] [--prompt-tokens 128] [--threads N] [--json]

Wall-clock seconds suffer from whatever else the machine does, and two threads more than one; processor seconds of the process are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anypo.engines.memory import LARGE_PAGES, TUNABLES, wants_large_pages

SAMPLES, NEW_TOKENS = 8, 64
LEARNING_RATE = 1e-5
TEXTS = (
    "A train leaves the station at nine in the morning and travels at sixty kilometres an hour towards a town that is far away. ",
    "The garden behind the old house holds twelve apple trees, and every tree carries a different number of red apples this year. ",
)


def reward(completion: str) -> float:
    """Some number that differs between samples; what is rewarded does not matter for time and memory."""
    return sum(c in "aeiou" for c in completion) / 100


def prompt_text(tokenizer: Any, text: str, length: int = 128) -> str:
    """A text of exactly `length` tokens."""
    return tokenizer.decode(tokenizer(text * (length // 6), add_special_tokens=False).input_ids[:length])


class Clock:
    """Wall-clock and processor seconds of named parts."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        result = work()
        spent = self.parts.setdefault(name, [0.0, 0.0])
        spent[0] += time.perf_counter() - wall
        spent[1] += time.process_time() - processor
        return result

    def per_step(self, steps: int) -> dict[str, dict[str, float]]:
        return {name: {"seconds": wall / steps, "processor_seconds": cpu / steps} for name, (wall, cpu) in self.parts.items()}


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def run_anypo(folder: Path, dtype: str, steps: int, length: int) -> dict[str, Any]:
    from anypo.batch import Batch
    from anypo.domains.language.models import load_policy
    from anypo.policy import Loss, Signals

    policy = load_policy(str(folder), dtype=dtype)
    prompts = [torch.tensor(policy.tokenizer(prompt_text(policy.tokenizer, t, length), add_special_tokens=False).input_ids) for t in TEXTS]
    optimizer = torch.optim.AdamW([g | {"lr": LEARNING_RATE} for g in policy.parameter_groups()], fused=True)
    generator = torch.Generator().manual_seed(0)

    def generate() -> Batch:
        found = policy.sample(prompts, SAMPLES, max_tokens=NEW_TOKENS, generator=generator, eos_ids=())
        return Batch(found.tokens, found.valid, found.logp, found.source, [prompts[i] for i in found.source.tolist()])

    def score(batch: Batch) -> None:
        batch.reward = torch.tensor([reward(policy.decode(tokens)) for tokens in batch.action])
        grouped = batch.reward.view(len(prompts), SAMPLES)
        spread = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        batch.advantage = spread.view(-1, 1).expand(batch.mask.shape)

    def loss(batch: Batch, new: Signals) -> Loss:
        ratio = (new.logp - batch.logp).exp()
        gain = torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
        return Loss(-(gain * batch.mask).sum() / batch.mask.sum())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    clock = Clock()
    for step in range(steps + 1):
        clock = Clock() if step <= 1 else clock
        batch = clock.time("generate", generate)
        clock.time("score", lambda batch=batch: score(batch))
        clock.time("backward", lambda batch=batch: policy.backward(batch, {"logp"}, loss, Signals(logp=batch.logp)))
        clock.time("update", update)
    return {"split": clock.per_step(steps), "peak_gigabytes": peak_gigabytes()}


def run_trl(folder: Path, dtype: str, steps: int, length: int, checkpointing: bool) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    clock = Clock()
    generate = model.generate
    model.generate = lambda *args, **settings: clock.time("generate", lambda: generate(*args, **settings))

    class StepTimes(TrainerCallback):
        """Counts from the end of the first step."""

        begun = [0.0, 0.0]

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                clock.parts.clear()
                self.begun = [time.perf_counter(), time.process_time()]
            elif state.global_step == steps + 1:
                clock.parts["step"] = [time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]]

    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=dtype == "bfloat16", learning_rate=LEARNING_RATE, max_steps=steps + 1, seed=0,
            per_device_train_batch_size=len(TEXTS) * SAMPLES, num_generations=SAMPLES, max_completion_length=NEW_TOKENS,
            generation_kwargs={"min_new_tokens": NEW_TOKENS}, gradient_checkpointing=checkpointing, logging_steps=1000,
            report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [reward(c) for c in completions],
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": [prompt_text(tokenizer, t, length) for t in TEXTS] * 4}),
            processing_class=tokenizer,
            callbacks=[StepTimes()],
        )
        trainer.train()
    return {"split": clock.per_step(steps), "peak_gigabytes": peak_gigabytes()}


def run_sampling(folder: Path, dtype: str, steps: int, length: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from anypo.domains.language.models import load_policy

    policy = load_policy(str(folder), dtype=dtype)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    prompts = [torch.tensor(policy.tokenizer(prompt_text(policy.tokenizer, t, length), add_special_tokens=False).input_ids) for t in TEXTS]
    ids = torch.stack(prompts).repeat_interleave(SAMPLES, dim=0)
    settings = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": True,
        "top_k": 0,
        "attention_mask": torch.ones_like(ids),
    }
    work: dict[str, Callable[[], Any]] = {
        "anypo": lambda: policy.sample(prompts, SAMPLES, max_tokens=NEW_TOKENS, generator=torch.Generator().manual_seed(0), eos_ids=()),
        "transformers": lambda: plain.generate(ids, **settings),
    }
    clock = Clock()
    for step in range(steps + 1):
        clock = Clock() if step <= 1 else clock
        for name, run in work.items():
            clock.time(name, run)
    return {name: len(ids) * NEW_TOKENS / spent["seconds"] for name, spent in clock.per_step(steps).items()}


def child(side: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one side measured, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--folder",
        str(folder),
        "--dtype",
        arguments.dtype,
        "--steps",
        str(arguments.steps),
        "--prompt-tokens",
        str(arguments.prompt_tokens),
    ]
    command += ["--threads", str(arguments.threads)] if arguments.threads else []
    command += ["--no-checkpointing"] if arguments.no_checkpointing else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if wants_large_pages() and (arguments.large_pages == "both" or (arguments.large_pages == "anypo" and side != "trl")):
        environment[TUNABLES] = LARGE_PAGES
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides and the samplers, one after another."""
    from anypo.domains.language.models import load_policy

    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        load_policy("smollm2").save_pretrained(folder)
        anypo = child("anypo", Path(folder), arguments)
        trl = child("trl", Path(folder), arguments)
        tokens = child("sampling", Path(folder), arguments)
    step = {kind: sum(part[kind] for part in anypo["split"].values()) for kind in ("seconds", "processor_seconds")}
    peer = trl["split"]["step"]
    return {
        "dtype": arguments.dtype,
        "prompt_tokens": arguments.prompt_tokens,
        "threads": arguments.threads or torch.get_num_threads(),
        "large_pages": arguments.large_pages if wants_large_pages() else "the system's choice",
        "load_average": [load_before, os.getloadavg()[0]],
        "speedup": peer["seconds"] / step["seconds"],
        "processor_speedup": peer["processor_seconds"] / step["processor_seconds"],
        "memory_ratio": anypo["peak_gigabytes"] / trl["peak_gigabytes"],
        "anypo": step | {"peak_gigabytes": anypo["peak_gigabytes"]},
        "trl": peer | {"peak_gigabytes": trl["peak_gigabytes"], "generate_seconds": trl["split"]["generate"]["seconds"]},
        "split": anypo["split"],
        "tokens_per_second": tokens,
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"SmolLM2-135M, {result['dtype']}, prompts of {result['prompt_tokens']} tokens, {result['threads']} threads, "
        f"load average {result['load_average'][0]:.1f}"
    )
    for side in ("anypo", "trl"):
        r = result[side]
        print(
            f"  {side:<6} {r['seconds']:7.1f} s a step  {r['processor_seconds']:7.1f} processor seconds  {r['peak_gigabytes']:5.2f} GB at most"
        )
    print(
        f"  faster {result['speedup']:6.1f} times (by processor seconds {result['processor_speedup']:.1f}), memory {result['memory_ratio']:.2f}"
    )
    for name, spent in result["split"].items():
        print(f"    {name:<9} {spent['seconds']:6.2f} s")
    print(f"  sampling {result['tokens_per_second']['anypo']:.0f} tokens/s, transformers {result['tokens_per_second']['transformers']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=3, help="measured steps a side, after one that warms up")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--threads", type=int, help="PyTorch threads a side; default: PyTorch's own choice")
    parser.add_argument("--no-checkpointing", action="store_true", help="turn off the gradient checkpointing that TRL has on by default")
    parser.add_argument(
        "--large-pages",
        choices=("anypo", "both", "none"),
        default="anypo",
        help="who starts with pages of 2 MB: anypo, whose commands ask for them by themselves (default), both sides, or none",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--side", choices=("anypo", "trl", "sampling"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is None:
        result = compare(arguments)
        print(json.dumps(result)) if arguments.json else show(result)
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    settings = (arguments.folder, arguments.dtype, arguments.steps, arguments.prompt_tokens)
    if arguments.side == "trl":
        print(json.dumps(run_trl(*settings, checkpointing=not arguments.no_checkpointing)))
    else:
        print(json.dumps({"anypo": run_anypo, "sampling": run_sampling}[arguments.side](*settings)))


if __name__ == "__main__":
    main()
