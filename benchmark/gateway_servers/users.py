"""Users of the comparison: microphones at real-time pace, and counts of the server's events.

Cheaper than RealtimeClient, so that the servers get the machine's cores.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import orjson
from websockets.asyncio.client import ClientConnection, connect

from lab.load_client.microphone import LATE_FRAME_S
from lab.load_client.utterance import append_message, silence_message
from sglang_live.client import clip
from sglang_live.clock import Clock


def period(pcm: bytes, quiet_s: float, frames_per_message: int = 1) -> list[str]:
    """The append events of a clip and the silence after it.

    frames_per_message: frames of 20 ms in one event.
    """
    said = [append_message(frames) for frames in clip.frames(pcm, frames_per_message)]
    n_quiet = round(quiet_s / clip.FRAME_S / frames_per_message)
    return said + [silence_message(frames_per_message)] * n_quiet


@dataclass(slots=True)
class Traffic:
    """Traffic of all sockets since the last reset.

    sent: appends.
    late: appends sent more than 50 ms behind real time.
    behind_s: time of each turn from the due time of its last audio to the event of its end.
    events: the server's events, by type.
    """

    audio_s: float = 0.0
    sent: int = 0
    late: int = 0
    delta_bytes: int = 0
    behind_s: list[float] = field(default_factory=list)
    events: Counter = field(default_factory=Counter)

    @property
    def n_deltas(self) -> int:
        return self.events["response.output_audio.delta"]


class Users:
    """All sessions of an arm. `traffic` counts from the last reset."""

    def __init__(
        self,
        url: str,
        periods: list[list[str]],
        message_s: float,
        compression: str | None,
        clock: Clock,
    ):
        self._url, self._periods, self._message_s = url, periods, message_s
        self._compression, self._clock = compression, clock
        self.traffic = Traffic()

    def reset(self) -> None:
        self.traffic = Traffic()

    async def run(self) -> None:
        """Run until cancelled. Raises an error if a server closes a session."""
        async with asyncio.TaskGroup() as tasks:
            for i in range(len(self._periods)):
                tasks.create_task(self._session(i))

    async def _session(self, i: int) -> None:
        async with (
            connect(self._url, compression=self._compression, max_size=None, proxy=None) as socket,
            asyncio.TaskGroup() as tasks,
        ):
            # Users are spread over a period, and within a message's time.
            due_s = self._clock.now_s() + self._message_s * i / len(self._periods)
            tasks.create_task(self._listen(socket, due_s))
            tasks.create_task(self._speak(socket, i, due_s))

    async def _speak(self, socket: ClientConnection, i: int, due_s: float) -> None:
        messages = self._periods[i]
        at = i * len(messages) // len(self._periods)
        while True:
            await self._clock.sleep(due_s - self._clock.now_s())
            self.traffic.sent += 1
            self.traffic.audio_s += self._message_s
            self.traffic.late += self._clock.now_s() - due_s > LATE_FRAME_S
            await socket.send(messages[at % len(messages)])
            at += 1
            due_s += self._message_s

    async def _listen(self, socket: ClientConnection, began_s: float) -> None:
        async for text in socket:
            event = orjson.loads(text)
            self.traffic.events[event["type"]] += 1
            if event["type"] == "response.output_audio.delta":
                self.traffic.delta_bytes += len(event["delta"]) * 3 // 4
            elif event["type"] == "input_audio_buffer.speech_stopped":
                n_messages = -(-event["audio_end_ms"] // round(1000 * self._message_s))
                due_s = began_s + (n_messages - 1) * self._message_s
                self.traffic.behind_s.append(self._clock.now_s() - due_s)
        raise ConnectionError("the server closed a session")
