"""Interruptions, and the server's counters of them; for test_barge_in.py."""

import base64
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import wraps

import httpx
import numpy as np
import pytest

from test.e2e.conftest import Server, wait_until
from test.e2e.socket_client import Socket, clip_24k, is_whole

GREEDY = {"temperature": 0, "output_modalities": ["audio"]}
TEXT = {"output_modalities": ["text"]}
BYTES_PER_MS = 48
# The audio of longer responses cannot be retrieved.
RETRIEVABLE_MS = 14_000
TRIES = 6
# The stages' figures arrive with a ping every two seconds.
PINGED_S = 15
STARTED = "input_audio_buffer.speech_started"
STOPPED = "input_audio_buffer.speech_stopped"
DELTA = "response.output_audio.delta"
TRANSCRIPT = "response.output_audio_transcript.delta"
DONE = "response.done"
CUT = "conversation.item.truncated"


class Counts:
    """Growth of the server's counters since the object's creation."""

    def __init__(self, server: Server):
        self._server = server
        self._before = dict(self._now())

    def gateway(self, name: str) -> float:
        return self._grown(f"sglang_live_gateway_{name}")

    def thinker(self, what: str) -> float:
        labels = f'replica="0",stage="thinker",what="{what}"'
        return self._grown(f"sglang_live_stage_load{{{labels}}}")

    def check_compactions(self, n: int) -> None:
        """Check that n responses were truncated in the thinker's sessions, and none rebuilt."""
        wait_until(lambda: self.thinker("sessions_truncated") >= n, PINGED_S, f"{n} cuts")
        assert self.thinker("sessions_truncated") == n
        assert self.thinker("sessions_rebuilt") == 0
        assert self.thinker("truncations_refused") == 0

    def _grown(self, series: str) -> float:
        return dict(self._now()).get(series, 0.0) - self._before.get(series, 0.0)

    def _now(self) -> Iterator[tuple[str, float]]:
        for line in httpx.get(f"{self._server.http}/metrics", timeout=5).text.splitlines():
            if not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                yield series, float(value)


class UnsuitableResponse(Exception):
    """The response's length does not fit the test."""


def until_suitable(
    test: Callable[[Server], Awaitable[None]],
) -> Callable[[Server], Awaitable[None]]:
    @wraps(test)
    async def again(server: Server) -> None:
        for _ in range(TRIES):
            with suppress(UnsuitableResponse):
                return await test(server)
        pytest.fail(f"{TRIES} responses were too short or too long")

    return again


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(24_000 * seconds), "<i2")


def voice() -> np.ndarray:
    """One sentence, with the silence that ends a turn."""
    return np.concatenate([clip_24k("sp_librivox_0880.flac"), silence(1.0)])


def burst() -> np.ndarray:
    """130 ms in the middle of a word: detected as a voice for 96 ms; a barge-in needs 250."""
    vowel = clip_24k("sp_jfk.flac")[26_400:29_520]
    return np.concatenate([silence(0.2), vowel, silence(0.8)])


def click() -> np.ndarray:
    noise = np.random.default_rng(1).integers(-30_000, 30_000, 120).astype("<i2")
    return np.concatenate([silence(0.1), noise, silence(0.1)])


async def detection(socket: Socket, **settings) -> None:
    """Configure turn detection with these settings; responses are text by default."""
    vad = {"type": "server_vad", **settings}
    updated = await socket.session(audio={"input": {"turn_detection": vad}}, **TEXT)
    assert updated["type"] == "session.updated"


async def request(socket: Socket, text: str, **response) -> None:
    content = [{"type": "input_text", "text": text}]
    item = {"type": "message", "role": "user", "content": content}
    await socket.send("conversation.item.create", item=item)
    await socket.send("response.create", response=response)


async def listen(socket: Socket, seconds: float) -> None:
    with suppress(TimeoutError):
        await socket.until(timeout_s=seconds)


