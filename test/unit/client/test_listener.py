import asyncio

import pytest

from sglang_live.client.listener import Listener
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.reply import Reply
from sglang_live.clock import SimClock

PACKET_1_S = bytes(48_000)


@pytest.fixture
def clock():
    return SimClock(100.0)


@pytest.fixture
def sent() -> list[dict]:
    return []


def reply_of(clock, seconds: int) -> Reply:
    reply = Reply("resp_1", clock.now_s(), PlaybackClock(clock), item_id="item_1")
    for _ in range(seconds):
        reply.add_audio(PACKET_1_S, clock.now_s())
    return reply


def test_what_was_not_played_yet_is_dropped_and_the_server_told_what_was(clock, sent):
    reply = reply_of(clock, 3)
    clock.advance(1.25)
    Listener(clock, sent.append, truncate=True).on_speech_started([reply])
    assert reply.heard_s == 1.25
    (event,) = sent
    assert event["type"] == "conversation.item.truncate"
    assert (event["item_id"], event["audio_end_ms"]) == ("item_1", 1250)
    reply.add_audio(PACKET_1_S, clock.now_s())
    assert reply.heard_s == 1.25, "packets on their way are not played"


@pytest.mark.parametrize("truncate", [True, False])
def test_a_reply_that_was_played_out_is_left_alone(clock, sent, truncate):
    reply = reply_of(clock, 1)
    reply.done_s = clock.now_s()
    clock.advance(1.5)
    Listener(clock, sent.append, truncate).on_speech_started([reply])
    assert sent == []
    assert reply.flushed_s is None


def test_speech_in_a_stall_of_an_unfinished_reply_still_ends_it(clock, sent):
    reply = reply_of(clock, 1)
    clock.advance(1.5)
    Listener(clock, sent.append, truncate=True).on_speech_started([reply])
    assert sent[0]["audio_end_ms"] == 1000


async def test_acks_tell_twice_a_second_what_has_been_heard(clock, sent):
    reply = reply_of(clock, 1)
    listener = Listener(clock, sent.append, truncate=True)
    acking = asyncio.create_task(listener.keep_acking(lambda: [reply]))
    await asyncio.sleep(0)
    for _ in range(6):
        clock.advance(0.25)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    acking.cancel()
    assert {event["type"] for event in sent} == {"playback.ack"}
    heard_ms = [event["audio_end_ms"] for event in sent]
    assert heard_ms == [500, 1000], "nothing more once it has been heard out"
