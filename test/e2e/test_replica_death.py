"""kill -9 of one of two replicas: its sessions answer their next turn on the other one.

A server of its own. The other replica serves while the dead one is being started again.
"""

import asyncio
import contextlib

import httpx
import psutil
import pytest

from test.e2e.conftest import Server, running_server, wait_until
from test.e2e.socket_client import connected, is_whole

pytestmark = [pytest.mark.e2e]

LEFT = "sglang_live_stage_sessions_left_total"
START_S = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = [flag for stage in ("thinker", "vocoder") for flag in (f"--{stage}.replicas", "2")]
    path = tmp_path_factory.mktemp("replicas")
    with running_server("demo-random", path, *flags, start_timeout_s=START_S) as running:
        yield running


def process_of(server: Server, replica: str) -> psutil.Process:
    name = f"sglang_live::{replica}"
    children = psutil.Process(server.process.pid).children(recursive=True)
    [found] = [child for child in children if " ".join(child.cmdline()).startswith(name)]
    return found


def metrics(server: Server) -> str:
    return httpx.get(f"{server.http}/metrics", timeout=30).text


def until_both_are_up(server: Server, stage: str) -> None:
    def are_up() -> bool:
        lines = [f'sglang_live_stage_up{{replica="{n}",stage="{stage}"}} 1.0' for n in (0, 1)]
        return all(line in metrics(server) for line in lines)

    wait_until(are_up, START_S, f"both replicas of the {stage} are up")


@pytest.mark.parametrize("stage", ["vocoder", "thinker"])
async def test_sessions_of_a_killed_replica_answer_their_next_turn_on_the_other(server, stage):
    await asyncio.to_thread(until_both_are_up, server, stage)
    async with connected(server.ws) as one, connected(server.ws) as other:
        for session in (one, other):
            first = await session.ask("remember this")
            assert is_whole(first), first
        # The first of two equal replicas got the first session.
        killed = process_of(server, f"{stage}/0")
        killed.kill()

        def is_noticed() -> bool:
            """It is down, or up again, which may be half a second later."""
            if f'sglang_live_stage_up{{replica="0",stage="{stage}"}} 0.0' in metrics(server):
                return True
            with contextlib.suppress(ValueError):
                return process_of(server, f"{stage}/0").pid != killed.pid
            return False

        await asyncio.to_thread(wait_until, is_noticed, 20, "the death is noticed")
        for session in (one, other):
            again = await session.ask("and now")
            assert is_whole(again), again
            n_tokens = [done["response"]["usage"]["input_tokens"] for done in (first, again)]
            assert n_tokens[1] > n_tokens[0], "the whole conversation was heard"
        series = metrics(server)
        assert f'{LEFT}{{replica="0",stage="{stage}"}} 1.0' in series
        assert f'{LEFT}{{replica="1",stage="{stage}"}} 0.0' in series
    async with connected(server.ws) as new:
        assert is_whole(await new.ask("hello"))
