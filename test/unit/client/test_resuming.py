"""The client goes on after its connection was lost, against the gateway itself."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from sglang_live.client.connection import SessionOptions
from sglang_live.client.conversation import Conversation
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
