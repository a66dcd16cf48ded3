"""OpenAI's SDK, blocking."""

import base64
import json

from openai import OpenAI
from play import FRAME, LONG, QUESTION, SAID, SHORT, TOOL, Playing, play, seconds, weather


def connect(url: str, key: str = SHORT, **more):
    return OpenAI(base_url=f"{url}/v1", api_key=key).realtime.connect(model="demo", **more)


def ask(connection) -> None:
    content = [{"type": "input_text", "text": QUESTION}]
    connection.conversation.item.create(
        item={"type": "message", "role": "user", "content": content}
    )
    connection.response.create()


def say(connection) -> None:
    """Send the recording at once, with the silence that ends a turn."""
    sound = SAID + bytes(50 * FRAME)
    for at in range(0, len(sound), FRAME):
        connection.input_audio_buffer.append(
            audio=base64.b64encode(sound[at : at + FRAME]).decode()
        )


def next_response(connection) -> tuple[dict, list]:
    """The received part of the next response, and its items."""
    text, pcm = "", bytearray()
    for event in connection:
        if event.type == "response.output_audio_transcript.delta":
            text += event.delta
        elif event.type == "response.output_audio.delta":
            pcm += base64.b64decode(event.delta)
        elif event.type == "error":
            raise RuntimeError(event.error.message)
        elif event.type == "response.done":
            return {"text": text, "sound_s": seconds(pcm)}, event.response.output
    raise RuntimeError("the connection ended")


def text(url: str) -> dict:
    with connect(url) as connection:
        ask(connection)
        return next_response(connection)[0]


def speech(url: str) -> dict:
    with connect(url) as connection:
        say(connection)
        return next_response(connection)[0]


def tool(url: str) -> dict:
    with connect(url) as connection:
        connection.session.update(session={"type": "realtime", "tools": [TOOL]})
        ask(connection)
        _, [item] = next_response(connection)
        arguments = json.loads(item.arguments)
        output = {"type": "function_call_output", "call_id": item.call_id}
        connection.conversation.item.create(item={**output, "output": weather(**arguments)})
        connection.response.create()
        return {"called": arguments, **next_response(connection)[0]}


def forced(url: str) -> dict:
    with connect(url, LONG) as connection:
        settings = {"type": "realtime", "tools": [TOOL], "tool_choice": "required"}
        connection.session.update(session=settings)
        ask(connection)
        _, [item] = next_response(connection)
        return {"called": json.loads(item.arguments)}


def interruption(url: str) -> dict:
    """Interrupts every response, until one ends incomplete and the next has begun."""
    with connect(url, LONG) as connection:
        ask(connection)
        playing, spoken_over, cut = Playing(""), False, False
        for event in connection:
            if event.type == "response.output_audio.delta" and cut:
                return {}
            if event.type == "response.output_audio.delta":
                if event.item_id != playing.item_id:
                    playing, spoken_over = Playing(event.item_id), False
                playing.sound_s += seconds(base64.b64decode(event.delta))
                if not spoken_over and playing.passed_s() > 1:
                    spoken_over = True
                    say(connection)
            elif event.type == "input_audio_buffer.speech_started" and playing.sound_s:
                connection.conversation.item.truncate(**playing.position())
            elif event.type == "response.done":
                cut = event.response.status == "cancelled"
                if not spoken_over:
                    ask(connection)
    raise RuntimeError("the connection ended")


def reconnect(url: str) -> dict:
    """The SDK reconnects to a new conversation."""
    pcm = bytearray()
    with connect(url, on_reconnecting=lambda event: None) as connection:
        for event in connection:
            if event.type == "session.created":
                pcm.clear()
                ask(connection)
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
