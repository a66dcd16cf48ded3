import asyncio

import pytest

from lab.load_client.player import Player
from lab.load_client.response import Response
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.clock import SimClock

PACKET_1_S = bytes(48_000)


@pytest.fixture
def clock():
    return SimClock(100.0)


@pytest.fixture
def sent() -> list[dict]:
    return []


def response_of(clock, seconds: int) -> Response:
    response = Response("resp_1", clock.now_s(), PlaybackClock(clock), item_id="item_1")
    for _ in range(seconds):
        response.add_audio(PACKET_1_S, clock.now_s())
    return response


def test_unplayed_audio_is_dropped_and_the_heard_part_reported(clock, sent):
    response = response_of(clock, 3)
    clock.advance(1.25)
    Player(clock, sent.append, truncate=True).on_speech_started([response])
    assert response.heard_s == 1.25
    (event,) = sent
    assert event["type"] == "conversation.item.truncate"
    assert (event["item_id"], event["audio_end_ms"]) == ("item_1", 1250)
    response.add_audio(PACKET_1_S, clock.now_s())
    assert response.heard_s == 1.25, "later packets are not played"


@pytest.mark.parametrize("truncate", [True, False])
def test_a_response_that_was_played_out_is_not_stopped(clock, sent, truncate):
    response = response_of(clock, 1)
    response.done_s = clock.now_s()
    clock.advance(1.5)
    Player(clock, sent.append, truncate).on_speech_started([response])
    assert sent == []
    assert response.flushed_s is None


def test_speech_in_a_stall_of_a_response_stops_it(clock, sent):
    response = response_of(clock, 1)
    clock.advance(1.5)
    Player(clock, sent.append, truncate=True).on_speech_started([response])
    assert sent[0]["audio_end_ms"] == 1000


async def test_acks_report_the_heard_audio_twice_a_second(clock, sent):
    response = response_of(clock, 1)
    player = Player(clock, sent.append, truncate=True)
    acking = asyncio.create_task(player.keep_acking(lambda: [response]))
    await asyncio.sleep(0)
    for _ in range(6):
        clock.advance(0.25)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    acking.cancel()
    assert {event["type"] for event in sent} == {"playback.ack"}
    heard_ms = [event["audio_end_ms"] for event in sent]
    assert heard_ms == [500, 1000], "no ack after all audio was heard"
