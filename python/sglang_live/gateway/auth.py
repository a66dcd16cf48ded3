"""API keys, for HTTP requests and for sockets.

In: headers, offered subprotocols. Out: allowed or not, and whose key it was.
"""

from collections.abc import Iterable
from secrets import compare_digest

from starlette.datastructures import Headers

REALTIME_SUBPROTOCOL = "realtime"
# Browsers cannot set headers on a socket, so the key travels as a subprotocol.
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_BEARER = "bearer "
# Who comes without a key where none is wanted.
ANONYMOUS = ""


class Keys:
    def __init__(self, keys: Iterable[str]):
        self._keys = tuple(keys)

    def allow(self, headers: Headers, subprotocols: Iterable[str] = ()) -> bool:
        """True if a valid key came along, or if no keys are configured."""
        return not self._keys or bool(self._known(offered_keys(headers, subprotocols)))

    def owner(self, headers: Headers, subprotocols: Iterable[str] = ()) -> str:
        """The valid key that came along; ANONYMOUS without one."""
        return self._known(offered_keys(headers, subprotocols)) or ANONYMOUS

    def _known(self, offered: list[str]) -> str | None:
        # No early exit: the time taken must not tell how much of a key was right.
        found = [
            known
            for key in offered
            for known in self._keys
            if compare_digest(key.encode(), known.encode())
        ]
        return found[0] if found else None


def offered_keys(headers: Headers, subprotocols: Iterable[str] = ()) -> list[str]:
    """Whatever a client says its key is."""
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
