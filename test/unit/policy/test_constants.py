"""docs/scheduling.md states the constants and the marks that hold."""

import re
from dataclasses import fields

import pytest

from sglang_live.policy.config import TALKER, THINKER, PolicyConfig
from sglang_live.policy.flex import FlexConfig
from sglang_live.policy.pacing import latency_s, pacing_marks, yield_marks
from sglang_live.policy.startup_delay import StartupDelayConfig
from sglang_live.policy.view import FIRST_INTERRUPTS, FRAME_S, StageRates
from test.unit.constants_in_docs import DOCS, constants_of, written

from .views import playing, view_of

MARKS = re.findall(r"^\| (\d+) ms \| (.*) \|$", (DOCS / "scheduling.md").read_text(), re.MULTILINE)


def test_docs_state_every_constant():
    named = ("FRAME_S", FRAME_S), ("FIRST_INTERRUPTS", FIRST_INTERRUPTS)
    stated = constants_of("scheduling.md")
    expected = dict(written(PolicyConfig(), StartupDelayConfig(), FlexConfig(), *named))
    expected["may_pause_prefill"] = "True in both engines"
    expected["runs_ahead_for_kv"] = "False, thinker True"
    for name in ("pipeline_s", "p_safe_s", "min_gap_s"):
        expected[name] += f", thinker {getattr(THINKER, name):g}"
    assert stated == expected


def test_engines_differ_from_the_defaults_only_where_docs_say():
    names = {f.name for f in fields(PolicyConfig)}
    changed = {n for n in names if getattr(TALKER, n) != getattr(PolicyConfig(), n)}
    assert changed == {"may_pause_prefill"}
    changed = {n for n in names if getattr(THINKER, n) != getattr(TALKER, n)}
    assert changed == {"pipeline_s", "p_safe_s", "min_gap_s", "runs_ahead_for_kv"}


@pytest.mark.parametrize(("round_ms", "stated"), MARKS)
def test_docs_state_the_marks_of_the_talker(round_ms, stated):
    round_s = float(round_ms) / 1000
    streams = [playing(1.0, interrupts=interrupts) for interrupts in (0.0, 0.2, 1.0)]
    view = view_of(*streams, rates=StageRates(round_s=round_s))
    paced = pacing_marks(view, TALKER.p_safe_s, TALKER)
    yielding = yield_marks(view, TALKER.p_safe_s, TALKER)
    found = latency_s(round_s, TALKER), paced.low_s, *paced.high_s, yielding.low_s, yielding.high_s
    assert [float(text) for text in stated.split(" | ")] == pytest.approx(found, abs=6e-4)


def test_docs_state_marks_of_four_rounds():
    assert len(MARKS) == 4
