"""Pipecat: a pipeline with an open microphone and a loudspeaker."""

import asyncio
from contextlib import asynccontextmanager

from pipecat.frames.frames import (
    BotStoppedSpeakingFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMRunFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    SessionProperties,
    TurnDetection,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from play import LONG, QUESTION, RATE_HZ, SHORT, SpeechSource, play, seconds
from play import weather as weather_of

called: list[dict] = []


async def weather(params, town: str):
    """The weather of a town.

    Args:
        town: its name.
    """
    called.append({"town": town})
    await params.result_callback(weather_of(town))


class Microphone(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.speech, self._speaking = SpeechSource(), None

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        await self.push_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self._speaking = asyncio.create_task(self._speak())

    async def cleanup(self) -> None:
        await super().cleanup()
        self._speaking.cancel()

    async def _speak(self) -> None:
        async for frame in self.speech.frames():
            await self.push_frame(InputAudioRawFrame(frame, RATE_HZ, 1))


class Loudspeaker(FrameProcessor):
    """Collects the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.heard.put_nowait(frame)
        await self.push_frame(frame, direction)


class Conversation:
    def __init__(self, url: str, key: str, *, typed: bool):
        detection = TurnDetection(silence_duration_ms=500)
        audio = AudioConfiguration(input=AudioInput(turn_detection=detection))
        properties = SessionProperties(instructions="Be brief.", audio=audio)
        self.llm = OpenAIRealtimeLLMService(
            api_key=key,
            base_url=f"{url.replace('http', 'ws', 1)}/v1/realtime",
            settings=OpenAIRealtimeLLMService.Settings(model="demo", session_properties=properties),
        )
        messages = [{"role": "user", "content": QUESTION}] if typed else []
        context = LLMContextAggregatorPair(LLMContext(messages, tools=[weather]))
        self.microphone, self.loudspeaker = Microphone(), Loudspeaker()
        parts = [self.microphone, context.user(), self.llm, self.loudspeaker, context.assistant()]
        params = PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ)
        self.worker = PipelineWorker(Pipeline(parts), params=params)

    async def next_response(self) -> dict:
        """The received part of the conversation until a response with audio is over."""
        text, pcm = "", bytearray()
        while True:
            frame = await self.loudspeaker.heard.get()
            if isinstance(frame, TTSTextFrame):
                text += frame.text
            elif isinstance(frame, TTSAudioRawFrame):
                pcm += frame.audio
            elif isinstance(frame, LLMFullResponseEndFrame) and pcm:
                return {"text": text, "sound_s": seconds(pcm)}

    async def until(self, kind: type[Frame]) -> None:
        while not isinstance(await self.loudspeaker.heard.get(), kind):
            pass


@asynccontextmanager
async def connected(url: str, key: str = SHORT, *, typed: bool = True):
    conversation = Conversation(url, key, typed=typed)
    running = asyncio.create_task(WorkerRunner(handle_sigint=False).run(conversation.worker))
    if typed:
        await conversation.worker.queue_frame(LLMRunFrame())
    try:
        yield conversation
    finally:
        await conversation.worker.cancel()
        await running


async def text(url: str) -> dict:
    async with connected(url) as conversation:
        return await conversation.next_response()


async def speech(url: str) -> dict:
    async with connected(url, typed=False) as conversation:
        conversation.microphone.speech.say()
        return await conversation.next_response()


async def tool(url: str) -> dict:
    async with connected(url) as conversation:
        heard = await conversation.next_response()
        return {"called": called.pop(), **heard}


async def interruption(url: str) -> dict:
    """Interrupts every response, until one ends incomplete and the next has begun."""
    async with connected(url, LONG) as conversation:
        cut = asyncio.Event()

        @conversation.llm.event_handler("on_conversation_item_updated")
        async def note(service, item_id, item) -> None:
            if item and item.status == "incomplete":
                cut.set()

        await conversation.until(TTSAudioRawFrame)
        while not cut.is_set():
            conversation.microphone.speech.say(after_s=1.0)
            await conversation.until(InterruptionFrame)
            await conversation.until(LLMFullResponseStartFrame)
            await conversation.until(TTSAudioRawFrame)
    return {}


async def reconnect(url: str) -> dict:
    """The service reports the loss; the program starts a new conversation."""
    async with connected(url) as conversation:
        lost = asyncio.Event()
        conversation.worker.add_event_handler("on_pipeline_error", lambda worker, frame: lost.set())
        await lost.wait()
        # A transport reports the end of playback; until then the service would truncate an item
        # that the new conversation does not have.
        await conversation.loudspeaker.push_frame(
            BotStoppedSpeakingFrame(), FrameDirection.UPSTREAM
        )
        await conversation.llm.reset_conversation()
        while not conversation.loudspeaker.heard.empty():
            conversation.loudspeaker.heard.get_nowait()
        conversation.microphone.speech.say()
        return await conversation.next_response()


play(text=text, speech=speech, tool=tool, interruption=interruption, reconnect=reconnect)
