"""The exploitability curve of a run."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspiel")

from anypo.domains.games.setup import build
from anypo.loops.on_policy import train
from anypo.methods.games.vrpo import METHOD
from anypo.run import Run


def test_a_run_draws_its_exploitability() -> None:
    method = METHOD.set("select.group_size", 8)
    policy, task = build("kuhn_poker", None, needs={n.removeprefix("old_") for n in method.needs()})
    run = Run(method, policy, task, steps=4)
    assert task.figures(run) == []
    before = task.evaluate(run)["exploitability"]
    train(run)
    assert run.history[0]["exploitability"] == before
    [(title, picture)] = task.figures(run)
    assert title == "Exploitability" and picture.lstrip().startswith("<svg")
