"""Users of calls: recorded speech at the pace of time, over WebRTC or a socket; what comes back.

In: a script of utterances and pauses, encoded once for all users. Out: when which sound and which
event came, in seconds since the first frame that was sent. A network in between may lose packets
of both directions and delay those of the user: each by a random time, so that they overtake each
other.
"""

import asyncio
import fractions
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aioice.ice
import httpx
import orjson
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamTrack
from aiortc.rtcrtpreceiver import StreamStatistics
from av import Packet
from websockets.asyncio.client import connect

from lab.load_client.microphone import LATE_FRAME_S
from lab.load_client.utterance import append_message, frames_before_speech
from sglang_live.client import clip
from sglang_live.webrtc.opus import Encoder
from sglang_live.webrtc.receive import RTP_RATE_HZ

CALLS = "/v1/realtime/calls"
DELTA = "response.output_audio.delta"
STARTED, CLEARED = "input_audio_buffer.speech_started", "output_audio_buffer.cleared"
_TICKS = RTP_RATE_HZ // 50  # in a frame
# A packet of silence is shorter than one with sound.
_SOUND_BYTES = 20
_CONNECT_S = 20.0

aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]


@dataclass(frozen=True, slots=True)
class Utterance:
    """Where its speech begins and ends in a script, in frames.

    interrupts: it begins while a response is heard.
    """

    begin: int
    end: int
    interrupts: bool


