"""What holds for every client that talks to a server over /v1/realtime."""

import asyncio

import pytest

from sglang_live.client import clip
from sglang_live.client.connection import SessionError


class ClientClaims:
    """
    client: the class that is tested. options: the class of its sessions' settings.
    """

    client: type
    options: type

    def opened(self, server, clock, *, turn_timeout_s=30.0, **chosen):
        options = self.options(url=server.url, turn_timeout_s=turn_timeout_s, **chosen)
        return self.client(options, clock)

    async def test_a_spoken_turn_gets_a_response_and_is_measured(
        self, fake_server, stream_clock, speech
    ):
        async with fake_server() as server, self.opened(server, stream_clock) as client:
            turn = await client.speak(speech)
        assert turn.status == "completed", turn.error
        assert turn.audio_s == pytest.approx(0.3)
        assert turn.transcript == "word0 word1 word2 "
        # The frame that ends the speech may be sent late; later frames then come early.
        assert turn.end_of_turn_ms >= 400, "the scripted VAD waits for 500 ms of silence"
        assert turn.ttfp_ms >= turn.end_of_turn_ms
        assert server.paths == ["/v1/realtime"], "the server's own model"

    async def test_the_clip_arrives_bit_equal_followed_by_silence(
        self, fake_server, fast_clock, speech
    ):
        async with fake_server() as server, self.opened(server, fast_clock) as client:
            await client.speak(speech)
        assert speech in server.audio()
        assert not any(server.audio().partition(speech)[2])

    async def test_turns_share_one_session(self, fake_server, fast_clock, speech):
        async with fake_server() as server, self.opened(server, fast_clock) as client:
            first = await client.speak(speech)
            await client.wait_until_played()
            second = await client.speak(speech)
        assert (first.response_id, second.response_id) == ("resp_1", "resp_2")
        assert len(server.paths) == 1

    async def test_push_to_talk_stops_at_the_end_of_speech_and_commits(
        self, fake_server, fast_clock, speech
    ):
        chosen = {"push_to_talk": True, "voice": "ash", "instructions": "Be brief."}
        async with (
            fake_server() as server,
            self.opened(server, fast_clock, **chosen) as client,
        ):
            turn = await client.speak(speech)
        assert turn.ok
        assert turn.end_of_turn_ms is None
        assert server.types() == ["session.update", "input_audio_buffer.commit", "response.create"]
        session = server.received[0]["session"]
        assert session["audio"]["input"]["turn_detection"] is None
        assert session["audio"]["output"]["voice"] == "ash"
        assert session["instructions"] == "Be brief."
        assert len(server.audio()) == 5 * clip.FRAME_BYTES

    async def test_a_written_question_gets_a_spoken_response(self, fake_server, fast_clock):
        async with fake_server() as server, self.opened(server, fast_clock) as client:
            turn = await client.ask("How late is it?")
        assert turn.ok
        assert turn.kind == "text"
        assert turn.ttfp_ms >= 0
        assert server.types()[-2:] == ["conversation.item.create", "response.create"]

    async def after_an_early_response(self, fake_server, fast_clock, speech):
        async with (
            fake_server("too_early") as server,
            self.opened(server, fast_clock) as client,
        ):
            # Long enough for the early response to arrive during the speech.
            turn = await client.speak(speech[: 5 * clip.FRAME_BYTES] * 40)
        return turn

    async def test_the_response_to_the_whole_clip_counts_after_an_early_one(
        self, fake_server, fast_clock, speech
    ):
        turn = await self.after_an_early_response(fake_server, fast_clock, speech)
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
        self, fake_server, fast_clock, speech, script, status, message
    ):
        async with (
            fake_server(script) as server,
            self.opened(server, fast_clock) as client,
        ):
            turn = await client.speak(speech)
        assert turn.status == status
        assert message in turn.error

    async def test_a_server_that_never_responds_costs_only_the_turn_timeout(
        self, fake_server, fast_clock, speech
    ):
        async with (
            fake_server("hang") as server,
            self.opened(server, fast_clock, turn_timeout_s=0.05) as client,
        ):
            turn = await asyncio.wait_for(client.speak(speech), 20.0)
        assert turn.status == "timeout"
        assert turn.audio_s == 0

    async def test_after_the_connection_is_gone_the_next_turn_fails_at_once(
        self, fake_server, fast_clock, speech
    ):
        async with (
            fake_server("close") as server,
            self.opened(server, fast_clock) as client,
        ):
            await client.speak(speech)
            turn = await client.speak(speech)
        assert turn.status == "closed"

    async def test_an_unreachable_server_is_a_clear_error(self, fast_clock):
        unused = self.options(url="ws://127.0.0.1:1/v1/realtime")
        with pytest.raises(SessionError, match="cannot reach ws://127"):
            async with self.client(unused, fast_clock):
                pass

    async def test_a_refused_session_has_the_servers_reason(self, fake_server, fast_clock):
        async with fake_server("refuse") as server:
            with pytest.raises(SessionError, match="4 of 4 sessions"):
                async with self.opened(server, fast_clock):
                    pass

    async def test_a_silent_server_is_an_error_after_a_timeout(
        self, fake_server, fast_clock, monkeypatch
    ):
        monkeypatch.setattr(f"{self.client.__module__}.CONNECT_TIMEOUT_S", 0.05)
        async with fake_server("mute") as server:
            with pytest.raises(SessionError, match="sent no session"):
                async with self.opened(server, fast_clock):
                    pass
