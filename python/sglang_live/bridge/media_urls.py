"""What the engine fetches for whoever asks: public addresses only, wherever a URL leads.

The gateway looks at the URL that a request names; only the engine sees where that one redirects.
"""

import os
import socket
from urllib.parse import urlsplit

from sglang_live.addresses import is_public

# Set where requests may name hosts of this network.
PRIVATE_MEDIA_ENV = "SGLANG_LIVE_PRIVATE_MEDIA"


def check_public(result: None, url: str) -> None:
    """After SGLang's own check of a URL, before every connection.

    Raises:
        ValueError: its host is unknown, or not public.
    """
    if os.environ.get(PRIVATE_MEDIA_ENV):
        return
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(f"The media host {host!r} cannot be resolved") from None
    if not all(is_public(str(address[0])) for *_, address in found):
        raise ValueError(f"The media host {host!r} is not a public address")
