"""docs/capacity.md states the constants that hold."""

from sglang_live.capacity import control, forecast
from sglang_live.capacity.aimd import AimdConfig
from sglang_live.capacity.control import CapacityConfig
from sglang_live.capacity.deadlines import DeadlineConfig
from test.unit.constants_in_docs import constants_of, written


def test_docs_state_every_constant():
    expected = dict(
        written(
            CapacityConfig(max_sessions=64),
            ("AUDIBLE_GAP_S", control.AUDIBLE_GAP_S),
            ("RETRY_AFTER_S", control._RETRY_AFTER_S),
            DeadlineConfig(),
            AimdConfig(),
            ("HISTORY_S", forecast.HISTORY_S),
            ("LEAST_SAMPLES", forecast._LEAST_SAMPLES),
            ("CERTAIN", forecast._CERTAIN),
        )
    )
    for name in ("aimd", "deadlines", "max_sessions", "adapts"):
        del expected[name]  # configs of their own, a flag, and the policy itself
    stated = constants_of("capacity.md")
    assert stated == expected