@dataclass(frozen=True, slots=True)
class Script:
    """What a user says, over and over. frames: PCM16 of 20 ms at 24 kHz."""

    frames: tuple[bytes, ...]
    utterances: tuple[Utterance, ...]

    @classmethod
    def of(cls, clips: Sequence[bytes], reply_s: float) -> Self:
        """Every second utterance interrupts the response to the one before it."""
        frames: list[bytes] = []
        said = []
        for number, pcm in enumerate(clips):
            begin = len(frames) + frames_before_speech(pcm)
            said.append(Utterance(begin, len(frames) + clip.speech_frames(pcm), number % 2 == 1))
            frames += clip.frames(pcm)
            # Detection and the first sound take about a second.
            pause_s = 2.5 if number % 2 == 0 else reply_s + 2.5
            frames += [bytes(clip.FRAME_BYTES)] * round(pause_s / clip.FRAME_S)
        return cls(tuple(frames), tuple(said))

    def said_until(self, n_frames: int, first: int) -> list[tuple[float, float, bool]]:
        """(begin, end, interrupts) of what was said in n_frames from frame `first` on, in seconds
        since then."""
        found = []
        for lap in range((first + n_frames) // len(self.frames) + 1):
            shift = lap * len(self.frames) - first
            for one in self.utterances:
                if one.begin + shift >= 0 and one.end + shift <= n_frames:
                    times = (clip.FRAME_S * (n + shift) for n in (one.begin, one.end))
                    found.append((*times, one.interrupts))
        return found


@dataclass(frozen=True, slots=True)
class Network:
    """loss: share of the packets. jitter_s: the longest delay of a packet."""

    loss: float = 0.0
    jitter_s: float = 0.0

    def spoil(self, ice: Any, rng: random.Random) -> None:
        """ice: aiortc's transport, whose packets all pass this network from now on."""
        send, receive = ice._send, ice._recv
        on_the_way: set[asyncio.Task[None]] = set()

        async def arrive(data: bytes) -> None:
            await asyncio.sleep(self.jitter_s * rng.random())
            with suppress(ConnectionError):  # the call is over
                await send(data)

        async def spoiled_send(data: bytes) -> None:
            if rng.random() >= self.loss:
                task = asyncio.create_task(arrive(data))
                on_the_way.add(task)
                task.add_done_callback(on_the_way.discard)

        async def spoiled_receive() -> bytes:
            while True:
                data = await receive()
                if rng.random() >= self.loss:
                    return data

        if self.loss or self.jitter_s:
            ice._send, ice._recv = spoiled_send, spoiled_receive


@dataclass(slots=True)
class User:
    """
    Attributes:
        first: frame of the script with which it begins.
        sounds: when each piece of the agent's voice came.
        events: (when, type, audio_start_ms or None) of STARTED and CLEARED.
        n_sent, n_late: frames; those that left too late.
    """

    script: Script
    first: int
    began_s: float = 0.0
    n_sent: int = 0
    n_late: int = 0
    sounds: list[float] = field(default_factory=list)
    events: list[tuple[float, str, int | None]] = field(default_factory=list)

    async def next_frame(self) -> int:
        """Wait until the next frame is due. Returns its number in the script."""
        self.began_s = self.began_s or time.monotonic()
        due_s = self.began_s + clip.FRAME_S * self.n_sent
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        self.n_late += time.monotonic() - due_s > LATE_FRAME_S
        self.n_sent += 1
        return (self.first + self.n_sent - 1) % len(self.script.frames)

    def heard(self) -> None:
        self.sounds.append(time.monotonic() - self.began_s)

    def took(self, text: str | bytes) -> None:
        event = orjson.loads(text)
        if event["type"] == DELTA:
            self.heard()
        elif event["type"] in (STARTED, CLEARED):
            came_s = time.monotonic() - self.began_s
            self.events.append((came_s, event["type"], event.get("audio_start_ms")))
        elif event["type"] == "error":
            raise RuntimeError(f"the server says {event['error']}")

    @property
    def said(self) -> list[tuple[float, float, bool]]:
        return self.script.said_until(self.n_sent, self.first)


def encoded(script: Script, loss: float) -> list[bytes]:
    """The script as packets of Opus."""
    encoder = Encoder(clip.SAMPLE_RATE_HZ)
    encoder.expect_loss(max(loss, 0.01))
    packets = [encoder.encode(frame) for frame in script.frames]
    encoder.close()
    return packets


def appended(script: Script) -> list[str]:
    """The script as events."""
    return [append_message(frame) for frame in script.frames]


class _Microphone(MediaStreamTrack):
    kind = "audio"

    def __init__(self, user: User, packets: Sequence[bytes]):
        super().__init__()
        self._user, self._packets = user, packets

    async def recv(self) -> Packet:
        number = await self._user.next_frame()
        packet = Packet(self._packets[number])
        packet.pts = _TICKS * (self._user.n_sent - 1)
        packet.time_base = fractions.Fraction(1, RTP_RATE_HZ)
        return packet


async def call(
    user: User,
    packets: Sequence[bytes],
    url: str,
    network: Network,
    rng: random.Random,
    form: dict[str, Any] | None = None,
    took: Any = None,
) -> None:
    """A call over WebRTC, until cancelled.

    Args:
        packets: the script's.
        form: settings of the session.
        took: is given each event; None: the user.
    Raises:
        RuntimeError: the server refuses it, or ends it.
    """
    connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    opened = asyncio.Event()

    def on_message(text: str) -> None:
        try:
            (took or user.took)(text)
        except Exception as error:  # pyee would print it and go on
            if not failed.done():
                failed.set_exception(error)

    def on_close() -> None:
        if not failed.done():
            failed.set_exception(RuntimeError("the call has ended"))

    async def on_packet(packet: Any, arrival_time_ms: int) -> None:
        # aiortc's reports of losses are from these; the server repeats more when more is lost.
        streams = receiver._RTCRtpReceiver__remote_streams
        streams.setdefault(packet.ssrc, StreamStatistics(RTP_RATE_HZ)).add(packet)
        if len(packet.payload) > _SOUND_BYTES:
            user.heard()

    try:
        connection.addTrack(_Microphone(user, packets))
        channel = connection.createDataChannel("oai-events")
        channel.on("message", on_message)
        channel.on("open", opened.set)
        channel.on("close", on_close)
        await connection.setLocalDescription(await connection.createOffer())
        offer = {"sdp": (None, connection.localDescription.sdp, "application/sdp")}
        if form is not None:
            offer["session"] = (None, orjson.dumps(form).decode(), "application/json")
        async with httpx.AsyncClient(timeout=_CONNECT_S) as http:
            answer = await http.post(url + CALLS, files=offer)
        if answer.status_code != 201:
            raise RuntimeError(f"the server refuses a call: {answer.text}")
        await connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        # Of the sound and of the channel: they are bundled from now on.
        [receiver] = connection.getReceivers()
        network.spoil(receiver.transport.transport, rng)
        receiver._handle_rtp_packet = on_packet
        async with asyncio.timeout(_CONNECT_S):
            await opened.wait()
        await failed
    finally:
        await connection.close()


async def talk(user: User, messages: Sequence[str], url: str) -> None:
    """The same over a socket. messages: the script's events."""
    address = url.replace("http", "ws", 1) + "/v1/realtime"
    async with (
        connect(address, compression=None, max_size=None, proxy=None) as socket,
        asyncio.TaskGroup() as tasks,
    ):

        async def listen() -> None:
            async for text in socket:
                user.took(text)
            raise RuntimeError("the server has closed a session")

        async def speak() -> None:
            while True:
                await socket.send(messages[await user.next_frame()])

        tasks.create_task(listen())
        tasks.create_task(speak())
