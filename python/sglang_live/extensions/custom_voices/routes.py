"""/v1/audio/voices, as OpenAI has it: what a client may send, and the answers.

A recording becomes a voice in the talker's stage, and is then gone.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

import numpy as np
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError, LiveError
from sglang_live.extensions.custom_voices.config import MAX_BYTES, MAX_S, PATH, ROUTES
from sglang_live.extensions.custom_voices.store import TooManyVoicesError, Voice, VoiceStore
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.http import openapi
from sglang_live.gateway.http.body import multipart, refuse_query
from sglang_live.gateway.model import CUSTOM_VOICE
from sglang_live.gateway.parts import GatewayAddition, GatewayParts
from sglang_live.ids import new_id
from sglang_live.interaction.presence import has_speech
from sglang_live.models.voice_files import decode_recording

log = logging.getLogger(__name__)

_FORM_BYTES = 1 << 14  # all of a form but the recording
_NAME, _CONSENT, _SAMPLE = "name", "consent", "audio_sample"
_LENGTHS = {_NAME: 256, _CONSENT: 1024}
_BODY = {
    "type": "object",
    "required": [_NAME, _CONSENT, _SAMPLE],
    "properties": {
        **{field: {"type": "string", "maxLength": most} for field, most in _LENGTHS.items()},
        _SAMPLE: {"type": "string", "format": "binary"},
    },
}


class VoicesNotAllowedError(LiveError):
    code = "custom_voices_not_allowed"
    http_status = 403

    def __init__(self) -> None:
        super().__init__("This key may make no voices: the operator allows it for others alone.")


class VoiceRoutes(GatewayAddition):
    def __init__(
        self,
        parts: GatewayParts,
        store: VoiceStore,
        keys: Collection[str],
        rate_hz: int,
        min_s: float,
    ):
        """
        Args:
            store: closed with the gateway.
            keys: that may make voices.
            rate_hz, min_s: of recordings, for the talker.
        """
        self._parts, self._store = parts, store
        self._keys, self._rate_hz, self._min_s = frozenset(keys), rate_hz, min_s
        self._making: set[str] = set()
        parts.custom_voices = store
        served = self.create, self.retrieve, self.delete
        self.routes = dict(zip(ROUTES, served, strict=True))
        self.paths = _described()

    async def close(self) -> None:
        self._store.close()

    async def create(self, request: Request) -> Response:
        refuse_query(request)
        owner = self._owner(request)
        self._store.check_room(owner)
        if owner in self._making:
            raise TooManyVoicesError("This key makes a voice at the moment: one at a time.")
        self._making.add(owner)
        try:
            return JSONResponse(_shown(await self._made(request, owner)))
        finally:
            self._making.discard(owner)

    async def _made(self, request: Request, owner: str) -> Voice:
        form_of = multipart(request, MAX_BYTES + _FORM_BYTES, max_fields=2, file=_SAMPLE)
        async with form_of as form:
            _check_fields(form)
            name, consent = (_text(form, field) for field in _LENGTHS)
            sample = form.get(_SAMPLE)
            if not isinstance(sample, UploadFile):
                raise _missing(_SAMPLE, "a recording")
            data = await sample.read()
        try:
            samples = await asyncio.to_thread(self._samples, data)
        except BadInputError as error:
            raise ClientEventError(str(error), param=_SAMPLE) from error
        speaker = await self._parts.orchestrator.make_voice(samples)
        voice = Voice(
            id=new_id(CUSTOM_VOICE.rstrip("_")),
            owner=self._store.digest(owner),
            name=name,
            consent=consent,
            created_s=int(time.time()),
            duration_s=len(samples) / self._rate_hz,
            model=self._store.model,
            speaker=speaker,
        )
        await asyncio.to_thread(self._store.add, voice)
        log.info("voice_made voice=%s duration_s=%.1f", voice.id, voice.duration_s)
        return voice

    def _samples(self, data: bytes) -> np.ndarray:
        """Raises BadInputError: no voice can be made of the recording."""
        heard = decode_recording(data, INPUT_RATE_HZ, MAX_S, self._min_s)
        if not has_speech(np.round(32767 * heard).astype(np.int16), self._parts.scorer.model):
            raise BadInputError("There is no speech in it.")
        return decode_recording(data, self._rate_hz, MAX_S, self._min_s)

    async def retrieve(self, request: Request) -> Response:
        return JSONResponse(_shown(self._named(request)))

    async def delete(self, request: Request) -> Response:
        """What is spoken by the voice now goes on to its end."""
        voice = self._named(request)
        await asyncio.to_thread(self._store.delete, voice)
        log.info("voice_deleted voice=%s", voice.id)
        return JSONResponse({"id": voice.id, "object": "audio.voice.deleted", "deleted": True})

    def _named(self, request: Request) -> Voice:
        """Raises VoicesNotAllowedError, NoSuchVoiceError."""
        return self._store.get(self._owner(request), request.path_params["id"])

    def _owner(self, request: Request) -> str:
        """Raises VoicesNotAllowedError."""
        owner = self._parts.keys.owner(request.headers)
        if owner not in self._keys:
            raise VoicesNotAllowedError
        return owner


def _check_fields(form: FormData) -> None:
    for name in form:
        if name not in _BODY["properties"]:
            raise ClientEventError(
                f"Unknown field {cut(name)!r}.", code="unknown_parameter", param=name
            )


def _text(form: FormData, field: str) -> str:
    value, most = form.get(field), _LENGTHS[field]
    if not isinstance(value, str) or not value.strip():
        raise _missing(field, "the speaker's consent, in words" if field == _CONSENT else "a text")
    if len(value) > most:
        raise ClientEventError(f"{field} has more than {most} characters.", param=field)
    return value


def _missing(field: str, what: str) -> ClientEventError:
    return ClientEventError(
        f"The form needs {field!r}: {what}.", code="missing_required_parameter", param=field
    )


def _shown(voice: Voice) -> dict[str, Any]:
    return {
        "id": voice.id,
        "object": "audio.voice",
        "name": voice.name,
        "created_at": voice.created_s,
        "consent": voice.consent,
    }


def _described() -> dict[str, Any]:
    json, more = openapi.JSON, openapi.refusals(401, 403, 404)
    path_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    of_one = openapi.get("A voice that this key has made.", json, more)
    deleted = openapi.get("Deletes a voice.", json, more)["get"]
    create = openapi.post("Makes a voice.", {"multipart/form-data": {"schema": _BODY}}, json)
    listed = openapi.get("The voices.", json, openapi.refusals(401))
    one = {**of_one, "delete": deleted, "parameters": [path_id]}
    return {PATH: listed | create, f"{PATH}/{{id}}": one}
