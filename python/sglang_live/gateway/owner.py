"""Cache namespaces and names that separate the owners of keys in the engines.

In: an owner from Keys.owner ("" without keys). Out: strings that no other owner can make.
SGLang has one radix tree and one table of requests and sessions for all clients.
"""

import hashlib
import hmac
from secrets import token_bytes

# Not derived from the keys: a salt that reaches a log or a stage must reveal nothing of a key.
_RUN_SECRET = token_bytes(32)
_DIGEST_CHARS = 32


def owner_salt(owner: str) -> str:
    """The `cache_salt` of all requests of this owner; only these share prefixes.

    Returns:
        32 hexadecimal digits, the same for the life of the process.
    Source: SGLang keys its radix tree by (tokens, extra_key, cache_salt).
    """
    return _digest("salt", owner)


def owned_digest(kind: str, owner: str, name: str) -> str:
    """32 hexadecimal digits for a name that an owner chose. kind: namespace of the name."""
    return _digest(kind, owner, name)


def _digest(*parts: str) -> str:
    # Length before each part: ("a", "bc") and ("ab", "c") are different names.
    data = b"".join(len(part.encode()).to_bytes(8, "big") + part.encode() for part in parts)
    return hmac.new(_RUN_SECRET, data, hashlib.sha256).hexdigest()[:_DIGEST_CHARS]
