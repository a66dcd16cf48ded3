"""Waiting for one task while others work beside it."""

import asyncio
import sys

import pytest

from sglang_live.aio import EXIT_BROKEN, result_with

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


async def test_the_result_comes_while_helpers_go_on():
    beside = helper(50, "done")
    assert await result_with(after(3, "result"), beside) == "result"
    assert not beside.done()
    assert await beside == "done"


async def test_helpers_may_end_first():
    assert await result_with(after(20, "result"), helper(1, None), helper(2, None)) == "result"


async def test_an_error_of_a_helper_ends_the_main_task_and_is_raised():
    ended = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(KeyError, match="helper"):
        await result_with(forever(), helper(3, KeyError("helper")))
    assert ended


async def test_an_error_of_the_main_task_is_its_own():
    with pytest.raises(ValueError, match="main"):
        await result_with(after(2, ValueError("main")), helper(50, None))


async def test_a_cancelled_helper_does_not_disturb_the_result():
    beside = helper(1_000_000, None)
    beside.cancel()
    assert await result_with(after(5, "result"), beside) == "result"


async def test_cancelling_the_wait_ends_the_main_task_before_it_returns():
    ended = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    waiting = asyncio.create_task(result_with(forever(), helper(50, None)))
    await after(3, None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended


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
async def test_a_process_ends_with_the_work_that_others_rely_on(end, then, status):
    program = PROCESS.format(end=end, then=then)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), stderr=asyncio.subprocess.PIPE
    )
    _, told = await process.communicate()
    assert process.returncode == status
    assert (b"task_ended name='work'" in told) == (status == EXIT_BROKEN)
