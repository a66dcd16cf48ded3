"""Restriction of the engine's media downloads to public addresses, redirects included.

The gateway checks the URL in a request; only the engine sees the redirects of that URL.
"""

import os
import socket
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from sglang_live.addresses import is_public

# Set if requests may name hosts of the private network.
PRIVATE_MEDIA_ENV = "SGLANG_LIVE_PRIVATE_MEDIA"


def check_public(result: None, url: str) -> None:
    """After SGLang's own check of a URL, before every connection.

    Raises:
        ValueError: its host cannot be resolved, or is not public.
    """
    if os.environ.get(PRIVATE_MEDIA_ENV):
        return
    public_address(urlsplit(url).hostname or "")


def public_address(host: str) -> str:
    """An address of a host whose addresses are all public.

    Raises:
        ValueError: the host cannot be resolved, or has another address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(f"The media host {host!r} cannot be resolved") from None
    addresses = [str(address[0]) for *_, address in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise ValueError(f"The media host {host!r} is not a public address")
    return addresses[0]


class _PublicConnection(HTTPConnection):
    """Connects to the checked address, even if the name resolves to another one afterwards.

    urllib3 takes the name for TLS and for the Host header from `host` after `_new_conn`.
    """

    def _new_conn(self) -> socket.socket:
        if os.environ.get(PRIVATE_MEDIA_ENV):
            return super()._new_conn()
        name = self._dns_host
        self._dns_host = public_address(name)
        try:
            return super()._new_conn()
        finally:
            self._dns_host = name


class _PublicTlsConnection(_PublicConnection, HTTPSConnection):
    pass


class _PublicPool(HTTPConnectionPool):
    ConnectionCls = _PublicConnection


class _PublicTlsPool(HTTPSConnectionPool):
    ConnectionCls = _PublicTlsConnection


class PublicAdapter(HTTPAdapter):
    """An adapter with public connections. With a proxy of the environment, the proxy resolves."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _PublicPool, "https": _PublicTlsPool}


def with_public_connections(session: requests.Session) -> requests.Session:
    """After SGLang returns a thread's session for downloads: mount the PublicAdapter."""
    if not isinstance(session.adapters.get("http://"), PublicAdapter):
        for scheme in ("http://", "https://"):
            session.mount(scheme, PublicAdapter())
    return session
