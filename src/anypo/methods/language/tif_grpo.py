"""TIF-GRPO: trajectory-integral feedback with verifiable clinical units (arXiv:2605.20277).

Reports trained on lexical rewards read well and say what is wrong. Here a report is graded by its verifiable units: the true ones, in the order of the
reference, are a pseudo-time along which a running recall error is squared and integrated, so that an early omission is charged again at every later
unit, while units that match nothing are charged as control effort. Changes the reward of GRPO. Formulas from the authors' code; a section whose tags
are not closed counts as one that the judge could not read [ours]. Left out: shuffling the pseudo-time.

The task reads a section's units (`units(text)`, which raises ValueError for what it cannot read) and its problems bring the true report as the column
`report`; see anypo.domains.language.reports for units and how they are matched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.reports import Matches, matched, sections
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO

if TYPE_CHECKING:
    from anypo.run import Run


def unit_scores(hit: Int[Tensor, " K"], location: Int[Tensor, " K"], attribute: Int[Tensor, " K"], partial: float) -> Float[Tensor, " K"]:
    """Equation 1: r_k in [0,1]; a hit earns 1 with the right location and attributes, `partial` with one of them, 0 with neither."""
    right = hit * (location + attribute)
    return torch.where(right == 2, 1.0, torch.where(right == 1, partial, 0.0)).double()


def running_error(
    hit: Int[Tensor, " K"], location: Int[Tensor, " K"], attribute: Int[Tensor, " K"], partial: float = 0.5
) -> Float[Tensor, " K"]:
    """E_k in [0,1] of equation 2: what the first k units still lack, on average."""
    score = unit_scores(hit, location, attribute, partial)
    return 1 - score.cumsum(0) / torch.arange(1, len(score) + 1)


def section_reward(
    hit: Int[Tensor, " K"], location: Int[Tensor, " K"], attribute: Int[Tensor, " K"], fp: int, alpha: float = 1.0, gamma: float = 1.0,
    terminal_weight: float = 0.2, explore_bonus: float = 0.05, partial: float = 0.5, eps: float = 1e-8,
) -> Tensor:  # fmt: skip
    """Equations 2-5, a scalar. Nothing written earns no credit for effort; a section without true units earns 2 when nothing is reported, else 0."""
    if len(hit) == 0:
        return torch.tensor(2 - 2 * (fp / (fp + eps)) ** 2, dtype=torch.float64)
    written = int(hit.sum()) + fp
    running = alpha * (1 - running_error(hit, location, attribute, partial).square().mean())
    effort = gamma * (1 - (fp / (written + eps)) ** 2) if written else 0.0
    terminal = terminal_weight * unit_scores(hit, location, attribute, partial).mean()
    return running + effort + terminal + explore_bonus * (written > 0)


def report_reward(
    sections: Float[Tensor, " S"], has_format: float, length: float, format_weight: float = 0.1, length_threshold: float = 1600,
    length_scale: float = 5000,
) -> Tensor:  # fmt: skip
    """Equations 6-7, a scalar: format and the mean of the sections, all shrunk by what the report is longer than `length_threshold`."""
    return (format_weight * has_format + sections.mean()) / (1 + max(length - length_threshold, 0) / length_scale)


def judged(batch: Batch, run: Run) -> list[tuple[list[Matches | None], bool, int]]:
    """Of every row: the matches of each section (None where it cannot be read), whether the format is right, the characters of the sections.

    Raises ValueError for a task that does not read units or whose problems have no `report`.
    """
    read = getattr(run.task, "units", None)
    columns = batch.signals.get("columns", [{}])
    if read is None or "completion" not in batch.signals or not all("report" in known for known in columns):
        raise ValueError(
            f"{run.method.name} grades reports by their units, which the task '{run.task.name}' does not offer; give the task `units(text)` and "
            "its problems the column 'report', or take --task toy_ct"
        )
    found = []
    for text, known in zip(batch.signals["completion"], columns, strict=True):
        parts, ordered = sections(text)
        truth, _ = sections(known["report"])
        grades: list[Matches | None] = []
        for part, true in zip(parts, truth, strict=True):
            try:
                grades.append(None if part is None else matched(read(part), read(true or "")))
            except ValueError:  # the judge could not read it
                grades.append(None)
        found.append((grades, ordered, sum(len(part or "") for part in parts)))
    return found


@dataclass
class IntegralReward:
    """The report's reward by the integral of its recall error and its control effort."""

    alpha: float = 1.0  # of the integral, >= 0
    gamma: float = 1.0  # of the effort, >= 0
    terminal_weight: float = 0.2  # of the mean unit score, >= 0
    explore_bonus: float = 0.05  # for reporting anything, >= 0
    partial: float = 0.5  # score of a unit with location or attributes wrong, in [0,1]
    format_weight: float = 0.1  # of all tags in order, >= 0
    length_threshold: float = 1600  # characters that cost nothing, >= 0
    length_scale: float = 5000  # characters beyond it that halve the reward, > 0

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        rewards, hits, units, false = [], 0, 0, 0
        for grades, ordered, length in judged(batch, run):
            parts = [0.0 if m is None else self.section(m) for m in grades]
            rewards.append(
                float(report_reward(torch.tensor(parts), ordered, length, self.format_weight, self.length_threshold, self.length_scale))
            )
            read = [m for m in grades if m is not None]
            hits, units = hits + sum(int(m.hit.sum()) for m in read), units + sum(len(m.hit) for m in read)
            false += sum(m.fp for m in read)
        run.log(unit_recall=hits / max(units, 1), false_units=false / max(hits + false, 1))
        return torch.tensor(rewards, dtype=torch.float64)

    def section(self, m: Matches) -> float:
        weights = (self.alpha, self.gamma, self.terminal_weight, self.explore_bonus, self.partial)
        return float(section_reward(m.hit, m.location, m.attribute, m.fp, *weights))


METHOD = GRPO.but(
    name="tif_grpo",
    paper=Paper("TIF-GRPO: trajectory-integral feedback with verifiable clinical units", "2605.20277", 2026),
    summary="reports are graded by verifiable units: the squared running recall error along them, and false units as control effort",
    reward=IntegralReward(),
    task="toy_ct",
)
