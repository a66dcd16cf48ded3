"""Guard of the media that an HTTP request makes SGLang load.

In: the JSON body of a proxied request. Out: nothing, or MediaRefusedError.
SGLang opens file:// URLs and paths, and fetches any URL: clients could read the server's disk and
private network. The engine checks redirects (bridge/platform/media_urls.py). A name server that
changes its response between two queries is not detected: that needs a firewall.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sglang_live.addresses import is_public
from sglang_live.errors import BadInputError
from sglang_live.settings import Settings, flag

Resolve = Callable[[str], Awaitable[list[str]]]

_DATA_FIELDS = ("image_data", "audio_data", "video_data")
# Keys of a dict in these fields that describe the media and do not hold them.
_NOT_MEDIA = frozenset(("type", "detail", "format", "modality", "modalities", "content_hash"))
# SGLang decodes an image's bare string as base64 unless it looks like a path.
_BARE_BASE64 = re.compile(r"[A-Za-z0-9+][A-Za-z0-9+/]*={0,2}")
# URL parsers disagree about these characters, and such differences circumvent guards.
_AMBIGUOUS = re.compile(r"[\s\\@\x00-\x20\x7f]")
_MAX_SOURCES = 256


class MediaRefusedError(BadInputError):
    code = "media_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig(Settings):
    allow_local_media: bool = flag(False, "HTTP requests may name files of this machine")
    allow_private_media_urls: bool = flag(False, "HTTP requests may name hosts of its network")


class MediaGuard:
    def __init__(self, config: MediaConfig, resolve: Resolve | None = None):
        self._allow_local = config.allow_local_media
        self._allow_private = config.allow_private_media_urls
        self._resolve = resolve or resolve_host

    async def check(self, body: Any) -> None:
        """Raises MediaRefusedError for the first source that is not allowed."""
        hosts = set()
        for index, (field, source) in enumerate(_sources(body)):
            if index >= _MAX_SOURCES:
                raise MediaRefusedError(f"At most {_MAX_SOURCES} media per request.")
            host = self._host_to_check(field, source)
            if host:
                hosts.add(host)
        for host in sorted(hosts):
            await self._check_host(host)

    def _host_to_check(self, field: str, source: str) -> str | None:
        if source.startswith("data:"):
            return None
        if source.startswith(("http://", "https://")):
            return None if self._allow_private else _host_of(source)
        if field == "image_data" and _BARE_BASE64.fullmatch(source):
            return None
        if self._allow_local:
            return None
        shown = source if len(source) <= 80 else source[:80] + "…"
        raise MediaRefusedError(f"Local media are not allowed: {shown!r}. Send a data: URL.")

    async def _check_host(self, host: str) -> None:
        try:
            addresses = [host] if _is_address(host) else await self._resolve(host)
        except OSError:
            addresses = []
        if not addresses:
            raise MediaRefusedError(f"The media host '{host}' cannot be resolved.")
        if any(not is_public(address) for address in addresses):
            raise MediaRefusedError(f"The media host '{host}' is not a public address.")


async def resolve_host(host: str) -> list[str]:
    """All addresses of a name. Raises OSError if it has none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _sources(body: Any) -> Iterator[tuple[str, str]]:
    """All media of a request, each with the name of its field."""
    if not isinstance(body, dict):
        return
    for field in _DATA_FIELDS:
        for source in _strings(body.get(field)):
            yield field, source
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            yield from _part_sources(part)


def _part_sources(part: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(part, dict):
        return
    for key, value in part.items():
        # input_audio carries base64, which SGLang itself turns into a data: URL.
        if key.endswith("_url") or key in ("image", "audio", "video", "url"):
            for source in _strings(value):
                yield key, source


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:  # not recursive: a client could nest too deep
        value = pending.pop()
        if isinstance(value, str):
            if value:
                yield value
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(part for key, part in value.items() if key not in _NOT_MEDIA)


def _host_of(url: str) -> str:
    if _AMBIGUOUS.search(url):
        raise MediaRefusedError("Media URLs must not hold spaces, backslashes or '@'.")
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise MediaRefusedError("A media URL has no valid host.")
    return host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False  # also 127.1 and 0x7f000001, which the resolver then expands
    return True
