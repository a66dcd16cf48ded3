"""What was heard is passed on in few messages, also after one that failed."""

import asyncio

import pytest

from sglang_live import messages
from sglang_live.aio import failed_tasks
from sglang_live.clock import SimClock
from sglang_live.stages.engine_link import FLUSH_EVERY_S, HeardFeed


class World:
    def __init__(self):
        self.clock, self.sent, self.error = SimClock(), [], None
        self.feed = HeardFeed(self._send, self.clock)

    def _send(self, news) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.sent.append(dict(zip(news.rids, news.columns()["heard_s"].tolist(), strict=True)))

    def put(self, rid: str, heard_s: float) -> None:
        self.feed.put(rid, messages.Heard("job", heard_s, True))

    async def passes(self, seconds: float = FLUSH_EVERY_S) -> None:
        await settle()
        self.clock.advance(seconds)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def world() -> World:
    return World()


async def test_the_newest_progress_of_all_requests_is_one_message(world):
    for heard_s in (1.0, 2.0):
        world.put("a", heard_s)
        world.put("b", 3.0)
    await world.passes()
    assert world.sent == [{"a": 2.0, "b": 3.0}]
    world.put("a", 4.0)
    await world.passes()
    assert world.sent[1:] == [{"a": 4.0}]


async def test_after_a_message_that_failed_the_next_progress_is_sent(world, caplog):
    n_before = failed_tasks.n_by_name["heard feed"]
    world.error = ValueError("a bug")
    world.put("a", 1.0)
    await world.passes()
    assert world.sent == []
    assert failed_tasks.n_by_name["heard feed"] == n_before + 1
    assert "task_failed name='heard feed'" in caplog.text
    world.put("a", 2.0)
    world.put("b", 1.0)
    await world.passes()
    assert world.sent == [{"a": 2.0, "b": 1.0}]


async def test_a_request_that_is_over_is_not_sent(world):
    world.put("a", 1.0)
    world.put("b", 1.0)
    world.feed.forget("a")
    await world.passes()
    assert world.sent == [{"b": 1.0}]
