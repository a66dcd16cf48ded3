"""voice-evals: a scripted caller, its transcripts, what was said and how soon.

    PYTHONPATH=DIR python -m benchmark.third_party.run_voice_evals --url http://127.0.0.1:30000

The probe sends sound only while its caller speaks, and takes a response for over when its last
event has come. The transport here has a microphone that is always on, and plays what comes at the
pace of time, as clients do: the probe sees what is heard.
"""

import argparse
import asyncio
import importlib.metadata
import json
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voice_evals.probe.audio import AudioFormat
from voice_evals.probe.clock import MonotonicClock
from voice_evals.probe.config import ProbeConfig
from voice_evals.probe.models import (
    AgentEvent,
    AudioPayload,
    EventKind,
    SendReceipt,
    SynthesizedAudio,
    TransportCapabilities,
)
from voice_evals.probe.runner import SessionRunner
from voice_evals.probe.scenario import ScenarioScript

from benchmark.anything_said import Speaker, speaker_of
from benchmark.load.provenance import facts
from benchmark.third_party import realtime
from sglang_live.client import clip

FORMAT = AudioFormat(sample_rate=clip.SAMPLE_RATE_HZ)
# What the demo model knows.
SCENARIO = {
    "schema_version": 2,
    "name": "a name is remembered",
    "expected_outcome": "remembered",
    "required_facts": ["Paris", "Emma"],
    "forbidden_facts": ["I did not understand"],
    "seed": 1,
    "facts": {},
    "steps": [
        {
            "id": "town",
            "intent": "ask",
            "cue": {"mode": "speak_now"},
            "utterance": {"text": "What is the capital of France?"},
        },
        {
            "id": "name",
            "intent": "tell",
            "cue": {"mode": "wait_agent_end", "response_to": "town", "timeout_ms": 30_000},
            "utterance": {"text": "My name is Emma."},
        },
        {
            "id": "story",
            "intent": "ask",
            "cue": {"mode": "wait_agent_end", "response_to": "name", "timeout_ms": 30_000},
            "utterance": {"text": "Tell me a story."},
        },
        {
            "id": "who",
            "intent": "interrupt",
            "cue": {
                "mode": "interrupt",
                "response_to": "story",
                "after_ms": 1200,
                "timeout_ms": 30_000,
                "if_missed": "fail",
            },
            "utterance": {"text": "What is my name?"},
        },
    ],
    "outcome_rule": {
        "source": "final_agent_text",
        "after_step": "who",
        "all_of": ["Emma"],
        "value": "remembered",
    },
}


class Voice:
    def __init__(self, speaker: Speaker):
        self._speaker = speaker

    async def synthesize(
        self, text: str, *, audio_format: AudioFormat, seed: int | None = None
    ) -> SynthesizedAudio:
        pcm = await asyncio.to_thread(realtime.spoken, self._speaker, text)
        return SynthesizedAudio(
            text=text,
            pcm=pcm,
            audio_format=audio_format,
            samples=len(pcm) // 2,
            provenance={},
        )

    async def aclose(self) -> None:
        """Does nothing: there is nothing to release."""


@dataclass(slots=True)
class _Response:
    pcm: bytearray = field(default_factory=bytearray)
    has_all: bool = False


