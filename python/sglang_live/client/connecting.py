"""Opens the socket of a session, with a clear error if that fails."""

from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from sglang_live.client.session_options import SessionOptions

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0


class SessionError(Exception):
    """The session could not be opened; the message names a remedy."""


async def open_socket(options: SessionOptions) -> ClientConnection:
    """Raises SessionError if no server responds there, or the server refuses."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    loopback = urlsplit(options.url).hostname in ("localhost", "127.0.0.1", "::1")
    try:
        return await connect(
            options.full_url(),
            additional_headers=headers,
            open_timeout=CONNECT_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=None,
            # Base64 of audio hardly compresses, and trying costs both sides time.
            compression=None,
            # A proxy cannot reach the loopback of this machine.
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
