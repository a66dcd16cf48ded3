"""One call as aiortc sees it: an offer, connectivity, a data channel, packets of sound.

In: an offer, events, audio. Out: an answer, events, audio (messages.py).
Owner: one Peer per call, in the process of calls. aiortc does ICE, DTLS, SRTP and SCTP; packets of
sound are taken from its receiver before its jitter buffer, and given to its sender encoded.
"""

import asyncio
import fractions
import ipaddress
import logging
import re
from collections.abc import Callable
from typing import Any

from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamTrack
from aiortc.rtcrtpreceiver import StreamStatistics
from aiortc.rtp import RtcpRrPacket, RtcpSrPacket
from av import Packet

from sglang_live.errors import LiveError
from sglang_live.webrtc.messages import (
    Discard,
    Ended,
    Event,
    FromGateway,
    FromProcess,
    HangUp,
    Heard,
    Hold,
    Left,
    Opened,
    Play,
    PlayedOut,
)
from sglang_live.webrtc.receive import RTP_RATE_HZ, ReceivePath
from sglang_live.webrtc.send import SendPath

log = logging.getLogger(__name__)

CHANNEL = "oai-events"
# From the offer to a connection with an open channel.
_CONNECT_S = 15.0
# A peer that takes no events for a while is given up.
_MOST_BUFFERED_BYTES = 16 << 20
_HANG_UP_S = 1.0
_MOST_CANDIDATES = 32
_TIME_BASE = fractions.Fraction(1, RTP_RATE_HZ)
_PACKET_TICKS = RTP_RATE_HZ // 50
_OPUS = re.compile(r"^a=rtpmap:(\d+) opus/48000", re.MULTILINE | re.IGNORECASE)
_OF_CODEC = re.compile(r"a=(?:rtpmap|fmtp|rtcp-fb):(\d+) ")
_FEC = "a=fmtp:{0} minptime=10;useinbandfec=1"


class UnusableOfferError(LiveError):
    """Told to the client."""


