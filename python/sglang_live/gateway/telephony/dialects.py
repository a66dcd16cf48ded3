"""How phone services speak on a socket: their frames, and what they mean.

In: frames of a service. Out: facts; frames for the service.
Sources: Twilio's Media Streams (SignalWire has the same messages), Telnyx's Media Streaming,
Asterisk's chan_websocket.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from sglang_live.errors import BadInputError
from sglang_live.gateway.audio.codec import (
    PCMA,
    PCMU,
    WireFormat,
    decode_base64,
    encode_base64,
)
from sglang_live.gateway.errors import cut

# What comes later than this many pieces after it is lost.
_MOST_WAITING = 8
# Audio that Asterisk sends before it says what it is.
_MOST_EARLY_BYTES = 8_000
_MOST_PAYLOAD_BYTES = 1 << 16
# Speech that waits at a service which can drop it, and at one which cannot.
_LEAD_S, _SMALL_LEAD_S = 1.0, 0.06
KEYS = frozenset("0123456789*#ABCD")


class PhoneFrameError(BadInputError):
    code = "invalid_phone_frame"


@dataclass(frozen=True, slots=True)
class Begun:
    """call_id: the service's name of the call. form: of its audio, both ways."""

    call_id: str
    form: WireFormat


@dataclass(frozen=True, slots=True)
class Sound:
    """raw: the user's next audio, in the call's format."""

    raw: bytes


@dataclass(frozen=True, slots=True)
class Key:
    """digit: one of KEYS."""

    digit: str


@dataclass(frozen=True, slots=True)
class Played:
    """All audio before this mark was played, or dropped."""

    mark: str


@dataclass(frozen=True, slots=True)
class HungUp:
    pass


Fact = Begun | Sound | Key | Played | HungUp
Frame = str | bytes


class Dialect(Protocol):
    """Of one call.

    lead_s: of the speech that waits at the service.
    """

    lead_s: float

    def read(self, frame: Frame) -> Iterator[Fact]:
        """Raises BadInputError."""
        ...

    def speech(self, raw: bytes) -> Frame: ...

    def mark(self, name: str) -> Frame | None:
        """Reported when all audio before it was played. None: the service reports nothing."""
        ...

    def clear(self) -> Frame | None:
        """Drop what was not played. None: nothing waits."""
        ...

    def hang_up(self) -> Frame | None:
        """None: the end of the socket says it."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """What services call the same things.

    formats: by the names of encodings.
    tells_stream: whether frames for the service name the stream.
    """

    stream: str
    call: str
    media_format: str
    formats: Mapping[str, WireFormat]
    tells_stream: bool


TWILIO = Names("streamSid", "callSid", "mediaFormat", {"audio/x-mulaw": PCMU}, True)
TELNYX = Names("stream_id", "call_control_id", "media_format", {"PCMU": PCMU, "PCMA": PCMA}, False)


class JsonStream:
    """Twilio's messages, with the names of a service. Media may come in another order."""

    lead_s = _LEAD_S

    def __init__(self, names: Names):
        self._names = names
        self._stream = ""
        self._form = PCMU
        self._next = 0  # number of the next piece; 0: none came yet
        self._waiting: dict[int, bytes] = {}

    def read(self, frame: Frame) -> Iterator[Fact]:
        message = _object(frame)
        match message.get("event"):
            case "start":
                yield self._started(message)
            case "media":
                yield from self._media(_part(message, "media"))
            case "dtmf":
                yield from _key(_text(_part(message, "dtmf"), "digit"))
            case "mark":
                yield Played(_text(_part(message, "mark"), "name"))
            case "stop":
                yield HungUp()

    def speech(self, raw: bytes) -> Frame:
        return self._message("media", media={"payload": encode_base64(raw)})

    def mark(self, name: str) -> Frame | None:
        return self._message("mark", mark={"name": name})

    def clear(self) -> Frame | None:
        return self._message("clear")

    def hang_up(self) -> Frame | None:
        return None

    def _message(self, event: str, **fields: Any) -> Frame:
        names = self._names
        stream = {names.stream: self._stream} if names.tells_stream else {}
        return orjson.dumps({"event": event, **stream, **fields}).decode()

    def _started(self, message: dict[str, Any]) -> Begun:
        start, names = _part(message, "start"), self._names
        self._stream = str(message.get(names.stream) or start.get(names.stream) or "")
        encoding = _part(start, names.media_format).get("encoding")
        form = names.formats.get(str(encoding))
        if form is None:
            raise PhoneFrameError(
                f"Audio as {cut(str(encoding))!r} is not served, only as "
                f"{' or '.join(names.formats)} at 8 kHz."
            )
        self._form = form
        return Begun(_text(start, names.call), form)

    def _media(self, media: dict[str, Any]) -> Iterator[Fact]:
        if str(media.get("track") or "inbound").startswith("outbound"):
            return  # what the user hears
        payload = _text(media, "payload")
        raw = decode_base64(payload, self._form, max_bytes=_MOST_PAYLOAD_BYTES, param="payload")
        number = str(media.get("chunk") or "")
        if not (number.isascii() and number.isdecimal() and len(number) < 16):
            yield Sound(raw)
            return
        at = int(number)
        self._next = self._next or at
        if at < self._next:
            return  # silence has taken its place
        self._waiting[at] = raw
        while self._waiting:
            if self._next in self._waiting:
                yield Sound(self._waiting.pop(self._next))
            elif len(self._waiting) <= _MOST_WAITING:
                return
            else:  # a lost pause would end a turn too late
                yield Sound(self._form.silence * len(raw))
            self._next += 1


