"""Options of a session under load, and their form in the protocol."""

from dataclasses import dataclass
from typing import Any

from sglang_live.client.connection import SessionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(SessionOptions):
    """
    Attributes:
        turn_detection: its settings in the protocol's form; None: server_vad, with its defaults.
        frames_per_message: 20 ms frames of microphone audio in one message.
        truncate: whether the server is told how much of an interrupted response was heard.
        transcribes: whether the server sends the text of the user's speech.
        acks: whether the server is told twice a second how much was heard so far.
    """

    turn_detection: dict[str, Any] | None = None
    frames_per_message: int = 1
    truncate: bool = True
    transcribes: bool = False
    acks: bool = False

    def session_update(self) -> dict[str, Any]:
        # Not super(): a class with slots is another one than the one that the method was made for.
        update = SessionOptions.session_update(self)
        audio = update["session"]["audio"]["input"]
        if self.turn_detection is not None and not self.push_to_talk:
            audio["turn_detection"] = self.turn_detection
        if self.transcribes:
            audio["transcription"] = {"model": "whisper-1"}
        return update
