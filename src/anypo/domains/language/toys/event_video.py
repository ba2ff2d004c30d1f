"""event_video: say what happens in a "video" of 64 frames, of which the policy first sees an overview of a few and may then ask for crops.

An event of 2 to 6 frames has a class A, B, C or D; all else is empty. The first observation names the number of frames of the overview and the class if
one of them shows it. A reply may hold several tool calls, each for a window of 16 frames; up to `parallel` of them are answered together, by helpers
that miss the event in a share of all crops. A reply with a closed answer, or without a call, ends the conversation. Reward 1 for the right class. One
word of the vocabulary is a token: tags, windows, classes, fillers; the prompt ends in <think>, so every reply begins behind it. The policy is a GRU that
imitates scripted conversations, of which some lack a closing tag. Stands in for a model that watches videos with a cropping tool; left out: frames.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.agents import AgentTask
from anypo.domains.language.toys.gru_policy import GruPolicy, Samples, imitate
from anypo.policy import Policy
from anypo.task import Prompt, Task

FRAMES, WINDOW, CLASSES = 64, 16, "ABCD"
BUDGETS = (4, 8, 16, 32, 64)  # frames that an overview may have
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")
CALLS = tuple(f'{{"name": "crop", "arguments": {{"window": [{a}, {a + WINDOW}]}}}}' for a in range(0, FRAMES, WINDOW))
FILLERS = ("perhaps ", "overview ")
OBSERVED = (
    "<tool_response>",
    "</tool_response>",
    "none",
    *(f"<video {k}>" for k in BUDGETS),
)  # words that the policy reads and never writes
WORDS = (*TAGS, *CALLS, *CLASSES, *FILLERS, *OBSERVED)
LETTERS = "".join(chr(0x100 + i) for i in range(len(WORDS)))  # one character a word, for the character-level policy
WORD = re.compile("|".join(map(re.escape, WORDS)))
REPLY = 24  # tokens, the longest reply
WARM_STEPS, WARM_ROWS = 300, 32


def overview_hits(start: Int[Tensor, " N"], length: int | Tensor, n_frames: int, k: int) -> Int[Tensor, " N"]:
    """1 where one of the k frames of an overview, the centres of equal bins, lies in [start, start + length)."""
    centre = ((torch.arange(k) + 0.5) * n_frames / k).floor().long()
    begin, after = start[..., None], (start + length)[..., None]
    return ((centre >= begin) & (centre < after)).any(-1).long()


@dataclass
class EventVideo:
    """One conversation about one video. Columns of a problem: start, length, answer, frames."""

    parallel: int = 4  # calls that are answered in one turn, >= 1
    miss: float = 0.15  # share of crops whose helper never sees the event, in [0,1]

    def reset(self, problem: Prompt) -> str:
        self.columns = problem.columns
        start, length, frames = (int(self.columns[name]) for name in ("start", "length", "frames"))
        seen = bool(overview_hits(torch.tensor(start), length, FRAMES, frames))
        return f"<video {frames}>{self.columns['answer'] if seen else 'none'}<think>"

    def step(self, text: str) -> tuple[str, float, bool]:
        answer = re.search(r"<answer>(.*?)</answer>", text)
        asked = [call for call in re.findall(r"<tool_call>(.*?)</tool_call>", text) if call in CALLS][: self.parallel]
        if answer or not asked:
            return "", float(answer is not None and answer[1] == self.columns["answer"]), True
        return f"<tool_response>{''.join(self._crop(CALLS.index(call)) for call in asked)}</tool_response>", 0.0, False

    def _crop(self, window: int) -> str:
        start, length, answer = (self.columns[name] for name in ("start", "length", "answer"))
        shown = start // WINDOW <= window <= (start + length - 1) // WINDOW
        missed = (
            zlib.crc32(f"{start} {length} {answer} {window}".encode()) % 1000 < 1000 * self.miss
        )  # the same crop, the same helper's text
        return answer if shown and not missed else "none"

    def save(self) -> dict[str, Any]:
        return self.columns

    def restore(self, state: dict[str, Any]) -> None:
        self.columns = state


class Videos:
    """Random videos; the overview has all frames unless a method says otherwise, those of held-out problems take all sizes in turn."""

    name = "event_video"
    check: Callable[..., Any] | None = None

    def training(self, count: int, rng: np.random.Generator, frames: Sequence[int] = (FRAMES,)) -> list[Prompt]:
        drawn = []
        for i in range(count):
            length, kind = int(rng.integers(2, 7)), int(rng.integers(len(CLASSES)))
            start = int(rng.integers(FRAMES - length + 1))
            columns = {"start": start, "length": length, "answer": CLASSES[kind], "frames": frames[i % len(frames)]}
            drawn.append(Prompt((start * 8 + length) * len(CLASSES) + kind, "", columns))
        return drawn

    def held_out(self, count: int) -> list[Prompt]:
        return self.training(count, np.random.default_rng(64), BUDGETS)


class WordPolicy(GruPolicy):
    """The character-level policy with a word a token; words that are only observed have probability 0."""

    temperature = 1.0

    def __init__(self, hidden: int = 48, seed: int = 0) -> None:
        super().__init__(hidden=hidden, alphabet=LETTERS, seed=seed)
        with torch.no_grad():
            self.output.bias[-len(OBSERVED) :] = -1e9

    def encode(self, text: str) -> Tensor:
        """Raises ValueError for a text that is not made of the vocabulary's words."""
        words = WORD.findall(text)
        if "".join(words) != text:
            raise ValueError(f"'{text}' is not made of the words of event_video; write {', '.join(WORDS[:6])}, ...")
        return super().encode("".join(LETTERS[WORDS.index(word)] for word in words))

    def decode(self, tokens: Tensor) -> str:
        """All words; an end token, which every reply has, is none."""
        return "".join(WORDS[token - 1] for token in tokens.tolist() if token != self.eos)

    def sample(
        self, prompts: Sequence[Tensor], samples: Sequence[int], *, stop: Callable[..., Tensor] | None = None, **options: Any
    ) -> Samples:
        assert stop is None  # replies end with the end token alone
        return super().sample(prompts, samples, **options)


