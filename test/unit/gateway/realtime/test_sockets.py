"""The gateway on a real server, with unmodified clients."""

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sglang_live.core import AudioDelta, AudioPart
from sglang_live.gateway.http.body import MAX_FRAME_BYTES
from sglang_live.interaction.silero import SileroModel
from test.protocol import schema
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, full, spoken, tone
from test.unit.gateway.live_server import listening

SPEECH = Path(__file__).parents[3] / "data" / "audio" / "sp_librivox_0880.flac"
_PATIENCE_S = 10.0


def url(address: str, model: str = MODEL) -> str:
    return f"ws://{address}/v1/realtime?model={model}"


async def send(socket, event_type: str, **fields) -> None:
    await socket.send(json.dumps({"type": event_type, **fields}))


async def until(socket, event_type: str) -> list[dict]:
    events = []
    async with asyncio.timeout(_PATIENCE_S):
        while not events or events[-1]["type"] != event_type:
            events.append(json.loads(await socket.recv()))
            schema.check(events[-1])
    return events


async def test_a_user_speaks_and_gets_a_response():
    orchestrator = FakeOrchestrator([spoken("A young man indeed.", 800)])
    pcm, rate_hz = soundfile.read(SPEECH, dtype="int16")
    pcm_24k = soxr.resample(pcm, rate_hz, 24_000).astype("<i2")
    audio = bytes(24_000) + pcm_24k.tobytes() + bytes(96_000)
    async with (
        listening(app_of(orchestrator, speech_model=SileroModel())) as address,
        connect(url(address)) as socket,
    ):
        for at in range(0, len(audio), 4800):
            piece = base64.b64encode(audio[at : at + 4800]).decode()
            await send(socket, "input_audio_buffer.append", audio=piece)
        events = await until(socket, "response.done")
        kinds = [event["type"] for event in events]
        assert kinds.count("input_audio_buffer.speech_started") == 1
        assert kinds.count("response.output_audio.delta") == 10
        (heard,) = orchestrator.turns[0].history[0].parts
        assert isinstance(heard, AudioPart)
        # The turn has the whole utterance at its original level.
        assert heard.duration_s == pytest.approx(len(pcm) / rate_hz + 0.5, abs=0.5)
        assert np.abs(heard.pcm).max() == pytest.approx(np.abs(pcm).max(), rel=0.1)


async def test_openais_own_client_holds_a_conversation():
    orchestrator = FakeOrchestrator([spoken("Good morning.")])
    async with listening(app_of(orchestrator, api_keys=("secret",))) as address:
        client = AsyncOpenAI(websocket_base_url=f"ws://{address}/v1", api_key="secret")
        async with client.realtime.connect(model=MODEL) as connection:
            await connection.session.update(
                session={"type": "realtime", "instructions": "Be polite."}
            )
            await connection.conversation.item.create(
                item={
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "Morning!"}],
                }
            )
            await connection.response.create()
            transcript, audio = "", b""
            async for event in connection:
                if event.type == "response.output_audio_transcript.delta":
                    transcript += event.delta
                elif event.type == "response.output_audio.delta":
                    audio += base64.b64decode(event.delta)
                elif event.type == "response.done":
                    break
                assert event.type != "error"
        assert transcript == "Good morning."
        assert audio == tone(80) * 5
        assert orchestrator.turns[0].instructions == "Be polite."


async def test_keys_are_read_from_header_or_subprotocol_and_wrong_ones_get_401():
    by_header = {"additional_headers": {"Authorization": "Bearer k2"}}
    by_protocol = {"subprotocols": ["realtime", "openai-insecure-api-key.k1"]}
    wrong = {"additional_headers": {"Authorization": "Bearer nope"}}
    async with listening(app_of(FakeOrchestrator(), api_keys=("k1", "k2"))) as address:
        async with connect(url(address), **by_header) as socket:
            await until(socket, "session.created")
            assert socket.subprotocol is None
        async with connect(url(address), **by_protocol) as socket:
            await until(socket, "session.created")
            assert socket.subprotocol == "realtime"
        for arguments in (wrong, {}, {"subprotocols": ["realtime"]}):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url(address), **arguments)
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("query", "code"),
    [("model=gpt-5", "model_not_found"), ("intent=dream", "unsupported_session_type")],
)
async def test_an_unsupported_handshake_gets_an_error_event_then_a_close(query, code):
    async with (
        listening(app_of(FakeOrchestrator())) as address,
        connect(f"ws://{address}/v1/realtime?{query}") as socket,
    ):
        (event,) = await until(socket, "error")
        assert event["error"]["code"] == code
        assert code != "model_not_found" or MODEL in event["error"]["message"]
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1008


