"""Spoken turns on a modelled device: the spans of their traces beside what they should cost.

    python -m benchmark.modelled_turn --json out.json

One user speaks a clip with the policies off, each time in a new session. Spans lie between marks of
the turn in the session's timeline (telemetry/trace.py). Costs follow from the device model and
the turn's sizes: tokens, seconds of audio, frames. What computes beneath the device is the model
`demo`, or the random one with one layer in each part (benchmark.load.drawn_length_model.py), which
takes less time than the device. Stages have a device each, or one for all, where their batches wait
for each other.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark.load.device_times import DeviceTimes, device_times, grown
from benchmark.load.drawn_length_model import drawn_length_model
from benchmark.load.provenance import facts
from benchmark.load.server import ServerProcess
from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from sglang_live.client import clip
from sglang_live.client.clip import BUNDLED_CLIP
from sglang_live.clock import MonotonicClock
from sglang_live.extensions.planner.device_model.model import H100, DeviceModel, load_device_model
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord
from sglang_live.models.demo.location import DEMO
from sglang_live.policy.view import FRAME_S

NAME = "demo"
START_TIMEOUT_S = 240.0
WARM_UP_TURNS = 2
# Responses of the model with one layer, which does not end them.
MAX_TOKENS = 40
# The vocoder decodes the first two frames as one chunk.
FRAMES_OF_FIRST_CHUNK = 2
STAGES = ("thinker", "talker", "vocoder")


@dataclass(frozen=True, slots=True)
class Arm:
    """shallow: one layer beneath the device. device_each: whether every stage has a device."""

    name: str
    shallow: bool
    device_each: bool

    def model_path(self) -> str:
        return str(drawn_length_model(shallow=True)) if self.shallow else DEMO

    def server_args(self) -> list[str]:
        stages = enumerate(STAGES) if self.device_each else ()
        return [f"--{stage}.device=cuda:{i}" for i, stage in stages]


ARMS = (
    Arm("one layer, a device per stage", shallow=True, device_each=True),
    Arm("one layer, one device", shallow=True, device_each=False),
    Arm("`demo`, one device", shallow=False, device_each=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one turn.

    Attributes:
        new_tokens: of the thinker's prompt, without those that its cache had.
        audio_s: of the prompt.
        n_tokens, n_frames: of the response: text, and codec frames.
    """

    prompt_tokens: int
    new_tokens: int
    audio_s: float
    n_tokens: int
    n_frames: int


def sizes_of(usage: dict[str, Any]) -> Sizes:
    """usage: of `response.done`."""
    given, made = usage["input_token_details"], usage["output_token_details"]
    return Sizes(
        prompt_tokens=usage["input_tokens"],
        new_tokens=usage["input_tokens"] - given["cached_tokens"],
        audio_s=given["audio_tokens"] * FRAME_S,
        n_tokens=made["text_tokens"],
        n_frames=made["audio_tokens"],
    )


