"""scripts/check_seams.py on seams of our own making: the table is only as good as its verdicts."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_live.bridge.seams import Seam, all_seams

ROOT = Path(__file__).parents[3]

# A target that needs no SGLang.
SEAM = Seam(
    name="detect",
    target="json.detect_encoding",
    kind="replace",
    signature="(b)",
    hook=None,
    why="because",
    drop_when="never",
    stages=("talker",),
    cpu_only=False,
)


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("check_seams", ROOT / "scripts/check_seams.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, monkeypatch, capsys):
    def run(*seams: Seam, form: str = "--json") -> tuple[int, str]:
        monkeypatch.setattr(script, "all_seams", lambda: list(seams))
        status = script.main([form] if form else [])
        return status, capsys.readouterr().out

    return run


def test_a_signature_as_expected_is_ok(run):
    status, out = run(SEAM)
    (row,) = json.loads(out)["seams"]
    assert (status, row["status"], row["detail"]) == (0, "OK", "")


def test_another_signature_is_a_mismatch_that_shows_both(run):
    status, out = run(SEAM, replace(SEAM, signature="(b, fast)"))
    row = json.loads(out)["seams"][1]
    assert (status, row["status"]) == (1, "MISMATCH")
    assert row["detail"] == "found (b), expected (b, fast)"


@pytest.mark.parametrize(
    "target, kind",
    [("json.gone", "around"), ("json.gone.too", "define"), ("json.gone", "item")],
)
def test_a_target_that_is_gone_is_a_mismatch(run, target, kind):
    status, out = run(replace(SEAM, target=target, kind=kind, signature=None))
    assert (status, json.loads(out)["seams"][0]["status"]) == (1, "MISMATCH")


def test_what_has_no_signature_is_not_checked(run):
    seam = replace(SEAM, target="json.not_there_yet", kind="define", signature=None)
    status, out = run(seam)
    assert (status, json.loads(out)["seams"][0]["status"]) == (0, "not checked")


def test_without_the_target_package_nothing_is_checked(run):
    status, out = run(replace(SEAM, target="no_such_package.thing"))
    assert (status, json.loads(out)["seams"][0]["status"]) == (0, "not checked")


@pytest.mark.parametrize("form", ["", "--markdown"])
def test_every_seam_is_in_the_table_with_its_reasons(run, form):
    _, out = run(SEAM, replace(SEAM, name="other"), form=form)
    assert "detect" in out and "other" in out
    assert out.count("because") == out.count("never") == 2


def test_the_table_in_the_docs_has_every_seam_as_it_is():
    table = (ROOT / "docs" / "seams.md").read_text()
    for seam in all_seams():
        row = next((r for r in table.splitlines() if r.startswith(f"| {seam.name} |")), "")
        fresh = seam.why in row and seam.drop_when in row
        assert fresh, f"{seam.name}: docs/seams.md is stale, it says how to refresh it"
