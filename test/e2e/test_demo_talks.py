"""The shipped demo model answers its questions, in text and audio."""

import asyncio
import base64

import httpx
import numpy as np
import pytest

from sglang_live.client.clip import BUNDLED_CLIP as QUESTION
from test.e2e.socket_client import NO_VAD, connected

pytestmark = [pytest.mark.e2e]

UNKNOWN = "I did not understand that. Please ask me something else."


def said(done: dict) -> str:
    [item] = done["response"]["output"]
    return item["content"][0]["transcript"].strip()


def audio(events: list[dict]) -> np.ndarray:
    """float in [-1, 1] at 24 kHz."""
    deltas = [e["delta"] for e in events if e["type"] == "response.output_audio.delta"]
    pcm = b"".join(base64.b64decode(delta) for delta in deltas)
    return np.frombuffer(pcm, "<i2") / 32768


async def test_known_questions_get_answers_and_unknown_ones_the_apology(talking):
    async with connected(talking.ws) as socket:
        await socket.session(**NO_VAD)
        assert said(await socket.ask("What is the capital of France?")) == (
            "Paris is the capital of France."
        )
        voice = audio(socket.events)
        assert 1.0 < len(voice) / 24_000 < 4.0
        level_db = 20 * np.log10(np.sqrt(np.mean(voice**2)))
        assert -35 < level_db < -10
        assert said(await socket.ask("Seventeen purple ladders argue.")) == UNKNOWN


def test_a_recorded_question_is_written_down(talking):
    url, form = f"{talking.http}/v1/audio/transcriptions", {"model": "demo"}
    answer = httpx.post(url, data=form, files={"file": QUESTION.read_bytes()}, timeout=60)
    assert answer.json()["text"] == "what is the capital of france"


async def test_a_long_response_can_be_interrupted(talking):
    async with connected(talking.ws) as socket:
        await socket.session(**NO_VAD)
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Tell me a story."}],
        }
        await socket.send("conversation.item.create", item=item)
        await socket.send("response.create")
        await socket.until("response.output_audio.delta")
        await asyncio.sleep(1.0)
        await socket.send("response.cancel")
        cut = await socket.until("response.done")
        assert cut["response"]["status"] == "cancelled"
        assert said(await socket.ask("Who are you?")).startswith("A small voice")


async def test_a_name_is_remembered_over_turns(talking):
    async with connected(talking.ws) as socket:
        await socket.session(**NO_VAD)
        assert said(await socket.ask("My name is Emma.")) == "Emma, what a lovely name."
        await socket.ask("Good morning!")
        assert said(await socket.ask("What is my name?")) == "Emma is your name."


async def test_the_fortieth_typed_question_is_answered_like_the_first(talking):
    """Far beyond the length of its training, by the window that suits it."""
    async with connected(talking.ws) as socket:
        await socket.session(**NO_VAD)
        texts = []
        for _ in range(40):
            done = await socket.ask("What is the capital of France?", output_modalities=["text"])
            texts.append(done["response"]["output"][0]["content"][0]["text"].strip())
        assert ["Paris" in text for text in texts] == 40 * [True], texts