class Peer:
    def __init__(
        self, call: str, tell: Callable[[FromProcess], None], turn: RTCIceServer | None = None
    ):
        """
        Args:
            tell: is given what the gateway has to know.
            turn: a relay; None: none.
        """
        self.call = call
        self._tell = tell
        # Without a list, aiortc asks a public server for this machine's address.
        servers = [turn] if turn is not None else []
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=servers))
        self._turn = turn
        self._heard, self._spoken = ReceivePath(), SendPath()
        self._out = _Packets()
        self._channel: Any = None
        self._over = False
        self._limit = asyncio.get_running_loop().call_later(_CONNECT_S, self._too_late)
        self._closing: asyncio.Task[None] | None = None
        self._connection.on("datachannel", self._on_channel)
        self._connection.on("connectionstatechange", self._on_state)

    @property
    def is_over(self) -> bool:
        return self._over

    async def answer(self, offer: str, client: str) -> str:
        """client: see Offer. Raises UnusableOfferError."""
        check_offer(offer)
        usable = usable_part(offer)
        try:
            if self._turn is not None:
                usable = with_address(usable, client)
            description = RTCSessionDescription(usable, "offer")
            await self._connection.setRemoteDescription(description)
            [transceiver] = self._connection.getTransceivers()
            self._take_over(transceiver)
            await self._connection.setLocalDescription(await self._connection.createAnswer())
        except Exception as error:  # of any type: the parser checks little
            log.info("offer_refused call=%s error=%r", self.call, error)
            raise UnusableOfferError("The SDP offer cannot be read.") from error
        answer = self._connection.localDescription.sdp
        if self._turn is not None and " typ relay" not in answer:
            log.warning("no_relay call=%s url=%s", self.call, self._turn.urls)
        return asking_for_fec(answer)

    def _take_over(self, transceiver: Any) -> None:
        transceiver.direction = "sendrecv"
        sender, receiver = transceiver.sender, transceiver.receiver
        sender.replaceTrack(self._out)
        receiver._handle_rtp_packet = self._on_packet
        # Reports to the peer are aiortc's own, from these.
        self._statistics: dict[int, StreamStatistics] = receiver._RTCRtpReceiver__remote_streams
        handle_report = sender._handle_rtcp_packet

        async def on_report(packet: Any) -> None:
            await handle_report(packet)
            if isinstance(packet, RtcpRrPacket | RtcpSrPacket):
                for report in packet.reports:
                    if report.ssrc == sender._ssrc:
                        self._spoken.expect_loss(report.fraction_lost / 256)

        sender._handle_rtcp_packet = on_report

    async def _on_packet(self, packet: Any, arrival_time_ms: int) -> None:
        if packet.ssrc not in self._statistics:
            self._statistics[packet.ssrc] = StreamStatistics(RTP_RATE_HZ)
        self._statistics[packet.ssrc].add(packet)
        if not self._over:
            self._heard.push(packet.timestamp, packet.payload)

    def tick(self, n: int, missed: int) -> None:
        """The next 20 ms, of all calls the n-th. missed: how many before them were not given."""
        if self._over or self._channel is None:
            return
        for _ in range(1 + missed):
            if (pcm := self._heard.tick()) is not None:
                self._tell(Heard(self.call, pcm))
        packet, lane, n_bytes = self._spoken.tick()
        if packet is not None:
            self._out.put(packet, n)
            if n_bytes:
                self._tell(Left(self.call, lane, n_bytes))

    def take(self, message: FromGateway) -> None:
        if self._over:
            return
        match message:
            case Event():
                self._send(message.text)
            case Play():
                self._spoken.play(message.lane, message.pcm)
            case PlayedOut():
                self._spoken.played_out(message.lane)
            case Hold():
                self._spoken.hold(message.lane, held=message.held)
            case Discard():
                self._spoken.discard(message.lane)
            case HangUp():
                self._end("hung up")

    def _send(self, text: str) -> None:
        if self._channel is None or self._channel.readyState != "open":
            return
        if self._channel.bufferedAmount > _MOST_BUFFERED_BYTES:
            return self._end("the client does not read")
        self._channel.send(text)

    def _on_channel(self, channel: Any) -> None:
        if channel.label != CHANNEL or self._channel is not None:
            return
        self._limit.cancel()
        self._channel = channel
        channel.on("message", self._on_text)
        channel.on("close", lambda: self._end("the client closed the channel"))
        self._tell(Opened(self.call, self._connection.sctp._remote_max_message_size or 0))

    def _on_text(self, text: str | bytes) -> None:
        if not self._over:
            self._tell(Event(self.call, text if isinstance(text, str) else text.decode("latin-1")))

    def _on_state(self) -> None:
        if self._connection.connectionState in ("failed", "closed"):
            self._end("the connection is lost")

    def _too_late(self) -> None:
        self._end(f"no connection within {_CONNECT_S:g} s")

    def _end(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        self._limit.cancel()
        self._tell(Ended(self.call, reason))
        self._closing = asyncio.get_running_loop().create_task(self.close())

    async def close(self) -> None:
        """The events that were sent before still arrive, if the peer takes them soon."""
        self._over = True
        self._limit.cancel()
        until_s = asyncio.get_running_loop().time() + _HANG_UP_S
        while self._channel is not None and self._channel.bufferedAmount:
            if asyncio.get_running_loop().time() > until_s:
                break
            await asyncio.sleep(0.02)
        await self._connection.close()
        self._heard.close()
        self._spoken.close()


class _Packets(MediaStreamTrack):
    """Packets as they leave, for aiortc's sender."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._queue: asyncio.Queue[Packet] = asyncio.Queue()

    def put(self, data: bytes, n: int) -> None:
        packet = Packet(data)
        packet.pts, packet.time_base = n * _PACKET_TICKS, _TIME_BASE
        self._queue.put_nowait(packet)

    async def recv(self) -> Packet:
        return await self._queue.get()


def check_offer(offer: str) -> None:
    """Raises UnusableOfferError with what is missing."""
    media = [line.split(" ")[0] for line in offer.splitlines() if line.startswith("m=")]
    if media.count("m=audio") != 1 or media.count("m=application") != 1 or len(media) != 2:
        raise UnusableOfferError(
            "The SDP offer must have one audio line and one data channel, and nothing else."
        )


def usable_part(offer: str) -> str:
    """Opus alone, without candidates of TCP, of names in other networks (mDNS), or too many.

    The server waits for the client's first check: its address is known then.

    Raises:
        UnusableOfferError: there is no Opus.
    """
    opus = _OPUS.search(offer)
    if opus is None:
        raise UnusableOfferError("The SDP offer lacks Opus.")
    kept, n_candidates = [], 0
    for line in offer.splitlines():
        if line.startswith("m=audio "):
            line = " ".join((*line.split(" ")[:3], opus[1]))
        elif (of_codec := _OF_CODEC.match(line)) and of_codec[1] != opus[1]:
            continue
        if line.startswith("a=candidate:"):
            fields = line.lower().split()
            n_candidates += 1
            is_udp = len(fields) > 4 and fields[2] == "udp" and not fields[4].endswith(".local")
            if not is_udp or n_candidates > _MOST_CANDIDATES:
                continue
        # Once it has them all, aioice gives up without a pair; a browser's come with its checks.
        if line.strip() != "a=end-of-candidates":
            kept.append(line)
    return "\r\n".join((*kept, ""))


def with_address(offer: str, client: str) -> str:
    """The offer with a candidate at the client's address, whose port is not known.

    A relay lets packets through from addresses alone that were named to it (RFC 8656, section 9),
    as aioice does with candidates. Browsers' offers have none.
    """
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return offer  # a name, or nothing: a proxy's word
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    at = offer.index("\r\nm=", offer.index("\r\nm=") + 1)
    return f"{offer[:at]}\r\na=candidate:0 1 udp 1 {address} 9 typ host{offer[at:]}"


def asking_for_fec(answer: str) -> str:
    """The answer with a wish for Opus's own repetition of lost packets."""
    lines = []
    for line in answer.splitlines():
        lines.append(line)
        if line.startswith("a=rtpmap:") and "opus/48000" in line.lower():
            lines.append(_FEC.format(line.partition(" ")[0].removeprefix("a=rtpmap:")))
    return "\r\n".join((*lines, ""))
