"""Checks of the Realtime API over WebRTC, by aiortc, if it is installed."""

import asyncio
import fractions
import ipaddress
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from sglang_live.conformance.order import EventOrder
from sglang_live.conformance.server import (
    PATIENCE_S,
    RATE_HZ,
    Event,
    Server,
    Session,
    Skip,
    Violation,
    check_types,
    hold,
    parsed,
)

CALLS = "/v1/realtime/calls"
_CHANNEL = "oai-events"
_SDP = {"Content-Type": "application/sdp"}
_FRAME = RATE_HZ // 50


class Call:
    """
    Attributes:
        place: path of the call.
        events: that came, in order.
        n_packets: with sound.
    """

    place = ""

    def __init__(self, server: Server, speech: bytes = b""):
        aiortc, av = _libraries(server)
        self._server = server
        self._order = EventOrder()
        self._came: asyncio.Queue[Event | Violation] = asyncio.Queue()
        self.events: list[Event] = []
        self.n_loud = 0
        self.closed = asyncio.Event()
        configuration = aiortc.RTCConfiguration(iceServers=[])
        self.connection = aiortc.RTCPeerConnection(configuration)
        self.speech = bytearray(speech)
        self.connection.addTrack(_microphone(aiortc, av, self))
        self.channel = self.connection.createDataChannel(_CHANNEL)
        self.channel.on("message", self._on_message)
        self.channel.on("close", self.closed.set)
        self.connection.on("track", self._on_track)
        self._description = aiortc.RTCSessionDescription
        self._listening: asyncio.Task[None] | None = None

    def _on_message(self, text: str) -> None:
        try:
            event = parsed(text)
            check_types(event)
            if "event_id" in event:
                self._order.see(event)
        except (AssertionError, KeyError) as fault:
            self._came.put_nowait(Violation(f"{event.get('type')}: {fault!r}"))
        except Violation as fault:
            self._came.put_nowait(fault)
        else:
            self._came.put_nowait(event)

    def _on_track(self, track: Any) -> None:
        self._listening = asyncio.create_task(self._listen(track))

    async def _listen(self, track: Any) -> None:
        while True:
            frame = await track.recv()
            self.n_loud += bool(abs(frame.to_ndarray()).max() > 500)

    async def offer(self) -> str:
        await self.connection.setLocalDescription(await self.connection.createOffer())
        sdp: str = self.connection.localDescription.sdp
        return sdp

    async def connect(self) -> None:
        async with self._server.http() as http:
            answer = await http.post(CALLS, content=await self.offer(), headers=_SDP)
        hold(answer.status_code == 201, f"POST {CALLS} is {answer.status_code}: {answer.text}")
        kind = answer.headers.get("content-type", "")
        hold(kind.startswith("application/sdp"), f"its Content-Type is {kind!r}")
        self.place = answer.headers.get("location", "")
        hold(self.place.rpartition("/")[2].startswith("rtc_"), f"its Location is {self.place!r}")
        await self.connection.setRemoteDescription(self._description(answer.text, "answer"))
        await self.find("session.created")

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def find(self, kind: str, within_s: float = PATIENCE_S) -> Event:
        try:
            async with asyncio.timeout(within_s):
                while True:
                    event = await self._came.get()
                    if isinstance(event, Violation):
                        raise event
                    self.events.append(event)
                    if event["type"] == kind:
                        return event
                    hold(event["type"] != "error", f"in place of {kind}: {event.get('error')}")
        except TimeoutError:
            raise Violation(f"no {kind} within {within_s:g} s") from None

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        await self.connection.close()


def _libraries(server: Server) -> tuple[Any, Any]:
    try:
        import aioice.ice
        import aiortc
        import av
    except ImportError:
        raise Skip("aiortc is not installed") from None
    host = urlsplit(server.url).hostname or ""
    try:
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if is_here:  # else aioice leaves this address out
        aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]
    return aiortc, av