async def test_a_client_without_a_model_name_gets_the_served_model():
    async with (
        listening(app_of(FakeOrchestrator())) as address,
        connect(f"ws://{address}/v1/realtime") as socket,
    ):
        (created,) = await until(socket, "session.created")
        assert created["session"]["model"] == MODEL


async def test_a_full_server_sends_an_error_and_closes_with_try_again_later():
    async with (
        listening(app_of(FakeOrchestrator(refuse_with=full()))) as address,
        connect(url(address)) as socket,
    ):
        (event,) = await until(socket, "error")
        assert event["error"]["code"] == "server_overloaded"
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1013


async def test_pings_are_answered_while_the_model_computes():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("At last.")]])
    async with listening(app_of(orchestrator)) as address, connect(url(address)) as socket:
        await send(socket, "response.create")
        await until(socket, "response.created")
        async with asyncio.timeout(_PATIENCE_S):
            await (await socket.ping())
        gate.set()
        await until(socket, "response.done")


async def test_fifteen_mebibytes_of_audio_fit_into_one_append():
    async with (
        listening(app_of(FakeOrchestrator())) as address,
        connect(url(address)) as socket,
    ):
        detection = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
        await send(socket, "session.update", session=detection)
        audio = base64.b64encode(bytes(15 * 1024 * 1024)).decode()
        await send(socket, "input_audio_buffer.append", audio=audio)
        await send(socket, "input_audio_buffer.commit")
        events = await until(socket, "input_audio_buffer.committed")
        assert "error" not in [event["type"] for event in events]
        too_long = base64.b64encode(bytes(15 * 1024 * 1024 + 2)).decode()
        await send(socket, "input_audio_buffer.append", audio=too_long, event_id="big")
        error = (await until(socket, "error"))[-1]["error"]
        assert (error["code"], error["event_id"]) == ("audio_too_large", "big")


async def test_a_frame_beyond_the_socket_limit_closes_with_1009():
    orchestrator = FakeOrchestrator()
    async with listening(app_of(orchestrator)) as address, connect(url(address)) as socket:
        await until(socket, "session.created")
        await socket.send("x" * (MAX_FRAME_BYTES + 1))
        with pytest.raises(ConnectionClosed):
            await until(socket, "never")
        assert socket.close_code == 1009
        async with asyncio.timeout(30):
            await orchestrator.session.closed.wait()


async def test_a_lost_connection_frees_the_turn_and_the_session():
    orchestrator = FakeOrchestrator([[AudioDelta(tone(100)), asyncio.Event()]])
    async with listening(app_of(orchestrator)) as address:
        socket = await connect(url(address))
        await send(socket, "response.create")
        await until(socket, "response.output_audio.delta")
        socket.transport.abort()
        async with asyncio.timeout(30):
            await orchestrator.session.closed.wait()
        assert orchestrator.session.n_cancelled == 1


async def test_a_client_that_stops_reading_is_dropped():
    endless = [AudioDelta(tone(1000)) for _ in range(600)]
    orchestrator = FakeOrchestrator([endless])
    async with listening(app_of(orchestrator, send_buffer_bytes=500_000)) as address:
        socket = await connect(url(address), max_queue=1, close_timeout=0.1)
        await until(socket, "session.created")
        socket.transport.pause_reading()
        await send(socket, "response.create")
        async with asyncio.timeout(_PATIENCE_S):
            await orchestrator.session.closed.wait()
        socket.transport.abort()
