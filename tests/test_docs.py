"""The worked example of docs/adding_a_method.md runs as it stands, and its claim holds with its ablation."""

import re
from pathlib import Path

from anypo.claims import Claim, run_claim
from anypo.method import Method

DOCS = Path(__file__).parent.parent / "docs"


def test_the_worked_example_runs_and_its_claim_holds():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "adding_a_method.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    space: dict = {}
    for block in blocks:
        exec(compile(block, "adding_a_method.md", "exec"), space)
    assert isinstance(space["METHOD"], Method) and isinstance(space["learns"], Claim)
    found = run_claim(space["learns"])
    assert found["holds"], found
    assert [a["holds"] for a in found["ablations"]] == [False]
