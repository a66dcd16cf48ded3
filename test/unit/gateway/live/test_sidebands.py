"""Claims about more sockets of one session."""

import asyncio
import base64
from contextlib import asynccontextmanager

import numpy as np
import pytest

from sglang_live.errors import CapacityError
from sglang_live.gateway.draining import DrainingError
from sglang_live.gateway.live.broadcast import MOST_SIDEBANDS
from sglang_live.gateway.live.sidebands import SessionNotFoundError, Sideband
from test.protocol.live import LiveEvents
from test.unit.gateway.fakes import spoken, voice
from test.unit.gateway.live.world import (
    AUDIO,
    LiveClient,
    LiveWire,
    LiveWorld,
    errors,
    sound_of,
    spoken_ticks,
    text_of,
)

HEARD = "session.input_audio.append"


@asynccontextmanager
async def attached(world: LiveWorld):
    """A sideband of the world's session. It leaves at the end, unless it was closed before."""
    wire = LiveWire()
    wire.seen = LiveEvents(is_sideband=True)
    session = world.sessions.find(world.session.session_id, "")
    serving = asyncio.create_task(Sideband(wire, world.shared, session).run())
    client = LiveClient(wire, world)
    await client.rest()
    yield client
    client.send_raw(None)
    async with asyncio.timeout(30):
        await serving
    assert not wire.faults, wire.faults


async def test_two_sidebands_see_and_steer_the_session():
    world = LiveWorld(spoken("Hello there.", 400))
    async with world.connect() as client, attached(world) as one, attached(world) as two:
        assert [event["type"] for event in one.events] == ["session.started"]
        assert one.events[0]["session"] == client.events[0]["session"]
        one.send("session.commentary.append", content="Greet.", delegation_id=None, event_id="mine")
        await client.ticks(12)
        for each in (one, two):
            await each.rest()
            assert text_of(each.events) == text_of(client.events) == "Hello there."
            assert sound_of(each.events) == sound_of(client.events)[-len(sound_of(each.events)) :]
            times = [(event["start_ms"], event["end_ms"]) for event in each.of(AUDIO)]
            assert all(end == begin + 100 for begin, end in times)
            assert [begin for begin, _ in times[1:]] == [end for _, end in times[:-1]]
        assert spoken_ticks(client.events)
        for each in (client, one, two):
            [done] = each.of("session.commentary.appended")
            assert done["client_event_id"] == "mine"


async def test_errors_go_to_the_socket_whose_event_is_wrong():
    world = LiveWorld()
    async with world.connect() as client, attached(world) as one, attached(world) as two:
        one.send("session.start", session={"model": "fake-omni"}, event_id="a")
        one.send("session.input_audio.append", audio="AAAA", event_id="b")
        one.send("session.thinking.append", content="x", delegation_id="no", event_id="c")
        one.send("nonsense", event_id="d")
        one.send_raw(b"binary")
        one.send_raw("{")
        await one.rest()
        await client.rest()
        await two.rest()
        assert [error.get("client_event_id") for error in errors(one.events)] == [
            *("a", "b", "c", "d", None, None),
        ]
        assert not errors(client.events) and not errors(two.events)
        one.send("session.input_audio.mute")
        await one.rest()
        await two.rest()
        assert len(two.of("session.input_audio.muted")) == 1


@pytest.mark.parametrize(
    ("form", "n_bytes"),
    [
        ({"type": "audio/pcm", "rate": 24_000}, 4800),
        ({"type": "audio/pcm", "rate": 16_000}, 3200),
        ({"type": "audio/pcmu", "rate": 8_000}, 800),
    ],
)
async def test_the_users_audio_is_shown_as_it_was_before_muting(form, n_bytes):
    world = LiveWorld()
    async with world.connect(audio={"format": form}) as client, attached(world) as aside:
        client.send("session.input_audio.mute")
        for _ in range(5):
            client.append((voice(100) * 2)[:n_bytes])
            await client.rest()
        await aside.rest()
        heard = aside.of(HEARD)
        assert len(heard) == 5
        pcm = b"".join(base64.b64decode(event["audio"]) for event in heard)
        assert 0.9 < len(pcm) / 24_000 < 1.01
        assert np.abs(np.frombuffer(pcm, "<i2").astype(int)).max() > 1000
        assert not client.of(HEARD)


async def test_the_session_lasts_without_a_sideband():
    world = LiveWorld()
    async with world.connect() as client:
        async with attached(world):
            await client.ticks(2)
        await client.ticks(2)
        async with attached(world) as again:
            await client.ticks(2)
            await again.rest()
            assert len(sound_of(again.events)) == 2
        assert len(sound_of(client.events)) == 7


async def test_a_sideband_closes_the_session():
    world = LiveWorld()
    async with world.connect() as client, attached(world) as one, attached(world) as two:
        one.send("session.close", event_id="end")
        await one.rest()
        await asyncio.sleep(0.7)
        for each in (client, one, two):
            await each.rest()
            assert each.events[-1]["type"] == "session.closed"
            assert each.events[-1]["client_event_id"] == "end"
            assert each.wire.closed == (1000, "close_requested")


async def test_two_sidebands_hear_that_the_client_has_vanished():
    world = LiveWorld(spoken("Hello there.", 4000))
    async with world.connect() as client:
        async with attached(world) as one, attached(world) as two:
            client.send("session.commentary.append", content="Greet.", delegation_id=None)
            await client.ticks(8)
            client.send_raw(None)
            await asyncio.sleep(0.05)
            for each in (one, two):
                await each.rest()
                assert each.events[-1]["type"] == "session.closed"
                assert each.events[-1]["reason"] == "connection_lost"
                assert each.wire.closed == (1000, "connection_lost")
        with pytest.raises(SessionNotFoundError):
            world.sessions.find(world.session.session_id, "")


async def test_a_restart_is_no_end_of_the_session():
    world = LiveWorld()
    async with world.connect(), attached(world) as aside:
        world.shared.drain.began.set()
        world.shared.drain.over.set()
        await asyncio.sleep(0.9)
        await aside.rest()
        assert not aside.of("session.closed")
        assert aside.wire.closed == (1012, DrainingError.code)


async def test_only_clients_with_the_sessions_key_find_it_and_only_few():
    world = LiveWorld()
    async with world.connect():
        name = world.session.session_id
        for wrong in ((name, "other"), (f"{name}x", "")):
            with pytest.raises(SessionNotFoundError):
                world.sessions.find(*wrong)
        async with attached(world), attached(world), attached(world), attached(world):
            assert MOST_SIDEBANDS == 4
            with pytest.raises(CapacityError):
                world.sessions.find(name, "").broadcast.check_room()
        world.sessions.find(name, "").broadcast.check_room()
