"""Headers of requests and answers on their way through the gateway: what passes, either way."""

import re
from collections.abc import Mapping

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
# No others: SGLang takes ranks, routing keys and overrides from headers.
_FORWARDED = ("accept", "user-agent", "x-request-id", "traceparent", "tracestate")
# RFC 9110 section 7.6.1, and what this server sets itself.
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
    """Whether a Host header is a name or an address, and a port if there is one."""
    return _HOST.fullmatch(value) is not None


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    # "Connection" may name headers that are meant for this hop only.
    for_this_hop = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {
        name: headers[name] for name in _FORWARDED if name in headers and name not in for_this_hop
    }


def returned(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in headers.items()
        if name.lower() not in _NOT_RETURNED
    ]