class Transport:
    def __init__(self, url: str):
        self._session = realtime.Session(url, self._take)
        self._clock = MonotonicClock()
        self._events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        self._said: deque[bytes] = deque()
        self._utterance = ""  # that is being said, or was last
        self._utterances: dict[str, str] = {}  # by the server's item
        self._responses: dict[str, _Response] = {}  # that are not played out
        self._ticking: asyncio.Task[None] | None = None

    async def open(self, config: Any) -> TransportCapabilities:
        await self._session.open()
        self._ticking = asyncio.create_task(self._tick())
        return TransportCapabilities(
            input_format=FORMAT,
            output_format=FORMAT,
            duplex=True,
            incremental_output=True,
            response_ids=True,
            input_transcripts=True,
            agent_transcripts=True,
            response_end_events=True,
        )

    async def events(self) -> AsyncIterator[AgentEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def send_audio(self, frame: Any) -> SendReceipt:
        self._utterance = frame.utterance_id
        self._said.append(frame.payload)
        now = self._clock.now_ns()
        return SendReceipt(frame.utterance_id, frame.sequence, now, now, len(frame.payload))

    async def end_utterance(self, utterance_id: str) -> None:
        """Does nothing: the server finds the end."""

    async def cancel_response(self, response_id: str) -> Any:
        raise NotImplementedError("no scenario here cancels")

    async def aclose(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self._session.close()
        self._events.put_nowait(None)

    async def _tick(self) -> None:
        """Every 20 ms: a frame of the microphone, and one for the ear."""
        begun_ns, n = self._clock.now_ns(), 0
        while True:
            n += 1
            due_ns = begun_ns + round(1e9 * clip.FRAME_S) * n
            await asyncio.sleep(max(0.0, (due_ns - self._clock.now_ns()) / 1e9))
            said = self._said.popleft() if self._said else b""
            await self._session.append(said.ljust(clip.FRAME_BYTES, b"\0"))
            self._play()

    def _play(self) -> None:
        for name, response in list(self._responses.items()):
            if response.pcm:
                pcm = bytes(response.pcm[: clip.FRAME_BYTES])
                del response.pcm[: clip.FRAME_BYTES]
                payload = AudioPayload(pcm, len(pcm) // 2, FORMAT)
                self._emit(EventKind.AGENT_AUDIO, name, audio=payload)
                return
            if not response.has_all:
                return
            del self._responses[name]
            self._emit(EventKind.RESPONSE_DONE, name)

    def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "response.created":
                name = event["response"]["id"]
                self._responses[name] = _Response()
                self._emit(EventKind.RESPONSE_START, name)
            case realtime.DELTA:
                if (response := self._responses.get(event["response_id"])) is not None:
                    response.pcm += realtime.sound_of(event)
            case "response.done":
                if (response := self._responses.get(event["response"]["id"])) is not None:
                    response.has_all = True
            case "response.output_audio_transcript.done":
                name, text = event["response_id"], event["transcript"]
                self._emit(EventKind.AGENT_TEXT_FINAL, name, text=text)
            case realtime.STARTED:
                self._utterances[event["item_id"]] = self._utterance
                for response in self._responses.values():
                    response.pcm.clear()
            case realtime.HEARD:
                utterance = self._utterances.get(event["item_id"])
                text = event["transcript"]
                kind = EventKind.CALLER_TRANSCRIPT_FINAL
                self._emit(kind, None, text=text, utterance_id=utterance)

    def _emit(self, kind: EventKind, response: str | None, **fields: Any) -> None:
        now = self._clock.now_ns()
        self._events.put_nowait(AgentEvent(kind, now, response_id=response, **fields))


async def measure(url: str, speaker: Speaker, folder: Path) -> dict[str, Any]:
    config = ProbeConfig(input_format=FORMAT, output_format=FORMAT)
    runner = SessionRunner(caller=Voice(speaker), transport=Transport(url), config=config)
    session = await runner.run(ScenarioScript.from_dict(SCENARIO), output_dir=folder)
    report = runner.last_report
    return {"errors": session.errors, "result": report.result, "probe": report.probe}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="of a running server: http://host:port")
    parser.add_argument("--speaker", default=realtime.SPEAKER, help="see benchmark.anything_said")
    parser.add_argument("--repeats", type=int, default=1, help="sessions")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    sessions = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            sessions.append(
                asyncio.run(measure(args.url, speaker_of(args.speaker), Path(folder) / "probe"))
            )
        print(json.dumps(sessions[-1], indent=1, default=str), flush=True)
    if args.json is not None:
        document = {
            "benchmark": "voice_evals",
            **facts(),
            "suite": f"voice-evals {importlib.metadata.version('voice-evals')}",
            "speaker": args.speaker,
            "sessions": sessions,
        }
        args.json.write_text(json.dumps(document, indent=1, default=str) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