class Asterisk:
    """chan_websocket: binary media, control in words or in JSON, as Asterisk begins."""

    lead_s = _LEAD_S

    def __init__(self) -> None:
        self._is_json = False
        self._early: bytearray | None = bytearray()  # None: the call has begun
        self._frame_bytes = 160

    def read(self, frame: Frame) -> Iterator[Fact]:
        if isinstance(frame, bytes):
            if self._early is None:
                yield Sound(frame)
            elif len(self._early) < _MOST_EARLY_BYTES:
                self._early += frame
            return
        event, fields = self._event(frame)
        match event:
            case "MEDIA_START":
                yield self._started(fields)
                early, self._early = self._early, None
                if early:
                    yield Sound(bytes(early))
            case "DTMF_END":
                yield from _key(_text(fields, "digit"))
            case "MEDIA_MARK_PROCESSED":
                yield Played(_text(fields, "correlation_id"))

    def speech(self, raw: bytes) -> Frame:
        # Asterisk drops what is left of a frame.
        lacks = -len(raw) % self._frame_bytes
        return raw + PCMU.silence * lacks if lacks else raw

    def mark(self, name: str) -> Frame | None:
        return self._command("MARK_MEDIA", name)

    def clear(self) -> Frame | None:
        return self._command("FLUSH_MEDIA")

    def hang_up(self) -> Frame | None:
        return self._command("HANGUP")

    def _started(self, fields: dict[str, Any]) -> Begun:
        form = {"ulaw": PCMU, "alaw": PCMA}.get(str(fields.get("format")))
        if form is None:
            raise PhoneFrameError(
                f"Audio as {cut(str(fields.get('format')))!r} is not served: dial with "
                "c(ulaw) or c(alaw)."
            )
        size = str(fields.get("optimal_frame_size") or "")
        if size.isascii() and size.isdecimal() and 0 < int(size[:6]) <= 1600:
            self._frame_bytes = int(size)
        return Begun(_text(fields, "connection_id"), form)

    def _event(self, frame: str) -> tuple[str, dict[str, Any]]:
        if frame.lstrip().startswith("{"):
            self._is_json = True
            fields = _object(frame)
            return str(fields.get("event")), fields
        event, *words = frame.split()[:32] or [""]
        fields = {}
        for word in words:
            name, colon, value = word.partition(":")
            fields.update({name: value} if colon else {"correlation_id": name})
        return event, fields

    def _command(self, name: str, correlation_id: str = "") -> Frame:
        if self._is_json:
            told = {"correlation_id": correlation_id} if correlation_id else {}
            return orjson.dumps({"command": name, **told}).decode()
        return f"{name} {correlation_id}".rstrip()


class PlainSocket:
    """Binary frames of G.711 both ways, at the pace of time; a text frame is a key."""

    lead_s = _SMALL_LEAD_S

    def __init__(self, call_id: str, form: WireFormat):
        self._begun: Begun | None = Begun(call_id, form)

    def read(self, frame: Frame) -> Iterator[Fact]:
        if self._begun is not None:
            yield self._begun
            self._begun = None
        if isinstance(frame, bytes):
            yield Sound(frame)
        else:
            yield from _key(frame)

    def speech(self, raw: bytes) -> Frame:
        return raw

    def mark(self, name: str) -> Frame | None:
        return None

    def clear(self) -> Frame | None:
        return None

    def hang_up(self) -> Frame | None:
        return None


def _object(frame: Frame) -> dict[str, Any]:
    try:
        message = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise PhoneFrameError(f"A frame is not JSON: {error}.") from None
    if not isinstance(message, dict):
        raise PhoneFrameError("A frame is no object.")
    return message


def _part(message: dict[str, Any], name: str) -> dict[str, Any]:
    part = message.get(name)
    if not isinstance(part, dict):
        raise PhoneFrameError(f"A message lacks '{name}'.")
    return part


def _text(message: dict[str, Any], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str) or not text:
        raise PhoneFrameError(f"A message lacks '{name}'.")
    return text


def _key(text: str) -> Iterator[Key]:
    if text.upper() not in KEYS:
        raise PhoneFrameError(f"{cut(text)!r} is no key of a phone.")
    yield Key(text.upper())
