"""Results that wait for helper tasks, merged sources, and tasks that the process depends on."""

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.aio import (
    EXIT_BROKEN,
    RETRY_S,
    CancelledSourceError,
    Channel,
    background,
    close_all,
    end,
    failed_tasks,
    lasting,
    merge,
    result_with,
)
from sglang_live.clock import SimClock

pytestmark = pytest.mark.usefixtures("must_not_hang")


async def after(turns: int, outcome):
    """`outcome` after some turns of the loop; raised if it is an error."""
    for _ in range(turns):
        await asyncio.sleep(0)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def helper(turns: int, outcome) -> asyncio.Task:
    return asyncio.create_task(after(turns, outcome))


# --- result_with ---


async def test_the_result_comes_while_helpers_go_on():
    beside = helper(50, "done")
    assert await result_with(after(3, "result"), beside) == "result"
    assert not beside.done()
    assert await beside == "done"


async def test_helpers_may_end_before_the_result():
    assert await result_with(after(20, "result"), helper(1, None), helper(2, None)) == "result"


async def test_an_error_of_a_helper_cancels_the_main_task_and_is_raised():
    ended = []

    async def unending():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(KeyError, match="helper"):
        await result_with(unending(), helper(3, KeyError("helper")))
    assert ended


async def test_an_error_of_the_main_task_is_raised():
    with pytest.raises(ValueError, match="main"):
        await result_with(after(2, ValueError("main")), helper(50, None))


async def test_a_cancelled_helper_does_not_change_the_result():
    beside = helper(1_000_000, None)
    beside.cancel()
    assert await result_with(after(5, "result"), beside) == "result"


