"""GET /openapi.json: what the gateway's own HTTP routes take and give, for tools and for people.

Made of the forms that requests are read into. SGLang's own routes are documented by SGLang.
"""

from typing import Any

import msgspec

from sglang_live.gateway.audio.files import FORMATS
from sglang_live.gateway.http.chat_schema import ChatForm
from sglang_live.gateway.http.speech import SpeechForm
from sglang_live.gateway.http.transcription import FORMATS as TEXT_FORMATS
from sglang_live.gateway.realtime.client_secrets import ClientSecretForm

_REFERENCE = "#/components/schemas/{name}"
_FORMS = (SpeechForm, ChatForm, ClientSecretForm)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "code", "message", "param"],
            "properties": {
                "type": {"type": "string"},
                "code": {"type": ["string", "null"]},
                "message": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    400: "The request is wrong; the message says where.",
    401: "There is no such key.",
    403: "A page from elsewhere asked, or a name that is not this machine's.",
    404: "There is no such model.",
    408: "The body of the request did not come in time.",
    413: "The request is too large.",
    429: "This key has used up its answers of this minute.",
    500: "A stage failed.",
    503: "The server is full, or a stage is down.",
    504: "A stage took too long.",
}
_JSON, _EVENTS = "application/json", "text/event-stream"
_DOWN = {"503": {"description": "Some stage does not.", "content": {_JSON: {}}}}
_UPLOAD = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"enum": list(TEXT_FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "stream": {"type": "boolean"},
    },
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    forms, components = msgspec.json.schema_components(_FORMS, ref_template=_REFERENCE)
    speech, chat, secret = ({_JSON: {"schema": form}} for form in forms)
    sounds = [media_type for media_type, _ in FORMATS.values()]
    upload = {"multipart/form-data": {"schema": _UPLOAD}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglang_live", "version": "1"},
        "paths": {
            "/v1/audio/speech": _post("A text, spoken as it stands.", speech, *sounds, _EVENTS),
            "/v1/audio/transcriptions": _post(
                "A recording, written down.", upload, _JSON, "text/plain", _EVENTS
            ),
            "/v1/chat/completions": _post("An answer, spoken or written.", chat, _JSON, _EVENTS),
            "/v1/realtime/client_secrets": _post("A key for one browser.", secret, _JSON),
            "/v1/models": _get("The model that is served.", _JSON, _refusals(401)),
            "/v1/capacity": _get("How many more callers may come.", _JSON, _refusals(401)),
            "/health": _get("Whether every stage serves.", _JSON, _DOWN),
            "/metrics": _get("Prometheus metrics.", "text/plain", _refusals(401)),
        },
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _post(summary: str, content: dict[str, Any], *answers: str) -> dict[str, Any]:
    responses = {**_done(*answers), **_refusals(*_REFUSALS)}
    body = {"required": True, "content": content}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _get(summary: str, answer: str, others: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {**_done(answer), **others}}}


def _done(*answers: str) -> dict[str, Any]:
    return {"200": {"description": "Done.", "content": {answer: {} for answer in answers}}}


def _refusals(*statuses: int) -> dict[str, Any]:
    error = {_JSON: {"schema": {"$ref": _REFERENCE.format(name="Error")}}}
    return {
        str(status): {"description": _REFUSALS[status], "content": error} for status in statuses
    }
