"""Reports as verifiable units: what is found, in which organ and where, with what attributes, how certainly, and by which words.

A report has sections between tags; a section is a row of clauses that end with ";" or ".". A clause with a name of the lexicon is a unit, any other is
prose. Stands in for a language model that reads and judges reports; left out: grammar, several findings in one clause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SECTIONS = ("findings", "impression")
CERTAINTY = {"no": "absent", "without": "absent", "possible": "possible", "probable": "possible"}  # a word of the clause; else present
SIMILAR = 0.5  # Jaccard index of attributes from which they agree


@dataclass(frozen=True)
class Unit:
    """One verifiable statement; what it does not say is empty."""

    name: str
    organ: str = ""
    location: str = ""
    attributes: frozenset[str] = frozenset()
    certainty: str = "present"  # present, possible or absent
    evidence: str = ""  # the clause


@dataclass(frozen=True)
class Lexicon:
    """Words with a meaning; `names` leads synonyms to one name."""

    names: Mapping[str, str]
    organs: frozenset[str]
    locations: frozenset[str]
    attributes: frozenset[str]

    def units(self, section: str) -> list[Unit]:
        """The units of a section in the order they are written."""
        found = []
        for clause in re.split(r"[;.]", section):
            words = clause.split()
            name = next((self.names[w] for w in words if w in self.names), None)
            if name is None:
                continue
            organ, location = (next((w for w in words if w in known), "") for known in (self.organs, self.locations))
            certainty = next((CERTAINTY[w] for w in words if w in CERTAINTY), "present")
            found.append(Unit(name, organ, location, self.attributes.intersection(words), certainty, clause.strip()))
        return found


class Matches(NamedTuple):
    """How K true units fared, in their order."""

    hit: Tensor  # [K] of 0/1
    location: Tensor  # [K] of 0/1, organ and location are right too
    attribute: Tensor  # [K] of 0/1, and so are the attributes
    fp: int  # predicted units that match no true one


def matched(predicted: Sequence[Unit], true: Sequence[Unit]) -> Matches:
    """Predicted against true units, one to one by name; of several with that name, the one that agrees most. Negated ones count on neither side."""
    left = [unit for unit in predicted if unit.certainty != "absent"]
    table = []
    for unit in (u for u in true if u.certainty != "absent"):
        same = [other for other in left if other.name == unit.name]
        if not same:
            table.append((0, 0, 0))
            continue
        best = max(same, key=lambda other: _agreement(other, unit))  # the first of equals
        left.pop(next(i for i, other in enumerate(left) if other is best))
        table.append((1, *_agreement(best, unit)))
    hit, location, attribute = torch.tensor(table, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return Matches(hit, location, attribute, len(left))


def _agreement(one: Unit, other: Unit) -> tuple[int, int]:
    """Whether location and attributes agree; what both leave out agrees."""
    union = one.attributes | other.attributes
    similar = not union or len(one.attributes & other.attributes) >= SIMILAR * len(union)
    return int((one.organ, one.location) == (other.organ, other.location)), int(similar)


def sections(text: str, names: Sequence[str] = SECTIONS) -> tuple[list[str | None], bool]:
    """What stands between the tags of each section, None where they are not closed; and whether all tags are there, in order."""
    found = [re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL) for name in names]
    starts = [m.start() for m in found if m is not None]
    ordered = len(starts) == len(names) and starts == sorted(starts)
    return [m and m[1].strip() for m in found], ordered
