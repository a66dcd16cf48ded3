"""POST /v1/realtime/calls: a session over WebRTC; its hang-up, and its sidebands.

In: an SDP offer, alone or with settings in a form. Out: the answer; the session begins.
Owner: one RealtimeCalls per gateway, with the calls that are open.
"""

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from sglang_live.aio import background, close_all
from sglang_live.errors import BadInputError, CapacityError
from sglang_live.gateway.auth import offered_keys
from sglang_live.gateway.call.wire import CLOSE_NORMAL
from sglang_live.gateway.errors import ClientEventError, InvalidKeyError, cut
from sglang_live.gateway.http.body import multipart, read_body, read_json
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.client_secrets import ClientSecret, ClientSecrets
from sglang_live.gateway.realtime.events import SessionForm
from sglang_live.gateway.realtime.protocol import realtime_link
from sglang_live.gateway.realtime.session_config import first_config
from sglang_live.gateway.realtime.transcription_session import (
    TRANSCRIPTION,
    transcription_defaults,
    update_transcription,
)
from sglang_live.gateway.webrtc.processes import MediaProcesses
from sglang_live.gateway.webrtc.wire import CallWire

log = logging.getLogger(__name__)

CALLS_PATH = "/v1/realtime/calls"
_SDP = "application/sdp"
_MAX_BODY_BYTES = 1 << 18
_MAX_SDP = 1 << 16


class NoSuchCallError(BadInputError):
    code = "call_not_found"
    http_status = 404
    param = "call_id"

    def __init__(self, call_id: str):
        super().__init__(f"There is no call {cut(call_id)!r}.")


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """owner: of the key that began it."""

    wire: CallWire
    owner: str
    running: asyncio.Task[None]


class RealtimeCalls:
    def __init__(self, parts: GatewayParts, secrets: ClientSecrets):
        self._parts = parts
        self._secrets = secrets
        network = parts.config.webrtc.network(is_loopback=parts.config.is_loopback)
        self._processes = MediaProcesses(network, parts.metrics.clients_dropped.labels("call_lost"))
        self._calls: dict[str, _OpenCall] = {}

    async def begin(self, request: Request) -> Response:
        """Not behind the guard of keys: client secrets open calls, too."""
        parts = self._parts
        secret = await self._secrets.find(offered_keys(request.headers))
        if secret is None and not parts.keys.allow(request.headers):
            parts.metrics.sessions_refused.labels(InvalidKeyError.code).inc()
            raise InvalidKeyError
        owner = secret.owner if secret else parts.keys.owner(request.headers)
        self._processes.check_installed()
        parts.tiers.check_heard(owner)
        with await parts.open_sessions.open(owner, secret.value if secret else None) as counted:
            return await self._begin(request, secret, owner, counted)

    async def _begin(
        self, request: Request, secret: ClientSecret | None, owner: str, counted: ExitStack
    ) -> Response:
        """counted: the session, among the open ones."""
        parts = self._parts
        parts.loop_lag.check()
        capacity = parts.orchestrator.capacity_now()
        if capacity.n_more < 1:
            raise CapacityError(capacity.why, retry_after_s=5.0)
        for name in request.query_params:
            if name != "model":
                raise ClientEventError(
                    f"Unknown parameter in the URL: {cut(name)!r}.",
                    code="unknown_parameter",
                    param=name,
                )
        sdp, preset = await _read(request)
        preset = preset or (secret.session if secret else None)
        transcribes = preset is not None and preset.type == TRANSCRIPTION
        model = request.query_params.get("model")
        parts.check_model(model, stock=transcribes)
        self._check(preset)
        call, answer = await self._processes.offer(sdp)
        wire = CallWire(call, parts.metrics.events_shortened)
        link = realtime_link(
            wire,
            parts,
            preset=preset,
            owner=owner,
            transcribes=transcribes,
            model=model,
            sound_of=wire.open_sound,
        )

        counted = counted.pop_all()

        async def run() -> None:
            parts.drain.begin_serving()
            try:
                with counted:
                    await link.run()
            finally:
                parts.drain.end_serving()
                wire.hang_up()
                del self._calls[call.id]

        self._calls[call.id] = _OpenCall(wire, owner, background(run(), "webrtc call"))
        log.info("call_begun call=%s session=%s", call.id, link.session_id)
        headers = {"location": f"{CALLS_PATH}/{call.id}"}
        return Response(answer, 201, headers, media_type=_SDP)

    async def hang_up(self, request: Request) -> Response:
        open_call = await self._find(request.path_params["call_id"], request)
        open_call.wire.hang_up()
        await asyncio.wait({open_call.running})
        return Response(status_code=200)

    async def attach(self, socket: WebSocket, call_id: str, owner: str) -> None:
        """Serve a sideband of a call.

        Raises:
            NoSuchCallError: there is none of this key.
        """
        open_call = self._calls.get(call_id)
        if open_call is None or open_call.owner != owner:
            raise NoSuchCallError(call_id)
        sideband = open_call.wire.attach()

        async def read() -> None:
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                sideband.send(message.get("text") or "")

        async def write() -> None:
            while (frame := await sideband.next()) is not None:
                await socket.send_text(frame)
            await socket.close(CLOSE_NORMAL, "the call is over")

        tasks = {asyncio.create_task(read()), asyncio.create_task(write())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            open_call.wire.detach(sideband)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        for open_call in list(self._calls.values()):
            open_call.wire.hang_up()
        if running := [one.running for one in self._calls.values()]:
            await asyncio.wait(running)
        await close_all(self._processes.close)

    async def _find(self, call_id: str, request: Request) -> _OpenCall:
        secret = await self._secrets.find(offered_keys(request.headers))
        if secret is None and not self._parts.keys.allow(request.headers):
            raise InvalidKeyError
        owner = secret.owner if secret else self._parts.keys.owner(request.headers)
        open_call = self._calls.get(call_id)
        if open_call is None or open_call.owner != owner:
            raise NoSuchCallError(call_id)
        return open_call

    def _check(self, preset: SessionForm | None) -> None:
        """Raises ClientEventError for settings that no session can have."""
        orchestrator, gateway = self._parts.orchestrator, self._parts.config
        if preset is not None and preset.type == TRANSCRIPTION:
            default = transcription_defaults(orchestrator, gateway)
            update_transcription(default, preset, default, gateway)
        else:
            first_config(orchestrator, gateway, preset)


async def _read(request: Request) -> tuple[str, SessionForm | None]:
    """The offer, and the settings if there are any."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _SDP:
        offer: Any = (await read_body(request, _MAX_BODY_BYTES)).decode("utf-8", "replace")
        settings: Any = None
    elif kind == "multipart/form-data":
        async with multipart(request, _MAX_BODY_BYTES, max_fields=8) as form:
            # Parts with a file name come as files.
            read = [
                value if isinstance(value, str | None) else (await value.read()).decode("utf-8")
                for value in (form.get("sdp"), form.get("session"))
            ]
        offer, settings = read
    else:
        raise ClientEventError(
            f"The Content-Type must be {_SDP}, or multipart/form-data with 'sdp' and 'session'.",
            param="Content-Type",
        )
    if not offer or len(offer) > _MAX_SDP:
        raise ClientEventError(
            f"'sdp' must be an SDP offer of at most {_MAX_SDP} characters.",
            code="invalid_sdp",
            param="sdp",
        )
    preset = None if settings is None else read_json(settings.encode(), SessionForm)
    return offer, preset
