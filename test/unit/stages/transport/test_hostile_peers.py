"""Bytes that no peer of ours sends, at both ends of a stage's socket: both go on."""

import asyncio
import random

import pytest
import zmq
import zmq.asyncio

from sglang_live.errors import StageFailedError
from sglang_live.messages import (
    CloseSession,
    Failed,
    NextUseHint,
    Ping,
    Ready,
    ScriptRequest,
    TalkerRequest,
    UserSpeaking,
)
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import StageClient
from test.unit.stages.transport.conftest import PATIENCE_S, Stage

N_DRAWN = 3000


def hostile_frames(rng: random.Random) -> list[bytes]:
    """Random bytes, or a message of ours with some bytes changed, and frames that do not belong."""
    valid = [
        *wire.encode(Ping("")),
        *wire.encode(Failed("j", "code", "message")),
        *wire.encode(UserSpeaking("session")),
        *wire.encode(NextUseHint("session", 1.0, None)),
        *wire.encode(CloseSession("session")),
    ]
    frame = bytearray(rng.choice([*valid, rng.randbytes(rng.randrange(40)), b"\x91" * 3000]))
    for _ in range(rng.randrange(4)):
        if frame:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    return [bytes(frame), *(rng.randbytes(9) for _ in range(rng.randrange(3)))]


async def test_a_stage_answers_pings_after_thousands_of_hostile_frames(tmp_path):
    async def run(job):
        raise AssertionError("no job was opened")

    rng, address = random.Random(1), f"ipc://{tmp_path}/stage"
    stage = Stage(address, run)
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    try:
        for frame in (b"\xff\xfe", b"\x81\xa4type\xa1\xff", b"\x81\xa4type\xa4Ping"):
            await socket.send_multipart([frame])
        for _ in range(N_DRAWN):
            await socket.send_multipart(hostile_frames(rng))
        peer = stage.peer()
        assert await peer.ping(PATIENCE_S) is not None, "before all of the flood is read"
        async with asyncio.timeout(PATIENCE_S):
            while stage.server.n_malformed <= N_DRAWN / 2:
                assert await peer.ping(PATIENCE_S) is not None
        assert not stage.task.done()
    finally:
        socket.close()
        await stage.close()


async def test_a_client_fails_its_jobs_and_reads_on(tmp_path):
    rng, address = random.Random(2), f"ipc://{tmp_path}/stage"
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    client = StageClient("fake/0", address, same_host=False)
    try:
        async with client.open("job") as job:
            await job.begin(ScriptRequest("job", "text", "key", 1.0))
            peer, *_ = await socket.recv_multipart()
            await socket.send_multipart([peer, b"\x81\xa4type\xa1\xff"])
            with pytest.raises(StageFailedError, match="unreadable"):
                async for _ in job.events(Failed):
                    pass
        for _ in range(N_DRAWN):
            await socket.send_multipart([peer, *hostile_frames(rng)])
        await socket.send_multipart([peer, b"\xc1"])
        [answer] = wire.encode(Ready("", stage="fake", pid=1, startup_s=0.5))
        ping = asyncio.create_task(client.ping(PATIENCE_S))
        while (await socket.recv_multipart())[1:] != wire.encode(Ping("")):
            pass
        await socket.send_multipart([peer, answer])
        assert await ping is not None
    finally:
        await client.close()
        socket.close()


async def test_a_session_is_closed_by_the_peer_that_opened_it(tmp_path):
    async def run(job):
        await job.send(Failed(job.job_id, "done", "done"))

    stage = Stage(f"ipc://{tmp_path}/stage", run)
    try:
        owner, other = stage.peer(), stage.peer()
        speak = TalkerRequest(
            "job",
            session_id="s",
            segment_keys=[],
            segments=[],
            voice="v",
            first_id=1,
            temperature=1.0,
            seed=1,
            timeout_s=9.0,
        )
        async with owner.open("job") as job:
            await job.begin(speak)
            with pytest.raises(StageFailedError):
                async for _ in job.events(Failed):
                    pass
        for message in (
            CloseSession("s"),
            UserSpeaking("s"),
            NextUseHint("s", 1.0, None),
        ):
            await other.send(message)
        await other.ping(PATIENCE_S)
        assert stage.server.n_refused == 3
        assert not stage.closed_sessions and not stage.hints
        await owner.send(UserSpeaking("s"))
        await owner.send(CloseSession("s"))
        await stage.until(lambda: stage.closed_sessions == ["s"])
        assert stage.hints == [UserSpeaking("s")]
    finally:
        await stage.close()


async def test_a_job_that_is_opened_twice_ends_the_earlier_one(tmp_path):
    running: list[asyncio.Task] = []

    async def run(job):
        running.append(asyncio.current_task())
        await stage.tell()
        await asyncio.Event().wait()

    stage = Stage(f"ipc://{tmp_path}/stage", run)
    try:
        peer = stage.peer()
        for n in (1, 2):
            await peer.send(ScriptRequest("job", "text", "key", 60.0))
            await stage.until(lambda n=n: len(running) == n)
        await stage.until(lambda: stage.cancelled == ["job"])
        assert running[0].cancelling() and not running[1].done() and stage.server.n_jobs == 1
    finally:
        await stage.close()


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 0.0])
async def test_a_job_must_say_a_time_that_ends(tmp_path, timeout_s):
    async def run(job):
        raise AssertionError("no job was opened")

    stage = Stage(f"ipc://{tmp_path}/stage", run)
    try:
        peer = stage.peer()
        await peer.send(ScriptRequest("job", "text", "key", timeout_s))
        assert await peer.ping(PATIENCE_S) is not None
        assert stage.server.n_malformed == 1 and stage.server.n_jobs == 0
    finally:
        await stage.close()
