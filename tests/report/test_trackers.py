from __future__ import annotations

import sys
from types import ModuleType

import pytest

from anypo.report.trackers import open_tracker

RECORD = {"step": 3, "reward": 0.5, "kl": None, "note": "text", "time": {"seconds": 2.0}}


def stand_in(monkeypatch, name, **members):
    module = ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_an_unknown_tracker_is_a_sentence_with_the_choices(tmp_path):
    with pytest.raises(ValueError, match="unknown tracker 'mlflow'; choose one of tensorboard, wandb, trackio"):
        open_tracker("mlflow", tmp_path, {})


@pytest.mark.parametrize("name, module", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")])
def test_a_missing_package_is_a_sentence_with_the_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"pip install 'anypo\[{name}\]'"):
        open_tracker(name, tmp_path, {})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_dashboards_get_every_finite_number_at_its_step(tmp_path, monkeypatch, name):
    calls = []
    stand_in(
        monkeypatch,
        name,
        init=lambda **settings: calls.append(settings),
        log=lambda numbers, step: calls.append((numbers, step)),
        finish=lambda: calls.append("finished"),
    )
    tracker = open_tracker(name, tmp_path / "run-7", {"seed": 1})
    tracker.log(RECORD)
    tracker.close()
    setup = {"project": "anypo", "name": "run-7", "config": {"seed": 1}}
    assert calls == [setup, ({"reward": 0.5, "time.seconds": 2.0}, 3), "finished"]


def test_tensorboard_gets_scalars_under_slashed_names(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, log_dir):
            calls.append(log_dir)

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    tracker = open_tracker("tensorboard", tmp_path, {})
    tracker.log(RECORD)
    tracker.close()
    assert calls == [str(tmp_path / "tensorboard"), ("reward", 0.5, 3), ("time/seconds", 2.0, 3), "closed"]