async def test_cancelling_the_wait_ends_the_main_task_before_it_returns():
    ended = []

    async def unending():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    waiting = asyncio.create_task(result_with(unending(), helper(50, None)))
    await after(3, None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended


# --- merge ---


class Source:
    """Yields what is put into it; None ends it, an exception is raised."""

    def __init__(self, *items):
        self.queue: asyncio.Queue = asyncio.Queue()
        self.is_closed = False
        for item in items:
            self.queue.put_nowait(item)

    async def __call__(self):
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


@given(st.lists(st.lists(st.integers(), max_size=6), max_size=4))
def test_all_items_come_and_keep_the_order_of_their_source(contents):
    async def scenario() -> list:
        sources = [Source(*[(n, item) for item in items], None) for n, items in enumerate(contents)]
        merged = [item async for item in merge(*(source() for source in sources))]
        assert all(source.is_closed for source in sources)
        return merged

    merged = asyncio.run(scenario())
    for n, items in enumerate(contents):
        assert [item for owner, item in merged if owner == n] == items
    assert len(merged) == sum(len(items) for items in contents)


async def test_an_item_does_not_wait_for_slower_sources():
    slow, fast = Source(), Source("quick")
    merged = merge(slow(), fast())
    assert await anext(merged) == "quick"
    slow.queue.put_nowait("late")
    assert await anext(merged) == "late"
    await merged.aclose()


async def test_the_first_error_is_raised_after_the_items_before_it():
    failing, waiting = Source("one", "two", KeyError("first")), Source()
    items = []
    with pytest.raises(KeyError, match="first"):
        async for item in merge(failing(), waiting()):
            items.append(item)
            waiting.queue.put_nowait(ValueError("second"))
    assert items == ["one", "two"]
    assert failing.is_closed and waiting.is_closed


async def test_closing_early_closes_every_source():
    sources = [Source("item"), Source(), Source()]
    merged = merge(*(source() for source in sources))
    await anext(merged)
    assert not any(source.is_closed for source in sources)
    await merged.aclose()
    assert all(source.is_closed for source in sources)


async def test_cancelling_the_consumer_closes_every_source():
    sources = [Source(), Source()]

    async def consume() -> None:
        async for _ in merge(*(source() for source in sources)):
            pass

    consuming = asyncio.create_task(consume())
    for _ in range(3):
        await asyncio.sleep(0)
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
    assert all(source.is_closed for source in sources)


async def test_a_consumer_that_takes_one_item_lets_the_sources_give_a_few():
    given: list[int] = []

    async def endless():
        while True:
            given.append(1)
            yield "item"

    merged = merge(endless(), endless())
    await anext(merged)
    await after(50, None)
    assert len(given) <= 5
    for _ in range(20):
        await anext(merged)
    await after(50, None)
    assert len(given) <= 25
    await merged.aclose()


async def test_a_source_that_is_cancelled_from_within_is_an_error_and_no_endless_wait():
    async def cancelled():
        yield "item"
        other = helper(1_000_000, None)
        other.cancel()
        await other

    waiting, items = Source(), []
    with pytest.raises(CancelledSourceError):
        async for item in merge(cancelled(), waiting()):
            items.append(item)
    assert items == ["item"] and waiting.is_closed


async def test_a_coroutine_is_a_source_without_items():
    source, done = Source("one", None), []

    async def work() -> None:
        done.append(await helper(20, "worked"))

    assert [item async for item in merge(source(), work())] == ["one"]
    assert done == ["worked"]


async def test_an_error_of_a_coroutine_is_raised_and_closes_the_others():
    async def failing() -> None:
        raise KeyError("failed")

    waiting = Source()
    with pytest.raises(KeyError, match="failed"):
        async for _ in merge(waiting(), failing()):
            pass
    assert waiting.is_closed


async def test_closing_early_ends_a_coroutine_that_has_not_run():
    async def work() -> None:
        raise AssertionError("it has begun")

    merged = merge(Source("item")(), work())
    working = asyncio.ensure_future(anext(merged))
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await merged.aclose()


async def test_merging_no_sources_yields_nothing():
    assert [item async for item in merge()] == []


# --- channels ---


async def test_a_producer_waits_for_the_consumer_but_the_end_does_not():
    channel: Channel[int] = Channel(2)
    putting = asyncio.create_task(put_all(channel, range(4)))
    await after(5, None)
    assert not putting.done()
    channel.end(KeyError("last"))
    items = []
    with pytest.raises(KeyError, match="last"):
        async for item in channel:
            items.append(item)
    assert items == [0, 1]
    await after(5, None)
    assert putting.done()


async def put_all(channel: Channel[int], items) -> None:
    for item in items:
        await channel.put(item)


async def test_producers_of_a_closed_channel_go_on():
    channel: Channel[int] = Channel(1)
    putting = [asyncio.create_task(put_all(channel, range(9))) for _ in range(3)]
    await after(5, None)
    channel.close()
    await asyncio.gather(*putting)


# --- close_all ---


async def test_everything_is_closed_in_order_whatever_fails():
    closed = []

    async def closes(name: str) -> None:
        await asyncio.sleep(0)
        closed.append(name)

    def fails() -> None:
        raise KeyError("first")

    async def fails_later() -> None:
        raise ValueError("second")

    with pytest.raises(ValueError, match="second") as raised:
        await close_all(
            lambda: closes("a"), fails, lambda: closes("b"), fails_later, lambda: closed.append("c")
        )
    assert closed == ["a", "b", "c"]
    assert isinstance(raised.value.__context__, KeyError)


async def test_a_cancellation_while_closing_leaves_nothing_open():
    closed, begun = [], asyncio.Event()

    async def hangs() -> None:
        begun.set()
        await asyncio.Event().wait()

    closing = asyncio.create_task(close_all(hangs, lambda: closed.append("last")))
    await begun.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed == ["last"]


# --- vital ---

PROCESS = """
import asyncio
from sglang_live.aio import vital

async def work():
    await asyncio.sleep(0)
    {end}

async def main():
    task = vital(work(), "work")
    await asyncio.sleep(0)
    {then}
    await asyncio.sleep(5)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("end", "then", "status"),
    [
        ("raise RuntimeError", "pass", EXIT_BROKEN),
        ("return", "pass", EXIT_BROKEN),
        ("await asyncio.sleep(9)", "task.cancel(); return", 0),
    ],
)
async def test_a_process_exits_when_a_vital_task_ends(end, then, status):
    program = PROCESS.format(end=end, then=then)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), stderr=asyncio.subprocess.PIPE
    )
    _, log = await process.communicate()
    assert process.returncode == status
    assert (b"task_ended name='work'" in log) == (status == EXIT_BROKEN)


# --- in the background ---


async def test_an_error_in_the_background_is_logged_and_counted(caplog):
    task = background(after(1, KeyError("a bug")), "chore")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert "task_failed name='chore'" in caplog.text and "a bug" in caplog.text
    [family] = failed_tasks.collect()
    values = {sample.labels["task"]: sample.value for sample in family.samples}
    assert values["chore"] == failed_tasks.n_by_name["chore"] == 1


async def test_a_task_in_the_background_that_ends_or_is_cancelled_is_not_counted():
    ends, never = background(after(1, "result"), "quiet"), background(after(9, None), "quiet")
    assert await ends == "result"
    never.cancel()
    await asyncio.wait([never])
    assert "quiet" not in failed_tasks.n_by_name


async def test_a_lasting_task_begins_anew_after_an_error():
    clock, n_begun = SimClock(), 0

    async def work():
        nonlocal n_begun
        n_begun += 1
        await after(1, ValueError("a bug") if n_begun < 3 else None)
        await asyncio.Event().wait()

    task = asyncio.create_task(lasting(work, "loop", clock))
    for _ in range(4):
        for _ in range(6):
            await asyncio.sleep(0)
        clock.advance(RETRY_S)
    assert n_begun == 3 and failed_tasks.n_by_name["loop"] == 2
    task.cancel()
    await asyncio.wait([task])


def test_no_cancellation_is_lost_to_wait_for():
    """Before Python 3.12 wait_for returns the result, and no cancellation, where both come at once:
    a loop around it then runs on after its end was asked for."""
    package = Path(__file__).parents[2] / "python" / "sglang_live"
    files = list(package.rglob("*.py"))
    assert files and [p for p in files if "asyncio.wait_for(" in p.read_text("utf-8")] == []


async def test_a_task_ends_that_swallows_a_cancellation():
    n_swallowed = 0

    async def stubborn() -> None:
        nonlocal n_swallowed
        while n_swallowed < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                n_swallowed += 1
        await asyncio.sleep(60)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled() and n_swallowed == 2
