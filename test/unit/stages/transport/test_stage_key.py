"""Who may talk to a stage that listens to other hosts."""

import pytest
import zmq
import zmq.asyncio

from sglang_live.errors import BadInputError
from sglang_live.messages import Ping
from sglang_live.stages.ports import free_port
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import StageClient
from sglang_live.stages.transport.stage_key import check_exposed, read_key, unlock
from test.unit.stages.transport.conftest import PATIENCE_S, Stage


def key_file(folder, name: str, text: str = "s" * 32, mode: int = 0o600) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.fixture
async def guarded(tmp_path):
    async def run(job):
        raise AssertionError("no job was opened")

    stage = Stage(
        f"tcp://127.0.0.1:{free_port()}", run, same_host=False, key_file=key_file(tmp_path, "key")
    )
    yield stage
    await stage.close()


async def test_a_server_with_the_same_key_is_answered(guarded, tmp_path):
    client = StageClient(
        "fake/0", guarded.address, same_host=False, key_file=key_file(tmp_path, "copy", "s" * 32)
    )
    try:
        assert await client.ping(PATIENCE_S) is not None
    finally:
        await client.close()


async def test_a_stage_is_reached_by_ipv6_and_by_the_ipv4_of_all_its_addresses(tmp_path):
    for bound, reached in (("[::1]", "[::1]"), ("*", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")):
        port, key = free_port(), key_file(tmp_path, "key")
        stage = Stage(f"tcp://{bound}:{port}", None, same_host=False, key_file=key)
        client = StageClient("f", f"tcp://{reached}:{port}", same_host=False, key_file=key)
        try:
            assert await client.ping(PATIENCE_S) is not None
        finally:
            await client.close()
            await stage.close()


@pytest.mark.parametrize("text", [None, "t" * 32], ids=["no key", "another key"])
async def test_others_reach_nothing(guarded, tmp_path, text):
    outsider = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    outsider.setsockopt(zmq.LINGER, 0)
    failed = outsider.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_DISCONNECTED
    )
    if text is not None:
        unlock(outsider, key_file(tmp_path, "other", text))
    outsider.connect(guarded.address)
    try:
        await outsider.send_multipart(wire.encode(Ping("")))
        assert await failed.poll(1000 * PATIENCE_S), "the handshake is refused"
        assert await outsider.poll(100) == 0
    finally:
        outsider.disable_monitor()
        outsider.close()
    assert not guarded.task.done()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [("s" * 31, 0o600, "under 32 bytes"), ("s" * 32, 0o644, "chmod 600")],
)
def test_a_weak_key_is_refused(tmp_path, text, mode, message):
    with pytest.raises(BadInputError, match=message):
        read_key(key_file(tmp_path, "key", text, mode))
    with pytest.raises(BadInputError, match="cannot read"):
        read_key(tmp_path / "none")


def test_only_loopback_is_served_without_a_key(tmp_path):
    check_exposed(("tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1"), "", False)
    for address in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://host:1", "tcp://[::]:1"):
        with pytest.raises(BadInputError, match="--stage-key-file"):
            check_exposed((address,), "", False)
        check_exposed((address,), "", True)
        check_exposed((address,), key_file(tmp_path, "key"), False)
