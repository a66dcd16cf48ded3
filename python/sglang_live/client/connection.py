"""Opens the socket of a session, with a clear error if that fails."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from sglang_live.client import clip

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
_PCM_FORMAT = {"type": "audio/pcm", "rate": clip.SAMPLE_RATE_HZ}


class SessionError(Exception):
    """The session could not be opened; the message names a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """
    Attributes:
        model: None: the one that the server has.
        voice: None: the model's first voice.
        instructions: system prompt; None: the server's default.
        push_to_talk: no turn detection; the client commits each clip.
        live: the session has the Live API.
        api_key: None: no key is sent.
        turn_timeout_s: longest wait for a response after the user's clip.
    """

    url: str
    model: str | None = None
    voice: str | None = None
    instructions: str | None = None
    push_to_talk: bool = False
    live: bool = False
    api_key: str | None = None
    turn_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"url must look like ws://host:port/v1/realtime, not {self.url!r}")
        if self.live and self.push_to_talk:
            raise ValueError("the Live API has no push-to-talk")
        if self.turn_timeout_s <= 0:
            raise ValueError(f"turn timeout must be positive, not {self.turn_timeout_s}")

    def full_url(self, **more: str) -> str:
        """more: parameters of its query."""
        parts = urlsplit(self.url)
        named = {"model": self.model} if self.model and not self.live else {}
        query = named | dict(parse_qsl(parts.query)) | more
        return urlunsplit(parts._replace(query=urlencode(query)))

    def session_update(self) -> dict[str, Any]:
        turn_detection = None if self.push_to_talk else {"type": "server_vad"}
        session: dict[str, Any] = {
            "type": "realtime",
            "output_modalities": ["audio"],
            "resumable": True,
            "audio": {
                "input": {"format": _PCM_FORMAT, "turn_detection": turn_detection},
                "output": {"format": _PCM_FORMAT},
            },
        }
        if self.voice is not None:
            session["audio"]["output"]["voice"] = self.voice
        if self.instructions is not None:
            session["instructions"] = self.instructions
        return {"type": "session.update", "session": session}


async def open_socket(options: SessionOptions, **query: str) -> ClientConnection:
    """Raises SessionError if no server responds there, or the server refuses."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    loopback = urlsplit(options.url).hostname in ("localhost", "127.0.0.1", "::1")
    try:
        return await connect(
            options.full_url(**query),
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
