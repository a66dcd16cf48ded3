"""API keys of HTTP requests and sockets.

In: headers, offered subprotocols. Out: whether the client is allowed, and its key.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from secrets import compare_digest, token_bytes

from starlette.datastructures import Headers

from sglang_live.errors import BadInputError
from sglang_live.settings import Settings, flag

REALTIME_SUBPROTOCOL = "realtime"
# Browsers cannot set headers on a socket, so the key travels as a subprotocol.
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_BEARER = "bearer "
# Owner of what clients without a key do.
ANONYMOUS = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig(Settings):
    """Without API keys no key is needed; without an operator's key its operations are refused."""

    api_keys: tuple[str, ...] = flag(
        (),
        "accepted key; may be given several times",
        name="api-key",
        value="KEY",
        env="SGLANG_LIVE_API_KEYS",
        unset="no key is needed",
    )
    batch_only_keys: tuple[str, ...] = flag(
        (),
        "accepted key whose requests are all flex, and which opens no session; may be given "
        "several times, and needs --api-key",
        name="batch-only-key",
        value="KEY",
        env="SGLANG_LIVE_BATCH_ONLY_KEYS",
    )
    operator_key: str | None = flag(
        None,
        "key for operations that affect all sessions: /flush_cache",
        value="KEY",
        env="SGLANG_LIVE_OPERATOR_KEY",
    )
    allow_anonymous: bool = flag(False, "serve non-loopback without a key")

    @property
    def accepted(self) -> tuple[str, ...]:
        return (*self.api_keys, *self.batch_only_keys)

    def check(self) -> None:
        if not all(key.strip() for key in self.accepted):
            raise BadInputError("an API key is empty")
        # The message goes to the log, so it does not contain the key. HTTP headers lose spaces
        # around a key, subprotocols cannot contain any, and two keys without a comma between them
        # look like one.
        if any(key.split() != [key] for key in self.accepted):
            raise BadInputError("an API key has spaces in it; a comma separates keys")
        if self.batch_only_keys and not self.api_keys:
            raise BadInputError("--batch-only-key needs --api-key: without one any key is accepted")
        if set(self.batch_only_keys) & set(self.api_keys):
            raise BadInputError("a key is both an --api-key and a --batch-only-key")


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


# --- cache namespaces and names that separate the owners of keys in the engines ---
# SGLang has one radix tree and one table of requests and sessions for all clients.


# Not derived from the keys: a salt that reaches a log or a stage must reveal nothing of a key.
_run_secret = token_bytes(32)
_DIGEST_CHARS = 32


def share_secret(secret: bytes) -> None:
    """Owners have the same salts in all processes that share this secret, from now on: a session
    that goes on in another one finds its KV."""
    global _run_secret
    _run_secret = secret


def owner_salt(owner: str) -> str:
    """The `cache_salt` of all requests of this owner; only these share prefixes.

    Returns:
        32 hexadecimal digits, the same for the life of the process or of a shared secret.
    Source: SGLang keys its radix tree by (tokens, extra_key, cache_salt).
    """
    return _digest("salt", owner)


def owned_digest(kind: str, owner: str, name: str) -> str:
    """32 hexadecimal digits for a name that an owner chose. kind: namespace of the name."""
    return _digest(kind, owner, name)


def _digest(*parts: str) -> str:
    # Length before each part: ("a", "bc") and ("ab", "c") are different names.
    data = b"".join(len(part.encode()).to_bytes(8, "big") + part.encode() for part in parts)
    return hmac.new(_run_secret, data, hashlib.sha256).hexdigest()[:_DIGEST_CHARS]
