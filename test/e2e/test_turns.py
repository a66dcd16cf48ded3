"""Conversations over /v1/realtime."""

import asyncio

import numpy as np
import pytest

from test.e2e.socket_client import NO_VAD, clip_24k, connected, is_whole

pytestmark = [pytest.mark.e2e]


async def test_a_spoken_turn_under_server_vad_gets_audio(server):
    voice = clip_24k("sp_librivox_0880.flac")
    silence = np.zeros(24_000, dtype="<i2")
    async with connected(server.ws) as socket:
        await socket.append(np.concatenate([voice, silence]), step=480)
        done = await socket.until("response.done")
    kinds = [event["type"] for event in socket.events]
    assert is_whole(done), done
    assert kinds.index("input_audio_buffer.speech_started") < kinds.index("response.created")
    wave = socket.audio().astype(float) / 32768
    assert len(wave) > 12_000
    rms_db = 20 * np.log10(np.sqrt(np.mean(wave**2)))
    assert -40 < rms_db < -10
    usage = done["response"]["usage"]
    assert usage["input_token_details"]["audio_tokens"] > 30


async def test_a_text_turn_gets_text(server):
    async with connected(server.ws) as socket:
        await socket.session(output_modalities=["text"])
        done = await socket.ask("how are you")
    item = done["response"]["output"][0]
    assert is_whole(done), done
    assert item["content"][0]["type"] == "output_text"
    assert item["content"][0]["text"]
    assert len(socket.audio()) == 0


async def test_the_second_turn_prefills_only_new_tokens(server):
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD, instructions="Answer in one short sentence.")
        first = await socket.say(clip_24k("sp_jfk.flac", 3.0))
        second = await socket.ask("and then")
    used = first["response"]["usage"]
    held = used["input_tokens"] + used["output_token_details"]["text_tokens"]
    cached = second["response"]["usage"]["input_token_details"]["cached_tokens"]
    # The response's last token is prefilled with the next turn.
    assert cached >= held - 1


async def test_a_pause_within_a_turn_starts_no_response_that_shows(server):
    """A speculative turn starts in each pause; the first is withdrawn, the second the response."""
    voice = clip_24k("sp_librivox_0880.flac")
    before = server.speculative_turns()
    async with connected(server.ws) as socket:
        for part in (voice[:30_000], voice[30_000:]):
            await socket.speak(np.concatenate([part, np.zeros(9_600, "<i2")]))
        await socket.speak(np.zeros(12_000, "<i2"))
        first = await socket.until("response.done")
        second = await socket.ask("and then")
    kinds = [event["type"] for event in socket.events]
    stopped = kinds.index("input_audio_buffer.speech_stopped")
    assert not [kind for kind in kinds[:stopped] if kind.startswith(("response.", "conversation."))]
    assert kinds[:-1].count("response.done") == 1
    after = server.speculative_turns()
    assert after["withdrawn"] > before["withdrawn"] and after["answered"] > before["answered"]
    used = first["response"]["usage"]
    held = used["input_tokens"] + used["output_token_details"]["text_tokens"]
    assert second["response"]["usage"]["input_token_details"]["cached_tokens"] >= held - 1


async def test_first_audio_is_sent_before_the_thinker_is_done(server):
    """At the client, transcript deltas still follow the first audio delta."""
    async with connected(server.ws) as socket:
        for _ in range(4):
            n_before = len(socket.events)
            await socket.ask("tell me a long story")
            kinds = [event["type"] for event in socket.events[n_before:]]
            audio, text = (f"response.output_audio{what}.delta" for what in ("", "_transcript"))
            if audio in kinds and text in kinds[kinds.index(audio) :]:
                return
    raise AssertionError("the transcript of each response was complete before its audio")


async def test_eight_concurrent_users_are_all_served(server):
    async def session(i: int) -> list[dict]:
        async with connected(server.ws) as socket:
            await socket.session(**NO_VAD)
            first = await socket.say(clip_24k("sp_jfk.flac", 1.0 + 0.4 * i))
            second = await socket.ask("go on")
            return [first, second]

    for turns in await asyncio.gather(*(session(i) for i in range(8))):
        for done in turns:
            assert is_whole(done), done


@pytest.mark.parametrize("law", ["audio/pcmu", "audio/pcma"])
async def test_telephone_audio_gets_telephone_audio(server, law):
    async with connected(server.ws) as socket:
        formats = {"input": {"format": {"type": law}}, "output": {"format": {"type": law}}}
        await socket.session(audio=formats)
        done = await socket.ask("hello")
    assert is_whole(done), done
    audio_s = done["response"]["usage"]["output_token_details"]["audio_tokens"] / 12.5
    assert len(socket.audio_bytes()) / 8000 == pytest.approx(audio_s, abs=0.1)


async def cancelled_turn(socket) -> dict:
    """Send a question and cancel at the first audio. Returns its response.done."""
    content = [{"type": "input_text", "text": "count to one hundred"}]
    item = {"type": "message", "role": "user", "content": content}
    await socket.send("conversation.item.create", item=item)
    await socket.send("response.create")
    await socket.until("response.output_audio.delta")
    await socket.send("response.cancel")
    return await socket.until("response.done")


async def test_cancel_ends_the_response_and_the_next_turn_works(server):
    async with connected(server.ws) as socket:
        # The demo model's responses end at random: one may end before it is cancelled.
        ends = [await cancelled_turn(socket) for _ in range(3)]
        after = await socket.ask("and now")
    cancelled = [done["response"]["status"] == "cancelled" for done in ends]
    assert any(cancelled)
    assert all(c or is_whole(done) for c, done in zip(cancelled, ends, strict=True)), ends
    assert is_whole(after), after


def test_the_stages_are_free_after_all_sessions_have_ended(server):
    server.wait_until_free()
