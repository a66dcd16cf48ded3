"""Pipecat as a client of the Live API: a pipeline with an open microphone and a loudspeaker.

    python pipecat_live.py URL RECORDING

RECORDING: int16 at 24 kHz. The application asks the model to open the conversation; then the user
speaks. Prints one JSON object.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    SpeechOutputAudioRawFrame,
    StartFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat.workers.runner import WorkerRunner

RATE_HZ, FRAME_BYTES, FRAME_S = 24_000, 960, 0.02
SAID = Path(sys.argv[2]).read_bytes()


class Microphone(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.left, self._speaking = b"", None

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        await self.push_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self._speaking = asyncio.create_task(self._speak())

    async def cleanup(self) -> None:
        await super().cleanup()
        self._speaking.cancel()

    async def _speak(self) -> None:
        due_s = time.monotonic()
        while True:
            frame, self.left = self.left[:FRAME_BYTES], self.left[FRAME_BYTES:]
            await self.push_frame(InputAudioRawFrame(frame.ljust(FRAME_BYTES, b"\0"), RATE_HZ, 1))
            due_s += FRAME_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


class Loudspeaker(FrameProcessor):
    """Collects the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.responses: list[str] = []
        self.errors: list[str] = []
        self.n_sounding = 0
        self.ended = asyncio.Event()
        self._text = ""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSTextFrame):
            self._text += frame.text
        elif isinstance(frame, SpeechOutputAudioRawFrame):
            self.n_sounding += any(frame.audio)
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.responses.append(self._text)
            self._text = ""
            self.ended.set()
        elif isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)
        await self.push_frame(frame, direction)

    async def response(self) -> None:
        async with asyncio.timeout(60):
            await self.ended.wait()
        self.ended.clear()


async def main(url: str) -> None:
    llm = OpenAILiveLLMService(
        api_key="none",
        base_url=f"{url}/v1/live/sessions",
        settings=OpenAILiveLLMService.Settings(model="gpt-live-1", system_instruction="Be brief."),
    )
    opening = {"role": "developer", "content": "Greet the user."}
    context = LLMContext([opening])
    aggregators = LLMContextAggregatorPair(context)
    microphone, loudspeaker = Microphone(), Loudspeaker()
    parts = [microphone, aggregators.user(), llm, loudspeaker, aggregators.assistant()]
    params = PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ)
    worker = PipelineWorker(Pipeline(parts), params=params)
    running = asyncio.create_task(WorkerRunner(handle_sigint=False).run(worker))
    await worker.queue_frame(LLMRunFrame())
    await loudspeaker.response()
    await asyncio.sleep(1)
    microphone.left = SAID
    await loudspeaker.response()
    await worker.stop_when_done()
    await running
    messages = [message for message in context.get_messages() if message["role"] != "developer"]
    report = {"responses": loudspeaker.responses, "errors": loudspeaker.errors}
    print(json.dumps({**report, "messages": messages, "n_sounding": loudspeaker.n_sounding}))


asyncio.run(main(sys.argv[1]))
