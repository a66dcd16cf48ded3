"""POST /v1/realtime/calls: a session over WebRTC; its hang-up, and its sidebands.

In: an SDP offer, alone or with settings in a form. Out: the answer; the session begins.
Owner: one RealtimeCalls per gateway.
"""

import asyncio
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from sglang_live.gateway.auth import offered_keys
from sglang_live.gateway.call.link import CallLink
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
from sglang_live.gateway.webrtc.calls import OpenCall, OpenCalls
from sglang_live.gateway.webrtc.processes import MAX_SDP, MediaCall
from sglang_live.gateway.webrtc.wire import CallWire

CALLS_PATH = "/v1/realtime/calls"
_SDP = "application/sdp"
_MAX_BODY_BYTES = 1 << 18


class RealtimeCalls:
    def __init__(self, parts: GatewayParts, secrets: ClientSecrets, calls: OpenCalls):
        self._parts = parts
        self._secrets = secrets
        self._calls = calls

    async def begin(self, request: Request) -> Response:
        """Not behind the guard of keys: client secrets open calls, too."""
        parts = self._parts
        secret = await self._secrets.find(offered_keys(request.headers))
        if secret is None and not parts.keys.allow(request.headers):
            parts.metrics.sessions_refused.labels(InvalidKeyError.code).inc()
            raise InvalidKeyError
        owner = secret.owner if secret else parts.keys.owner(request.headers)
        self._calls.check(owner)
        with await parts.open_sessions.open(owner, secret.value if secret else None) as counted:
            return await self._begin(request, secret, owner, counted)

    async def _begin(
        self, request: Request, secret: ClientSecret | None, owner: str, counted: ExitStack
    ) -> Response:
        """counted: see OpenCalls.begin."""
        parts = self._parts
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
        self._check(preset, owner)

        def link_of(_call: MediaCall, wire: CallWire) -> CallLink:
            return realtime_link(
                wire,
                parts,
                preset=preset,
                owner=owner,
                transcribes=transcribes,
                model=model,
                sound_of=wire.open_sound,
            )

        begun = await self._calls.begin(sdp, request.client, owner, counted, link_of)
        headers = {"location": f"{CALLS_PATH}/{begun.call_id}"}
        return Response(begun.answer, 201, headers, media_type=_SDP)

    async def hang_up(self, request: Request) -> Response:
        found = await self._find(request.path_params["call_id"], request)
        await found.hang_up()
        return Response(status_code=200)

    async def attach(self, socket: WebSocket, call_id: str, owner: str) -> None:
        """Serve a sideband of a call.

        Raises:
            NoSuchCallError: there is none of this key.
        """
        open_call = self._calls.find(call_id, owner)
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

    async def _find(self, call_id: str, request: Request) -> OpenCall:
        secret = await self._secrets.find(offered_keys(request.headers))
        if secret is None and not self._parts.keys.allow(request.headers):
            raise InvalidKeyError
        owner = secret.owner if secret else self._parts.keys.owner(request.headers)
        return self._calls.find(call_id, owner)

    def _check(self, preset: SessionForm | None, owner: str) -> None:
        """Raises ClientEventError for settings that no session can have."""
        orchestrator, gateway = self._parts.orchestrator, self._parts.config
        if preset is not None and preset.type == TRANSCRIPTION:
            default = transcription_defaults(orchestrator, gateway)
            update_transcription(default, preset, default, gateway)
        else:
            first_config(orchestrator, gateway, preset, self._parts.voices_of(owner))


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
    if not offer or len(offer) > MAX_SDP:
        raise ClientEventError(
            f"'sdp' must be an SDP offer of at most {MAX_SDP} characters.",
            code="invalid_sdp",
            param="sdp",
        )
    preset = None if settings is None else read_json(settings.encode(), SessionForm)
    return offer, preset
