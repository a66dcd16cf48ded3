"""OpenAI's SDK, async, with an open microphone."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager

from openai import AsyncOpenAI
from play import LONG, QUESTION, SHORT, TOOL, Playing, SpeechSource, play, seconds, weather


@asynccontextmanager
async def connected(url: str, key: str = SHORT, **more):
    """A connection and its microphone."""
    client, source = AsyncOpenAI(base_url=f"{url}/v1", api_key=key), SpeechSource()
    async with client.realtime.connect(model="demo", **more) as connection:

        async def speak() -> None:
            async for frame in source.frames():
                await connection.input_audio_buffer.append(audio=base64.b64encode(frame).decode())

        speaking = asyncio.create_task(speak())
        try:
            yield connection, source
        finally:
            speaking.cancel()


async def ask(connection) -> None:
    content = [{"type": "input_text", "text": QUESTION}]
    item = {"type": "message", "role": "user", "content": content}
    await connection.conversation.item.create(item=item)
    await connection.response.create()


async def next_response(connection) -> tuple[dict, list]:
    """The received part of the next response, and its items."""
    text, pcm = "", bytearray()
    async for event in connection:
        if event.type == "response.output_audio_transcript.delta":
            text += event.delta
        elif event.type == "response.output_audio.delta":
            pcm += base64.b64decode(event.delta)
        elif event.type == "error":
            raise RuntimeError(event.error.message)
        elif event.type == "response.done":
            return {"text": text, "sound_s": seconds(pcm)}, event.response.output
    raise RuntimeError("the connection ended")


async def text(url: str) -> dict:
    async with connected(url) as (connection, _):
        await ask(connection)
        return (await next_response(connection))[0]


async def speech(url: str) -> dict:
    async with connected(url) as (connection, source):
        source.say()
        return (await next_response(connection))[0]


async def tool(url: str) -> dict:
    async with connected(url) as (connection, _):
        await connection.session.update(session={"type": "realtime", "tools": [TOOL]})
        await ask(connection)
        _, [item] = await next_response(connection)
        arguments = json.loads(item.arguments)
        output = {"type": "function_call_output", "call_id": item.call_id}
        await connection.conversation.item.create(item={**output, "output": weather(**arguments)})
        await connection.response.create()
        return {"called": arguments, **(await next_response(connection))[0]}


async def forced(url: str) -> dict:
    async with connected(url, LONG) as (connection, _):
        settings = {"type": "realtime", "tools": [TOOL], "tool_choice": "required"}
        await connection.session.update(session=settings)
        await ask(connection)
        _, [item] = await next_response(connection)
        return {"called": json.loads(item.arguments)}


async def interruption(url: str) -> dict:
    """Interrupts every response, until one ends incomplete and the next has begun."""
    async with connected(url, LONG) as (connection, source):
        await ask(connection)
        playing, cut = Playing(""), False
        async for event in connection:
            if event.type == "response.output_audio.delta" and cut:
                return {}
            if event.type == "response.output_audio.delta":
                if event.item_id != playing.item_id:
                    playing = Playing(event.item_id)
                    source.say(after_s=1.0)
                playing.sound_s += seconds(base64.b64decode(event.delta))
            elif event.type == "input_audio_buffer.speech_started" and playing.sound_s:
                await connection.conversation.item.truncate(**playing.position())
            elif event.type == "response.done":
                cut = event.response.status == "cancelled"
    raise RuntimeError("the connection ended")


async def reconnect(url: str) -> dict:
    """The SDK reconnects to a new conversation, and then sends the queued events."""
    pcm = bytearray()
    async with connected(url, on_reconnecting=lambda event: None) as (connection, _):
        async for event in connection:
            if event.type == "session.created":
                pcm.clear()
                await ask(connection)
            elif event.type == "response.output_audio.delta":
                pcm += base64.b64decode(event.delta)
            elif event.type == "response.done":
                return {"sound_s": seconds(pcm)}
    raise RuntimeError("the connection ended")


play(
    text=text,
    speech=speech,
    tool=tool,
    forced=forced,
    interruption=interruption,
    reconnect=reconnect,
)
