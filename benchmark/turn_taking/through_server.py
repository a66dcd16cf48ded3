"""Ends of turns as a running server decides them: any server of the realtime protocol.

Recordings are sent at real-time pace, several at once, without responses. A decision counts at the
arrival of `input_audio_buffer.speech_stopped`, so it includes the network and the server's load.
"""

import asyncio
import base64
from collections.abc import Sequence
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


def server_rules() -> list[ServerRule]:
    silences = [
        ServerRule("server_vad", f"{ms} ms", {"type": "server_vad", "silence_duration_ms": ms})
        for ms in (500, 1000, 1800)
    ]
    eagerness = [
        ServerRule("semantic_vad", name, {"type": "semantic_vad", "eagerness": name})
        for name in ("low", "medium", "high")
    ]
    return [*silences, *eagerness]


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
    slots = asyncio.Semaphore(at_once)

    async def hear(recording: Recording) -> list[Decision]:
        async with slots, connect(url, max_size=None, proxy=None) as socket:
            await _configure(socket, rule.detection)
            return await _hear(socket, recording.pcm, pace)

    return await asyncio.gather(*map(hear, recordings))


async def _configure(socket: ClientConnection, detection: dict[str, Any]) -> None:
    audio = {
        "input": {
            "format": {"type": "audio/pcm", "rate": _RATE_HZ},
            "turn_detection": detection | {"create_response": False},
        }
    }
    update = {"type": "session.update", "session": {"type": "realtime", "audio": audio}}
    await socket.send(orjson.dumps(update).decode())
    async with asyncio.timeout(_TIMEOUT_S):
        while (event := orjson.loads(await socket.recv()))["type"] != "session.updated":
            if event["type"] == "error":
                raise ConnectionError(f"the server refused {detection}: {event['error']}")


async def _hear(socket: ClientConnection, pcm: np.ndarray, pace: Pace) -> list[Decision]:
    clock = MonotonicClock()
    wide = soxr.resample(pcm.astype(np.float32), INPUT_RATE_HZ, _RATE_HZ)
    raw = wide.round().clip(-32_768, 32_767).astype("<i2").tobytes()
    size = 2 * _RATE_HZ * PACKET_MS // 1000
    began_s = clock.now_s()
    decisions: list[Decision] = []

    async def listen() -> None:
        async for text in socket:
            event = orjson.loads(text)
            if event["type"] == "input_audio_buffer.speech_stopped":
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
            event = {"type": "input_audio_buffer.append", "audio": audio}
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
