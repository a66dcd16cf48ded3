"""What is known about one turn when it is over."""

from dataclasses import asdict, dataclass, field
from typing import Any

MS_PER_S = 1000.0
BARGE_IN = "barge_in"
FALSE_TRIGGER = "false_trigger"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn as the caller lived it. Times count from the end of the user's speech.

    Attributes:
        status: the response's own status (`completed`, `incomplete`, `cancelled`, `failed`),
            or what kept it from having one: `empty`, `error`, `timeout`, `closed`.
        ttfp_ms: until the first decodable audio packet; negative if it came too early.
        end_of_turn_ms: until the server's speech_stopped event; None without server VAD.
        generation_s: from response.created to the last audio packet.
        ttft_ms: until the first piece of a written answer.
        early_replies: responses that the server began before the user had finished.
        audio_s: what was received of the answer.
        heard_s: what the listener heard of it; all of it unless it was cut short.
        heard_in_all_s: the same with early replies and answers to a noise.
        chunks_due, chunks_on_time: packets from the second on, and those in time (viability).
        interruption: `barge_in` or `false_trigger`, if the caller did so while it played.
        truncated_ms: from the first packet to the moment the caller began to.
        cut_short: the server cancelled the answer, or made the client stop playing it.
        stop_latency_ms: from the onset of the user's speech to the answer's last packet; 0 if
            none came after it, None if the response was over before.
        silence_ms: from that onset until the client stopped playing.
        reply_pcm: the reply's audio, 24 kHz PCM16.
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
        # An answer that came to the limit the caller had set is an answer.
        return self.status in ("completed", "incomplete") or (
            self.interruption is not None and self.status == "cancelled"
        )

    @property
    def barged(self) -> bool:
        return self.interruption == BARGE_IN

    @property
    def wrongly_interrupted(self) -> bool:
        """The answer was cut short though nobody barged in."""
        return self.cut_short and not self.barged

    @property
    def rtf(self) -> float | None:
        """Generation wall time per second of audio; below 1 playback can keep up."""
        if self.generation_s is None or not self.audio_s:
            return None
        return self.generation_s / self.audio_s

    @property
    def ttfp_after_detection_ms(self) -> float | None:
        """The server's share of TTFP: without the time to decide that the turn is over."""
        if self.ttfp_ms is None or self.end_of_turn_ms is None:
            return None
        return self.ttfp_ms - self.end_of_turn_ms

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["reply_pcm"]
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}
        rounded["gaps_ms"] = [round(gap_ms, 1) for gap_ms in self.gaps_ms]
        return rounded
