"""Stages start as forks of one process, and end with it."""

import asyncio
import os

import psutil
import pytest

from sglang_live.stages.zygote import Zygote, is_useful

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not is_useful(), reason="with an accelerator stages are started apart"),
]


def zygotes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "sglang_live::zygote" in " ".join(child.cmdline())]


async def test_processes_started_at_once_are_forked_from_one_process(tmp_path):
    before, zygote = len(zygotes()), Zygote()
    try:
        with (tmp_path / "log").open("wb") as log:
            # Without a spec a stage exits with an error.
            nothing = {"PATH": os.environ["PATH"]}
            forked = await asyncio.gather(*(zygote.fork(nothing, log.fileno()) for _ in range(3)))
        assert len({process.pid for process in forked}) == 3
        assert all(code > 0 for code in await asyncio.gather(*(p.wait() for p in forked)))
        assert len(zygotes()) == before + 1
        assert (tmp_path / "log").read_text().count("KeyError") == 3
        forked[0].kill()  # it has ended: no other process gets the signal
    finally:
        await zygote.close()
    assert len(zygotes()) == before
