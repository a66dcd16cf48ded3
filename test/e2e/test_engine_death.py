"""A request that ends the engine runs twice; other sessions continue. A stuck engine restarts.

These tests have a separate server: a test hook makes its thinker die at one prompt.
"""

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from transformers import AutoTokenizer
from websockets.exceptions import ConnectionClosed

from lab import fault_injection
from lab.attachment import importable
from test.e2e.conftest import running_server, wait_until
from test.e2e.socket_client import connected, is_whole

pytestmark = [pytest.mark.e2e]

RESTART_S = 90
DEADLY = "kill the engine now"
REFUSED = "refused_after_engine_death"


@pytest.fixture(scope="module")
def server(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("deadly")
    from sglang_live.models.demo.build import ensure_built

    tokenizer = AutoTokenizer.from_pretrained(ensure_built())
    ids = tokenizer(DEADLY, add_special_tokens=False).input_ids
    temporary = tmp_path_factory.mktemp("t")  # short, for sockets
    fault = fault_injection.environment("die", ids)
    environment = fault | importable() | {"TMPDIR": str(temporary)}
    flags = ("--stuck-after-s", "4")
    with running_server("demo-random", path, *flags, environment=environment) as running:
        running.temporary = temporary
        yield running


def complete(server, text: str, **more) -> httpx.Response:
    message = {"role": "user", "content": text}
    body = {"model": "demo", "messages": [message], "max_tokens": 4, **more}
    return httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60)


def until_back(server, n_starts: float) -> None:
    def is_back() -> bool:
        return server.stage_starts()["thinker"] == n_starts and server.is_healthy()

    wait_until(is_back, RESTART_S, "thinker restarted")


async def test_a_deadly_request_kills_twice_and_other_sessions_continue(server):
    async with connected(server.ws) as beside, connected(server.ws) as deadly:
        assert is_whole(await beside.ask("hello"))
        starts = server.stage_starts()["thinker"]
        for n in (1, 2):
            killed = await asyncio.to_thread(complete, server, DEADLY)
            assert killed.status_code == 503
            assert killed.json()["error"]["code"] == "stage_unavailable"
            await asyncio.to_thread(until_back, server, starts + n)
        again = await asyncio.to_thread(complete, server, DEADLY, stream=True)
        assert (again.status_code, again.json()["error"]["code"]) == (400, REFUSED)
        assert is_whole(await beside.ask("and now"))

        # The same text in another turn is another request; it also kills twice, and then no more.
        codes = []
        for n in (3, 4, 4):
            if not codes:
                done = await deadly.ask(DEADLY)
            else:
                await deadly.send("response.create")
                done = await deadly.until("response.done")
            codes.append(done["response"]["status_details"]["error"]["code"])
            await asyncio.to_thread(until_back, server, starts + n)
        assert codes == ["stage_unavailable", "stage_unavailable", REFUSED]
        assert is_whole(await beside.ask("and then"))
        assert server.stage_starts()["thinker"] == starts + 4


async def test_a_scheduler_stuck_in_its_work_is_restarted_and_an_idle_one_is_not(server):
    starts = server.stage_starts()["thinker"]
    scheduler = next(
        child
        for child in server.stage_process("thinker").children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    )
    scheduler.suspend()
    try:
        await asyncio.sleep(6)  # longer than the limit, without work
        assert server.stage_starts()["thinker"] == starts
        stuck = await asyncio.to_thread(complete, server, "are you there")
        assert stuck.status_code == 503
        await asyncio.to_thread(until_back, server, starts + 1)
    finally:
        if scheduler.is_running():
            os.kill(scheduler.pid, signal.SIGCONT)
    assert not psutil.pid_exists(scheduler.pid)
    assert (await asyncio.to_thread(complete, server, "good morning")).status_code == 200


async def test_a_draining_server_completes_its_running_responses(server):
    """The last test of this server, which ends here."""
    async with connected(server.ws) as speaking, connected(server.ws) as silent:
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "tell me a story"}],
        }
        await speaking.send("conversation.item.create", item=item)
        await speaking.send("response.create", response={"max_output_tokens": 12})
        await speaking.until("response.output_audio.delta")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            await silent.until("error")
        assert closed.value.rcvd.code == 1012
        health = await asyncio.to_thread(httpx.get, f"{server.http}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert (await asyncio.to_thread(complete, server, "hello")).status_code == 503
        done = await speaking.until("response.done")
        assert is_whole(done), done
        with pytest.raises(ConnectionClosed) as closed:
            await speaking.until("error")
        assert closed.value.rcvd.code == 1012
    assert await asyncio.to_thread(server.process.wait, 20) == 0
    assert list(server.temporary.iterdir()) == []
    pids = set(re.findall(r"spawned \S+ pid=(\d+)", (server.log_dir / "server.log").read_text()))
    assert len(pids) > 5, "three stages, and what was started anew"
    left = [file.name for file in Path("/dev/shm").iterdir() if pids & set(file.name.split("-"))]
    assert left == []
