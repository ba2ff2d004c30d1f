"""Dr. GRPO: GRPO done right (arXiv:2503.20783).

Removes two biases of GRPO: the division by the group's standard deviation (easy and hard questions get larger advantages) and the division by
the response's own length (long wrong responses are punished less a token); the loss is divided by a constant length instead. No KL.
Equations 2 (without std) and 6 ("constant") of the GRPO family; the mathematics is in grpo.py and the shared seams.
"""

from __future__ import annotations

from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import ClippedSurrogate

METHOD = GRPO.but(
    name="dr_grpo",
    paper=Paper("Understanding R1-Zero-Like Training: A Critical Perspective", "2503.20783", 2025),
    summary="no division by the group's standard deviation nor by the response's length",
    credit=GroupRelative(std=False),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="constant"),
    regularize=(),
)
