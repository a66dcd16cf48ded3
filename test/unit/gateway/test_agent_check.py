"""What HAProxy learns of a server: one line for each connection, on a port of its own."""

import asyncio
import socket
import struct
from functools import partial

import pytest

from sglang_live.errors import BadInputError
from sglang_live.gateway.agent_check import AgentCheck
from sglang_live.gateway.draining import Drain
from sglang_live.gateway.http.health import SERVING, Health
from sglang_live.gateway.listen_socket import ListenConfig, ListenSocket

from .fakes import FakeOrchestrator, app_of
from .live_server import listening


async def asked(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = (await reader.read()).decode()
    writer.close()
    return text


@pytest.mark.parametrize(("more", "weight"), [(4, 100), (3, 75), (1, 25), (0, 1)])
async def test_the_free_share_of_the_limit_is_the_weight(more, weight):
    """Also a full server keeps a weight: its refusal says when to come back."""
    drain, stages = Drain(), {"thinker/0": SERVING}
    bound = ListenSocket("127.0.0.1", 0)
    port = bound.socket.getsockname()[1]
    check = partial(AgentCheck, bound, lambda: Health(stages))
    app = app_of(FakeOrchestrator(n_more=more), drain=drain, additions=[check])
    async with listening(app):
        assert await asked(port) == f"ready up {weight}%\n"
        stages["thinker/0"] = "restarting"
        assert (await asked(port)).startswith("down #")
        drain.began.set()
        assert await asked(port) == "drain\n"
    with pytest.raises(ConnectionRefusedError):
        await asked(port)


async def test_a_check_that_breaks_off_does_not_end_the_next():
    bound = ListenSocket("127.0.0.1", 0)
    port = bound.socket.getsockname()[1]
    check = partial(AgentCheck, bound, lambda: Health({"thinker/0": SERVING}))
    async with listening(app_of(FakeOrchestrator(n_more=4), additions=[check])):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as one:
                # It is closed by a reset.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert await asked(port) == "ready up 100%\n"


def test_a_port_out_of_range_is_refused():
    with pytest.raises(BadInputError, match="70000"):
        ListenConfig(agent_port=70_000).check()
