"""Sessions of one key share the KV of their instructions; those of two keys do not."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
import websockets

from test.e2e.conftest import running_server
from test.e2e.socket_client import NO_VAD, Socket

pytestmark = [pytest.mark.e2e]

INSTRUCTIONS = "Answer the caller of the bakery in one short sentence. " * 20
MANY = 300  # tokens; the instructions are 405 long


async def first_turn(socket: Socket) -> int:
    """Run a first turn. Returns cached_tokens of its usage."""
    await socket.until("session.created")
    await socket.session(**NO_VAD, instructions=INSTRUCTIONS)
    done = await socket.ask("Hello.", max_output_tokens=4, output_modalities=["text"])
    return done["response"]["usage"]["input_token_details"]["cached_tokens"]


def kv_tokens_used(server) -> float:
    headers = {"Authorization": "Bearer alice"}
    text = httpx.get(f"{server.http}/metrics", headers=headers, timeout=5).text
    label = 'sglang_live_stage_load{replica="0",stage="thinker",what="kv_tokens_used"}'
    [line] = [line for line in text.splitlines() if line.startswith(label)]
    return float(line.split()[-1])


async def test_instructions_are_shared_only_within_a_key(tmp_path):
    flags = ("--api-key", "alice", "--api-key", "bob")
    with running_server("demo-random", tmp_path, *flags) as server:
        used, told = [], []
        async with AsyncExitStack() as stack:
            for key in ("alice", "alice", "bob"):
                headers = {"Authorization": f"Bearer {key}"}
                connection = websockets.connect(server.ws, additional_headers=headers, proxy=None)
                told.append(await first_turn(Socket(await stack.enter_async_context(connection))))
                await asyncio.sleep(2)  # the stages' gauges lag by a second
                used.append(kv_tokens_used(server))
        assert used[1] - used[0] < MANY < used[2] - used[1], used
        assert told[2] == told[0], "the count does not depend on another key's prompts"
