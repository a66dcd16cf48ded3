"""scripts/check_seams.py on seams and names that these tests define."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.upstream.comparison import Upstream, attributes_of, differences, parameters_of
from lab.upstream.names import NAMES
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
    def run(*seams: Seam, form: str = "--json", names: tuple = ()) -> tuple[int, str]:
        monkeypatch.setattr(script, "all_seams", lambda: list(seams))
        monkeypatch.setattr(script, "NAMES", names)
        status = script.main([form] if form else [])
        return status, capsys.readouterr().out

    return run


def test_an_expected_signature_is_ok(run):
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


def test_a_seam_without_signature_is_not_checked(run):
    seam = replace(SEAM, target="json.not_there_yet", kind="define", signature=None)
    status, out = run(seam)
    assert (status, json.loads(out)["seams"][0]["status"]) == (0, "not checked")


def test_without_the_target_package_nothing_is_checked(run):
    status, out = run(replace(SEAM, target="no_such_package.thing"))
    assert (status, json.loads(out)["seams"][0]["status"]) == (0, "not checked")


# A class that needs no SGLang.
USED = Upstream(
    "json.JSONDecoder",
    functions={"decode": "self, s, _w=", "raw_decode": "self, s, idx="},
    attributes="scan_once strict",
)


def test_names_as_expected_are_no_difference(run):
    status, out = run(SEAM, names=(USED,))
    assert (status, json.loads(out)["changed_names"]) == (0, [])


@pytest.mark.parametrize(
    "changed, difference",
    [
        (replace(USED, target="json.Gone"), "json.Gone does not exist"),
        (replace(USED, functions={"gone": "self"}), "json.JSONDecoder.gone does not exist"),
        (
            replace(USED, functions={"decode": "self, text"}),
            "json.JSONDecoder.decode takes (self, s, _w=), expected (self, text)",
        ),
        (replace(USED, attributes="scan_once _gone"), "json.JSONDecoder._gone does not exist"),
    ],
)
@pytest.mark.parametrize("form", ["--json", ""])
def test_a_changed_name_is_shown_and_fails_the_check(run, changed, difference, form):
    status, out = run(SEAM, names=(changed,), form=form)
    assert status == 1 and difference in out


def test_parameters_show_kinds_and_defaults():
    def function(a, b=1, *, c, d=2, **rest):
        """Never called."""

    def variadic(*args, flag):
        """Never called."""

    assert parameters_of(function) == "a, b=, *, c, d=, **rest"
    assert parameters_of(variadic) == "*args, flag"


def test_attributes_include_those_that_methods_assign():
    assert {"scan_once", "decode"} <= attributes_of(json.JSONDecoder)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names.target.rpartition(".")[2])
def test_the_installed_sglang_has_every_used_name(names):
    assert differences(names) == []


@pytest.mark.parametrize("form", ["", "--markdown"])
def test_every_seam_is_in_the_table_with_its_reasons(run, form):
    _, out = run(SEAM, replace(SEAM, name="other"), form=form)
    assert "detect" in out and "other" in out
    assert out.count("because") == out.count("never") == 2


def test_the_table_has_every_seam_as_it_is():
    table = (ROOT / "sgl_patches" / "README.md").read_text()
    for seam in all_seams():
        row = next((r for r in table.splitlines() if r.startswith(f"| {seam.name} |")), "")
        fresh = seam.why in row and seam.drop_when in row
        assert fresh, f"{seam.name}: sgl_patches/README.md is stale, it says how to refresh it"
