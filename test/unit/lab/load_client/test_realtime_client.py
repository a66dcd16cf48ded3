import asyncio

import pytest

from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from sglang_live.client import clip
from sglang_live.client.connection import SessionError


def options(server, **kwargs):
    return LoadOptions(url=server.url, turn_timeout_s=30.0, **kwargs)


async def test_a_spoken_turn_gets_a_response_and_is_measured(fake_server, stream_clock, speech):
    async with fake_server() as server, RealtimeClient(options(server), stream_clock) as client:
        record = await client.speak(speech)
    assert record.status == "completed", record.error
    assert record.audio_s == pytest.approx(0.3)
    assert record.transcript == "word0 word1 word2 "
    # The frame that ends the speech may be sent late; later frames then come early.
    assert record.end_of_turn_ms >= 400, "the scripted VAD waits for 500 ms of silence"
    assert record.ttfp_ms >= record.end_of_turn_ms
    assert server.paths == ["/v1/realtime"], "the server's own model"


async def test_the_clip_arrives_bit_equal_followed_by_silence(fake_server, fast_clock, speech):
    async with fake_server() as server, RealtimeClient(options(server), fast_clock) as client:
        await client.speak(speech)
    assert speech in server.audio()
    assert not any(server.audio().partition(speech)[2])


async def test_turns_share_one_session(fake_server, fast_clock, speech):
    async with fake_server() as server, RealtimeClient(options(server), fast_clock) as client:
        first = await client.speak(speech)
        await client.wait_until_played()
        second = await client.speak(speech)
    assert (first.response_id, second.response_id) == ("resp_1", "resp_2")
    assert len(server.paths) == 1


async def test_push_to_talk_stops_at_the_end_of_speech_and_commits(fake_server, fast_clock, speech):
    chosen = {"push_to_talk": True, "voice": "ash", "instructions": "Be brief."}
    async with (
        fake_server() as server,
        RealtimeClient(options(server, **chosen), fast_clock) as client,
    ):
        record = await client.speak(speech)
    assert record.ok
    assert record.end_of_turn_ms is None
    assert server.types() == ["session.update", "input_audio_buffer.commit", "response.create"]
    session = server.received[0]["session"]
    assert session["audio"]["input"]["turn_detection"] is None
    assert session["audio"]["output"]["voice"] == "ash"
    assert session["instructions"] == "Be brief."
    assert len(server.audio()) == 5 * clip.FRAME_BYTES


async def test_a_written_question_gets_a_spoken_response(fake_server, fast_clock):
    async with fake_server() as server, RealtimeClient(options(server), fast_clock) as client:
        record = await client.ask("How late is it?")
    assert record.ok
    assert record.kind == "text"
    assert record.ttfp_ms >= 0
    assert server.types()[-2:] == ["conversation.item.create", "response.create"]


async def test_the_response_to_the_whole_clip_counts_after_an_early_one(
    fake_server, fast_clock, speech
):
    async with (
        fake_server("too_early") as server,
        RealtimeClient(options(server), fast_clock) as client,
    ):
        # Long enough for the early response to arrive during the speech.
        record = await client.speak(speech[: 5 * clip.FRAME_BYTES] * 40)
    assert record.ok
    assert record.response_id == "resp_2"
    assert record.early_replies == 1


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ("close", "closed", "stage died"),
        ("empty", "empty", "without any audio"),
        ("fail", "failed", "talker died"),
        ("error", "error", "vocoder full"),
        ("garbage", "error", "malformed event"),
    ],
)
async def test_a_failed_turn_has_its_reason(
    fake_server, fast_clock, speech, script, status, message
):
    async with (
        fake_server(script) as server,
        RealtimeClient(options(server), fast_clock) as client,
    ):
        record = await client.speak(speech)
    assert record.status == status
    assert message in record.error


async def test_a_server_that_never_responds_costs_only_the_turn_timeout(
    fake_server, fast_clock, speech
):
    quick = {"turn_timeout_s": 0.05}
    async with fake_server("hang") as server:
        session = LoadOptions(url=server.url, **quick)
        async with RealtimeClient(session, fast_clock) as client:
            record = await asyncio.wait_for(client.speak(speech), 20.0)
    assert record.status == "timeout"
    assert record.audio_s == 0


async def test_after_the_connection_is_gone_the_next_turn_fails_at_once(
    fake_server, fast_clock, speech
):
    async with (
        fake_server("close") as server,
        RealtimeClient(options(server), fast_clock) as client,
    ):
        await client.speak(speech)
        record = await client.speak(speech)
    assert record.status == "closed"


async def test_an_unreachable_server_is_a_clear_error(fast_clock):
    unused = LoadOptions(url="ws://127.0.0.1:1/v1/realtime")
    with pytest.raises(SessionError, match="cannot reach ws://127"):
        async with RealtimeClient(unused, fast_clock):
            pass


async def test_a_refused_session_has_the_servers_reason(fake_server, fast_clock):
    async with fake_server("refuse") as server:
        with pytest.raises(SessionError, match="4 of 4 sessions"):
            async with RealtimeClient(options(server), fast_clock):
                pass


async def test_a_silent_server_is_an_error_after_a_timeout(fake_server, fast_clock, monkeypatch):
    monkeypatch.setattr("lab.load_client.realtime_client.CONNECT_TIMEOUT_S", 0.05)
    async with fake_server("mute") as server:
        with pytest.raises(SessionError, match="sent no session"):
            async with RealtimeClient(options(server), fast_clock):
                pass
