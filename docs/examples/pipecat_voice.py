"""Pipecat: a pipeline whose microphone is a recording and whose loudspeaker counts seconds.

    python docs/examples/pipecat_voice.py python/sglang_live/assets/question.flac [--live]

In a real bot a transport (WebRTC, telephony) stands at both ends instead.
"""

import argparse
import asyncio
import time
from functools import partial

import numpy as np
import soundfile
import soxr
from pipecat.frames.frames import (
    BotStoppedSpeakingFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    OutputAudioRawFrame,
    StartFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    SessionProperties,
    TurnDetection,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

RATE_HZ = 24_000
FRAME = round(0.02 * RATE_HZ)


class Microphone(FrameProcessor):
    """Says a recording at its own pace, and then nothing."""

    def __init__(self, samples: np.ndarray):
        super().__init__()
        self._samples, self._speaking = samples, None

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        await self.push_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self._speaking = asyncio.create_task(self._speak())

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._speaking:
            self._speaking.cancel()

    async def _speak(self) -> None:
        due_s, at = time.monotonic(), 0
        while True:
            said = self._samples[at : at + FRAME]
            frame = np.pad(said, (0, FRAME - len(said))).astype("<i2").tobytes()
            await self.push_frame(InputAudioRawFrame(frame, RATE_HZ, 1))
            at += FRAME
            due_s += FRAME / RATE_HZ
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


class Loudspeaker(FrameProcessor):
    """Counts audio; ends the pipeline at the end of the first response."""

    def __init__(self, on_end):
        super().__init__()
        self._on_end, self.heard_s = on_end, 0.0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, OutputAudioRawFrame) and any(frame.audio):
            self.heard_s += len(frame.audio) / 2 / frame.sample_rate
        if isinstance(frame, LLMFullResponseEndFrame | BotStoppedSpeakingFrame) and self.heard_s:
            await self._on_end()
        if isinstance(frame, ErrorFrame):
            raise SystemExit(frame.error)
        await self.push_frame(frame, direction)


def recording(path: str) -> np.ndarray:
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono = soxr.resample(samples.mean(axis=1), rate_hz, RATE_HZ)
    return (np.clip(mono, -1, 1) * 32767).astype("<i2")


async def converse(args: argparse.Namespace) -> None:
    detection = TurnDetection(silence_duration_ms=500)
    audio = AudioConfiguration(input=AudioInput(turn_detection=detection))
    settings = OpenAIRealtimeLLMService.Settings(
        model=args.model,
        session_properties=SessionProperties(instructions="Be brief.", audio=audio),
    )
    if args.live:
        live = OpenAILiveLLMService.Settings(model=args.model, system_instruction="Be brief.")
        path, llm = "live/sessions", partial(OpenAILiveLLMService, settings=live)
    else:
        path, llm = "realtime", partial(OpenAIRealtimeLLMService, settings=settings)
    llm = llm(api_key=args.key, base_url=f"{args.url}/v1/{path}")
    context = LLMContextAggregatorPair(LLMContext())
    worker = None

    async def end() -> None:
        await worker.queue_frame(EndFrame())

    loudspeaker = Loudspeaker(end)
    microphone = Microphone(recording(args.wav))
    pipeline = Pipeline([microphone, context.user(), llm, loudspeaker, context.assistant()])
    params = PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ)
    worker = PipelineWorker(pipeline, params=params)
    if args.live:
        await worker.queue_frame(LLMRunFrame())  # it connects when there is a context
    runner = WorkerRunner()
    await runner.run(worker)
    print(f"{loudspeaker.heard_s:.1f} s of sound")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wav")
    parser.add_argument("--url", default="ws://127.0.0.1:30000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--live", action="store_true", help="the Live API")
    asyncio.run(converse(parser.parse_args()))


if __name__ == "__main__":
    main()
