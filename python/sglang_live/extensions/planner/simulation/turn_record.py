"""Measurements of one turn."""

from dataclasses import asdict, dataclass, field
from typing import Any

MS_PER_S = 1000.0
BARGE_IN = "barge_in"
FALSE_TRIGGER = "false_trigger"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn as its user experiences it. Times count from the end of the user's speech.

    Results of benchmarks and the client's JSON use these field names.

    Attributes:
        kind: `speech`, `text` or `posted`.
        status: the response's own status (`completed`, `incomplete`, `cancelled`, `failed`),
            or the reason why it has none: `empty`, `error`, `timeout`, `closed`, `unstopped`.
        error: message; None without an error.
        user_audio_s: duration of the user's clip.
        ttfp_ms: time to the first decodable audio packet; negative if that came too early.
        end_of_turn_ms: time to the server's speech_stopped event; None without server VAD.
        audio_s, audio_packets: received audio of the response.
        generation_s: from response.created to the last audio packet; None without audio.
        ttft_ms: time to the first text of a written response; None for a spoken one.
        heard_s: audio of the response that the user heard.
        heard_in_all_s: the same, with early responses and responses to a noise.
        chunks_due, chunks_on_time: packets from the second on, and those in time (viability).
        gaps_ms, gaps_over_100ms: lengths of all stalls, and number of the audible ones.
        user_transcript: the server's transcript of the user; None without one.
        early_replies: responses that the server began before the user had finished.
        interruption: `barge_in` or `false_trigger`; None: the user did not interrupt.
        truncated_ms: from the first packet to the start of the interruption; None without one.
        cut_short: the server cancelled the response, or the client stopped to play it.
        stop_latency_ms: from the onset of the user's speech to the last packet; 0 if no packet
            came after the onset, None if the response was over before.
        silence_ms: from that onset until the client stopped to play; None if it did not.
        response_id: None without a response.
        reply_pcm: audio of the response, 24 kHz PCM16.
    """

    kind: str
    status: str
    error: str | None = None
    user_audio_s: float = 0.0
    ttfp_ms: float | None = None
    end_of_turn_ms: float | None = None
    audio_s: float = 0.0
    audio_packets: int = 0
    generation_s: float | None = None
    ttft_ms: float | None = None
    heard_s: float = 0.0
    heard_in_all_s: float = 0.0
    chunks_due: int = 0
    chunks_on_time: int = 0
    gaps_ms: tuple[float, ...] = ()
    gaps_over_100ms: int = 0
    transcript: str = ""
    user_transcript: str | None = None
    early_replies: int = 0
    interruption: str | None = None
    truncated_ms: float | None = None
    cut_short: bool = False
    stop_latency_ms: float | None = None
    silence_ms: float | None = None
    response_id: str | None = None
    reply_pcm: bytes = field(default=b"", repr=False)

    @property
    def ok(self) -> bool:
        # A response counts that reached the client's limit of tokens, or that the user interrupted.
        return self.status in ("completed", "incomplete") or (
            self.interruption is not None and self.status == "cancelled"
        )

    @property
    def barged(self) -> bool:
        return self.interruption == BARGE_IN

    @property
    def wrongly_interrupted(self) -> bool:
        """Whether the response was cut short without a barge-in."""
        return self.cut_short and not self.barged

    @property
    def rtf(self) -> float | None:
        """Generation time per second of audio; below 1 playback does not stall. None: no audio."""
        if self.generation_s is None or not self.audio_s:
            return None
        return self.generation_s / self.audio_s

    @property
    def ttfp_after_detection_ms(self) -> float | None:
        """TTFP without the time to detect the end of the turn; None if either is unknown."""
        if self.ttfp_ms is None or self.end_of_turn_ms is None:
            return None
        return self.ttfp_ms - self.end_of_turn_ms

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["reply_pcm"]
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}
        rounded["gaps_ms"] = [round(gap_ms, 1) for gap_ms in self.gaps_ms]
        return rounded
