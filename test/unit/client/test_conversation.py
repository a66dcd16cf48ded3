import asyncio

import pytest

from sglang_live.client import clip
from sglang_live.client.connection import SessionError, SessionOptions
from sglang_live.client.conversation import Conversation


def options(server, **kwargs):
    return SessionOptions(url=server.url, turn_timeout_s=30.0, **kwargs)


async def test_a_spoken_turn_gets_a_response_and_is_measured(fake_server, stream_clock, speech):
    async with fake_server() as server, Conversation(options(server), stream_clock) as conversation:
        turn = await conversation.speak(speech)
    assert turn.status == "completed", turn.error
    assert turn.audio_s == pytest.approx(0.3)
    assert turn.transcript == "word0 word1 word2 "
    # The frame that ends the speech may be sent late; later frames then come early.
    assert turn.end_of_turn_ms >= 400, "the scripted VAD waits for 500 ms of silence"
    assert turn.ttfp_ms >= turn.end_of_turn_ms
    assert server.paths == ["/v1/realtime"], "the server's own model"
    named = SessionOptions(url=f"{server.url}?a=1", model="cascade").full_url()
    assert named.endswith("/v1/realtime?model=cascade&a=1")


async def test_the_clip_arrives_bit_equal_followed_by_silence(fake_server, fast_clock, speech):
    async with fake_server() as server, Conversation(options(server), fast_clock) as conversation:
        await conversation.speak(speech)
    assert speech in server.audio()
    assert not any(server.audio().partition(speech)[2])


async def test_turns_share_one_session(fake_server, fast_clock, speech):
    async with fake_server() as server, Conversation(options(server), fast_clock) as conversation:
        first = await conversation.speak(speech)
        await conversation.wait_until_played()
        second = await conversation.speak(speech)
    assert (first.response_id, second.response_id) == ("resp_1", "resp_2")
    assert len(server.paths) == 1


async def test_push_to_talk_stops_at_the_end_of_speech_and_commits(fake_server, fast_clock, speech):
    chosen = {"push_to_talk": True, "voice": "ash", "instructions": "Be brief."}
    async with (
        fake_server() as server,
        Conversation(options(server, **chosen), fast_clock) as conversation,
    ):
        turn = await conversation.speak(speech)
    assert turn.ok
    assert turn.end_of_turn_ms is None
    assert server.types() == ["session.update", "input_audio_buffer.commit", "response.create"]
    session = server.received[0]["session"]
    assert session["audio"]["input"]["turn_detection"] is None
    assert session["audio"]["output"]["voice"] == "ash"
    assert session["instructions"] == "Be brief."
    assert len(server.audio()) == 5 * clip.FRAME_BYTES


async def test_a_written_question_gets_a_spoken_response(fake_server, fast_clock):
    async with fake_server() as server, Conversation(options(server), fast_clock) as conversation:
        turn = await conversation.ask("How late is it?")
    assert turn.ok
    assert turn.kind == "text"
    assert turn.ttfp_ms >= 0
    assert server.types()[-2:] == ["conversation.item.create", "response.create"]


async def test_the_response_to_the_whole_clip_counts_after_an_early_one(
    fake_server, fast_clock, speech
):
    async with (
        fake_server("too_early") as server,
        Conversation(options(server), fast_clock) as conversation,
    ):
        # Long enough for the early response to arrive during the speech.
        turn = await conversation.speak(speech[: 5 * clip.FRAME_BYTES] * 40)
    assert turn.ok
    assert turn.response_id == "resp_2"


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
        Conversation(options(server), fast_clock) as conversation,
    ):
        turn = await conversation.speak(speech)
    assert turn.status == status
    assert message in turn.error


async def test_a_server_that_never_responds_costs_only_the_turn_timeout(
    fake_server, fast_clock, speech
):
    quick = {"turn_timeout_s": 0.05}
    async with fake_server("hang") as server:
        session = SessionOptions(url=server.url, **quick)
        async with Conversation(session, fast_clock) as conversation:
            turn = await asyncio.wait_for(conversation.speak(speech), 20.0)
    assert turn.status == "timeout"
    assert turn.audio_s == 0


async def test_after_the_connection_is_gone_the_next_turn_fails_at_once(
    fake_server, fast_clock, speech
):
    async with (
        fake_server("close") as server,
        Conversation(options(server), fast_clock) as conversation,
    ):
        await conversation.speak(speech)
        turn = await conversation.speak(speech)
    assert turn.status == "closed"


async def test_an_unreachable_server_is_a_clear_error(fast_clock):
    unused = SessionOptions(url="ws://127.0.0.1:1/v1/realtime")
    with pytest.raises(SessionError, match="cannot reach ws://127"):
        async with Conversation(unused, fast_clock):
            pass


async def test_a_refused_session_has_the_servers_reason(fake_server, fast_clock):
    async with fake_server("refuse") as server:
        with pytest.raises(SessionError, match="4 of 4 sessions"):
            async with Conversation(options(server), fast_clock):
                pass


async def test_a_silent_server_is_an_error_after_a_timeout(fake_server, fast_clock, monkeypatch):
    monkeypatch.setattr("sglang_live.client.conversation.CONNECT_TIMEOUT_S", 0.05)
    async with fake_server("mute") as server:
        with pytest.raises(SessionError, match="sent no session"):
            async with Conversation(options(server), fast_clock):
                pass


async def test_the_key_travels_in_the_header_only(fake_server, fast_clock):
    async with (
        fake_server() as server,
        Conversation(options(server, api_key="k-1"), fast_clock),
    ):
        pass
    assert server.headers[0]["authorization"] == "Bearer k-1"
    assert "k-1" not in server.paths[0]


@pytest.mark.parametrize("url", ["http://host/v1/realtime", "ws://", "nonsense"])
def test_a_wrong_url_is_refused_before_connecting(url):
    with pytest.raises(ValueError, match="url must look like"):
        SessionOptions(url=url)


async def test_speech_stops_the_response_and_the_server_gets_what_was_heard(
    fake_server, stream_clock, speech
):
    # The server takes the pause for the end of the turn.
    clip_with_pause = speech + bytes(50 * clip.FRAME_BYTES) + speech
    async with (
        fake_server("stream") as server,
        Conversation(options(server), stream_clock) as conversation,
    ):
        turn = await conversation.speak(clip_with_pause)
    [truncation] = [e for e in server.received if e["type"] == "conversation.item.truncate"]
    assert truncation["item_id"] == "item_1"
    assert 0 < truncation["audio_end_ms"] < 2000
    assert turn.ok
    assert turn.response_id == "resp_2"
    assert turn.audio_s == pytest.approx(2.0)


async def test_a_refused_truncation_does_not_fail_the_turn(fake_server, stream_clock, speech):
    clip_with_pause = speech + bytes(50 * clip.FRAME_BYTES) + speech
    async with (
        fake_server("strict") as server,
        Conversation(options(server), stream_clock) as conversation,
    ):
        turn = await conversation.speak(clip_with_pause)
    assert "conversation.item.truncate" in server.types()
    assert turn.ok
