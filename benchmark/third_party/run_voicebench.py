"""voicebench: when the agent answers, stops and does not stop, measured in the sound of both sides.

PYTHONPATH=DIR python -m benchmark.third_party.run_voicebench --url http://127.0.0.1:30000
"""

import argparse
import asyncio
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from voicebench.adapters import Adapter, AgentAudio, AgentClear, Transcript
from voicebench.audio import to_pcm16
from voicebench.bench import run_benchmark
from voicebench.report import render_console
from voicebench.scenario import parse_scenario

from benchmark.anything_said import Speaker, speaker_of
from benchmark.load.provenance import facts
from benchmark.third_party import realtime
from sglang_live.client import clip

# What the demo model knows. Short, and two that are answered at length.
QUESTIONS = ("What is the capital of France?", "Tell me a joke.", "How are you today?")
LONG = ("Tell me a story.", "Count to fifty.")
INTERRUPTION = "What time is it?"
_BREATH_MS = 700


class Realtime(Adapter):
    """A session of this server's Realtime API."""

    name = "sglang_live"

    def __init__(self, url: str, **options: Any):
        super().__init__(**options)
        self._call = realtime.Session(url, self._take)

    async def connect(self) -> None:
        await self._call.open()

    async def send_audio(self, pcm: Any) -> None:
        await self._call.append(to_pcm16(pcm))

    async def close(self) -> None:
        await self._call.close()

    def _take(self, event: dict[str, Any]) -> None:
        now = self.session.clock.now()
        match event["type"]:
            case realtime.DELTA:
                sound = np.frombuffer(realtime.sound_of(event), "<i2").astype(np.float32) / 32_768
                self.emit(AgentAudio(sound, now))
            case realtime.STARTED:
                self.emit(AgentClear(now))
            case realtime.HEARD:
                self.emit(Transcript("user", event["transcript"], now))


def scenario(folder: Path, speaker: Speaker) -> dict[str, Any]:
    """The questions one after another; long answers are interrupted by speech, and by a noise."""

    def said(text: str) -> dict[str, Any]:
        path = folder / f"{len(list(folder.iterdir()))}.wav"
        clip.write_wav(path, realtime.spoken(speaker, text))
        return {"audio": {"file": str(path)}, "text": text}

    after = {"after": "agent_speech_end", "delay_ms": _BREATH_MS, "timeout_ms": 20_000}
    during = {"after": "agent_speech_start", "delay_ms": 1200, "timeout_ms": 20_000}
    noise = {"synth": "noise", "duration_ms": 250, "level_db": -30}
    turns = [{**said(text), "start": after} for text in QUESTIONS]
    turns[0]["start"] = {"after": "session_start", "delay_ms": 1500}
    for text in LONG:
        turns.append({**said(text), "start": after})
        turns.append({**said(INTERRUPTION), "start": during, "expect": "stop"})
    turns.append({**said(LONG[0]), "start": after})
    turns.append({"audio": noise, "start": during, "expect": "ignore"})
    return {
        "name": "sglang_live",
        "sample_rate": clip.SAMPLE_RATE_HZ,
        "max_duration_ms": 300_000,
        "defaults": {"response_timeout_ms": 15_000, "max_stop_ms": 1500},
        "turns": turns,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="of a running server: http://host:port")
    parser.add_argument("--speaker", default=realtime.SPEAKER, help="see benchmark.anything_said")
    parser.add_argument("--repeats", type=int, default=1, help="sessions")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        script = parse_scenario(scenario(Path(folder), speaker_of(args.speaker)))
        adapter = f"{__name__}:{Realtime.__name__}"
        result = asyncio.run(
            run_benchmark(script, adapter=adapter, options={"url": args.url}, repeat=args.repeats)
        )
    print(render_console(result.report, result.sessions))
    if args.json is not None:
        document = {
            "benchmark": "voicebench",
            **facts(),
            "suite": f"voicebench {importlib.metadata.version('voicebench')}",
            "repeats": args.repeats,
            "speaker": args.speaker,
            "summary": result.summary,
            "sessions": result.report["sessions"],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
