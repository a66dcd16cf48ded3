"""Bad input gets a clear error; nothing hangs, and the connection stays open."""

import asyncio
import json

import httpx
import numpy as np
import pytest
import websockets

from test.e2e.socket_client import NO_VAD, clip_24k, connected, is_whole
from test.protocol.malformed import malformed_events

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def starts_before(server) -> dict[str, float]:
    return server.stage_starts()


@pytest.fixture(scope="module", autouse=True)
def _known_from_the_first_test_on(starts_before) -> None:
    """Record the starts of stages that other modules caused."""


async def assert_still_responds(socket) -> None:
    done = await socket.ask("are you there")
    assert is_whole(done), done


async def test_a_minute_of_silence_starts_no_turn(server):
    async with connected(server.ws) as socket:
        await socket.append(np.zeros(60 * 24_000, dtype="<i2"))
        await assert_still_responds(socket)
    kinds = {event["type"] for event in socket.events}
    assert "input_audio_buffer.speech_started" not in kinds
    assert "error" not in kinds


async def test_a_minute_of_pushed_silence_is_committed_and_gets_an_empty_response(server):
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        done = await socket.say(np.zeros(60 * 24_000, dtype="<i2"))
    assert done["response"]["status"] == "completed"
    assert done["response"]["output"] == []
    assert done["response"]["usage"]["input_token_details"]["audio_tokens"] == 0


async def test_a_minute_of_pushed_speech_is_a_turn(server):
    clip = clip_24k("sp_jfk.flac")
    speech = np.tile(clip, 1 + 60 * 24_000 // len(clip))[: 60 * 24_000]
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        done = await socket.say(speech.astype("<i2"))
    assert is_whole(done), done
    # 13 placeholders a second: a long clip must not be truncated.
    assert done["response"]["usage"]["input_token_details"]["audio_tokens"] >= 60 * 12.5


async def test_noise_and_clipping_get_responses(server):
    noise = np.random.default_rng(7).integers(-32768, 32767, 3 * 24_000).astype("<i2")
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        done = await socket.say(noise)
    assert is_whole(done), done


async def test_malformed_events_get_one_error_each_and_the_session_continues(server):
    events = malformed_events()
    assert len(events) > 100
    async with connected(server.ws) as socket:
        before = await socket.session(**NO_VAD)
        for event in events:
            await socket.connection.send(json.dumps(event))
        await socket.send("session.update", session={"type": "realtime"})
        after = await socket.until("session.updated")
        told = [e["error"]["event_id"] for e in socket.events if e["type"] == "error"]
        assert told == [event["event_id"] for event in events]
        assert after["session"] == before["session"]
        await assert_still_responds(socket)


async def test_an_unknown_model_is_refused_with_the_names_of_known_ones(server):
    async with websockets.connect(f"{server.ws}?model=gpt-9", proxy=None) as connection:
        error = json.loads(await connection.recv())
        assert error["type"] == "error"
        assert "gpt-9" in error["error"]["message"]
        assert "demo" in error["error"]["message"]


async def test_a_frame_of_20_mib_is_accepted_as_audio(server):
    """15 MiB of audio in one append, the most the protocol allows."""
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        await socket.send("input_audio_buffer.append", audio="A" * (20 * 1024 * 1024))
        await socket.send("input_audio_buffer.clear")
        await socket.until("input_audio_buffer.cleared")
        await assert_still_responds(socket)
    assert all(event["type"] != "error" for event in socket.events)


async def test_a_larger_append_is_refused_and_the_session_continues(server):
    async with connected(server.ws) as socket:
        audio = "A" * (21 * 1024 * 1024)
        await socket.send("input_audio_buffer.append", audio=audio, event_id="huge")
        assert (await socket.until("error"))["error"]["event_id"] == "huge"
        await assert_still_responds(socket)


async def test_a_frame_too_large_to_read_closes_only_its_connection(server):
    async with connected(server.ws) as other:
        async with connected(server.ws) as socket:
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await socket.send("input_audio_buffer.append", audio="A" * (25 * 1024 * 1024))
                await socket.until("error")
            assert closed.value.rcvd.code == 1009
        await assert_still_responds(other)


async def test_an_item_too_long_for_the_context_is_refused_and_the_session_continues(server):
    long = "one two three " * 21_000  # 294,000 characters
    part = {"type": "input_text", "text": long}
    item = {"type": "message", "role": "user", "content": [part]}
    output = {"type": "function_call_output", "call_id": "c", "output": long}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        await socket.send("conversation.item.create", item=call)
        for entry, place in ((item, "item.content[0].text"), (output, "item.output")):
            await socket.send("conversation.item.create", item=entry)
            error = (await socket.until("error"))["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", place)
            assert "At most" in error["message"]
        await assert_still_responds(socket)
    for modalities in ({}, {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}):
        body = {"model": "demo", "messages": [{"role": "user", "content": long}], **modalities}
        answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_users_who_disconnect_mid_turn_and_reconnect_at_once_are_served(server):
    """Each session is dropped in another phase of its turn."""
    voice = clip_24k("sp_jfk.flac", 2.0)
    for phase in (
        "input_audio_buffer.committed",
        "response.created",
        "response.output_audio.delta",
    ):
        async with connected(server.ws) as socket:
            await socket.session(**NO_VAD)
            await socket.append(voice)
            await socket.send("input_audio_buffer.commit")
            await socket.send("response.create")
            await socket.until(phase)
            socket.connection.transport.abort()
        async with connected(server.ws) as socket:
            await assert_still_responds(socket)


async def test_the_seventeenth_session_is_refused_as_overloaded(server):
    async def hold(stop: asyncio.Event, ready: list) -> None:
        async with connected(server.ws):
            ready.append(1)
            await stop.wait()

    stop, ready = asyncio.Event(), []
    clients = [asyncio.create_task(hold(stop, ready)) for _ in range(16)]
    try:
        async with asyncio.timeout(30):
            while len(ready) < 16:
                await asyncio.sleep(0.05)
        async with websockets.connect(server.ws, proxy=None) as connection:
            error = json.loads(await connection.recv())
            assert error["error"]["code"] == "server_overloaded"
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await connection.recv()
            assert closed.value.rcvd.code == 1013
    finally:
        stop.set()
        await asyncio.gather(*clients)


def test_http_errors_name_the_fault(server):
    messages = [{"role": "user", "content": "hi"}]
    unknown = httpx.post(
        f"{server.http}/v1/chat/completions", json={"model": "gpt-9", "messages": messages}
    )
    assert unknown.status_code == 404
    assert "demo" in unknown.text
    url = {"type": "audio_url", "audio_url": {"url": "file:///etc/hostname"}}
    local = httpx.post(
        f"{server.http}/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": [url]}]},
    )
    assert local.status_code == 400


def test_the_stages_are_free_after_bad_input(server, starts_before):
    server.wait_until_free()
    assert server.stage_starts() == starts_before
