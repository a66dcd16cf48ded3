"""One user of a session, who notes when text and audio of a response come."""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from sglang_live.client import clip
from sglang_live.client.connection import SessionOptions
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.resuming import ResumingSocket
from sglang_live.clock import MonotonicClock

DONE = "response.done"
QUESTION = "tell me a long story"
TIMEOUT_S = 60.0
# Audio after a loss in which its effects are looked for. Later the stages are far ahead of their
# listener, and wait by themselves.
WATCHED_S = 1.0


class ResponseError(RuntimeError):
    """A response that is not as it should be; the message has the server's words."""


@dataclass(frozen=True, slots=True)
class Came:
    """audio_s: duration of what came at at_s. 0: it was text."""

    at_s: float
    audio_s: float = 0.0


def longest_wait_s(came: Sequence[Came], since_s: float, until_s: float) -> float | None:
    """The longest time between two arrivals, or since_s and the first one. None: nothing came."""
    times_s = [since_s, *(one.at_s for one in came if since_s < one.at_s <= until_s)]
    return max((b - a for a, b in pairwise(times_s)), default=None)


def longest_silence_s(audio: Sequence[Came], until_s: float) -> float:
    """How long at once nothing is heard of audio that is played as it comes."""
    longest_s, ends_s = 0.0, None
    for one in audio:
        if one.at_s > until_s:
            break
        if ends_s is not None:
            longest_s = max(longest_s, one.at_s - ends_s)
        ends_s = max(ends_s or one.at_s, one.at_s) + one.audio_s
    return longest_s


@dataclass
class Listener:
    """A session. An asynchronous context manager.

    text, audio: what has come of the response.
    resumed_s: when the session went on at another gateway. None: it did not.
    """

    url: str
    resumable: bool = False
    text: list[Came] = field(default_factory=list)
    audio: list[Came] = field(default_factory=list)
    resumed_s: float | None = None

    def __post_init__(self) -> None:
        self._begin()
        self._socket = ResumingSocket(SessionOptions(url=self.url), lambda: self.playback.heard_s)

    def _begin(self) -> None:
        self.playback = PlaybackClock(MonotonicClock())
        self.text, self.audio = [], []

    async def __aenter__(self) -> Self:
        await self._socket.open()
        detection: dict[str, Any] = {"input": {"turn_detection": None}}
        settings = {"type": "realtime", "resumable": self.resumable, "audio": detection}
        await self._send("session.update", session=settings)
        await self._until("session.updated")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def ask(self, max_tokens: int = 60) -> float:
        """Ask for a greedy response. Returns when."""
        content = [{"type": "input_text", "text": QUESTION}]
        item = {"type": "message", "role": "user", "content": content}
        await self._send("conversation.item.create", item=item)
        self._begin()
        asked_s = time.monotonic()
        sampling = {"temperature": 0, "max_output_tokens": max_tokens}
        await self._send("response.create", response=sampling)
        return asked_s

    async def hear_until(self, holds: Callable[[], bool]) -> None:
        """Raises ResponseError: the response has ended before."""
        while not holds():
            event = await self._next()
            if event["type"] == DONE:
                raise ResponseError(f"the response ended too early: {event['response']}")

    async def hear_all(self) -> dict[str, Any]:
        """The response, once it has ended and was heard."""
        response = (await self._until(DONE))["response"]
        await self.playback.wait_until_played()
        return response

    async def hear_after(self, lose: Callable[[], object]) -> float:
        """Hear how the response goes on after a loss. Returns when that was."""
        n_before, lost_s = self.playback.received_s, time.monotonic()
        lose()
        await self.hear_until(lambda: self.playback.received_s >= n_before + WATCHED_S)
        return lost_s

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send({"type": kind, **fields})

    async def _until(self, kind: str) -> dict[str, Any]:
        while (event := await self._next())["type"] != kind:
            pass
        return event

    async def _next(self) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            event = json.loads(await self._socket.recv())
        now_s = time.monotonic()
        match event["type"]:
            case "error":
                raise ResponseError(json.dumps(event))
            case "session.resumed":
                self.resumed_s = now_s
            case "response.output_audio_transcript.delta":
                self.text.append(Came(now_s))
            case "response.output_audio.delta":
                n_bytes = len(base64.b64decode(event["delta"]))
                audio_s = n_bytes / (clip.SAMPLE_RATE_HZ * clip.BYTES_PER_SAMPLE)
                if audio_s:  # a session that goes on sends again what is known
                    self.audio.append(Came(now_s, audio_s))
                    self.playback.packet_received(audio_s)
        return event
