"""Ends of turns as a running server decides them: any server of the realtime protocol.

Recordings are sent at real-time pace, several at once. A decision counts at the arrival of
`input_audio_buffer.speech_stopped`, without responses, so it includes the network and the server's
load. The Live API shows none: there, and for comparison in the realtime protocol, it counts at the
arrival of the response's first sound.
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import soxr
from websockets.asyncio.client import ClientConnection, connect

from benchmark.turn_taking.components import PACKET_MS
from benchmark.turn_taking.timeline import Decision, Recording
from lab.load_client.microphone import LATE_FRAME_S
from sglang_live.clock import MonotonicClock
from sglang_live.core import INPUT_RATE_HZ

_RATE_HZ = 24_000
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class ServerRule:
    """component, setting: as the offline rule with the same settings has them."""

    component: str
    setting: str
    detection: dict[str, Any]
    front: "Front"


def server_rules() -> list[ServerRule]:
    silences = [
        ServerRule(
            "server_vad", f"{ms} ms", {"type": "server_vad", "silence_duration_ms": ms}, DECISIONS
        )
        for ms in (500, 1000, 1800)
    ]
    eagerness = [
        ServerRule("semantic_vad", name, {"type": "semantic_vad", "eagerness": name}, DECISIONS)
        for name in ("low", "medium", "high")
    ]
    return [*silences, *eagerness]


def sound_rules() -> list[ServerRule]:
    """Both protocols with the same detection of turns, measured at the response's first sound."""
    return [
        ServerRule("first sound", "realtime", {"type": "semantic_vad"}, SOUNDS),
        ServerRule("first sound", "live", {}, LIVE),
    ]


class _SpeechStopped:
    def ends(self, event: dict[str, Any]) -> bool:
        return event["type"] == "input_audio_buffer.speech_stopped"


class _NewResponse:
    """The first sound of each response."""

    def __init__(self) -> None:
        self._response = ""

    def ends(self, event: dict[str, Any]) -> bool:
        if event["type"] != "response.output_audio.delta":
            return False
        before, self._response = self._response, event["response_id"]
        return before != self._response


class _SoundAfterSilence:
    """The first packet with sound behind some of zeros: a response holds no longer pause."""

    _PACKETS = 5

    def __init__(self) -> None:
        self._n_zero = self._PACKETS

    def ends(self, event: dict[str, Any]) -> bool:
        if event["type"] != "session.output_audio.delta":
            return False
        if not any(base64.b64decode(event["delta"])):
            self._n_zero += 1
            return False
        is_first, self._n_zero = self._n_zero >= self._PACKETS, 0
        return is_first


@dataclass(frozen=True, slots=True)
class Front:
    """How a protocol begins a session, carries the microphone, and shows the end of a turn.

    begin: the first event of turn_detection. begun: the type of its answer. append: of audio.
    ear: made for each session.
    """

    path: str
    begin: Callable[[dict[str, Any]], dict[str, Any]]
    begun: str
    append: str
    ear: Callable[[], "_SpeechStopped | _NewResponse | _SoundAfterSilence"]


def _realtime(detection: dict[str, Any]) -> dict[str, Any]:
    audio = {
        "input": {
            "format": {"type": "audio/pcm", "rate": _RATE_HZ},
            "turn_detection": detection,
        }
    }
    return {"type": "session.update", "session": {"type": "realtime", "audio": audio}}


def _live(_detection: dict[str, Any]) -> dict[str, Any]:
    return {"type": "session.start", "session": {"model": "default"}}


_UPDATED, _APPEND = "session.updated", "input_audio_buffer.append"
DECISIONS = Front(
    "/v1/realtime",
    lambda detection: _realtime(detection | {"create_response": False}),
    _UPDATED,
    _APPEND,
    _SpeechStopped,
)
SOUNDS = Front("/v1/realtime", _realtime, _UPDATED, _APPEND, _NewResponse)
LIVE = Front(
    "/v1/live/sessions",
    _live,
    "session.started",
    "session.input_audio.append",
    _SoundAfterSilence,
)


@dataclass(slots=True)
class Pace:
    """Packets that were sent, and those more than 50 ms behind real time."""

    sent: int = 0
    late: int = 0


async def hear_all(
    url: str, rule: ServerRule, recordings: Sequence[Recording], at_once: int, pace: Pace
) -> list[list[Decision]]:
    """The decisions on each recording.

    Raises:
        ConnectionError: the server refused the settings, or closed a session.
    """
    slots, front = asyncio.Semaphore(at_once), rule.front
    own = url.replace(SOUNDS.path, front.path)

    async def hear(recording: Recording) -> list[Decision]:
        async with slots, connect(own, max_size=None, proxy=None) as socket:
            await _begin(socket, rule)
            return await _hear(socket, recording.pcm, front, pace)

    return await asyncio.gather(*map(hear, recordings))


async def _begin(socket: ClientConnection, rule: ServerRule) -> None:
    await socket.send(orjson.dumps(rule.front.begin(rule.detection)).decode())
    async with asyncio.timeout(_TIMEOUT_S):
        while (event := orjson.loads(await socket.recv()))["type"] != rule.front.begun:
            if event["type"] == "error":
                raise ConnectionError(f"the server refused {rule.detection}: {event['error']}")


async def _hear(
    socket: ClientConnection, pcm: np.ndarray, front: Front, pace: Pace
) -> list[Decision]:
    clock, ear = MonotonicClock(), front.ear()
    wide = soxr.resample(pcm.astype(np.float32), INPUT_RATE_HZ, _RATE_HZ)
    raw = wide.round().clip(-32_768, 32_767).astype("<i2").tobytes()
    size = 2 * _RATE_HZ * PACKET_MS // 1000
    began_s = clock.now_s()
    decisions: list[Decision] = []

    async def listen() -> None:
        async for text in socket:
            event = orjson.loads(text)
            if ear.ends(event):
                decisions.append(Decision("ended", 1000 * (clock.now_s() - began_s)))
            elif event["type"] == "error":
                raise ConnectionError(f"the server reports {event['error']}")
        raise ConnectionError("the server closed a session")

    async def speak() -> None:
        for number, at in enumerate(range(0, len(raw) - size + 1, size), 1):
            due_s = began_s + number * PACKET_MS / 1000
            await clock.sleep(due_s - clock.now_s())
            pace.sent += 1
            pace.late += clock.now_s() - due_s > LATE_FRAME_S
            audio = base64.b64encode(raw[at : at + size]).decode()
            event = {"type": front.append, "audio": audio}
            await socket.send(orjson.dumps(event).decode())

    listening = asyncio.create_task(listen())
    speaking = asyncio.create_task(speak())
    try:
        await asyncio.wait((listening, speaking), return_when=asyncio.FIRST_COMPLETED)
        for task in (listening, speaking):
            if task.done():
                task.result()
    finally:
        for task in (listening, speaking):
            task.cancel()
        await asyncio.gather(listening, speaking, return_exceptions=True)
    return decisions
