"""OpenAI's Agents SDK, with an open microphone."""

import asyncio
from contextlib import asynccontextmanager

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner
from play import LONG, QUESTION, SHORT, SpeechSource, play, seconds
from play import weather as weather_of

called: list[dict] = []


@function_tool
def weather(town: str) -> str:
    """The weather of a town."""
    called.append({"town": town})
    return weather_of(town)


@asynccontextmanager
async def connected(url: str, key: str = SHORT):
    """A session and its microphone."""
    agent, source = (
        RealtimeAgent(name="Guide", instructions="Be brief.", tools=[weather]),
        SpeechSource(),
    )
    url = f"{url.replace('http', 'ws', 1)}/v1/realtime?model=demo"
    async with await RealtimeRunner(agent).run(
        model_config={"url": url, "api_key": key}
    ) as session:

        async def speak() -> None:
            async for frame in source.frames():
                await session.send_audio(frame)

        speaking = asyncio.create_task(speak())
        try:
            yield session, source
        finally:
            speaking.cancel()


async def next_response(session) -> dict:
    """The received part of the conversation until a response with audio is over."""
    text, pcm = "", bytearray()
    async for event in session:
        if event.type == "raw_model_event" and event.data.type == "transcript_delta":
            text += event.data.delta
        elif event.type == "audio":
            pcm += event.audio.data
        elif event.type == "agent_end" and pcm:
            return {"text": text, "sound_s": seconds(pcm)}
        elif event.type == "error":
            raise RuntimeError(str(event.error))
    raise RuntimeError("the session ended")


async def text(url: str) -> dict:
    async with connected(url) as (session, _):
        await session.send_message(QUESTION)
        return await next_response(session)


async def speech(url: str) -> dict:
    async with connected(url) as (session, source):
        source.say()
        return await next_response(session)


async def tool(url: str) -> dict:
    async with connected(url) as (session, _):
        await session.send_message(QUESTION)
        heard = await next_response(session)
        return {"called": called.pop(), **heard}


async def interruption(url: str) -> dict:
    """Interrupts every response, until one ends incomplete and the next has begun."""
    async with connected(url, LONG) as (session, source):
        await session.send_message(QUESTION)
        spoken_over, cut = None, False
        async for event in session:
            if event.type == "audio" and cut:
                return {}
            if event.type == "audio" and event.item_id != spoken_over:
                spoken_over = event.item_id
                source.say(after_s=1.0)
            elif event.type == "raw_model_event" and event.data.type == "raw_server_event":
                if event.data.data["type"] == "response.done":
                    cut = event.data.data["response"]["status"] == "cancelled"
            elif event.type == "error":
                raise RuntimeError(str(event.error))
    raise RuntimeError("the session ended")


async def reconnect(url: str) -> dict:
    """The SDK's session ends with its socket: the program opens another."""
    try:
        async with connected(url) as (session, _):
            await session.send_message(QUESTION)
            await next_response(session)
    except Exception as lost:
        heard = await text(url)
        return {"lost": repr(lost), **heard}
    raise RuntimeError("the line did not break")


set_tracing_disabled(True)
play(text=text, speech=speech, tool=tool, interruption=interruption, reconnect=reconnect)
