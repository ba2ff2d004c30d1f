"""toy_ct: reports about "scans" of four organs, each a digit that somebody wrote; three of the ten digits are abnormalities.

The cell of an organ is 10 by 10 pixels; where the digit stands in it (upper or lower) is the location, its brightness (bright or faint) the attribute. A
report such as "<findings> nodule liver upper bright ; bones are intact . ... </findings> <impression> nodule liver ; ... </impression>" names the
abnormalities in the order of the organs, and then says what most reports say, in one of several ways. One word is a token. The policy is a small
convolutional network that has learned what a cell shows, frozen, and a GRU that attends to it. It has imitated reports that leave out most of the
abnormalities: a stand-in for a model of images that was tuned on reports dominated by the normal template. Left out: volumes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.reports import Matches, Unit, matched, sections
from anypo.domains.language.toys.ct_policy import (
    ATTRIBUTES,
    CELL,
    DIGIT,
    LEXICON,
    LOCATIONS,
    NAMES,
    ORGANS,
    PROSE,
    ReportPolicy,
    cell,
    report,
    train_eye,
)
from anypo.domains.language.toys.gru_policy import imitate
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt, Task

COMMON = (0.7, 0.2, 0.1)  # how often true reports say it each way; what was imitated says all ways equally often
LONGEST = 52  # tokens of a report
ABNORMAL, MENTIONED = 0.25, 0.3  # shares of the organs that are abnormal, and of the abnormalities that imitated reports mention
HELD_OUT = 400  # of the digits
WARM_STEPS, WARM_ROWS = 250, 32


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, [1797,8,8] in [0,1], and which each is."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the task 'toy_ct' needs the digits of scikit-learn: pip install scikit-learn") from None
    found = load_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target)


class ToyCT:
    """The task: reward is the F1 of the findings' units. Columns of a problem: report, the true one."""

    name = "toy_ct"
    objectives = ("reward",)
    units = staticmethod(LEXICON.units)  # the judge that reads a section

    def __init__(
        self, *, abnormal: float = ABNORMAL, temperature: float = 1.0, prompts_per_step: int = 8, evaluation_prompts: int = 256
    ) -> None:
        """`abnormal`: share of the organs that are, in [0,1]."""
        self.abnormal, self.temperature, self.prompts_per_step = abnormal, temperature, prompts_per_step
        self.evaluation_prompts = evaluation_prompts
        images, kinds = _digits()
        self.training, self.testing = (images[:-HELD_OUT], kinds[:-HELD_OUT]), (images[-HELD_OUT:], kinds[-HELD_OUT:])

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [self._scan(rng, self.training, COMMON) for _ in range(count)]

    def held_out(self) -> list[Prompt]:
        """Scans of digits that no training scan has, the same every time."""
        rng = np.random.default_rng(1 << 20)
        return [self._scan(rng, self.testing, COMMON) for _ in range(self.evaluation_prompts)]

    def _scan(self, rng: np.random.Generator, source: tuple[Tensor, Tensor], ways: Sequence[float]) -> Prompt:
        images, kinds = source
        scan, units, number = torch.zeros(len(ORGANS), CELL, CELL), [], 0
        abnormal = torch.isin(kinds, torch.tensor(list(NAMES)))
        for i, organ in enumerate(ORGANS):
            choices = (abnormal if rng.random() < self.abnormal else ~abnormal).nonzero().flatten()
            digit, place, shade = int(choices[rng.integers(len(choices))]), int(rng.integers(2)), int(rng.integers(2))
            scan[i] = cell(images[digit], place, shade, int(rng.integers(CELL - DIGIT + 1)))
            number = number * 10000 + digit * 4 + place * 2 + shade
            names = NAMES.get(int(kinds[digit]))
            if names is not None:
                units.append(Unit(names[rng.integers(len(names))], organ, LOCATIONS[place], frozenset({ATTRIBUTES[shade]})))
        said = [int(rng.choice(len(ways), p=ways)) for _ in PROSE]
        return Prompt(number % (1 << 62), scan, {"report": report(units, said), "units": units})

    def demonstrations(self, count: int, rng: np.random.Generator, mentioned: float) -> list[tuple[Tensor, str]]:
        """Images with reports that mention a share of the abnormalities and say the rest in any way."""
        found = []
        for p in self.prompts(count, rng):
            kept = [u for u in p.columns["units"] if rng.random() < mentioned]
            found.append((p.content, report(kept, [int(rng.integers(len(COMMON))) for _ in PROSE])))
        return found

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        entropy = bool({"entropy", "old_entropy"} & run.method.needs())
        return self.attempt(run.policy, prompts, run.generator, run.version, entropy)

    def attempt(self, policy: Any, prompts: list[Prompt], generator: torch.Generator, version: int = 0, entropy: bool = False) -> Batch:
        """`collect` without a run: any policy, any generator."""
        heat = [p.temperature or self.temperature for p in prompts]
        out = policy.sample([p.content for p in prompts], [p.samples for p in prompts], max_tokens=[p.max_actions or LONGEST for p in prompts],
                            temperature=heat, generator=generator, want_entropy=entropy)  # fmt: skip
        rows = [prompts[i] for i in out.source.tolist()]
        signals = {
            "prompt_id": torch.tensor([p.id for p in rows]),
            "completion": [policy.decode(tokens[kept]) for tokens, kept in zip(out.tokens, out.valid, strict=True)],
            "columns": [p.columns for p in rows],
            "temperature": torch.tensor(heat)[out.source],
        }
        if entropy:
            signals["old_entropy"] = out.entropy
        return Batch(
            action=out.tokens, mask=out.valid, logp=out.logp, group=out.source, context=[p.content for p in rows], terminated=out.finished,
            truncated=~out.finished, version=torch.full((len(rows),), version), signals=signals,
        )  # fmt: skip

    def findings(self, batch: Batch) -> list[Matches]:
        """How the findings of every row compare with the true ones; a section without its tags says nothing."""
        texts = zip(batch.signal("completion"), (known["report"] for known in batch.signal("columns")), strict=True)
        return [matched(*(self.units(sections(text)[0][0] or "") for text in pair)) for pair in texts]

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        """[N]: F1 of the units by name, 1 where there are none and none are reported."""
        found = [(int(m.hit.sum()), len(m.hit), m.fp) for m in self.findings(batch)]
        return torch.tensor([2 * hits / (hits + true + false) if true + false else 1.0 for hits, true, false in found], dtype=torch.float64)

    def measure(self, policy: Any) -> dict[str, float]:
        """One report of each held-out scan, with the same random numbers every time: over all units `f1`, `recall` and the share `false` of the
        reported ones; `complete`, the share of hits with location and attributes right."""
        with torch.no_grad():
            batch = self.attempt(policy, self.held_out(), torch.Generator().manual_seed(0))
        found = self.findings(batch)
        hits, true, false = sum(int(m.hit.sum()) for m in found), sum(len(m.hit) for m in found), sum(m.fp for m in found)
        complete = sum(int((m.location * m.attribute).sum()) for m in found)
        return {
            "f1": 2 * hits / max(hits + true + false, 1),
            "recall": hits / max(true, 1),
            "false": false / max(hits + false, 1),
            "complete": complete / max(hits, 1),
        }

    def expected_success(self, policy: Any) -> float:
        return self.measure(policy)["f1"]

    def evaluate(self, run: Run) -> dict[str, float]:
        return self.measure(run.policy)


