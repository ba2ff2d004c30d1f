"""Where lines may live: the direction of imports, and that nothing depends on a single method."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anypo
from anypo import catalogue

ROOT = Path(anypo.__file__).parent
PACKAGES = ("loops", "seams", "domains", "methods", "reproductions", "engines", "report")
# What a part of the house may not import.
FORBIDDEN = {
    "seams": {"domains", "methods", "reproductions", "loops", "api", "cli", "comparison"},
    "loops": {"domains", "methods", "reproductions", "api", "cli", "comparison"},
    "domains": {"methods", "reproductions", "loops", "api", "cli", "comparison"},
    "methods": {"reproductions", "loops", "api", "cli", "comparison"},
    "batch": {*PACKAGES, "api", "cli"},
    "method": {*PACKAGES, "api", "cli"},
    "policy": {*PACKAGES, "api", "cli"},
    "run": {"seams", "domains", "methods", "reproductions", "loops", "api", "cli"},
}


def imports(path: Path) -> set[str]:
    """First parts below anypo of everything a file imports at run time; imports for type checkers do not count."""
    tree = ast.parse(path.read_text())
    checked = {
        id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) for n in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in checked:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("anypo"):
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("anypo.")}
    return found


@pytest.mark.parametrize("part", sorted(FORBIDDEN))
def test_imports_point_one_way(part):
    files = sorted((ROOT / part).rglob("*.py")) if (ROOT / part).is_dir() else [ROOT / f"{part}.py"]
    wrong = [(f.relative_to(ROOT).as_posix(), sorted(imports(f) & FORBIDDEN[part])) for f in files if imports(f) & FORBIDDEN[part]]
    assert not wrong


def test_methods_import_only_their_own_domain():
    wrong = []
    for path in (ROOT / "methods").rglob("*.py"):
        domain = path.relative_to(ROOT / "methods").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("anypo.domains.")
                and node.module.split(".")[2] != domain
            ):
                wrong.append((path.name, node.module))
    assert not wrong


BASELINES = {"trpo", "sac", "spo_simple", "adam8bit"}  # rows whose parts others take up without being built on them


def lineage(method) -> set[str]:
    """Names of the methods that a method was made from."""
    found = set()
    while (method := getattr(method, "base", None)) is not None:
        found.add(method.name.split(".")[0])
    return found


def test_methods_take_parts_from_seams_and_not_from_one_another():
    """Deleting a method breaks what was built on it and nothing else."""
    wrong = []
    for path in (ROOT / "methods").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anypo.methods.") and path.stem != "__init__":
                other = node.module.split(".")[-1]
                if other not in BASELINES | lineage(catalogue.get(path.stem)):
                    wrong.append((path.stem, other))
    assert not wrong


def test_the_catalogue_is_up_to_date():
    assert catalogue.FILE.read_text() == catalogue.generate(), "run `python -m anypo.catalogue`"


def test_every_row_is_complete():
    for row in catalogue.entries():
        assert row.name and row.paper and row.domain in row.module, row.slug
        assert (ROOT.parent.parent / "docs" / "methods" / f"{row.slug}.md").exists(), f"{row.slug} has no page; run `make docs`"


@pytest.mark.parametrize("slug", sorted(catalogue.modules()))
def test_variants_bear_the_name_they_are_called_by(slug):
    row = catalogue.get(slug)
    for name, variant in catalogue.variants(slug).items():
        assert catalogue.get(f"{slug}.{name}") is variant and variant.name == f"{slug}.{name}"
        assert variant.summary != row.summary and variant.diff(row)


def test_an_unknown_variant_is_one_sentence():
    with pytest.raises(KeyError, match="spo_segment has no variant 'forest'; it has tree"):
        catalogue.get("spo_segment.forest")
    with pytest.raises(KeyError, match="grpo has no variant 'x'; it has none"):
        catalogue.get("grpo.x")


def test_no_method_is_needed_by_the_engine():
    """The engine and every other method load when a method file that is nobody's base is missing."""
    code = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "anypo.methods.language.gdpo": raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
import anypo.api, anypo.loops.on_policy, anypo.comparison, anypo.cli
from anypo import catalogue
catalogue.get("grpo"); catalogue.get("gspo")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_list_and_help_do_not_import_torch():
    code = "import sys, anypo, anypo.cli; from anypo import catalogue; assert catalogue.entries(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_method_file_has_a_training_loop():
    """A method may fit a helper of its own (a critic, a density); the steps of a run belong to the loops."""
    for path in (ROOT / "methods").rglob("*.py"):
        text = path.read_text()
        assert not [call for call in ("finish_step(", "begin_step(") if call in text], f"{path.name} steps through the run itself"
