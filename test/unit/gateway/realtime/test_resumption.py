"""A resumable session whose socket is lost goes on over another one: nothing is lost or doubled."""

import asyncio
import json
import random
import re

import pytest

from sglang_live.core import AudioDelta, AudioPart, TextPart, TranscriptDelta
from test.unit.gateway.fakes import done, history_item_of, paced, spoken, tone, voice

from .lossy_world import Gates, LossyClient, LossyWorld
from .playback_world import SILENCE_1S, VOICE, WORDS, interrupted_end

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '{"name": "weather", "arguments": {}}'
_ID = re.compile(r"\b(?:sess|item|resp|conv|call)_[0-9a-f]{20}")
_TOKEN = re.compile(r"\brt_[\w.-]+")


def conversation(**config) -> LossyWorld:
    """A call for a tool, its result spoken bit by bit, and a long response that is interrupted."""
    gates = Gates()
    bit = [AudioDelta(tone(80)), AudioDelta(tone(160))]
    bits = [step for _ in range(8) for step in (gates(), *bit)]
    answer = [TranscriptDelta("It is ", 2), *bits, TranscriptDelta("sunny.", 3)]
    scripts = [
        [*paced("Let me see.", 5)[:-1], done("Let me see.", function_calls=(CALL,), n_frames=5)],
        [*answer, done(item=history_item_of("It is sunny."), n_frames=24)],
        paced(WORDS, 25, done(item=history_item_of(WORDS), n_frames=25)),
        spoken("Yes?", 800),
    ]
    return LossyWorld(scripts, gates, **config)


async def held(world: LossyWorld, client: LossyClient) -> dict:
    """Hold the conversation. Returns what user and model know of it at the end."""
    # Microphone frames come at once here, so that none has a time at which it could hold an echo.
    detection = {"type": "server_vad", "ignore_echo": False}
    audio = {"input": {"transcription": None, "turn_detection": detection}}
    session = {"type": "realtime", "resumable": True, "tools": [TOOL], "audio": audio}
    await client.until("session.created")
    await client.send("session.update", session=session)
    await client.until("session.updated")
    world.orchestrator.session.on_interrupt = [interrupted_end()]

    await client.append(voice(600))
    await client.append(SILENCE_1S)
    response = (await client.until("response.done"))["response"]
    [call] = [item for item in response["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20 degrees"}
    await client.send("conversation.item.create", item=result)
    await client.send("response.create")
    await client.until("response.done", ticks=True)
    await client.tick(40)  # all is heard

    content = [{"type": "input_text", "text": "Count."}]
    item = {"type": "message", "role": "user", "content": content}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create")
    await client.until("response.done")
    await client.tick(12)
    await client.append(VOICE)
    await client.until("conversation.item.truncated")
    await client.append(SILENCE_1S)
    await client.until("response.done")
    await client.tick(12)
    await client.settle()
    return {
        "events": _without_ids(client.events),
        "audio": [bytes(audio) for audio in client.audio.values()],
        "turns": [
            [(item.role, [*map(_content, item.parts)], item.token_ids) for item in turn.history]
            for turn in world.orchestrator.turns
        ],
    }


def _content(part: TextPart | AudioPart) -> str | bytes:
    return part.text if isinstance(part, TextPart) else part.digest


def _without_ids(events: list[dict]) -> list[str]:
    """The events with each id replaced by its number, and without event ids and tokens."""
    known: dict[str, str] = {}
    plain = [
        # Heard milliseconds are whole ones of a clock in binary fractions of seconds.
        {k: round(v, -1) if k == "audio_end_ms" else v for k, v in one.items() if k != "event_id"}
        for one in events
    ]
    texts = map(json.dumps, plain)
    number = lambda found: known.setdefault(found[0], f"<{len(known)}>")  # noqa: E731
    return [_ID.sub(number, _TOKEN.sub("", text)) for text in texts]


async def run(cuts: tuple[int, ...] = (), seed: int = 0) -> tuple[dict, LossyClient]:
    world = conversation()
    async with LossyClient(world, cuts, seed) as client:
        known = await held(world, client)
    assert world.orchestrator.session.n_closed == 1
    assert world.value("sessions_open") == 0
    return known, client


@pytest.fixture(scope="module")
def undisturbed() -> tuple[dict, LossyClient]:
    return asyncio.run(run())


async def test_an_undisturbed_conversation_ends_as_planned(undisturbed):
    known, client = undisturbed
    assert (await run())[0] == known
    first, answer, story, last = known["audio"]
    assert [len(one) // 3840 for one in (first, answer, story, last)] == [5, 24, 12, 10]
    assert len(known["turns"]) == 4
    assert client.n_steps > 200


@pytest.mark.parametrize("seed", range(95))
async def test_a_conversation_that_is_cut_at_drawn_points_equals_an_undisturbed_one(
    seed, undisturbed
):
    whole, client = undisturbed
    cuts = tuple(random.Random(seed).sample(range(3, client.n_steps), 2))
    known, client = await run(cuts, seed)
    assert client.n_cuts == 2
    assert known == whole
