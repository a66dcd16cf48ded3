"""Claims that a session closes cleanly in every state."""

import asyncio
import base64
from collections.abc import Awaitable, Callable

import pytest

from test.unit.gateway.fakes import spoken, voice
from test.unit.gateway.live.test_backend import DELEGATION, LOOK, ask, calls
from test.unit.gateway.live.test_decisions import DELEGATION as DECISIONS
from test.unit.gateway.live.world import LiveClient, LiveWorld, sound_of
from test.unit.gateway.realtime.playback_world import interrupted_end

LONG = spoken("A long story.", 8000)
NEVER = [asyncio.Event()]


async def silent(client: LiveClient) -> None:
    await client.ticks(3)


async def user_speaks(client: LiveClient) -> None:
    await client.ticks(6, voice(600))


async def agent_speaks(client: LiveClient) -> None:
    ask(client)
    await client.ticks(8)


async def both_speak(client: LiveClient) -> None:
    ask(client)
    await client.ticks(8)
    await client.ticks(4, voice(400))


async def fixture(client: LiveClient) -> None:
    audio = base64.b64encode(voice(2000)).decode()
    client.send("session.output_audio.fixture.play", audio=audio)
    await client.ticks(3)


async def muted(client: LiveClient) -> None:
    client.send("session.input_audio.mute")
    await client.ticks(2, voice(200))


async def appended(client: LiveClient) -> None:
    await client.ticks(1)
    client.send("session.thinking.append", content="x", delegation_id=None)
    await client.rest()


async def decides(client: LiveClient) -> None:
    client.send("decision.create", event_id="d")
    await client.ticks(2)


STATES: list[tuple[Callable[[LiveClient], Awaitable[None]], dict, tuple[list, ...]]] = [
    (silent, {}, ()),
    (user_speaks, {}, ()),
    (agent_speaks, {}, (LONG,)),
    (both_speak, {}, (LONG,)),
    (fixture, {}, ()),
    (muted, {}, ()),
    (appended, {}, ()),
    (agent_speaks, {}, (LOOK,)),  # delegated to the client
    (agent_speaks, {"delegation": DELEGATION}, (LOOK, NEVER)),  # the text model works
    (agent_speaks, {"delegation": DELEGATION}, (LOOK, calls("Rome"))),  # a call waits
    (decides, {"delegation": DECISIONS}, (NEVER,)),
]


@pytest.mark.parametrize(("reach", "settings", "scripts"), STATES)
@pytest.mark.parametrize("way", ["close", "vanish"])
async def test_a_session_closes_in_every_state(reach, settings, scripts, way):
    world = LiveWorld(*scripts, NEVER, NEVER)
    async with world.connect(**settings) as client:
        world.session.on_interrupt = [interrupted_end()]
        await reach(client)
        n_ticks = len(sound_of(client.events))
        if way == "vanish":
            return  # the world checks that all work has ended
        client.send("session.close", event_id="end")
        client.send("session.close", event_id="again")
        client.send("session.thinking.append", content="late", delegation_id=None)
        await client.ticks(3)
        closed = client.of("session.closed")
        assert [event["client_event_id"] for event in closed] == ["end"]
        assert client.events[-1] is closed[0]
        assert closed[0]["reason"] == "close_requested"
        assert closed[0]["usage"]["seconds"] == pytest.approx(n_ticks / 10)
    assert world.wire.closed == (1000, "close_requested")
