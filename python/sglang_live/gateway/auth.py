"""API keys of HTTP requests and sockets.

In: headers, offered subprotocols. Out: whether the client is allowed, and its key.
"""

from collections.abc import Iterable
from secrets import compare_digest

from starlette.datastructures import Headers

REALTIME_SUBPROTOCOL = "realtime"
# Browsers cannot set headers on a socket, so the key travels as a subprotocol.
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_BEARER = "bearer "
# Owner of what clients without a key do.
ANONYMOUS = ""


class Keys:
    def __init__(self, keys: Iterable[str]):
        self._keys = tuple(keys)

    def allow(self, headers: Headers, subprotocols: Iterable[str] = ()) -> bool:
        """Returns True if a valid key is offered, or if no keys are configured."""
        return not self._keys or bool(self._known(offered_keys(headers, subprotocols)))

    def owner(self, headers: Headers, subprotocols: Iterable[str] = ()) -> str:
        """The valid key that is offered, or ANONYMOUS."""
        return self._known(offered_keys(headers, subprotocols)) or ANONYMOUS

    def _known(self, offered: list[str]) -> str | None:
        # No early exit: the time must not depend on how much of a key is right.
        found = [
            known
            for key in offered
            for known in self._keys
            if compare_digest(key.encode(), known.encode())
        ]
        return found[0] if found else None


def offered_keys(headers: Headers, subprotocols: Iterable[str] = ()) -> list[str]:
    """All strings that a client offers as its key."""
    offered = [
        name.removeprefix(_KEY_SUBPROTOCOL)
        for name in subprotocols
        if name.startswith(_KEY_SUBPROTOCOL)
    ]
    authorization = headers.get("authorization", "")
    if authorization.lower().startswith(_BEARER):
        offered.append(authorization[len(_BEARER) :].strip())
    return offered


def choose_subprotocol(offered: Iterable[str]) -> str | None:
    return REALTIME_SUBPROTOCOL if REALTIME_SUBPROTOCOL in offered else None
