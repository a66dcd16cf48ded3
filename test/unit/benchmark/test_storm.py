import base64
import json

import numpy as np
import pytest

from benchmark.load.storm import storm_message
from sglang_live.client import clip
from sglang_live.extensions.planner.simulation.load.rows import StormRow
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord

POOL = np.arange(clip.SAMPLE_RATE_HZ, dtype="<i2").tobytes()


def audio(message: str) -> bytes:
    (part,) = json.loads(message)["item"]["content"]
    assert part["type"] == "input_audio"
    return base64.b64decode(part["audio"])


def test_a_message_has_the_requested_duration_of_the_clips():
    pcm = audio(storm_message(POOL, 2.5, np.random.default_rng(0)))
    assert clip.duration_s(pcm) == 2.5
    turned = np.frombuffer(pcm, "<i2")[: clip.SAMPLE_RATE_HZ]
    assert sorted(turned) == sorted(np.frombuffer(POOL, "<i2"))


def test_messages_start_at_different_positions():
    beginnings = {
        audio(storm_message(POOL, 0.1, np.random.default_rng([1, 0, wave])))[:64]
        for wave in range(8)
    }
    assert len(beginnings) == 8


def test_the_flag_reads_number_period_and_length():
    assert StormSpec.parse("4:10:30") == StormSpec(4, 10.0, 30.0)


@pytest.mark.parametrize("text", ["4", "4:10", "x:1:1", "0:10:30", "1:0:30", "1:10:0", "1:1:9999"])
def test_an_invalid_storm_is_refused(text):
    with pytest.raises(ValueError):
        StormSpec.parse(text)


@pytest.mark.parametrize(
    ("status", "ok"), [("completed", True), ("incomplete", True), ("failed", False)]
)
def test_a_response_that_ends_at_its_token_limit_is_ok(status, ok):
    record = TurnRecord(kind="posted", status=status)
    assert StormRow(wave=1, session=0, start_s=1.0, record=record).ok is ok
