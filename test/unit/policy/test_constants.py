"""How the constants of both engines differ, and the marks that follow from them."""

from dataclasses import replace

import pytest

from sglang_live.policy.config import TALKER, THINKER, PolicyConfig
from sglang_live.policy.pacing import pacing_marks
from sglang_live.policy.view import StageRates

from .views import playing, view_of


def test_engines_differ_from_the_defaults_only_where_docs_say():
    assert PolicyConfig().changed({"stage.may_pause_prefill": True}) == TALKER
    differ = {
        "stage.pipeline_s": THINKER.stage.pipeline_s,
        "urgency.p_safe_s": THINKER.urgency.p_safe_s,
        "pacing.gap_s": THINKER.pacing.gap_s,
        "pacing.runs_ahead_for_kv": True,
    }
    assert TALKER.changed(differ) == THINKER
    assert THINKER.stage != TALKER.stage and THINKER.urgency != TALKER.urgency
    assert THINKER.pacing.gap_s != TALKER.pacing.gap_s


@pytest.mark.parametrize(
    ("round_s", "marks"),
    [
        (0.005, [0.495, 0.554, 0.854]),
        (0.015, [0.505, 0.585, 0.885]),
        (0.030, [0.520, 0.648, 0.948]),
        (0.060, [0.550, 0.990, 1.290]),
    ],
)
def test_marks_of_the_talker_follow_the_time_of_a_round(round_s, marks):
    """Latency; low and high mark."""
    view = replace(view_of(playing(1.0), rates=StageRates(round_s=round_s)), late_s=0.05)
    safe_s = TALKER.urgency.p_safe_s
    paced = pacing_marks(view, safe_s, TALKER.stage, TALKER.pacing, TALKER.urgency)
    found = TALKER.stage.latency_s(round_s), paced.low_s, paced.high_s
    assert marks == pytest.approx(found, abs=6e-4)
