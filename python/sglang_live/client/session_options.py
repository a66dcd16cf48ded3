"""What a caller asks of a session, and how that is said in the protocol."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from sglang_live.client import clip

_PCM_FORMAT = {"type": "audio/pcm", "rate": clip.SAMPLE_RATE_HZ}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a session asks of the server.

    Attributes:
        push_to_talk: no server VAD; each clip is committed by hand.
        turn_timeout_s: longest wait for an answer after the user's clip.
        frames_per_message: 20 ms frames of microphone audio in one message.
        truncate: tell the server what was heard of a reply that the user interrupted.
        acks: tell it twice a second what has been heard so far.
    """

    url: str
    model: str = "demo"
    voice: str | None = None
    instructions: str | None = None
    push_to_talk: bool = False
    api_key: str | None = None
    turn_timeout_s: float = 60.0
    frames_per_message: int = 1
    truncate: bool = True
    acks: bool = False

    def __post_init__(self):
        parts = urlsplit(self.url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"url must look like ws://host:port/v1/realtime, not {self.url!r}")
        if self.turn_timeout_s <= 0:
            raise ValueError(f"turn timeout must be positive, not {self.turn_timeout_s}")

    def full_url(self) -> str:
        parts = urlsplit(self.url)
        query = {"model": self.model, **dict(parse_qsl(parts.query))}
        return urlunsplit(parts._replace(query=urlencode(query)))

    def session_update(self) -> dict[str, Any]:
        turn_detection = None if self.push_to_talk else {"type": "server_vad"}
        session: dict[str, Any] = {
            "type": "realtime",
            "output_modalities": ["audio"],
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
