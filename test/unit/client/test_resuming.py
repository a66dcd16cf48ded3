"""The client goes on after its connection was lost, against the gateway itself."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import pytest
import websockets
from websockets.exceptions import ConnectionClosed

from sglang_live.client.connection import SessionOptions
from sglang_live.client.conversation import Conversation
from sglang_live.client.resuming import ResumingSocket
from sglang_live.clock import MonotonicClock
from test.unit.client.cutter import Cutter
from test.unit.gateway.fakes import FakeOrchestrator, app_of, spoken, voice
from test.unit.gateway.live_server import listening

pytestmark = pytest.mark.usefixtures("must_not_hang")

_WORDS = "One two three."
_AUDIO_MS = 1600


@asynccontextmanager
async def network(orchestrator: FakeOrchestrator, **config):
    async with listening(app_of(orchestrator, **config)) as address:
        cutter = Cutter(address)
        async with cutter.listening() as at:
            yield cutter, SessionOptions(url=f"ws://{at}/v1/realtime", turn_timeout_s=20.0)


async def cut_later(cutter: Cutter, *after_s: float) -> None:
    for delay_s in after_s:
        await asyncio.sleep(delay_s)
        cutter.cut()


async def taken(seed: int) -> None:
    """A spoken and a written turn, with three cuts at drawn times."""
    orchestrator = FakeOrchestrator([spoken(_WORDS, _AUDIO_MS), spoken(_WORDS, _AUDIO_MS)])
    draw, events = random.Random(seed), []
    async with network(orchestrator) as (cutter, options):
        conversation = Conversation(options, MonotonicClock(), events.append)
        async with conversation:
            cuts = [draw.uniform(0.3, 1.5) for _ in range(3)]
            cutting = asyncio.create_task(cut_later(cutter, *cuts))
            said = voice(500)
            turns = [await conversation.speak(said)]
            await conversation.wait_until_played()
            turns.append(await conversation.ask("And now?"))
            await conversation.wait_until_played()
            await cutting
            await conversation.ask("Still there?")
        assert cutter.n_lines == 4
    for turn in turns:
        assert turn.ok, turn.error
        assert turn.transcript == _WORDS
        assert turn.audio_s == pytest.approx(_AUDIO_MS / 1000)
    [session] = orchestrator.sessions
    ids = [event["event_id"] for event in events]
    assert len(ids) == len({*ids})
    heard = [part for turn in session.turns for item in turn.history for part in item.parts]
    assert max(part.duration_s for part in heard if hasattr(part, "duration_s")) < 1.5
    assert len(session.turns) == 3


async def test_conversations_that_are_cut_at_drawn_times_are_whole():
    await asyncio.gather(*map(taken, range(8)))


async def test_a_session_that_is_gone_ends_the_turn():
    orchestrator = FakeOrchestrator([spoken(_WORDS, 8000)])
    async with network(orchestrator, resume_s=0.05) as (cutter, options):
        async with Conversation(options, MonotonicClock()) as conversation:
            assert (await conversation.ask("Hello?")).ok
            cutter.is_down = True
            cutter.cut()
            await orchestrator.session.closed.wait()
            cutter.is_down = False
            turn = await conversation.ask("Still there?")
        assert turn.status in ("closed", "error")
        assert len(orchestrator.sessions) == 1


async def test_a_server_without_room_at_the_moment_is_asked_again():
    """Another server, that is: here one whose first answers are those of a full one."""
    n_asked = 0

    async def serve(socket) -> None:
        nonlocal n_asked
        n_asked += 1
        resumable = {"token": "t", "grace_ms": 20_000}
        session = {"type": "session.created", "session": {"resumable": resumable}}
        if n_asked == 1:
            await socket.send(json.dumps(session))
            await asyncio.sleep(0.1)
            socket.transport.abort()
        elif n_asked <= 3:
            await socket.send(json.dumps({"type": "error", "error": {"code": "server_overloaded"}}))
            await socket.close(1013)
        else:
            missed = {"type": "error", "error": {"code": "of an event"}}
            for event in (missed, session | {"type": "session.resumed", "events_received": 0}):
                await socket.send(json.dumps(event))
            await socket.recv()

    async with websockets.serve(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        socket = ResumingSocket(SessionOptions(url=f"ws://{host}:{port}"), lambda: 0.0)
        await socket.open()
        came = [json.loads(await socket.recv()) for _ in range(3)]
        await socket.close()
    assert [event["type"] for event in came] == ["session.created", "error", "session.resumed"]
    assert came[1]["error"]["code"] == "of an event" and n_asked == 4


async def test_a_server_that_refuses_for_good_is_not_asked_again():
    n_asked = 0

    async def serve(socket) -> None:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 1:
            resumable = {"token": "t", "grace_ms": 20_000}
            session = {"type": "session.created", "session": {"resumable": resumable}}
            await socket.send(json.dumps(session))
            await asyncio.sleep(0.1)
            socket.transport.abort()
        else:
            error = {"code": "invalid_resume_token"}
            await socket.send(json.dumps({"type": "error", "error": error}))
            await socket.close(1008)

    async with websockets.serve(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        socket = ResumingSocket(SessionOptions(url=f"ws://{host}:{port}"), lambda: 0.0)
        await socket.open()
        came = [json.loads(await socket.recv()) for _ in range(2)]
        with pytest.raises(ConnectionClosed):
            await socket.recv()
    assert came[1]["error"]["code"] == "invalid_resume_token" and n_asked == 2
