"""How the constants of both engines differ, and the marks that follow from them."""

import pytest

from sglang_live.policy.config import TALKER, THINKER, PolicyConfig
from sglang_live.policy.pacing import pacing_marks, yield_marks
from sglang_live.policy.view import StageRates

from .views import playing, view_of


def test_engines_differ_from_the_defaults_only_where_docs_say():
    assert PolicyConfig().changed({"stage.may_pause_prefill": True}) == TALKER
    differ = {
        "stage.pipeline_s": THINKER.stage.pipeline_s,
        "urgency.p_safe_s": THINKER.urgency.p_safe_s,
        "pacing.min_gap_s": THINKER.pacing.min_gap_s,
        "pacing.runs_ahead_for_kv": True,
    }
    assert TALKER.changed(differ) == THINKER
    assert THINKER.stage != TALKER.stage and THINKER.urgency != TALKER.urgency
    assert THINKER.pacing.min_gap_s != TALKER.pacing.min_gap_s


@pytest.mark.parametrize(
    ("round_s", "marks"),
    [
        (0.005, [0.495, 0.566, 10.566, 2.066, 0.866, 0.565, 0.885]),
        (0.015, [0.505, 0.629, 10.629, 2.129, 0.929, 0.615, 0.935]),
        (0.030, [0.520, 0.762, 10.762, 2.262, 1.062, 0.690, 1.010]),
        (0.060, [0.550, 1.560, 11.560, 3.060, 1.860, 0.840, 1.160]),
    ],
)
def test_marks_of_the_talker_follow_the_time_of_a_round(round_s, marks):
    """Latency; low and high marks for three shares of interruptions; marks of yielding streams."""
    streams = [playing(1.0, interrupts=interrupts) for interrupts in (0.0, 0.2, 1.0)]
    view = view_of(*streams, rates=StageRates(round_s=round_s))
    safe_s = TALKER.urgency.p_safe_s
    paced = pacing_marks(view, safe_s, TALKER.stage, TALKER.pacing, TALKER.urgency)
    yielding = yield_marks(view, safe_s, TALKER.stage, TALKER.yielding)
    paced_s = (paced.low_s, *paced.high_s)
    found = TALKER.stage.latency_s(round_s), *paced_s, yielding.low_s, yielding.high_s
    assert marks == pytest.approx(found, abs=6e-4)
