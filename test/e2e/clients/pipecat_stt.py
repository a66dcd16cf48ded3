"""Pipecat's recogniser in a pipeline: what it hears of a recording. The server ends the turns.

    python pipecat_stt.py URL RECORDING

RECORDING: int16 at 24 kHz. Prints one JSON object.
"""

import asyncio
import json
import sys
from pathlib import Path

from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    StartFrame,
    TranscriptionFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat.workers.runner import WorkerRunner

RATE_HZ, CHUNK_BYTES, CHUNK_S = 24_000, 4_800, 0.1
SAID = Path(sys.argv[2]).read_bytes() + bytes(2 * 2 * RATE_HZ)
WITHIN_S = 60


class Reader(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.kinds: list[str] = []
        self.text: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self.begun.set()
        elif isinstance(frame, ErrorFrame):
            self.text.set_exception(RuntimeError(frame.error))
        elif isinstance(frame, TranscriptionFrame) and not self.text.done():
            self.text.set_result(frame.text)
        if not isinstance(frame, InputAudioRawFrame):
            self.kinds.append(type(frame).__name__)
        await self.push_frame(frame, direction)


async def main() -> None:
    stt = OpenAIRealtimeSTTService(
        api_key="none",
        base_url=f"{sys.argv[1].replace('http', 'ws', 1)}/v1/realtime",
        turn_detection={"type": "server_vad"},
        settings=OpenAIRealtimeSTTService.Settings(model="gpt-transcribe"),
    )
    reader = Reader()
    params = PipelineParams(audio_in_sample_rate=RATE_HZ)
    worker = PipelineWorker(Pipeline([stt, reader]), params=params)
    running = asyncio.create_task(WorkerRunner(handle_sigint=False).run(worker))
    await reader.begun.wait()

    async def speak() -> None:
        for at in range(0, len(SAID), CHUNK_BYTES):
            chunk = SAID[at : at + CHUNK_BYTES]
            await worker.queue_frame(InputAudioRawFrame(chunk, RATE_HZ, 1))
            await asyncio.sleep(CHUNK_S)

    speaking = asyncio.create_task(speak())
    async with asyncio.timeout(WITHIN_S):
        text = await reader.text
    speaking.cancel()
    await worker.cancel()
    await running
    print(json.dumps({"kinds": reader.kinds, "texts": [text]}))


asyncio.run(main())
