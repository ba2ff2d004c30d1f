import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo import checkpoint

leaves = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5))
trees = st.recursive(
    leaves, lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.integers(), x, max_size=3), st.tuples(x)), max_leaves=8
)


@given(trees)
def test_pack_and_unpack_are_inverse(tree):
    tensors = {}
    packed = json.loads(json.dumps(checkpoint.pack(tree, tensors)))
    assert checkpoint.unpack(packed, tensors) == tree


def test_tensors_and_arrays_survive_exactly(tmp_path):
    state = {"a": torch.randn(3, 2, dtype=torch.float64), "b": [np.arange(4), torch.tensor(True)], 3: (torch.zeros(0), 1.5)}
    checkpoint.save(tmp_path, 7, state)
    loaded = checkpoint.load_latest(tmp_path)
    assert torch.equal(loaded["a"], state["a"]) and loaded["a"].dtype == torch.float64
    assert np.array_equal(loaded["b"][0], state["b"][0]) and bool(loaded["b"][1])
    assert loaded[3][0].shape == (0,) and loaded[3][1] == 1.5


def test_objects_are_refused_by_name():
    with pytest.raises(TypeError, match="object at '/a'"):
        checkpoint.pack({"a": object()}, {})


def test_only_the_newest_are_kept(tmp_path):
    for step in range(5):
        checkpoint.save(tmp_path, step, {"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "delete", "flip"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog, name, damage):
    checkpoint.save(tmp_path, 1, {"x": torch.ones(4)})
    checkpoint.save(tmp_path, 2, {"x": torch.zeros(4)})
    victim = tmp_path / "step-00000002" / name
    content = victim.read_bytes()
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes(content[: len(content) // 2] if damage == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    assert torch.equal(checkpoint.load_latest(tmp_path)["x"], torch.ones(4))
    assert "step-00000002" in caplog.text


def test_all_damaged_is_an_error(tmp_path):
    checkpoint.save(tmp_path, 1, {})
    (tmp_path / "step-00000001" / "state.json").write_text("")
    with pytest.raises(checkpoint.DamagedCheckpoint, match="every checkpoint"):
        checkpoint.load_latest(tmp_path)


def test_a_full_disk_is_said_and_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"x": 1})

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left.*earlier ones are untouched"):
        checkpoint.save(tmp_path, 2, {"x": 2})
    assert checkpoint.load_latest(tmp_path) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
