from types import ModuleType

from anypo import claims
from anypo.claims import Evidence, ablation, claim, run_claim


def make(holds, ablation_holds=None, reproduced=True):
    @claim("a sentence", reproduced=reproduced)
    def item():
        return Evidence(1.0, "> 0", holds)

    if ablation_holds is not None:

        @ablation(item, "mechanism off")
        def off():
            return Evidence(0.0, "> 0", ablation_holds)

    return item


def test_a_claim_holds_only_when_its_ablation_does_not():
    assert run_claim(make(True))["holds"]
    assert run_claim(make(True, ablation_holds=False))["holds"]
    assert not run_claim(make(True, ablation_holds=True))["holds"]
    assert not run_claim(make(False, ablation_holds=False))["holds"]


def test_an_exception_is_evidence_against_claim_and_never_for_an_ablation():
    @claim("breaks")
    def broken():
        raise RuntimeError("no")

    found = run_claim(broken)
    assert not found["holds"] and "RuntimeError" in found["measured"]

    working = make(True)

    @ablation(working, "breaks")
    def broken_ablation():
        raise RuntimeError("no")

    assert not run_claim(working)["holds"], "an ablation that cannot run proves nothing"


def test_not_reproduced_claims_are_reported_but_do_not_fail_the_row(monkeypatch):
    module = ModuleType("fake")
    module.first, module.second = make(True), make(False, reproduced=False)
    monkeypatch.setattr(claims.importlib, "import_module", lambda name: module)
    row = claims.reproduce_one("fake", "fake")
    assert row["holds"] and [c["holds"] for c in row["claims"]] == [True, False]
    module.third = make(False)
    assert not claims.reproduce_one("fake", "fake")["holds"]


def test_quick_skips_slow_claims_and_says_so(monkeypatch):
    module = ModuleType("fake")
    module.first = make(True)
    module.first.slow = True
    monkeypatch.setattr(claims.importlib, "import_module", lambda name: module)
    row = claims.reproduce_one("fake", "fake", quick=True)
    assert row["claims"] == [] and row["skipped"] == ["a sentence"]
