"""Options of a session, and their form in the protocol."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from sglang_live.client import clip

_PCM_FORMAT = {"type": "audio/pcm", "rate": clip.SAMPLE_RATE_HZ}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options of one session.

    Attributes:
        model: None: the one that the server has.
        voice: None: the model's first voice.
        instructions: system prompt; None: the server's default.
        push_to_talk: no turn detection; the client commits each clip.
        turn_detection: its settings in the protocol's form; None: server_vad, with its defaults.
        api_key: None: no key is sent.
        turn_timeout_s: longest wait for a response after the user's clip.
        frames_per_message: 20 ms frames of microphone audio in one message.
        truncate: whether the server is told how much of an interrupted response was heard.
        transcribes: whether the server sends the text of the user's speech.
        acks: whether the server is told twice a second how much was heard so far.
    """

    url: str
    model: str | None = None
    voice: str | None = None
    instructions: str | None = None
    push_to_talk: bool = False
    turn_detection: dict[str, Any] | None = None
    api_key: str | None = None
    turn_timeout_s: float = 60.0
    frames_per_message: int = 1
    truncate: bool = True
    transcribes: bool = False
    acks: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"url must look like ws://host:port/v1/realtime, not {self.url!r}")
        if self.turn_timeout_s <= 0:
            raise ValueError(f"turn timeout must be positive, not {self.turn_timeout_s}")

    def full_url(self) -> str:
        parts = urlsplit(self.url)
        query = ({"model": self.model} if self.model else {}) | dict(parse_qsl(parts.query))
        return urlunsplit(parts._replace(query=urlencode(query)))

    def session_update(self) -> dict[str, Any]:
        detection = self.turn_detection or {"type": "server_vad"}
        turn_detection = None if self.push_to_talk else detection
        session: dict[str, Any] = {
            "type": "realtime",
            "output_modalities": ["audio"],
            "audio": {
                "input": {"format": _PCM_FORMAT, "turn_detection": turn_detection},
                "output": {"format": _PCM_FORMAT},
            },
        }
        if self.transcribes:
            session["audio"]["input"]["transcription"] = {"model": "whisper-1"}
        if self.voice is not None:
            session["audio"]["output"]["voice"] = self.voice
        if self.instructions is not None:
            session["instructions"] = self.instructions
        return {"type": "session.update", "session": session}
