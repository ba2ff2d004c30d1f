import pytest

from anypo.method import SEAMS, Method
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.gspo import METHOD as GSPO
from anypo.seams.regularize import EntropyBonus


def test_but_changes_only_what_it_names_and_remembers_its_base():
    changed = GRPO.but(name="mine", credit=GSPO.credit)
    assert changed.base is GRPO and changed.objective is GRPO.objective
    with pytest.raises(TypeError, match="no field 'advantage'; its seams are prepare, select"):
        GRPO.but(advantage=None)


def test_plural_seams_take_one_or_many():
    one = GRPO.but(regularize=EntropyBonus())
    assert one.regularize == (EntropyBonus(),)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("objective.clip_high", "0.28", 0.28),
        ("objective.clip_high", 1, 1.0),
        ("objective.dual_clip", "3", 3.0),
        ("objective.dual_clip", "none", None),
        ("credit.std", "false", False),
        ("select.group_size", "4", 4),
        ("objective.aggregation", "token_mean", "token_mean"),
        ("regularize.0.beta", "1e-3", 1e-3),
        ("credit.weights", "(1, 0.5)", (1, 0.5)),
    ],
)
def test_settings_from_text_take_the_fields_type(path, value, expected):
    seam, *rest = path.split(".")
    found = getattr(GRPO.set(path, value), seam)
    for name in rest:
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("objectiv.clip_high", 1, "unknown seam 'objectiv'"),
        ("objective.clip", 1, "its fields are: clip_low, clip_high"),
        ("objective.clip_high", "wide", "takes float, not 'wide'"),
        ("select.group_size", 2.5, "takes int, not 2.5"),
        ("credit.std", 1, "takes bool, not 1"),
        ("objective", 1, "names a whole seam"),
        ("regularize.beta", 1, "write regularize.<number>.<field>"),
        ("regularize.3.beta", 1, "holds 1 components"),
    ],
)
def test_bad_settings_get_one_sentence(path, value, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(").replace("<", "<")):
        GRPO.set(path, value)


def test_nested_components_are_reached():
    assert DAPO.set("rollout.max_rounds", 5).rollout.max_rounds == 5
    paths = [path for path, _ in DAPO.components()]
    assert "rollout.inner" in paths and "reward.inner" in paths


def test_diff_and_describe_name_what_changed():
    assert [path for path, _, _ in GSPO.diff()] == ["objective", "regularize.0"]
    assert GRPO.diff() == []
    assert GRPO.set("objective.clip_high", 0.3).diff(GRPO) == [("objective.clip_high", "0.2", "0.3")]
    text = GSPO.describe()
    assert "base    grpo" in text and "* objective" in text


def test_fresh_copies_share_nothing_mutable():
    copy = DAPO.fresh()
    copy.rollout.max_rounds = 99
    assert DAPO.rollout.max_rounds != 99


def test_every_seam_of_a_root_method_is_filled():
    for seam in SEAMS:
        assert getattr(GRPO, seam) is not None
    assert isinstance(GRPO, Method)
