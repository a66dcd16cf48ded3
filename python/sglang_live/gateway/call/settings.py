"""Settings of a call, whatever protocol it has."""

from dataclasses import dataclass, field
from typing import Any

from sglang_live.gateway.audio.codec import PCM, WireFormat
from sglang_live.interaction.vad import TurnDetection, VadSettings
from sglang_live.kv.retention import RetentionConfig
from sglang_live.settings import Count, Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnConfig(Settings):
    """
    vad: defaults for server_vad; confirm_ms also for semantic_vad.
    speculate_ms: milliseconds of silence before a speculative turn; None: no speculative turns.
    turn_prefill_s: seconds of speech in each piece of a turn prefill; None: there are no pieces.
    prefills_at_pauses: turn prefill of what a recogniser heard up to each pause of the user.
    preheat: whether instructions and conversation are prefilled, where their KV is missing, when
        the user begins to speak.
    """

    vad: VadSettings = field(default_factory=VadSettings)
    speculate_ms: Count | None = None
    turn_prefill_s: Positive | None = None
    prefills_at_pauses: bool = False
    preheat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSettings:
    """Frame mode: audio in frames of fixed length, without turns.

    frame_ms: length of a frame of the user's audio, a multiple of 80 ms (one token of the audio
        encoder).
    max_tokens: text tokens after each frame.
    """

    frame_ms: int = 480
    max_tokens: int = 4

    @property
    def frame_s(self) -> float:
        return self.frame_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The part of a long conversation that a call keeps.

    wire: the client's value, for the echo.
    retention: its meaning here; None: the whole conversation is kept.
    """

    wire: str | dict[str, Any] = "auto"
    retention: RetentionConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """
    voice: name that the client used, which may be one of OpenAI's.
    voices: those of the model, the default one first, and of the client's key.
    parallel_tool_calls: a response may call several functions.
    max_output_tokens: None is "inf".
    speed: of the agent's speech.
    transcription: settings of input transcription; None: no input is transcribed.
    transcript_logprobs: transcripts have the logprobs of their tokens.
    turn_detection: None: the client ends turns, or frame mode.
    frames: settings of frame mode; None: the session has turns.
    resumable: the call may outlive its socket.
    """

    model: str
    voice: str
    voices: tuple[str, ...] = ()
    instructions: str = ""
    output_modalities: tuple[str, ...] = ("audio",)
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    truncation: Truncation
    input_format: WireFormat = PCM
    output_format: WireFormat = PCM
    speed: float = 1.0
    transcription: dict[str, Any] | None = None
    transcript_logprobs: bool = False
    turn_detection: TurnDetection | None
    frames: FrameSettings | None = None
    resumable: bool = False

    @property
    def transcripts(self) -> dict[str, Any] | None:
        """transcription, and whether it is in detail."""
        if self.transcription is None:
            return None
        return {**self.transcription, "in_detail": self.transcript_logprobs}
