"""kill -9 of a stage: running turns fail clearly, the stage restarts, the next turn works."""

import asyncio

import pytest

from test.e2e.conftest import wait_until
from test.e2e.socket_client import connected, is_whole

pytestmark = [pytest.mark.e2e]

RESTART_S = 90


# A thinker that dies in a turn: test_engine_death.py.
@pytest.mark.parametrize(
    "stage", ["vocoder", "talker", pytest.param("thinker", marks=pytest.mark.nightly)]
)
async def test_a_killed_stage_fails_its_turns_and_restarts(server, stage):
    async with connected(server.ws) as socket:
        first = await socket.ask("remember this")
        assert is_whole(first), first
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "tell me a story"}],
        }
        await socket.send("conversation.item.create", item=item)
        await socket.send("response.create")
        await socket.until("response.created")
        starts = server.stage_starts()[stage]
        server.stage_process(stage).kill()
        failed = await socket.until("response.done", timeout_s=20)
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["status_details"]["error"]["code"] == "stage_unavailable"

        def is_back() -> bool:
            return server.stage_starts()[stage] == starts + 1 and server.is_healthy()

        # In a thread: a client must answer pings during the wait, or it is disconnected.
        await asyncio.to_thread(wait_until, is_back, RESTART_S, f"{stage} restarted")
        # The same session continues; its history is prefilled again.
        again = await socket.ask("and now")
        assert is_whole(again), again
        assert (
            again["response"]["usage"]["input_tokens"] > first["response"]["usage"]["input_tokens"]
        )