def _microphone(aiortc: Any, av: Any, call: Call) -> Any:
    class Microphone(aiortc.mediastreams.MediaStreamTrack):
        kind = "audio"
        began_s, n = 0.0, 0

        async def recv(self) -> Any:
            self.began_s = self.began_s or time.monotonic()
            await asyncio.sleep(max(0.0, self.began_s + 0.02 * self.n - time.monotonic()))
            said = bytes(call.speech[: 2 * _FRAME]).ljust(2 * _FRAME, b"\0")
            if call.channel.readyState == "open":
                del call.speech[: 2 * _FRAME]
            frame = av.AudioFrame(format="s16", layout="mono", samples=_FRAME)
            frame.planes[0].update(said)
            frame.sample_rate, frame.pts = RATE_HZ, self.n * _FRAME
            frame.time_base = fractions.Fraction(1, RATE_HZ)
            self.n += 1
            return frame

    return Microphone()


@asynccontextmanager
async def _calling(server: Server, speech: bytes = b"") -> AsyncIterator[Call]:
    call = Call(server, speech)
    try:
        await call.connect()
        yield call
    finally:
        await call.close()


async def spoken_call(server: Server) -> None:
    """A spoken turn over a call is answered on its track; no event has audio."""
    speech = bytes(RATE_HZ) + await server.speech()
    async with _calling(server, speech) as call:
        await call.find("input_audio_buffer.committed")
        started = await call.find("output_audio_buffer.started")
        stopped = await call.find("output_audio_buffer.stopped", 120)
        hold(started["response_id"] == stopped["response_id"], "of two responses")
        done = [event for event in call.events if event["type"] == "response.done"]
        hold(done, "output_audio_buffer.stopped comes before response.done")
        audio = [e for e in call.events if e["type"] == "response.output_audio.delta"]
        hold(not audio, "an event has audio")
        hold(call.n_loud > 10, "there is no sound on the track")


async def clear_output(server: Server) -> None:
    """output_audio_buffer.clear silences a response."""
    async with _calling(server) as call:
        content = [{"type": "input_text", "text": "What is the capital of France?"}]
        item = {"type": "message", "role": "user", "content": content}
        call.send("conversation.item.create", item=item)
        call.send("response.create")
        started = await call.find("output_audio_buffer.started")
        call.send("output_audio_buffer.clear")
        cleared = await call.find("output_audio_buffer.cleared")
        hold(started["response_id"] == cleared["response_id"], "of two responses")


async def no_audio_on_the_channel(server: Server) -> None:
    """input_audio_buffer.append is an error on a call."""
    async with _calling(server) as call:
        call.send("input_audio_buffer.append", audio="AAAA")
        await call.find("error")


async def hangup(server: Server) -> None:
    """A hang-up is 200 and ends the call; a second one is 404."""
    async with _calling(server) as call, server.http() as http:
        path = f"{call.place}/hangup"
        hold((await http.post(path)).status_code == 200, "the hang-up is refused")
        async with asyncio.timeout(PATIENCE_S):
            await call.closed.wait()
        again = (await http.post(path)).status_code
        hold(again == 404, f"the second hang-up is {again}")


async def sideband(server: Server) -> None:
    """A WebSocket with the call's id sees its events, and sends some."""
    async with _calling(server) as call:
        call_id = call.place.rpartition("/")[2]
        async with server.socket(f"/v1/realtime?call_id={call_id}") as socket:
            side = Session(socket)
            update = {"type": "realtime", "instructions": "Be brief."}
            call.send("session.update", session=update)
            async with asyncio.timeout(PATIENCE_S):
                while parsed(await socket.recv())["type"] != "session.updated":
                    pass
            await call.find("session.updated")
            await side.send("session.update", session={**update, "instructions": "Be kind."})
            shown = (await call.find("session.updated"))["session"]
            hold(shown["instructions"] == "Be kind.", "its event has no effect")


async def no_offer(server: Server) -> None:
    """What is no offer is an error in JSON."""
    async with server.http() as http:
        answer = await http.post(CALLS, content="v=0\r\n", headers=_SDP)
    hold(answer.status_code == 400, f"it is {answer.status_code}")
    hold(answer.json()["error"]["message"], "the error has no message")


WEBRTC = (spoken_call, clear_output, no_audio_on_the_channel, hangup, sideband, no_offer)
