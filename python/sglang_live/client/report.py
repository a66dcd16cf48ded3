"""Output of the command: progress on stderr, one JSON object for programs."""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_live.client import clip
from sglang_live.client.turn_record import TurnRecord
from sglang_live.client.turn_tracker import Event
from sglang_live.clock import Clock

PAUSE_BETWEEN_RESPONSES_S = 0.5

_MILESTONES = {
    "input_audio_buffer.speech_started": "server detects speech",
    "input_audio_buffer.speech_stopped": "server detects the end of the turn",
    "response.created": "response begins",
    "response.output_audio.delta": "first audio",
    "response.done": "response complete",
}


class Progress:
    """Prints the milestones of each turn to stderr, with the time since the turn began."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._began_s = clock.now_s()
        self._has_audio = False

    def turn_begins(self, number: int, n_turns: int, what: str) -> None:
        self._began_s = self._clock.now_s()
        self._has_audio = False
        show(f"turn {number}/{n_turns}: {what}")

    def on_event(self, event: Event) -> None:
        kind = event["type"]
        if kind == "error":
            self._line(f"server error: {event['error'].get('message')}")
        if kind == "response.created":
            self._has_audio = False
        if kind not in _MILESTONES:
            return
        if kind == "response.output_audio.delta":
            if self._has_audio:
                return
            self._has_audio = True
        self._line(_MILESTONES[kind])

    def turn_ended(self, record: TurnRecord) -> None:
        if record.error:
            self._line(f"{record.status}: {record.error}")
        if record.ttfp_ms is not None:
            show(
                f"  first audio {record.ttfp_ms:.0f} ms after the end of speech"
                f"{_detection(record)}; response {record.audio_s:.2f} s, "
                f"{record.gaps_over_100ms} gaps over 100 ms"
            )
        if record.transcript:
            show(f"  response: {record.transcript}")

    def _line(self, text: str) -> None:
        show(f"  {self._clock.now_s() - self._began_s:6.2f} s  {text}")


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def summarise(records: list[TurnRecord], n_planned: int, error: str | None) -> dict[str, Any]:
    """The JSON object. Times are medians over the turns; durations and counts are sums."""
    status = "completed"
    if error is not None:
        status = "unreachable"
    elif failed := [record for record in records if not record.ok]:
        status, error = failed[0].status, failed[0].error
    return {
        "status": status,
        "error": error,
        "ttfp_ms": _median(record.ttfp_ms for record in records),
        "end_of_turn_ms": _median(record.end_of_turn_ms for record in records),
        "audio_s": round(sum(record.audio_s for record in records), 3),
        "gaps_over_100ms": sum(record.gaps_over_100ms for record in records),
        "transcript": "\n".join(record.transcript for record in records),
        "turns_planned": n_planned,
        "turns": [record.to_json() for record in records],
    }


def write_responses(path: Path, records: list[TurnRecord]) -> None:
    pause = bytes(round(PAUSE_BETWEEN_RESPONSES_S / clip.FRAME_S) * clip.FRAME_BYTES)
    clip.write_wav(path, pause.join(r.reply_pcm for r in records if r.reply_pcm))


def _detection(record: TurnRecord) -> str:
    if record.end_of_turn_ms is None:
        return ""
    return f" ({record.end_of_turn_ms:.0f} ms of it to detect that end)"


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None
