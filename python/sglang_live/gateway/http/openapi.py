"""GET /openapi.json: description of the gateway's own HTTP routes.

In: the forms that requests are read into. Out: an OpenAPI document. SGLang documents its own
routes.
"""

from typing import Any

import msgspec

from sglang_live.gateway.audio.files import FORMATS
from sglang_live.gateway.chat.form import ChatForm
from sglang_live.gateway.http.speech import SpeechForm
from sglang_live.gateway.http.transcription import UploadForm
from sglang_live.gateway.realtime.client_secrets import ClientSecretForm

REFERENCE = "#/components/schemas/{name}"
_FORMS = (SpeechForm, ChatForm, ClientSecretForm, UploadForm)
# Routes that a server without a language model refuses.
OF_LANGUAGE_MODEL = (
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
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
JSON, _EVENTS = "application/json", "text/event-stream"
_DOWN = {"503": {"description": "A stage does not serve.", "content": {JSON: {}}}}


def document(has_language_model: bool = True) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    has_language_model: see GatewayConfig.
    """
    forms, components = msgspec.json.schema_components(_FORMS, ref_template=REFERENCE)
    speech, chat, secret = ({JSON: {"schema": form}} for form in forms[:3])
    upload = components.pop(UploadForm.__name__)
    upload["properties"]["file"] = {"type": "string", "format": "binary"}
    upload["required"].append("file")
    sounds = [form.media_type for form in FORMATS.values()]
    paths = {
        "/v1/audio/speech": post("Speaks a text word for word.", speech, *sounds, _EVENTS),
        "/v1/audio/voices": get("The voices.", JSON, refusals(401)),
        "/v1/audio/transcriptions": post(
            "Transcribes a recording.",
            {"multipart/form-data": {"schema": upload}},
            JSON,
            "text/plain",
            _EVENTS,
        ),
        "/v1/audio/translations": post(
            "Writes down in English what is said in another language.",
            {"multipart/form-data": {"schema": upload}},
            JSON,
            "text/plain",
        ),
        "/v1/chat/completions": post("Completes a chat, spoken or written.", chat, JSON, _EVENTS),
        "/v1/realtime/client_secrets": post(
            "Makes a temporary secret for a browser.", secret, JSON
        ),
        "/v1/models": get("The served model.", JSON, refusals(401)),
        "/v1/capacity": get("Open sessions and room for more.", JSON, refusals(400, 401, 503)),
        "/health": get("Whether every stage serves.", JSON, _DOWN),
        "/metrics": get("Prometheus metrics.", "text/plain", refusals(401)),
    }
    scope = {"type": "string", "enum": ["gateway", "fleet"]}
    paths["/v1/capacity"]["get"]["parameters"] = [{"name": "scope", "in": "query", "schema": scope}]
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


def post(summary: str, content: dict[str, Any], *media_types: str) -> dict[str, Any]:
    responses = {**done(*media_types), **refusals(*_REFUSALS)}
    body = {"required": True, "content": content}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def get(summary: str, media_type: str, others: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {**done(media_type), **others}}}


def done(*media_types: str) -> dict[str, Any]:
    content: dict[str, Any] = {media_type: {} for media_type in media_types}
    return {"200": {"description": "Done.", "content": content}}


def refusals(*statuses: int) -> dict[str, Any]:
    error = {JSON: {"schema": {"$ref": REFERENCE.format(name="Error")}}}
    return {
        str(status): {"description": _REFUSALS[status], "content": error} for status in statuses
    }
