"""LiveKit Agents: an agent session whose microphone is a recording, without a room.

    python docs/examples/livekit_voice.py python/sglang_live/assets/question.flac [--live]

In a real agent the session gets its sound from a LiveKit room: pass `room=ctx.room` to `start`.
"""

import argparse
import asyncio
import time

import numpy as np
import soundfile
import soxr
from livekit import rtc
from livekit.agents import Agent, AgentSession
from livekit.agents.voice import io
from livekit.plugins import openai

RATE_HZ = 24_000
FRAME = round(0.02 * RATE_HZ)


class Microphone(io.AudioInput):
    """Sends a recording at its pace, and then silence."""

    def __init__(self, samples: np.ndarray):
        super().__init__(label="recording")
        self._samples, self._at, self._due_s = samples, 0, None

    async def __anext__(self) -> rtc.AudioFrame:
        self._due_s = (self._due_s or time.monotonic()) + FRAME / RATE_HZ
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        said = self._samples[self._at : self._at + FRAME]
        self._at += FRAME
        samples = np.pad(said, (0, FRAME - len(said))).astype("<i2")
        return rtc.AudioFrame(samples.tobytes(), RATE_HZ, 1, FRAME)


class Loudspeaker(io.AudioOutput):
    """Counts audio, and reports at once that it was played."""

    def __init__(self) -> None:
        super().__init__(
            label="counter",
            capabilities=io.AudioOutputCapabilities(pause=False),
            sample_rate=RATE_HZ,
        )
        self.heard_s, self._segment_s = 0.0, 0.0
        self.ended = asyncio.Event()

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._segment_s:
            self.on_playback_started(created_at=time.time())
        self.heard_s += frame.duration
        self._segment_s += frame.duration

    def flush(self) -> None:
        super().flush()
        self._finish(interrupted=False)

    def clear_buffer(self) -> None:
        self._finish(interrupted=True)

    def _finish(self, *, interrupted: bool) -> None:
        if self._segment_s:
            self.on_playback_finished(playback_position=self._segment_s, interrupted=interrupted)
            self._segment_s = 0.0
            self.ended.set()


def recording(path: str) -> np.ndarray:
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono = soxr.resample(samples.mean(axis=1), rate_hz, RATE_HZ)
    return (np.clip(mono, -1, 1) * 32767).astype("<i2")


async def converse(args: argparse.Namespace) -> None:
    kind = openai.realtime.GPTLiveModel if args.live else openai.realtime.RealtimeModel
    model = kind(base_url=f"{args.url}/v1", api_key=args.key, model=args.model)
    session, loudspeaker = AgentSession(llm=model), Loudspeaker()
    session.input.audio = Microphone(recording(args.wav))
    session.output.audio = loudspeaker
    await session.start(Agent(instructions="Be brief."))
    try:
        await asyncio.wait_for(loudspeaker.ended.wait(), 100)
    finally:
        await session.aclose()
        await model.aclose()
    print(f"{loudspeaker.heard_s:.1f} s of sound")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wav")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--live", action="store_true", help="the Live API")
    asyncio.run(converse(parser.parse_args()))


if __name__ == "__main__":
    main()