def costs_ms(model: DeviceModel, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of every span, if nothing waits for anything but its own stage.

    The talker's prompt counts as long as the thinker's: it has the user's messages.
    """
    thinker, talker = model.thinker, model.talker
    round_s = thinker.decode_s(1, sizes.prompt_tokens + sizes.n_tokens // 2)
    frame_s = talker.decode_s(1, sizes.prompt_tokens + sizes.n_frames // 2)
    first_s = {
        "thinker, first token": thinker.prefill_s(sizes.new_tokens, sizes.audio_s),
        # The prefill samples code 0 of the first frame; the round after it completes the frame.
        "talker, first frame": talker.prefill_s(sizes.prompt_tokens, 0.0) + frame_s,
        "talker and vocoder, first audio": (FRAMES_OF_FIRST_CHUNK - 1) * frame_s
        + model.vocoder.decode_s(1),
    }
    seconds = {
        **first_s,
        "all, first audio": sum(first_s.values()),
        "client, first audio after the end of turn": sum(first_s.values()),
        "thinker, per further token": round_s,
        "talker, per further frame": frame_s,
    }
    return {name: 1000 * span_s for name, span_s in seconds.items()}


def measured_ms(marks: dict[str, float], record: TurnRecord, sizes: Sizes) -> dict[str, float]:
    """The same spans of a trace. marks: seconds since the turn began."""
    token_s, frame_s, audio_s = (
        marks[name] for name in ("thinker_first_token", "talker_first_frame", "first_audio")
    )
    assert record.ttfp_after_detection_ms is not None, "the turn is complete"
    return {
        "thinker, first token": 1000 * token_s,
        "talker, first frame": 1000 * (frame_s - token_s),
        "talker and vocoder, first audio": 1000 * (audio_s - frame_s),
        "all, first audio": 1000 * audio_s,
        "client, first audio after the end of turn": record.ttfp_after_detection_ms,
        "thinker, per further token": 1000
        * (marks["thinker_done"] - token_s)
        / max(1, sizes.n_tokens - 1),
        "talker, per further frame": 1000
        * (marks["talker_done"] - frame_s)
        / max(1, sizes.n_frames - 1),
    }


async def speak(url: str, arm: Arm) -> tuple[str, TurnRecord, dict[str, Any]]:
    """A turn in a new session: id of the session, record of the turn, usage of its response."""
    done: list[dict[str, Any]] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "response.done":
            done.append(event["response"])

    options = LoadOptions(url=url, model=NAME)
    async with RealtimeClient(options, MonotonicClock(), note) as client:
        if arm.shallow:
            await client.limit_responses(MAX_TOKENS)
        record = await client.speak(clip.load_pcm(BUNDLED_CLIP))
        if not record.ok or not record.audio_s:
            raise RuntimeError(f"turn failed: {record.status}: {record.error}")
        await client.wait_until_played()
        return client.session["id"], record, done[-1]["usage"]


def marks_of(timeline: Path) -> dict[str, float]:
    events = json.loads(timeline.read_text("utf-8"))["events"]
    return next(event["marks"] for event in events if event["event"] == "turn_result")


def measure(device_model: Path, arm: Arm, turns: int) -> tuple[list[dict[str, Any]], DeviceTimes]:
    """One row per turn, and the counters of the device over all of them."""
    model = load_device_model(device_model)
    with tempfile.TemporaryDirectory() as folder:
        args = (
            f"--device-model={device_model}",
            f"--timeline-dir={folder}",
            f"--served-model-name={NAME}",
            *arm.server_args(),
        )
        with ServerProcess(arm.model_path(), "off", args, START_TIMEOUT_S) as server:
            for _ in range(WARM_UP_TURNS):
                asyncio.run(speak(server.url, arm))
            before = device_times(server.metrics())
            spoken = [asyncio.run(speak(server.url, arm)) for _ in range(turns)]
            times = grown(before, device_times(server.metrics()))
        rows = []
        for session, record, usage in spoken:
            sizes, marks = sizes_of(usage), marks_of(Path(folder) / f"{session}.json")
            rows.append(
                {
                    "arm": arm.name,
                    "sizes": asdict(sizes),
                    "marks": marks,
                    "computed_ms": costs_ms(model, sizes),
                    "measured_ms": measured_ms(marks, record, sizes),
                }
            )
        return rows, times


def table(rows: list[dict[str, Any]], device: dict[str, DeviceTimes]) -> list[str]:
    """Medians over turns, by span: computed, and measured with every arm; lateness by stage."""
    lines = [f"| span | computed | {' | '.join(device)} |", "|---" * (2 + len(device)) + "|"]
    for span in rows[0]["computed_ms"]:
        cells = [statistics.median(row["computed_ms"][span] for row in rows)]
        for arm in device:
            own = [row["measured_ms"][span] for row in rows if row["arm"] == arm]
            cells.append(statistics.median(own))
        lines.append(f"| {span} | {' | '.join(f'{ms:.1f} ms' for ms in cells)} |")
    for stage in next(iter(device.values())):
        late = [times[stage]["late_s"] / times[stage]["modelled_s"] for times in device.values()]
        shares = " | ".join(f"{100 * share:.0f} %" for share in late)
        lines.append(f"| results of the {stage} late by | | {shares} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark.modelled_turn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device-model", type=Path, default=H100, metavar="FILE")
    parser.add_argument("--turns", type=int, default=5, help="per arm (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("--turns is at least 1")
    rows: list[dict[str, Any]] = []
    device: dict[str, DeviceTimes] = {}
    for arm in ARMS:
        own, device[arm.name] = measure(args.device_model, arm, args.turns)
        rows += own
    print("\n".join(table(rows, device)))
    if args.json:
        document = {
            "benchmark": "modelled_turn",
            **facts(args.device_model),
            "config": {"device_model": args.device_model.name, "turns": args.turns},
            "rows": rows,
            "device_times": device,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
