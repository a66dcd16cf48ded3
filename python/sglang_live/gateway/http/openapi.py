"""GET /openapi.json: description of the gateway's own HTTP routes.

In: the forms that requests are read into. Out: an OpenAPI document. SGLang documents its own
routes.
"""

from typing import Any

import msgspec

from sglang_live.gateway.audio.files import FORMATS
from sglang_live.gateway.batch.forms import LEAST_S, MOST_S, BatchForm
from sglang_live.gateway.flex.tier import TIERS
from sglang_live.gateway.http.chat_schema import ChatForm
from sglang_live.gateway.http.speech import SpeechForm
from sglang_live.gateway.http.transcription import FORMATS as TEXT_FORMATS
from sglang_live.gateway.realtime.client_secrets import ClientSecretForm

_REFERENCE = "#/components/schemas/{name}"
_FORMS = (SpeechForm, ChatForm, ClientSecretForm, BatchForm)
# Routes that a server without a language model refuses.
OF_LANGUAGE_MODEL = (
    "/v1/audio/transcriptions",
    "/v1/chat/completions",
    "/v1/realtime/client_secrets",
)
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
    401: "The key is missing or unknown.",
    403: "The page is foreign, its Host is not this machine, or the key is for batches alone.",
    404: "There is no such model.",
    409: "A file is in use, or a batch has ended.",
    408: "The body of the request did not arrive in time.",
    413: "The request is too large.",
    415: "The body is compressed.",
    429: "This key has used up its responses of this minute, or too many flex requests wait.",
    500: "A stage failed.",
    503: "The server is full, or a stage is down.",
    504: "A stage took too long.",
}
_JSON, _EVENTS = "application/json", "text/event-stream"
_DOWN = {"503": {"description": "A stage does not serve.", "content": {_JSON: {}}}}
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
        "service_tier": {"enum": list(TIERS)},
    },
}
_INPUT_FILE = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_S, "maximum": MOST_S},
    },
}


def document(has_language_model: bool = True, has_batches: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    Args:
        has_language_model: see GatewayConfig.
        has_batches: whether the server has a Batch API.
    """
    forms, components = msgspec.json.schema_components(_FORMS, ref_template=_REFERENCE)
    speech, chat, secret, batch = ({_JSON: {"schema": form}} for form in forms)
    sounds = [form.media_type for form in FORMATS.values()]
    upload = {"multipart/form-data": {"schema": _UPLOAD}}
    paths = {
        "/v1/audio/speech": _post("Speaks a text word for word.", speech, *sounds, _EVENTS),
        "/v1/audio/voices": _get("The voices.", _JSON, _refusals(401)),
        "/v1/audio/transcriptions": _post(
            "Transcribes a recording.", upload, _JSON, "text/plain", _EVENTS
        ),
        "/v1/chat/completions": _post("Completes a chat, spoken or written.", chat, _JSON, _EVENTS),
        "/v1/realtime/client_secrets": _post(
            "Makes a temporary secret for a browser.", secret, _JSON
        ),
        "/v1/models": _get("The served model.", _JSON, _refusals(401)),
        "/v1/capacity": _get("Open sessions and room for more.", _JSON, _refusals(401)),
        "/health": _get("Whether every stage serves.", _JSON, _DOWN),
        "/metrics": _get("Prometheus metrics.", "text/plain", _refusals(401)),
    }
    if has_batches:
        paths |= _batch_paths(batch)
    refused = () if has_language_model else OF_LANGUAGE_MODEL
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglang_live", "version": "1"},
        "paths": {path: route for path, route in paths.items() if path not in refused},
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _batch_paths(batch: dict[str, Any]) -> dict[str, Any]:
    """batch: content of a request for a batch."""
    upload = {"multipart/form-data": {"schema": _INPUT_FILE}}
    path_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    of_one, refused = {"parameters": [path_id]}, _refusals(400, 401, 404, 409, 503)

    def get(summary: str, media_type: str = _JSON) -> dict[str, Any]:
        return _get(summary, media_type, refused)

    cancelling = {"summary": "Cancels a batch.", "responses": {**_done(_JSON), **refused}}
    deleting = {"summary": "Deletes a file.", "responses": {**_done(_JSON), **refused}}
    return {
        "/v1/files": _post("Uploads requests.", upload, _JSON) | get("The files of the key."),
        "/v1/files/{id}": of_one | get("A file.") | {"delete": deleting},
        "/v1/files/{id}/content": of_one | get("What is in a file.", "application/octet-stream"),
        "/v1/batches": _post("Makes a batch.", batch, _JSON) | get("The batches of the key."),
        "/v1/batches/{id}": of_one | get("A batch."),
        "/v1/batches/{id}/cancel": of_one | {"post": cancelling},
    }


def _post(summary: str, content: dict[str, Any], *media_types: str) -> dict[str, Any]:
    responses = {**_done(*media_types), **_refusals(*_REFUSALS)}
    body = {"required": True, "content": content}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _get(summary: str, media_type: str, others: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {**_done(media_type), **others}}}


def _done(*media_types: str) -> dict[str, Any]:
    content: dict[str, Any] = {media_type: {} for media_type in media_types}
    return {"200": {"description": "Done.", "content": content}}


def _refusals(*statuses: int) -> dict[str, Any]:
    error = {_JSON: {"schema": {"$ref": _REFERENCE.format(name="Error")}}}
    return {
        str(status): {"description": _REFUSALS[status], "content": error} for status in statuses
    }
