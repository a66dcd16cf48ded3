"""Barge-ins and false triggers of a RealtimeClient against the scripted server."""

import pytest

from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import Interruption, RealtimeClient
from lab.load_client.utterance import Utterance


@pytest.fixture
def utterance(speech) -> Utterance:
    return Utterance.of(speech)


def options(server, **kwargs):
    return LoadOptions(url=server.url, turn_timeout_s=30.0, **kwargs)


def events_of(server, kind: str) -> list[dict]:
    return [event for event in server.received if event["type"] == kind]


async def barge_in(server, clock, utterance, **kwargs):
    """Two turns; the second begins while the response of the first plays."""
    async with RealtimeClient(options(server, **kwargs), clock) as client:
        first = await client.take_turn(utterance, Interruption(after_s=0.3))
        second = await client.take_turn(utterance)
        await client.wait_until_played()
    return client, first.record(), second.record()


async def test_the_next_turn_interrupts_the_response_and_is_measured_too(
    fake_server, stream_clock, utterance
):
    async with fake_server("stream") as server:
        _, first, second = await barge_in(server, stream_clock, utterance)
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


async def test_the_server_gets_the_length_of_the_heard_audio(fake_server, stream_clock, utterance):
    async with fake_server("stream") as server:
        _, first, _ = await barge_in(server, stream_clock, utterance)
    (truncate,) = events_of(server, "conversation.item.truncate")
    assert truncate["item_id"] == "item_1"
    assert truncate["content_index"] == 0
    assert truncate["audio_end_ms"] == int(first.heard_s * 1000)


async def test_truncation_can_be_turned_off(fake_server, stream_clock, utterance):
    async with fake_server("stream") as server:
        _, first, _ = await barge_in(server, stream_clock, utterance, truncate=False)
    assert first.cut_short
    assert events_of(server, "conversation.item.truncate") == []


async def test_a_refused_truncation_is_recorded_and_does_not_fail_the_turn(
    fake_server, stream_clock, utterance
):
    async with fake_server("strict") as server:
        client, first, second = await barge_in(server, stream_clock, utterance)
    assert first.ok
    assert second.ok, second.error
    assert client.side_errors == ["invalid_value"]


async def test_a_response_played_out_before_the_interruption_is_complete(
    fake_server, stream_clock, utterance
):
    async with (
        fake_server() as server,
        RealtimeClient(options(server), stream_clock) as client,
    ):
        turn = await client.take_turn(utterance, Interruption(after_s=5.0))
    record = turn.record()
    assert not turn.barged
    assert record.interruption is None
    assert record.status == "completed"
    assert record.heard_s == pytest.approx(0.3)


async def test_a_noise_that_stops_the_response_is_a_wrong_interruption(
    fake_server, stream_clock, utterance
):
    async with (
        fake_server("stream") as server,
        RealtimeClient(options(server), stream_clock) as client,
    ):
        turn = await client.take_turn(utterance, Interruption(0.3, sound=utterance))
        await client.wait_until_played()
    record = turn.record()
    assert record.interruption == "false_trigger"
    assert record.wrongly_interrupted
    assert record.response_id == "resp_1", "the response to the noise is not the turn's"
    assert record.heard_in_all_s > record.heard_s + 1.9, "but it was heard"


async def test_a_noise_that_the_server_ignores_changes_nothing(
    fake_server, stream_clock, utterance
):
    long_speech = Utterance.of(b"\x00\x10" * 24_000)
    async with (
        fake_server("stream", onset_frames=10) as server,
        RealtimeClient(options(server), stream_clock) as client,
    ):
        record = (await client.take_turn(long_speech, Interruption(0.3, sound=utterance))).record()
    assert record.interruption == "false_trigger"
    assert record.status == "completed"
    assert not record.cut_short
    assert record.heard_s == pytest.approx(2.0)


async def test_a_posted_message_gets_a_written_response(fake_server, stream_clock):
    item = '{"type": "conversation.item.create", "item": {}}'
    async with (
        fake_server() as server,
        RealtimeClient(options(server, push_to_talk=True), stream_clock) as client,
    ):
        record = await client.post(item, max_output_tokens=16)
    assert record.kind == "posted"
    assert server.types()[-2:] == ["conversation.item.create", "response.create"]
    (create,) = events_of(server, "response.create")
    assert create["response"] == {"output_modalities": ["text"], "max_output_tokens": 16}
