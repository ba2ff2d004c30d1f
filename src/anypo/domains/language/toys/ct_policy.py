"""The scans and reports of toy_ct, and its policy: an eye that says what every cell of a scan shows, and a GRU over words that attends to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.domains.language.reports import Lexicon, Unit
from anypo.domains.language.toys.gru_policy import GruPolicy

ORGANS = ("heart", "lung", "liver", "spleen")
NAMES = {0: ("nodule", "node"), 4: ("cyst", "cavity"), 7: ("mass", "lesion")}  # what a digit is called; the others are normal
LOCATIONS, ATTRIBUTES = ("upper", "lower"), ("bright", "faint")
LEXICON = Lexicon(
    {word: names[0] for names in NAMES.values() for word in names}, frozenset(ORGANS), frozenset(LOCATIONS), frozenset(ATTRIBUTES)
)
PROSE = (  # what is said of every patient, the commonest way first; the last one is the impression's
    ("bones are intact .", "no fracture seen .", "skeleton looks normal ."),
    ("airways are open .", "trachea looks normal .", "no narrowing seen ."),
    ("vessels not dilated .", "aorta looks normal .", "no aneurysm seen ."),
    ("no acute change .", "study within limits .", "nothing urgent today ."),
)
TAGS = ("<findings>", "</findings>", "<impression>", "</impression>")
SPOKEN = {word for ways in PROSE for way in ways for word in way.split()}
WORDS = (*TAGS, *LEXICON.names, *ORGANS, *LOCATIONS, *ATTRIBUTES, ";", *sorted(SPOKEN))
LETTERS = "".join(chr(0x100 + i) for i in range(len(WORDS)))  # one character a word, for the character-level policy
CELL, DIGIT = 10, 8
SHADES = (1.0, 0.4)
SIGHT = 1 + len(NAMES) + len(LOCATIONS) + len(ATTRIBUTES)  # numbers that the eye says of a cell
EYE_STEPS, EYE_ROWS = 800, 64


def cell(digit: Float[Tensor, "8 8"], place: int, shade: int, left: int) -> Float[Tensor, "10 10"]:
    """A digit at location and attribute number `place` and `shade`, `left` pixels from the left."""
    top = place * (CELL - DIGIT)
    drawn = torch.zeros(CELL, CELL)
    drawn[top : top + DIGIT, left : left + DIGIT] = digit * SHADES[shade]
    return drawn


def report(units: Sequence[Unit], ways: Sequence[int]) -> str:
    """The text of a report; `ways`: how each part of the prose is said."""
    prose = [PROSE[i][way] for i, way in enumerate(ways)]
    findings = [f"{u.name} {u.organ} {u.location} {' '.join(u.attributes)} ;" for u in units]
    impression = [f"{u.name} {u.organ} ;" for u in units]
    return " ".join([TAGS[0], *findings, *prose[:-1], TAGS[1], TAGS[2], *impression, prose[-1], TAGS[3]])


class Eye(nn.Module):
    """What a cell shows: probabilities of normal and each name, of each location, of each attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, SIGHT)
        )  # fmt: skip

    def forward(self, cells: Float[Tensor, "M 10 10"]) -> list[Float[Tensor, "M _"]]:
        """Log-probabilities of the three questions."""
        parts = self.layers(cells[:, None]).split([1 + len(NAMES), len(LOCATIONS), len(ATTRIBUTES)], dim=1)
        return [part.log_softmax(1) for part in parts]


