"""Connections to a Valkey server (or one of its protocol, such as Redis), which gateways share."""

from urllib.parse import urlsplit

from valkey.asyncio import Valkey

from sglang_live.errors import BadInputError

SCHEMES = ("valkey", "valkeys")
# A server that does not answer in this time counts as away. It answers within milliseconds.
_TIMEOUT_S = 2.0


def connect(url: str) -> Valkey:
    """A pool of connections, made at first use.

    Args:
        url: valkey://[[USER]:PASSWORD@]HOST[:PORT][/DB], or valkeys:// over TLS.
    Raises:
        BadInputError: for another URL.
    """
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        if not is_known:
            raise ValueError("not valkey://HOST:PORT or valkeys://HOST:PORT")
        return Valkey.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    except ValueError as error:
        # Without the URL, which may have a password.
        raise BadInputError(f"the URL of a Valkey server: {error}") from None
