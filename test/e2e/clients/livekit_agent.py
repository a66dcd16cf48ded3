"""LiveKit Agents: a session without a room, with an open microphone and a loudspeaker."""

import asyncio
import time
from contextlib import asynccontextmanager

from livekit import rtc
from livekit.agents import Agent, AgentSession, function_tool
from livekit.agents.voice import io
from livekit.plugins import openai
from play import LONG, QUESTION, RATE_HZ, SHORT, SpeechSource, play
from play import weather as weather_of

called: list[dict] = []


@function_tool
async def weather(town: str) -> str:
    """The weather of a town."""
    called.append({"town": town})
    return weather_of(town)


class Microphone(io.AudioInput):
    def __init__(self) -> None:
        super().__init__(label="microphone")
        self.speech = SpeechSource()
        self._frames = self.speech.frames()

    async def __anext__(self) -> rtc.AudioFrame:
        frame = await anext(self._frames)
        return rtc.AudioFrame(frame, RATE_HZ, 1, len(frame) // 2)


class Loudspeaker(io.AudioOutput):
    """Simulates playback in real time.

    played: playback events, of interrupted and of complete responses.
    """

    def __init__(self) -> None:
        super().__init__(
            label="loudspeaker",
            capabilities=io.AudioOutputCapabilities(pause=False),
            sample_rate=RATE_HZ,
        )
        self.began, self.played = asyncio.Event(), asyncio.Queue()
        self._sound_s, self._since_s, self._ending = 0.0, 0.0, None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._sound_s:
            self._since_s = time.monotonic()
            self.on_playback_started(created_at=time.time())
        self._sound_s += frame.duration
        self.began.set()

    def flush(self) -> None:
        super().flush()
        if self._sound_s:
            left_s = self._since_s + self._sound_s - time.monotonic()
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(max(0.0, left_s), self._end, False)

    def clear_buffer(self) -> None:
        if self._sound_s:
            self._end(True)

    def _end(self, interrupted: bool) -> None:
        if self._ending:
            self._ending.cancel()
            self._ending = None
        heard_s = min(self._sound_s, time.monotonic() - self._since_s)
        self.played.put_nowait((interrupted, self._sound_s))
        self._sound_s = 0.0
        self.on_playback_finished(playback_position=heard_s, interrupted=interrupted)


@asynccontextmanager
async def connected(url: str, key: str = SHORT):
    model = openai.realtime.RealtimeModel(base_url=f"{url}/v1", api_key=key, model="demo")
    session = AgentSession(llm=model)
    session.input.audio, session.output.audio = Microphone(), Loudspeaker()
    said: asyncio.Queue[str] = asyncio.Queue()

    @session.on("conversation_item_added")
    def note(event) -> None:
        if event.item.role == "assistant":
            said.put_nowait(event.item.text_content)

    await session.start(Agent(instructions="Be brief.", tools=[weather]))
    try:
        yield session, said
    finally:
        await session.aclose()
        await model.aclose()


async def next_response(session, said) -> dict:
    _, sound_s = await session.output.audio.played.get()
    return {"text": await said.get(), "sound_s": sound_s}


async def text(url: str) -> dict:
    async with connected(url) as (session, said):
        session.generate_reply(user_input=QUESTION)
        return await next_response(session, said)


async def speech(url: str) -> dict:
    async with connected(url) as (session, said):
        session.input.audio.speech.say()
        return await next_response(session, said)


async def tool(url: str) -> dict:
    async with connected(url) as (session, said):
        session.generate_reply(user_input=QUESTION)
        heard = await next_response(session, said)
        return {"called": called.pop(), **heard}


async def forced(url: str) -> dict:
    async with connected(url, LONG) as (session, _):
        session.generate_reply(user_input=QUESTION, tool_choice="required")
        while not called:
            await asyncio.sleep(0.1)
        return {"called": called.pop()}


async def interruption(url: str) -> dict:
    """Interrupts every response, until one ends incomplete and the next has begun."""
    async with connected(url, LONG) as (session, _):
        cut, loudspeaker = asyncio.Event(), session.output.audio

        @session.current_agent.realtime_llm_session.on("openai_server_event_received")
        def note(event: dict) -> None:
            if event["type"] == "response.done" and event["response"]["status"] == "cancelled":
                cut.set()

        session.generate_reply(user_input=QUESTION)
        await loudspeaker.began.wait()
        while not cut.is_set():
            session.input.audio.speech.say(after_s=1.0)
            await loudspeaker.played.get()
            loudspeaker.began.clear()
            await loudspeaker.began.wait()
    return {}


async def reconnect(url: str) -> dict:
    """The framework reconnects, and sends the conversation to the new session."""
    async with connected(url) as (session, said):
        await session.generate_reply(user_input=QUESTION)
        while not said.empty():
            said.get_nowait()
        while not session.output.audio.played.empty():
            session.output.audio.played.get_nowait()
        session.generate_reply(user_input=QUESTION)
        return await next_response(session, said)


play(
    text=text,
    speech=speech,
    tool=tool,
    forced=forced,
    interruption=interruption,
    reconnect=reconnect,
)