class Carrying(nn.Module):
    """A GRU that reads what the eye said at every step and hands it on as the last part of its state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.gru = hidden, nn.GRU(width + SIGHT * len(ORGANS), hidden, batch_first=True)

    def forward(
        self, embedded: Float[Tensor, "N T E"], state: Float[Tensor, "1 N S"]
    ) -> tuple[Float[Tensor, "N T S"], Float[Tensor, "1 N S"]]:
        own, seen = state.split([self.hidden, SIGHT * len(ORGANS)], dim=-1)
        seen = seen[0][:, None].expand(-1, embedded.shape[1], -1)
        states = torch.cat([self.gru(torch.cat([embedded, seen], -1), own.contiguous())[0], seen], dim=-1)
        return states, states[None, :, -1]


class ReadOut(nn.Module):
    """Logits from the state and from what the eye said of the organs that the state attends to."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden, self.query, self.linear = hidden, nn.Linear(hidden, len(ORGANS)), nn.Linear(hidden + SIGHT, len(WORDS) + 1)

    def forward(self, state: Float[Tensor, "*N S"]) -> Float[Tensor, "*N V"]:
        own, seen = state.split([self.hidden, SIGHT * len(ORGANS)], dim=-1)
        weight = self.query(own).softmax(-1)
        return self.linear(torch.cat([own, (weight[..., None] * seen.unflatten(-1, (len(ORGANS), SIGHT))).sum(-2)], -1))


class ReportPolicy(GruPolicy):
    """The recurrent policy over words, with an image [4,10,10] as the context of a row. The eye is frozen."""

    learning_rate = 5e-3

    def __init__(self, hidden: int = 64, seed: int = 0) -> None:
        super().__init__(hidden=hidden, alphabet=LETTERS, seed=seed)
        self.provides = frozenset({"logp", "entropy", "logits", "hidden", "prompt_hidden"})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.eye = Eye()
            self.gru = Carrying(hidden, hidden)  # type: ignore[assignment]
            self.output = ReadOut(hidden)  # type: ignore[assignment]
        self.hidden = hidden
        self.eye.requires_grad_(False)

    def encode(self, text: str) -> Int[Tensor, " L"]:
        """Tokens of a text. Raises ValueError for a word outside the vocabulary."""
        unknown = [word for word in text.split() if word not in WORDS]
        if unknown:
            raise ValueError(f"'{unknown[0]}' is no word of toy_ct; its words are {', '.join(WORDS[:8])}, ...")
        return torch.tensor([WORDS.index(word) + 1 for word in text.split()], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The words before the first end token."""
        kept = tokens.tolist()
        return " ".join(WORDS[t - 1] for t in (kept[: kept.index(self.eos)] if self.eos in kept else kept))

    def _read(self, context: Sequence[Tensor], action: Int[Tensor, "N T"]) -> tuple[Float[Tensor, "N T+1 D"], Float[Tensor, "N S D"]]:
        images = torch.stack(list(context))
        seen = torch.cat([part.exp() for part in self.eye(images.flatten(0, 1))], 1).reshape(len(images), -1)
        first = torch.cat([seen.new_zeros(len(images), self.hidden), seen], 1)
        if action.shape[1] == 0:
            return first[:, None], first[:, None]
        states = torch.cat([first[:, None], self.gru(self.embedding(action), first[None])[0]], dim=1)
        return states, states

    def _lengths(self, prompts: Sequence[Tensor]) -> Tensor:
        return torch.ones(len(prompts), dtype=torch.int64)


def train_eye(eye: Eye, digits: tuple[Tensor, Tensor], rng: np.random.Generator) -> None:
    """Cross-entropy of the three questions on random cells, half of them abnormal."""
    images, kinds = digits
    label = torch.stack([(kinds == digit) * (1 + i) for i, digit in enumerate(NAMES)]).sum(0)
    weight = torch.where(label > 0, 1 / (label > 0).sum(), 1 / (label == 0).sum()).double().numpy()
    optimizer = torch.optim.Adam(eye.parameters(), lr=3e-3)
    for _ in range(EYE_STEPS):
        chosen, place, shade = rng.choice(len(kinds), EYE_ROWS, p=weight / weight.sum()), *rng.integers(2, size=(2, EYE_ROWS))
        cells = torch.stack(
            [cell(images[d], p, s, int(rng.integers(CELL - DIGIT + 1))) for d, p, s in zip(chosen, place, shade, strict=True)]
        )
        targets = (label[torch.from_numpy(chosen)], torch.from_numpy(place), torch.from_numpy(shade))
        loss = torch.stack([nn.functional.nll_loss(found, target) for found, target in zip(eye(cells), targets, strict=True)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