class VideoTask(AgentTask):
    """Conversations about videos."""

    def expected_success(self, policy: WordPolicy) -> float:
        """Share of the held-out videos whose class is answered, one conversation each with the same random numbers every time."""
        with torch.no_grad():
            batch = self.attempt(policy, self.held_out(), torch.Generator().manual_seed(0))
        return float(self.correct(batch).double().mean())


def demonstration(
    environment: EventVideo, problem: Prompt, rng: np.random.Generator, prior: float, spoilt: float
) -> tuple[str, list[tuple[str, bool]]]:
    """A scripted conversation: the prompt, and texts with whether the policy wrote them. With probability `prior` it asks for `parallel` windows; then
    it answers with what it has seen, or guesses. In a share `spoilt` one of three closing tags, drawn evenly, is left out where it would stand."""
    prompt = environment.reset(problem)
    windows = sorted(rng.permutation(len(CALLS))[: environment.parallel]) if rng.random() < prior else []
    dropped = TAGS[1 + 2 * int(rng.integers(3))] if rng.random() < spoilt else ""

    def written(text: str) -> str:
        return text.replace(dropped, "", 1) if dropped else text

    thought = "".join(FILLERS[i] for i in rng.integers(len(FILLERS), size=2)) + "</think>"
    seen, turns = prompt, []
    if windows:
        turns.append((written(thought + "".join(f"<tool_call>{CALLS[w]}</tool_call>" for w in windows)), True))
        observation, _, done = environment.step(turns[0][0])
        if done:
            return prompt, turns
        turns.append((observation, False))
        seen, thought = prompt + observation, ""
    shown = [word for word in WORD.findall(seen) if word in CLASSES]
    answer = shown[0] if shown else CLASSES[int(rng.integers(len(CLASSES)))]
    return prompt, [*turns, (written(f"{thought}<answer>{answer}</answer>"), True)]


def demonstrated(policy: GruPolicy, conversations: Sequence[tuple[str, list[tuple[str, bool]]]], ended: bool = True) -> Batch:
    """Conversations as a batch to imitate; the mask is what the policy wrote, with an end token after each reply when `ended`."""
    rows, masks = [], []
    end = torch.tensor([policy.eos] * ended, dtype=torch.int64)
    for _, turns in conversations:
        tokens = [torch.cat([policy.encode(text), end]) if own else policy.encode(text) for text, own in turns]
        rows.append(torch.cat(tokens))
        masks.append(torch.cat([torch.full((len(t),), own) for t, (_, own) in zip(tokens, turns, strict=True)]))
    action, mask = (nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (rows, masks))
    context = [policy.encode(prompt) for prompt, _ in conversations]
    return Batch(action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(len(rows)), context=context)


_WARM: dict[tuple[Any, ...], dict[str, Tensor]] = {}  # warm-started weights by settings, for the life of the process


def make_event_video(
    *, prior: float = 0.7, parallel: int = 4, spoilt: float = 0.3, temperature: float = 0.7, prompts_per_step: int = 8
) -> tuple[WordPolicy, VideoTask]:
    """A policy that has imitated conversations, and its task, both new. `prior`: the share of conversations that call the tool; `spoilt`: that lack a
    closing tag. Raises ValueError for `parallel` below 1."""
    if parallel < 1:
        raise ValueError(f"parallel must be at least 1 call a turn, not {parallel}")
    policy, key = WordPolicy(), (prior, parallel, spoilt)
    if key not in _WARM:
        rng, source, environment = np.random.default_rng(0), Videos(), EventVideo(parallel)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        for _ in range(WARM_STEPS):
            problems = source.training(WARM_ROWS, rng, BUDGETS)
            imitate(policy, demonstrated(policy, [demonstration(environment, p, rng, prior, spoilt) for p in problems]), optimizer)
        _WARM[key] = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.load_state_dict(_WARM[key])
    task = VideoTask("event_video", Videos(), lambda: EventVideo(parallel), max_turns=3, max_tokens=REPLY, temperature=temperature,
                     prompts_per_step=prompts_per_step)  # fmt: skip
    return policy, task


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    return make_event_video(**options)
