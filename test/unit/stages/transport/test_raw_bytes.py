"""A stage's TCP port and what is not ZMTP, or not yet: before any key was proved."""

import asyncio
import struct

import psutil
import pytest

from sglang_live.stages.ports import free_port
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import StageClient
from test.unit.stages.transport.conftest import PATIENCE_S, Stage

pytestmark = pytest.mark.usefixtures("must_not_hang")

LONG, COMMAND = 2, 4


def greeting(mechanism: bytes) -> bytes:
    """ZMTP 3.1, RFC 37: signature, version, mechanism, as-server, filler."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def announced(n_bytes: int, flags: int) -> bytes:
    return struct.pack(">BQ", LONG | flags, n_bytes)


@pytest.fixture(params=["key", "no key"])
async def stage(request, tmp_path):
    async def run(job):
        raise AssertionError("no job was opened")

    key = tmp_path / "key"
    key.write_text("s" * 32)
    key.chmod(0o600)
    file = str(key) if request.param == "key" else ""
    serving = Stage(f"tcp://127.0.0.1:{free_port()}", run, same_host=False, key_file=file)
    serving.key_file, serving.mechanism = file, b"CURVE" if file else b"NULL"
    yield serving
    await serving.close()


async def connect(stage: Stage):
    host, port = stage.address.removeprefix("tcp://").split(":")
    return await asyncio.open_connection(host, int(port))


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """The stage hangs up; what it said before does not count."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(4096):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def answers(stage: Stage) -> bool:
    client = StageClient("fake/0", stage.address, same_host=False, key_file=stage.key_file)
    try:
        return await client.ping(PATIENCE_S) is not None
    finally:
        await client.close()


@pytest.mark.parametrize("n_bytes", [wire.MAX_FRAME_BYTES + 1, 1 << 40, (1 << 63) - 1, 1 << 63])
@pytest.mark.parametrize("flags", [0, COMMAND], ids=["message", "command"])
async def test_a_huge_frame_is_refused_when_it_is_announced(stage, n_bytes, flags):
    reader, writer = await connect(stage)
    writer.write(greeting(stage.mechanism) + announced(n_bytes, flags))
    assert await is_closed(reader)
    writer.close()
    assert await answers(stage)


@pytest.mark.parametrize("signature", [b"\x01\x00", b"\xff" + bytes(8) + b"\x7f\x01\x05"])
async def test_a_huge_frame_of_an_older_protocol_is_refused_as_well(stage, signature):
    """ZMTP 1.0 has no greeting; 2.0 ends it with the socket's type."""
    reader, writer = await connect(stage)
    if len(signature) == 2:
        writer.write(signature + b"\xff" + struct.pack(">Q", 1 << 40) + bytes(16))
    else:
        writer.write(signature + b"\x00\x00" + announced(1 << 40, 0))
    assert await is_closed(reader)
    writer.close()
    assert await answers(stage)


async def test_announced_frames_take_no_memory(stage):
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    connections = [await connect(stage) for _ in range(20)]
    for _, writer in connections:
        writer.write(greeting(stage.mechanism) + announced(wire.MAX_FRAME_BYTES, COMMAND))
        await writer.drain()
    assert await answers(stage)
    assert process.memory_info().rss - before < 64 << 20
    for _, writer in connections:
        writer.close()


@pytest.mark.parametrize(
    "bytes_sent",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + bytes(64), b"\xff" * 64, b"\x00" * 64],
    ids=["http", "tls", "ones", "zeros"],
)
async def test_what_is_no_zmtp_changes_nothing(stage, bytes_sent):
    _, writer = await connect(stage)
    writer.write(bytes_sent)
    await writer.drain()
    assert await answers(stage)
    assert stage.server.n_jobs == 0 and not stage.task.done()
    writer.close()


async def test_a_connection_that_never_proves_its_key_is_closed(stage, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_MS", 100)
    other = Stage(
        f"tcp://127.0.0.1:{free_port()}",
        stage._run,
        same_host=False,
        key_file=stage.key_file,
    )
    reader, writer = await connect(other)
    try:
        writer.write(greeting(stage.mechanism))
        assert await is_closed(reader)
    finally:
        writer.close()
        await other.close()
