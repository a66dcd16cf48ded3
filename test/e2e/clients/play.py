"""Inputs and report of every client in this folder: one line of JSON per part.

    python CLIENT.py '{"text": URL, …}' RECORDING SHORT LONG

RECORDING: int16 at 24 kHz. SHORT, LONG: keys whose sessions have short or long responses.
"""

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

RATE_HZ = 24_000
FRAME = RATE_HZ // 50 * 2  # bytes of 20 ms
QUESTION = "What is the weather in Rome?"
SAID = Path(sys.argv[2]).read_bytes()
SHORT, LONG = sys.argv[3:]
TIMEOUT_S = 90
# In the wire format, for clients that describe their functions themselves.
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
    },
}


class SpeechSource:
    """An endless microphone: 20 ms of sound every 20 ms, silent when nothing is spoken."""

    def __init__(self) -> None:
        self._left = b""

    def say(self, after_s: float = 0.0) -> None:
        self._left = bytes(round(after_s * 50) * FRAME) + SAID

    async def frames(self) -> AsyncIterator[bytes]:
        due_s = time.monotonic()
        while True:
            frame, self._left = self._left[:FRAME].ljust(FRAME, b"\0"), self._left[FRAME:]
            yield frame
            due_s += FRAME / 2 / RATE_HZ
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


class Playing:
    """Simulated playback position of a response, for clients without one of their own."""

    def __init__(self, item_id: str):
        self.item_id, self.sound_s, self._began_s = item_id, 0.0, time.monotonic()

    def passed_s(self) -> float:
        return time.monotonic() - self._began_s

    def position(self) -> dict[str, Any]:
        played_s = min(self.sound_s, self.passed_s()) / 2
        fields = {"item_id": self.item_id, "content_index": 0}
        return {**fields, "audio_end_ms": max(1, int(played_s * 1000))}


def seconds(pcm: bytes | bytearray) -> float:
    return len(pcm) / 2 / RATE_HZ


def weather(town: str) -> str:
    """The result of the client's function."""
    return f"It rains in {town}."


def play(**parts: Callable[[str], Any]) -> None:
    """Run all parts. Each gets its URL and returns its report; a failure ends only its part."""
    for name, url in json.loads(sys.argv[1]).items():
        began_s = time.monotonic()
        try:
            told = parts[name](url)
            if inspect.isawaitable(told):
                told = asyncio.run(asyncio.wait_for(told, TIMEOUT_S))
        except BaseException:
            told = {"failed": traceback.format_exc()}
        took_s = round(time.monotonic() - began_s, 1)
        print(json.dumps({"part": name, "took_s": took_s, **told}), flush=True)