def demonstrated(policy: ReportPolicy, shown: Sequence[tuple[Tensor, str]]) -> Batch:
    """Images and reports as a batch to imitate, an end token after each report."""
    end = torch.tensor([policy.eos])
    rows = [torch.cat([policy.encode(text), end]) for _, text in shown]
    action = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(action.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return Batch(
        action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(len(rows)), context=[image for image, _ in shown]
    )


_WARM: dict[tuple[Any, ...], dict[str, Tensor]] = {}  # warm-started weights by settings, for the life of the process


def make_toy_ct(*, mentioned: float = MENTIONED, **options: Any) -> tuple[ReportPolicy, ToyCT]:
    """A policy that has imitated reports, of whose abnormalities a share `mentioned` in [0,1] is named, and its task, both new. `options` are the
    task's; what was imitated is about scans of the usual kind."""
    policy, task, key = ReportPolicy(), ToyCT(**options), (mentioned,)
    if key not in _WARM:
        source = ToyCT()
        rng = np.random.default_rng(0)
        train_eye(policy.eye.requires_grad_(True), source.training, rng)
        policy.eye.requires_grad_(False)
        optimizer = torch.optim.Adam((p for p in policy.parameters() if p.requires_grad), lr=1e-2)
        for _ in range(WARM_STEPS):
            imitate(policy, demonstrated(policy, source.demonstrations(WARM_ROWS, rng, mentioned)), optimizer)
        _WARM[key] = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.load_state_dict(_WARM[key])
    return policy, task


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    return make_toy_ct(**options)
