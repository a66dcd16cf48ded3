"""API keys, for HTTP requests and for sockets.

In: headers, offered subprotocols. Out: allowed or not.
"""

from collections.abc import Iterable
from secrets import compare_digest

from starlette.datastructures import Headers

REALTIME_SUBPROTOCOL = "realtime"
# Browsers cannot set headers on a socket, so the key travels as a subprotocol.
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_BEARER = "bearer "


class Keys:
    def __init__(self, keys: Iterable[str]):
        self._keys = tuple(key.encode() for key in keys)

    def allow(self, headers: Headers, subprotocols: Iterable[str] = ()) -> bool:
        """True if a valid key came along, or if no keys are configured."""
        if not self._keys:
            return True
        offered = [
            name.removeprefix(_KEY_SUBPROTOCOL)
            for name in subprotocols
            if name.startswith(_KEY_SUBPROTOCOL)
        ]
        authorization = headers.get("authorization", "")
        if authorization.lower().startswith(_BEARER):
            offered.append(authorization[len(_BEARER) :].strip())
        return any(self._known(key.encode()) for key in offered)

    def _known(self, key: bytes) -> bool:
        # No early exit: the time taken must not tell how much of a key was right.
        return any([compare_digest(key, known) for known in self._keys])


def choose_subprotocol(offered: Iterable[str]) -> str | None:
    return REALTIME_SUBPROTOCOL if REALTIME_SUBPROTOCOL in offered else None
