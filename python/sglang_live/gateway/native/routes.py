"""Routes and headers of SGLang's own API that pass the gateway."""

import re
from collections.abc import Mapping

CHAT = "/v1/chat/completions"
OPEN_SESSION, CLOSE_SESSION = "/open_session", "/close_session"
ABORT, FLUSH, HEALTH = "/abort_request", "/flush_cache", "/health_generate"
SERVER_INFO = ("/server_info", "/get_server_info")
MODEL_INFO = ("/model_info", "/get_model_info")
# An explicit list: SGLang also serves routes that load weights, profile or stop the engine.
ROUTES: Mapping[str, tuple[str, ...]] = {
    "/generate": ("POST", "PUT"),
    CHAT: ("POST",),
    "/v1/completions": ("POST",),
    "/v1/tokenize": ("POST",),
    "/v1/detokenize": ("POST",),
    "/get_model_info": ("GET",),
    "/model_info": ("GET",),
    "/get_server_info": ("GET",),
    "/server_info": ("GET",),
    HEALTH: ("GET",),
    FLUSH: ("POST",),
    OPEN_SESSION: ("POST",),
    CLOSE_SESSION: ("POST",),
    ABORT: ("POST",),
}
# Routes whose requests a model completes.
GENERATING = ("/generate", CHAT, "/v1/completions")
# Routes that count against the rate limit; the model writes a token for the health check.
LIMITED = (*GENERATING, HEALTH)
# Routes whose bodies name a model.
OF_A_MODEL = (CHAT, "/v1/completions")

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
# An explicit list: SGLang takes ranks, routing keys and overrides from headers.
_FORWARDED = ("accept", "user-agent", "x-request-id", "traceparent", "tracestate")
# RFC 9110 section 7.6.1, and headers that this server sets itself.
_NOT_RETURNED = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "set-cookie",
    )
)


def is_host(value: str) -> bool:
    """Returns True for a Host header that is a name or an address, with or without a port."""
    return _HOST.fullmatch(value) is not None


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a client's request that go to SGLang."""
    # "Connection" may name headers that are meant for this hop only.
    for_this_hop = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {
        name: headers[name] for name in _FORWARDED if name in headers and name not in for_this_hop
    }


def returned(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """The headers of SGLang's response that go to the client."""
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in headers.items()
        if name.lower() not in _NOT_RETURNED
    ]
