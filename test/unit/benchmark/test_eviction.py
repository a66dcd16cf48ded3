"""The comparison of victim index and scans, at tiny sizes."""

import json
import random

import pytest

from benchmark import eviction
from benchmark.eviction import ARMS, CASES, Options
from sglang_live.kv.victim_index import VictimIndex


def test_every_arm_of_every_case_is_measured(tmp_path, capsys):
    path = tmp_path / "out.json"
    flags = ["--picks", "20", "--scanned-keys", "100", "--json", str(path)]
    eviction.main(["--pages", "40,400", *flags])
    result = json.loads(path.read_text())
    assert {(row["key"], row["what"], row["n_pages"]) for row in result["rows"]} == {
        (case, arm, n) for case in CASES for arm in ARMS for n in (40, 400)
    }
    assert all(0 < row["average_ms"] <= row["max_ms"] for row in result["rows"])
    assert result["options"]["seed"] == 1 and "git_commit" in result
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(result["rows"])


@pytest.mark.parametrize("case", CASES)
def test_index_and_scans_pick_the_same(case):
    keys = eviction.draw_keys(case, 400, random.Random(3), Options())
    index = VictimIndex(eviction.PAGE_TOKENS)
    for name, key in enumerate(keys):
        key.put(index, name)
    for now_s in (0.0, 10.0, 100.0):
        picked = index.peek(now_s).key
        assert picked == eviction.loop_scan(keys)(now_s) == eviction.numpy_scan(keys)(now_s)


def test_sessions_have_forty_pages_and_leaves_one():
    keys = eviction.draw_keys("session", 1000, random.Random(3), Options())
    pages = [key.n_tokens // eviction.PAGE_TOKENS for key in keys]
    assert sum(pages) == 1000
    assert sorted(set(pages)) == [1, 40] and pages.count(1) == 200


@pytest.mark.parametrize("bad", [["--pages", "10,x"], ["--picks", "0"], ["--unknown", "2"]])
def test_bad_options_are_refused(bad):
    with pytest.raises(ValueError):
        eviction.read_options(Options(), "", bad)
