"""Opening the socket of a session, and saying why it could not be opened."""

from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from sglang_live.client.session_options import SessionOptions

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0


class SessionError(Exception):
    """The session could not be opened; the message says what to do about it."""


async def open_socket(options: SessionOptions) -> ClientConnection:
    """Raises SessionError if nobody answers or the server refuses."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    loopback = urlsplit(options.url).hostname in ("localhost", "127.0.0.1", "::1")
    try:
        return await connect(
            options.full_url(),
            additional_headers=headers,
            open_timeout=CONNECT_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=None,
            # Base64 of audio hardly compresses, and both sides would pay for trying.
            compression=None,
            # A proxy for the world outside does not know this machine's loopback.
            proxy=None if loopback else True,
        )
    except InvalidStatus as error:
        raise SessionError(f"{options.url} refused: {_describe(error)}") from error
    except (OSError, WebSocketException) as error:
        raise SessionError(
            f"cannot reach {options.url}: {error or type(error).__name__}; "
            "is the server running (GET /health)?"
        ) from error


def _describe(error: InvalidStatus) -> str:
    response = error.response
    body = response.body.decode(errors="replace").strip()[:300] if response.body else ""
    retry = response.headers.get("Retry-After")
    hint = f"; try again in {retry} s" if retry else ""
    return f"HTTP {response.status_code} {body}{hint}".strip()