async def long_response(socket: Socket, heard_s: float) -> str:
    """Send a question and play heard_s of the response. Returns the id of its item."""
    await request(socket, "tell me a long story", **GREEDY)
    first = await socket.until(DELTA)
    await listen(socket, heard_s)
    if any(e["type"] == DONE for e in since(socket, first)):
        raise UnsuitableResponse
    return first["item_id"]


async def speech_over_response(socket: Socket) -> tuple[dict, dict]:
    """Returns speech_started and the response.done of the interrupted response."""
    started = await socket.until(STARTED, DONE)
    if started["type"] == DONE:
        raise UnsuitableResponse
    done = await socket.until(DONE)
    if is_whole(done):
        raise UnsuitableResponse
    check_cancelled(done, "turn_detected")
    return started, done


async def truncated(socket: Socket) -> dict:
    """The truncation of the interrupted response.

    Raises:
        UnsuitableResponse: the next response is done: all that was sent of the interrupted one
            had been heard, as on a machine that generates audio more slowly than it is heard.
    """
    event = await socket.until(CUT, DONE)
    if event["type"] == DONE:
        raise UnsuitableResponse
    return event


async def cancelled(socket: Socket) -> dict:
    """Cancel the response. Returns its response.done."""
    await socket.send("response.cancel")
    done = await socket.until(DONE)
    if is_whole(done):
        raise UnsuitableResponse
    check_cancelled(done, "client_cancelled")
    return done


async def retrieve(socket: Socket, item_id: str) -> dict:
    await socket.send("conversation.item.retrieve", item_id=item_id)
    return (await socket.until("conversation.item.retrieved"))["item"]["content"][0]


async def truncate(socket: Socket, item_id: str, audio_end_ms: int) -> dict:
    fields = {"item_id": item_id, "content_index": 0, "audio_end_ms": audio_end_ms}
    await socket.send(CUT.removesuffix("d"), **fields)
    return await socket.until(CUT, "error")


def since(socket: Socket, event: dict) -> list[dict]:
    """The events after this one."""
    ids = [e["event_id"] for e in socket.events]
    return socket.events[ids.index(event["event_id"]) + 1 :]


def of_item(socket: Socket, kind: str, item_id: str) -> list[dict]:
    return [e for e in socket.events if e["type"] == kind and e["item_id"] == item_id]


def received_ms(socket: Socket, item_id: str) -> float:
    deltas = (e["delta"] for e in of_item(socket, DELTA, item_id))
    return sum(len(base64.b64decode(delta)) for delta in deltas) / BYTES_PER_MS


def sound_ms(shown: dict) -> float:
    """Duration of a retrieved item's audio."""
    return len(base64.b64decode(shown["audio"])) / BYTES_PER_MS


def said(socket: Socket, item_id: str) -> str:
    """The whole transcript, as sent in deltas."""
    return "".join(e["delta"] for e in of_item(socket, TRANSCRIPT, item_id))


def check_compaction(socket: Socket, item_id: str, shown: dict) -> None:
    """Check that a retrieved response is a prefix of the sent one, in audio and transcript.

    Raises:
        UnsuitableResponse: no text was made ahead of the sound.
    """
    [cut] = of_item(socket, CUT, item_id)
    assert 0 < cut["audio_end_ms"] <= received_ms(socket, item_id)
    # Positions are in whole milliseconds.
    assert sound_ms(shown) < cut["audio_end_ms"] + 1
    whole = said(socket, item_id)
    assert whole.startswith(shown["transcript"])
    if shown["transcript"] == whole:
        raise UnsuitableResponse


def check_cancelled(done: dict, reason: str) -> None:
    response = done["response"]
    assert response["status"] == "cancelled"
    assert response["status_details"] == {"type": "cancelled", "reason": reason}


def session_tokens(done: dict) -> int:
    """Tokens in the session's KV after this response, whose last token is prefilled later."""
    usage = done["response"]["usage"]
    return usage["input_tokens"] + usage["output_token_details"]["text_tokens"] - 1


def cached_tokens(done: dict) -> int:
    assert is_whole(done), done
    return done["response"]["usage"]["input_token_details"]["cached_tokens"]
