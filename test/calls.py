"""A client of calls over WebRTC that offers as browsers do: aiortc with sound of its own.

Connections are of this machine alone.
"""

import asyncio
import fractions
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aioice.ice
import httpx
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamTrack
from av import Packet

from sglang_live.webrtc.messages import SENT_RATE_HZ
from sglang_live.webrtc.opus import Decoder, Encoder

aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]

PATH, LIVE_PATH = "/v1/realtime/calls", "/v1/live/sessions"
PATIENCE_S = 20.0
MOST_BYTES = 65_536  # of a message, at the end of the offer: the data channel comes last
_FRAME = SENT_RATE_HZ // 50


class Microphone(MediaStreamTrack):
    """Says what it is given, and silence, in packets of 20 ms; loses a share of them."""

    kind = "audio"

    def __init__(self, loss: float = 0.0, seed: int = 1):
        super().__init__()
        self._encoder = Encoder(SENT_RATE_HZ)
        self._encoder.expect_loss(max(loss, 0.01))
        self._pcm = np.zeros(0, np.int16)
        self._rng, self._loss = random.Random(seed), loss
        self._began_s, self._n = 0.0, 0

    def say(self, pcm: np.ndarray) -> None:
        """pcm: int16 at SENT_RATE_HZ."""
        self._pcm = np.concatenate((self._pcm, pcm))

    async def recv(self) -> Packet:
        while True:
            self._began_s = self._began_s or time.monotonic()
            await asyncio.sleep(max(0, self._began_s + 0.02 * self._n - time.monotonic()))
            frame, self._pcm = self._pcm[:_FRAME], self._pcm[_FRAME:]
            frame = np.pad(frame, (0, _FRAME - len(frame)))
            packet = Packet(self._encoder.encode(frame.tobytes()))
            packet.pts, packet.time_base = 960 * self._n, fractions.Fraction(1, 48_000)
            self._n += 1
            if self._rng.random() >= self._loss:
                return packet


class Browser:
    """
    Attributes:
        id: of the call, or of its Live session.
        events: that have come, all of them.
        heard: packets of sound, each with the time at which it came.
    """

    id = ""

    def __init__(self, loss: float = 0.0, kinds: tuple[str, ...] = ()):
        """kinds: of the server's addresses that are reached; (): all."""
        self._kinds = kinds
        self.microphone = Microphone(loss)
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.events: list[dict[str, Any]] = []
        self.heard: list[tuple[float, bytes]] = []
        self.closed = asyncio.Event()
        self._come = asyncio.Event()
        self._read = 0
        self.connection.addTrack(self.microphone)
        self.channel = self.connection.createDataChannel("oai-events")
        self.channel.on("message", self._on_message)
        self.channel.on("close", self.closed.set)

        @self.connection.on("connectionstatechange")
        def on_state() -> None:
            if self.connection.connectionState in ("closed", "failed"):
                self.closed.set()

    def _on_message(self, text: str) -> None:
        self.events.append(json.loads(text))
        self._come.set()

    async def offer(self) -> str:
        """Without candidates, as browsers give it."""
        await self.connection.setLocalDescription(await self.connection.createOffer())
        lines = self.connection.localDescription.sdp.splitlines()
        gone = ("a=candidate", "a=end-of-candidates", "a=max-message-size")
        kept = [line for line in lines if not line.startswith(gone)]
        return "\r\n".join((*kept, f"a=max-message-size:{MOST_BYTES}", ""))

    async def connect(self, http: httpx.AsyncClient, **request: Any) -> httpx.Response:
        offer = await self.offer()
        if "files" in request:
            request["files"] = {"sdp": (None, offer, "application/sdp"), **request["files"]}
        else:
            request |= {"content": offer}
            request["headers"] = {"content-type": "application/sdp", **request.get("headers", {})}
        response = await http.post(PATH, **request)
        if response.status_code != 201:
            return response
        self.id = response.headers["location"].rpartition("/")[2]
        await self._answered(response.text)
        return response

    async def connect_live(
        self, http: httpx.AsyncClient, session: dict[str, Any], **request: Any
    ) -> httpx.Response:
        body = {"session": session, "transport": {"type": "webrtc", "sdp": await self.offer()}}
        response = await http.post(LIVE_PATH, json=body, **request)
        if response.status_code == 201:
            self.id = response.json()["session"]["id"]
            await self._answered(response.json()["transport"]["sdp"])
        return response

    async def _answered(self, sdp: str) -> None:
        if self._kinds:
            sdp = "".join(line for line in sdp.splitlines(True) if self._is_reached(line))
        await self.connection.setRemoteDescription(RTCSessionDescription(sdp, "answer"))
        [receiver] = self.connection.getReceivers()

        async def on_packet(packet: Any, arrival_time_ms: int) -> None:
            self.heard.append((time.monotonic(), packet.payload))

        receiver._handle_rtp_packet = on_packet

    def _is_reached(self, line: str) -> bool:
        return not line.startswith("a=candidate:") or line.split()[7] in self._kinds

    def send(self, event_type: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": event_type, **fields}))

    async def until(self, event_type: str, patience_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        """Events up to and including the next one of this type."""
        async with asyncio.timeout(patience_s):
            begin = self._read
            while True:
                while self._read < len(self.events):
                    self._read += 1
                    if self.events[self._read - 1]["type"] == event_type:
                        return self.events[begin : self._read]
                self._come.clear()
                await self._come.wait()

    async def find(self, event_type: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        return (await self.until(event_type, patience_s))[-1]

    def sound(self) -> np.ndarray:
        """What has come, [n] int16 at SENT_RATE_HZ, its silence left out."""
        decoder = Decoder(SENT_RATE_HZ)
        pcm = b"".join(decoder.decode(packet) for _, packet in self.heard)
        decoder.close()
        return np.frombuffer(pcm, np.int16)


@asynccontextmanager
async def calling(
    http: httpx.AsyncClient, loss: float = 0.0, *, kinds: tuple[str, ...] = (), **request: Any
) -> AsyncIterator[Browser]:
    """A browser whose session has begun."""
    browser = Browser(loss, kinds)
    try:
        response = await browser.connect(http, **request)
        assert response.status_code == 201, response.text
        await browser.find("session.created")
        yield browser
    finally:
        await browser.connection.close()


@asynccontextmanager
async def calling_live(
    http: httpx.AsyncClient,
    loss: float = 0.0,
    *,
    kinds: tuple[str, ...] = (),
    headers: Any = None,
    **session: Any,
) -> AsyncIterator[Browser]:
    """The same over the Live API."""
    browser = Browser(loss, kinds)
    try:
        wanted = {"model": "default", **session}
        response = await browser.connect_live(http, wanted, headers=headers)
        assert response.status_code == 201, response.text
        await browser.find("session.started")
        yield browser
    finally:
        await browser.connection.close()
