"""`python -m sglang_live.client`: hold a conversation and report how long its responses took."""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.client import clip
from sglang_live.client.connection import SessionError, SessionOptions
from sglang_live.client.conversation import Conversation, Event, Turn
from sglang_live.client.live import LiveConversation
from sglang_live.clock import Clock, MonotonicClock
from sglang_live.environment import start_in_utf8_mode

API_KEY_VARIABLE = "SGLANG_LIVE_API_KEY"
PAUSE_BETWEEN_RESPONSES_S = 0.5
_SERVER = "ws://127.0.0.1:30000"
_MILESTONES = {
    "input_audio_buffer.speech_started": "server detects speech",
    "input_audio_buffer.speech_stopped": "server detects the end of the turn",
    "response.created": "response begins",
    "response.output_audio.delta": "first audio",
    "response.done": "response complete",
}


@dataclass(frozen=True, slots=True)
class Said:
    """A recording or a written question. pcm: of the recording."""

    what: str
    pcm: bytes | None = None


class Progress:
    """Prints the milestones of each turn to stderr, with the time since the turn began."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._began_s = clock.now_s()
        self._has_audio = False

    def turn_begins(self, number: int, n_turns: int, what: str) -> None:
        self._began_s = self._clock.now_s()
        show(f"turn {number}/{n_turns}: {what}")

    def on_event(self, event: Event) -> None:
        kind = event["type"]
        if kind == "error":
            self._line(f"server error: {event['error'].get('message')}")
        if kind == "response.created":
            self._has_audio = False
        is_audio = kind == "response.output_audio.delta"
        if kind in _MILESTONES and not (is_audio and self._has_audio):
            self._line(_MILESTONES[kind])
        self._has_audio |= is_audio

    def turn_ended(self, turn: Turn) -> None:
        if turn.error:
            self._line(f"{turn.status}: {turn.error}")
        if turn.ttfp_ms is not None:
            detected_ms = turn.end_of_turn_ms
            detection = f" ({detected_ms:.0f} ms of it to detect that end)" if detected_ms else ""
            show(
                f"  first audio {turn.ttfp_ms:.0f} ms after the end of speech{detection}; "
                f"response {turn.audio_s:.2f} s, {turn.playback.audible_gaps} gaps over 100 ms"
            )
        if turn.transcript:
            show(f"  response: {turn.transcript}")

    def _line(self, text: str) -> None:
        show(f"  {self._clock.now_s() - self._began_s:6.2f} s  {text}")


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def converse(options: SessionOptions, planned: list[Said], taken: list[Turn]) -> None:
    """Take the turns one after another; stop at the first that fails.

    taken: filled turn by turn, so that they are kept if a later turn raises.
    """
    clock = MonotonicClock()
    progress = Progress(clock)
    kind = LiveConversation if options.live else Conversation
    async with kind(options, clock, progress.on_event) as conversation:
        show(f"connected to {options.url}, session {conversation.session.get('id')}")
        for number, said in enumerate(planned, start=1):
            progress.turn_begins(number, len(planned), said.what)
            if said.pcm is not None:
                turn = await conversation.speak(said.pcm)
            else:
                turn = await conversation.ask(said.what)
            progress.turn_ended(turn)
            taken.append(turn)
            if not turn.ok:
                return
            if number < len(planned):
                # Speech before the end of the response would interrupt it.
                await conversation.wait_until_played()


def summarise(turns: list[Turn], n_planned: int, error: str | None) -> dict[str, Any]:
    """The JSON object. Times are medians over the turns; durations and counts are sums."""
    status = "completed"
    if error is not None:
        status = "unreachable"
    elif failed := [turn for turn in turns if not turn.ok]:
        status = failed[0].status
        error = failed[0].error
    return {
        "status": status,
        "error": error,
        "ttfp_ms": _median(turn.ttfp_ms for turn in turns),
        "end_of_turn_ms": _median(turn.end_of_turn_ms for turn in turns),
        "audio_s": round(sum(turn.audio_s for turn in turns), 3),
        "gaps_over_100ms": sum(turn.playback.audible_gaps for turn in turns),
        "transcript": "\n".join(turn.transcript for turn in turns),
        "turns_planned": n_planned,
        "turns": [turn.to_json() for turn in turns],
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def write_responses(path: Path, turns: list[Turn]) -> None:
    pause = bytes(round(PAUSE_BETWEEN_RESPONSES_S / clip.FRAME_S) * clip.FRAME_BYTES)
    pcm = pause.join(turn.pcm for turn in turns if turn.pcm)
    clip.write_wav(path, pcm)
    level = clip.measure_level(pcm)
    show(
        f"wrote {path}: {level.duration_s:.2f} s, "
        f"peak {level.peak_dbfs:.1f} dBFS, rms {level.rms_dbfs:.1f} dBFS"
    )


def _spoken(value: str) -> Said:
    try:
        pcm = clip.load_pcm(Path(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Said(f"{value} ({clip.duration_s(pcm):.1f} s)", pcm)


def _written(value: str) -> Said:
    if not value.strip():
        raise argparse.ArgumentTypeError("a written question must not be empty")
    return Said(value)


def _out_file(value: str) -> Path:
    path = Path(value)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {path.parent}")
    return path


def parse_args(argv: list[str] | None = None) -> tuple[SessionOptions, argparse.Namespace]:
    """The session, and `turns`, `out` and `json`."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_live.client",
        description="Speak into a realtime server at real-time pace and measure the responses. "
        "Exit code 0: every turn has a response; 1: one has none; 2: wrong arguments.",
    )
    add = parser.add_argument
    add("--url", help=f"default: {_SERVER}/v1/realtime, with --live {_SERVER}/v1/live/sessions")
    add("--live", action="store_true", help="speak the Live API; --text is what to speak about")
    add(
        "--wav",
        dest="turns",
        action="append",
        type=_spoken,
        metavar="FILE",
        help="recording to speak (wav or flac); repeat for several turns in one session "
        "(default: the bundled recording)",
    )
    add(
        "--text",
        dest="turns",
        action="append",
        type=_written,
        help="ask in writing instead; may be mixed with --wav in any order",
    )
    add(
        "--out",
        type=_out_file,
        metavar="FILE",
        help="write the audio of all responses as one wav file",
    )
    add("--json", action="store_true", help="print one JSON object as the last line of stdout")
    add("--model", help="default: the one that the server has")
    add("--voice", help="default: the model's first voice")
    add("--instructions", help="system prompt of the session")
    add("--push-to-talk", action="store_true", help="commit each recording, without server VAD")
    add("--api-key", help=f"default: environment variable {API_KEY_VARIABLE}")
    add(
        "--turn-timeout-s",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait for a response after the end of the recording (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    args.turns = args.turns or [_spoken(str(clip.BUNDLED_CLIP))]
    try:
        options = SessionOptions(
            url=args.url or _SERVER + ("/v1/live/sessions" if args.live else "/v1/realtime"),
            model=args.model,
            voice=args.voice,
            instructions=args.instructions,
            push_to_talk=args.push_to_talk,
            live=args.live,
            api_key=args.api_key or os.environ.get(API_KEY_VARIABLE),
            turn_timeout_s=args.turn_timeout_s,
        )
    except ValueError as error:
        parser.error(str(error))
    return options, args


def main(argv: list[str] | None = None) -> int:
    options, args = parse_args(argv)
    turns: list[Turn] = []
    error = None
    try:
        asyncio.run(converse(options, args.turns, turns))
    except SessionError as refused:
        error = str(refused)
        show(f"error: {error}")
    except KeyboardInterrupt:
        show("interrupted")
        return 130
    if args.out is not None and any(turn.pcm for turn in turns):
        write_responses(args.out, turns)
    summary = summarise(turns, len(args.turns), error)
    if args.json:
        print(json.dumps(summary), flush=True)
    return 0 if summary["status"] == "completed" else 1


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
