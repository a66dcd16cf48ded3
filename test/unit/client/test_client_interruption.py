"""Barge-ins and false triggers of a RealtimeClient against the scripted server."""

import pytest

from sglang_live.client.realtime_client import Interruption, RealtimeClient
from sglang_live.client.session_options import SessionOptions
from sglang_live.client.utterance import Utterance


@pytest.fixture
def said(speech) -> Utterance:
    return Utterance.of(speech)


def options(server, **kwargs):
    return SessionOptions(url=server.url, turn_timeout_s=2.0, **kwargs)


def told(server, kind: str) -> list[dict]:
    return [event for event in server.received if event["type"] == kind]


async def barge_in(server, clock, said, **kwargs):
    """Two turns; the second is spoken into the first one's reply."""
    async with RealtimeClient(options(server, **kwargs), clock) as client:
        first = await client.take_turn(said, Interruption(after_s=0.3))
        second = await client.take_turn(said)
        await client.wait_until_played()
    return client, first.record(), second.record()


async def test_the_next_turn_interrupts_the_reply_and_is_measured_as_any_other(
    fake_server, stream_clock, said
):
    async with fake_server("stream") as server:
        _, first, second = await barge_in(server, stream_clock, said)
    assert first.interruption == "barge_in"
    assert first.status == "cancelled"
    assert first.ok
    assert first.truncated_ms >= 300
    assert 0 < first.heard_s < first.audio_s < 2.0
    assert first.stop_latency_ms >= 0
    assert first.silence_ms > 0
    assert second.status == "completed", second.error
    assert second.response_id == "resp_2"
    assert second.ttfp_ms > 0
    assert second.heard_s == pytest.approx(2.0)
    assert second.interruption is None


async def test_the_server_is_told_what_was_heard(fake_server, stream_clock, said):
    async with fake_server("stream") as server:
        _, first, _ = await barge_in(server, stream_clock, said)
    (truncate,) = told(server, "conversation.item.truncate")
    assert truncate["item_id"] == "item_1"
    assert truncate["content_index"] == 0
    assert truncate["audio_end_ms"] == int(first.heard_s * 1000)


async def test_truncation_can_be_left_out(fake_server, stream_clock, said):
    async with fake_server("stream") as server:
        _, first, _ = await barge_in(server, stream_clock, said, truncate=False)
    assert first.cut_short
    assert told(server, "conversation.item.truncate") == []


async def test_a_refused_truncation_is_noted_and_does_not_fail_the_turn(
    fake_server, stream_clock, said
):
    async with fake_server("strict") as server:
        client, first, second = await barge_in(server, stream_clock, said)
    assert first.ok
    assert second.ok, second.error
    assert client.side_errors == ["invalid_value"]


async def test_a_reply_played_out_before_the_cut_was_not_interrupted(
    fake_server, stream_clock, said
):
    async with (
        fake_server() as server,
        RealtimeClient(options(server), stream_clock) as client,
    ):
        turn = await client.take_turn(said, Interruption(after_s=5.0))
    record = turn.record()
    assert not turn.barged
    assert record.interruption is None
    assert record.status == "completed"
    assert record.heard_s == pytest.approx(0.3)


async def test_a_noise_that_silences_the_reply_is_a_wrong_interruption(
    fake_server, stream_clock, said
):
    async with (
        fake_server("stream") as server,
        RealtimeClient(options(server), stream_clock) as client,
    ):
        turn = await client.take_turn(said, Interruption(0.3, sound=said))
        await client.wait_until_played()
    record = turn.record()
    assert record.interruption == "false_trigger"
    assert record.wrongly_interrupted
    assert record.response_id == "resp_1", "the answer to the noise is not the turn's"
    assert record.heard_in_all_s > record.heard_s + 1.9, "but it was listened to"


async def test_a_noise_that_the_server_ignores_changes_nothing(fake_server, stream_clock, said):
    long_speech = Utterance.of(b"\x00\x10" * 24_000)
    async with (
        fake_server("stream", onset_frames=10) as server,
        RealtimeClient(options(server), stream_clock) as client,
    ):
        record = (await client.take_turn(long_speech, Interruption(0.3, sound=said))).record()
    assert record.interruption == "false_trigger"
    assert record.status == "completed"
    assert not record.cut_short
    assert record.heard_s == pytest.approx(2.0)


async def test_a_posted_message_is_answered_in_writing(fake_server, stream_clock):
    item = '{"type": "conversation.item.create", "item": {}}'
    async with (
        fake_server() as server,
        RealtimeClient(options(server, push_to_talk=True), stream_clock) as client,
    ):
        record = await client.post(item, max_output_tokens=16)
    assert record.kind == "posted"
    assert server.types()[-2:] == ["conversation.item.create", "response.create"]
    (asked,) = told(server, "response.create")
    assert asked["response"] == {"output_modalities": ["text"], "max_output_tokens": 16}
