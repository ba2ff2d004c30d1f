from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.report.store import MetricsStore, columns, flatten, read, read_json, write_json_atomic


def filled(path, steps=4):
    store = MetricsStore(path)
    for step in range(1, steps + 1):
        store.append({"step": step, "reward": step / 3, "time": {"seconds": step * 0.1}})
    return store


def test_one_line_a_step_and_floats_keep_every_bit(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    values = [0.1 + 0.2, 1e-310, -0.0, 1.7976931348623157e308, 1 / 3]
    store = MetricsStore(path)
    for step, value in enumerate(values):
        store.append({"step": step, "reward": value})
    assert len(path.read_text().splitlines()) == len(values)
    assert [record["reward"].hex() for record in read(path)] == [value.hex() for value in values]


def test_arrays_and_tensors_become_numbers_and_what_is_not_finite_null(tmp_path):
    store = MetricsStore(tmp_path / "m.jsonl")
    store.append({"step": 0, "a": np.float32(0.1), "b": torch.tensor(2.0), "c": float("nan"), "d": [math.inf, 1], "e": np.arange(2)})
    assert store.records() == [{"step": 0, "a": float(np.float32(0.1)), "b": 2.0, "c": None, "d": [None, 1], "e": [0, 1]}]


@pytest.mark.parametrize("step", [None, 1.0, True, "3"])
def test_a_step_must_be_an_integer(tmp_path, step):
    with pytest.raises(ValueError, match="integer 'step'"):
        MetricsStore(tmp_path / "m.jsonl").append({"step": step})


def test_a_step_must_grow_also_across_processes(tmp_path):
    filled(tmp_path / "m.jsonl")
    store = MetricsStore(tmp_path / "m.jsonl")
    for step in (4, 3):
        with pytest.raises(ValueError, match=f"step {step} does not follow step 4"):
            store.append({"step": step})
    store.append({"step": 7})
    assert [record["step"] for record in store.records()] == [1, 2, 3, 4, 7]


def test_a_value_without_a_json_form_is_named_and_nothing_is_written(tmp_path):
    store = filled(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="'policy' holds a object"):
        store.append({"step": 5, "time": {"policy": object()}})
    assert len(store.records()) == 4
    store.append({"step": 5})


@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_keeps_its_whole_records_and_goes_on(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    # A record is whole once its last brace is there; the newline after it is not part of it.
    expected = [json.loads(line) for line in whole[: cut + 1].split(b"\n")[:-1]]
    assert read(path) == expected
    store = MetricsStore(path)
    store.append({"step": 9, "reward": 1.0})
    assert [r["step"] for r in read(path)] == [r["step"] for r in expected] + [9]
    assert path.read_bytes().endswith(b"}\n")


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    filled(path)
    lines = path.read_text().splitlines()
    for damage in ('{"step": 2, "rew', "[1]", '{"reward": 1}', ""):
        path.write_text("\n".join([lines[0], damage, *lines[2:]]) + "\n")
        with pytest.raises(ValueError, match=r"m\.jsonl, line 2 is damaged"):
            read(path)
        with pytest.raises(ValueError, match="line 2"):
            MetricsStore(path)


def test_truncation_gives_the_bytes_of_a_run_that_never_went_further(tmp_path):
    long, short = filled(tmp_path / "long.jsonl", 6), filled(tmp_path / "short.jsonl", 3)
    long.truncate_after(3)
    assert long.path.read_bytes() == short.path.read_bytes()
    long.append({"step": 4})
    long.truncate_after(0)
    assert long.records() == [] and long.last_step is None
    assert sorted(os.listdir(tmp_path)) == ["long.jsonl", "short.jsonl"]


def test_a_crash_while_replacing_leaves_the_old_file(tmp_path, monkeypatch):
    store = filled(tmp_path / "m.jsonl")
    before = store.path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        store.truncate_after(1)
    assert store.path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    store = filled(tmp_path / "m.jsonl")
    before, write = store.path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(OSError, match="no space left"):
        store.append({"step": 5})
    monkeypatch.undo()
    assert store.path.read_bytes() == before
    store.append({"step": 5})
    assert store.last_step == 5


def test_columns_reads_dotted_names_and_skips_records_without_them(tmp_path):
    records = [{"step": 1, "time": {"seconds": 2}}, {"step": 2}, {"step": 3, "time": {"seconds": None, "unit": "s"}}]
    steps, values = columns(records, "time.seconds")
    assert steps == [1, 3] and values[0] == 2.0 and math.isnan(values[1])
    assert columns(records, "absent") == ([], [])
    assert set(flatten(records[2])) == {"step", "time.seconds"}


def test_json_files_are_written_whole_or_named(tmp_path):
    path = tmp_path / "deep" / "config.json"
    write_json_atomic(path, {"a": [1, float("nan")], "words": "Übermut \ud800", "path": tmp_path})
    assert read_json(path) == {"a": [1, None], "words": "Übermut \ud800", "path": str(tmp_path)}
    path.write_text('{"a": ')
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent.json")
