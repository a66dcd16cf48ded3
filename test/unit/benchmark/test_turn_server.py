"""Recordings go to a server in real time; its decisions count when they arrive."""

import base64
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from websockets.asyncio.server import serve

from benchmark.turn_taking.components import end_rules
from benchmark.turn_taking.report import rows_of
from benchmark.turn_taking.through_server import (
    DECISIONS,
    Pace,
    ServerRule,
    hear_all,
    server_rules,
    sound_rules,
)
from benchmark.turn_taking.timeline import Recording, Turn

RULE = ServerRule(
    "server_vad", "500 ms", {"type": "server_vad", "silence_duration_ms": 500}, DECISIONS
)
PCM = np.full(16 * 600, 1000, np.int16)
RECORDING = Recording("r", "g", "made", PCM, (Turn(0.0, 150.0, 60_000.0),))


@asynccontextmanager
async def server(reply):
    """A realtime server; reply: from the number of appends so far, or 0 for an update, to events.
    Yields its URL and what clients sent."""
    seen = []

    async def talk(socket):
        n = 0
        async for text in socket:
            event = json.loads(text)
            seen.append(event)
            n += event["type"].endswith(".append")
            for answer in reply(n):
                await socket.send(json.dumps(answer))

    async with serve(talk, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"ws://127.0.0.1:{port}", seen


def stops_after(n_appends):
    def reply(n):
        if n == 0:
            return [{"type": "session.created"}, {"type": "session.updated"}]
        return [{"type": "input_audio_buffer.speech_stopped"}] if n == n_appends else []

    return reply


async def test_a_decision_counts_when_it_arrives():
    pace = Pace()
    async with server(stops_after(10)) as (url, seen):
        [decisions, again] = await hear_all(url, RULE, [RECORDING, RECORDING], 2, pace)
    assert [d.kind for d in decisions] == [d.kind for d in again] == ["ended"]
    # After the tenth packet, which is due at 200 ms; timers may fire up to a millisecond early.
    assert decisions[0].at_ms > 190
    assert pace.sent == 2 * 30
    detection = seen[0]["session"]["audio"]["input"]["turn_detection"]
    assert detection == RULE.detection | {"create_response": False}
    [row, _] = rows_of("server_vad", "500 ms", [(RECORDING, decisions)])
    assert (row["turns"], row["missed"]) == (1, 0)


@pytest.mark.parametrize("n_appends", [0, 5], ids=["at the update", "later"])
async def test_an_error_of_the_server_is_raised(n_appends):
    def reply(n):
        error = [{"type": "error", "error": {"message": "no"}}]
        return error if n == n_appends else [{"type": "session.updated"}]

    async with server(reply) as (url, _):
        with pytest.raises(ConnectionError, match="no"):
            await hear_all(url, RULE, [RECORDING], 1, Pace())


def test_the_settings_are_those_of_offline_components():

    offline = {(rule.component, rule.setting) for rule in end_rules()}
    assert {(rule.component, rule.setting) for rule in server_rules()} <= offline


def packet(value):
    audio = base64.b64encode(np.full(2400, value, "<i2").tobytes()).decode()
    return {"type": "session.output_audio.delta", "delta": audio}


def sound(response_id):
    return {"type": "response.output_audio.delta", "response_id": response_id, "delta": "AAA="}


# What the server sends at which append: two responses, the second one with a pause in it.
LIVE = {0: [{"type": "session.started"}], 5: [packet(0), packet(9), packet(9)]}
LIVE |= {8: 5 * [packet(0)], 9: [packet(9), packet(0), packet(9)]}
REALTIME = {0: [{"type": "session.updated"}], 5: [sound("a"), sound("a")], 9: [sound("b")]}


@pytest.mark.parametrize(("rule", "says"), zip(sound_rules(), (REALTIME, LIVE), strict=True))
async def test_a_response_counts_once_at_its_first_sound(rule, says):
    async with server(lambda n: says.get(n, [])) as (url, _):
        [decisions] = await hear_all(url, rule, [RECORDING], 1, Pace())
    first, second = (d.at_ms for d in decisions)
    assert 95 < first < second and second > 175
