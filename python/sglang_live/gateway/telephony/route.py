"""/v1/telephony/…: sockets of phone services. A call is a session of the Realtime API whose audio
is no events; its sideband is /v1/realtime?call_id=, with the service's name of the call.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
from contextlib import ExitStack, suppress

from starlette.datastructures import Headers
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.audio.codec import PCMA, PCMU
from sglang_live.gateway.auth import ANONYMOUS, choose_subprotocol, offered_keys
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.wire import CLOSE_NORMAL, CLOSE_TRY_AGAIN_LATER
from sglang_live.gateway.errors import (
    CLOSE_POLICY_VIOLATION,
    InvalidKeyError,
    cut,
    refuse_handshake,
)
from sglang_live.gateway.json_forms import unknown_parameter
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.protocol import realtime_link
from sglang_live.gateway.telephony.dialects import (
    TELNYX,
    TWILIO,
    Asterisk,
    Begun,
    Dialect,
    Fact,
    JsonStream,
    PhoneFrameError,
    PlainSocket,
)
from sglang_live.gateway.telephony.line import PhoneLine
from sglang_live.gateway.webrtc.calls import OpenCalls
from sglang_live.gateway.webrtc.sound import CallSound
from sglang_live.gateway.webrtc.wire import CallWire
from sglang_live.ids import new_id

log = logging.getLogger(__name__)

TELEPHONY_PATH = "/v1/telephony"
# From the socket to the service's first message about the call.
_START_S = 10.0
_END_S = 1.0
_SIGNATURES = ("x-twilio-signature", "x-signalwire-signature")
_SENT_TOKENS = ("x-telnyx-streaming-auth-token",)
_BASIC = "basic "
_SIGNED = ("twilio", "signalwire")


class NoPhoneServiceError(BadInputError):
    code = "unknown_url"
    http_status = 404


class NoStartError(BadInputError):
    code = "call_not_started"


class TelephonyRoute:
    def __init__(self, parts: GatewayParts, calls: OpenCalls):
        self._parts = parts
        self._calls = calls
        self._config = parts.config.telephony

    async def __call__(self, socket: WebSocket) -> None:
        service = socket.path_params["service"]
        try:
            dialect = _dialect(service, socket)
            owner = self._admitted(socket, service)
            self._calls.check(owner)
            counted = await self._parts.open_sessions.open(owner)
        except LiveError as error:
            self._parts.metrics.sessions_refused.labels(error.code).inc()
            await refuse_handshake(socket, error)
            return
        with counted:
            await self._accepted(socket, dialect, owner, counted)

    async def _accepted(
        self, socket: WebSocket, dialect: Dialect, owner: str, counted: ExitStack
    ) -> None:
        await socket.accept(choose_subprotocol(socket.scope.get("subprotocols", [])))
        service = socket.path_params["service"]
        code, reason = CLOSE_NORMAL, "the call is over"
        try:
            await self._serve(socket, dialect, owner, counted)
        except WebSocketDisconnect:
            return
        except LiveError as error:
            self._parts.metrics.errors.labels(error.code).inc()
            log.info("phone_call_refused service=%s error=%s", service, error)
            later = error.http_status in (429, 503)
            code = CLOSE_TRY_AGAIN_LATER if later else CLOSE_POLICY_VIOLATION
            reason = error.code
        if socket.client_state == WebSocketState.CONNECTED:
            with suppress(WebSocketDisconnect):  # it has left meanwhile
                await socket.close(code, reason)

    async def _serve(
        self, socket: WebSocket, dialect: Dialect, owner: str, counted: ExitStack
    ) -> None:
        """counted: see OpenCalls.begin."""
        parts = self._parts
        try:
            async with asyncio.timeout(_START_S):
                begun, early = await _begun(socket, dialect)
        except TimeoutError:
            raise NoStartError(f"No call began within {_START_S:g} s.") from None

        async def send(frame: str | bytes) -> None:
            try:
                if isinstance(frame, str):
                    await socket.send_text(frame)
                else:
                    await socket.send_bytes(frame)
            except Exception as error:  # of any type that a socket raises for a lost client
                log.debug("send_failed error=%r", error)
                line.lost("the socket is closed")

        as_text = self._config.telephony_keys_as_text
        line = PhoneLine(begun, dialect, send, parts.clock, keys_as_text=as_text)
        wire = CallWire(line, parts.metrics.events_shortened)

        def sound_of(outbox: Outbox) -> CallSound:
            line.open(outbox.emit)
            return wire.open_sound(outbox)

        link = realtime_link(wire, parts, owner=owner, sound_of=sound_of)
        call = self._calls.start(line.id, wire, link, owner, counted)
        log.info("phone_call_begun call=%s session=%s", line.id, link.session_id)
        speaking = asyncio.create_task(line.speak())
        reading = asyncio.create_task(_read(socket, dialect, line, early))
        tasks = {speaking, reading}
        try:
            await asyncio.wait({*tasks, call.running}, return_when=asyncio.FIRST_COMPLETED)
            line.lost("the call is over")
            await asyncio.wait({speaking, call.running}, timeout=_END_S)
        finally:
            line.lost("the call is over")
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait({call.running})
        for error in found:
            if isinstance(error, Exception):
                raise error

    def _admitted(self, socket: WebSocket, service: str) -> str:
        """The owner of the call. Raises InvalidKeyError."""
        keys, token = self._parts.config.keys.api_keys, self._config.telephony_token
        offered = socket.scope.get("subprotocols", [])
        if keys and self._parts.keys.allow(socket.headers, offered):
            return self._parts.keys.owner(socket.headers, offered)
        if token and service in _SIGNED:
            signed = self._signature(socket)
            given = [socket.headers.get(name, "") for name in _SIGNATURES]
            is_right = any([hmac.compare_digest(signed, one.encode()) for one in given])
        else:
            given = _sent_tokens(socket.headers)
            is_right = bool(token) and any(
                [hmac.compare_digest(token.encode(), one.encode()) for one in given]
            )
        if not is_right:
            raise InvalidKeyError
        return keys[0] if keys else ANONYMOUS

    def _signature(self, socket: WebSocket) -> bytes:
        url = socket.url
        base = self._config.telephony_url.rstrip("/") or f"{url.scheme}://{url.netloc}"
        text = base + url.path + (f"?{url.query}" if url.query else "")
        token = self._config.telephony_token.encode()
        return base64.b64encode(hmac.new(token, text.encode(), hashlib.sha1).digest())


def _dialect(service: str, socket: WebSocket) -> Dialect:
    """Raises BadInputError."""
    known = ("format",) if service == "g711" else ()
    for name in socket.query_params:
        if name not in known:
            raise unknown_parameter(name)
    match service:
        case "twilio" | "signalwire":
            return JsonStream(TWILIO)
        case "telnyx":
            return JsonStream(TELNYX)
        case "asterisk":
            return Asterisk()
        case "g711":
            forms = {form.kind: form for form in (PCMU, PCMA)}
            kind = socket.query_params.get("format", PCMU.kind)
            if kind not in forms:
                raise PhoneFrameError(f"format is {' or '.join(forms)}.")
            return PlainSocket(new_id("phone"), forms[kind])
    raise NoPhoneServiceError(
        f"There is no phone service {cut(service)!r}: asterisk, g711, signalwire, telnyx, twilio."
    )


def _sent_tokens(headers: Headers) -> list[str]:
    found = [*offered_keys(headers), *(headers.get(name, "") for name in _SENT_TOKENS)]
    authorization = headers.get("authorization", "")
    if authorization.lower().startswith(_BASIC):  # of Asterisk
        try:
            pair = base64.b64decode(authorization[len(_BASIC) :], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return found
        found.append(pair.partition(":")[2])
    return found


async def _frame(socket: WebSocket) -> str | bytes:
    """Raises WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", CLOSE_NORMAL))
    text = message.get("text")
    return text if text is not None else message.get("bytes") or b""


async def _begun(socket: WebSocket, dialect: Dialect) -> tuple[Begun, list[Fact]]:
    """The start of the call, and what came with it. Raises BadInputError."""
    while True:
        facts = list(dialect.read(await _frame(socket)))
        if facts and isinstance(facts[0], Begun):
            return facts[0], facts[1:]


async def _read(socket: WebSocket, dialect: Dialect, line: PhoneLine, early: list[Fact]) -> None:
    """Raises LiveError."""
    await line.opened.wait()
    for fact in early:
        line.take(fact)
    while True:
        try:
            frame = await _frame(socket)
        except WebSocketDisconnect:
            line.lost("the socket is closed")
            return
        for fact in dialect.read(frame):
            if not isinstance(fact, Begun):
                line.take(fact)
