"""Peers that flood or do not read: what waits for them is bounded, counted, and ends their jobs."""

import asyncio
import resource
import threading
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from sglang_live.errors import StageFailedError, StageUnavailableError
from sglang_live.messages import (
    CodecFrames,
    Failed,
    Heard,
    Pcm,
    Ping,
    Ready,
    RetainNative,
    ScriptRequest,
    StreamEvent,
    TalkerInput,
    TalkerRequest,
    VocoderDone,
)
from sglang_live.stages.transport import queues, wire
from sglang_live.stages.transport import server as server_module
from sglang_live.stages.transport.client import StageClient
from sglang_live.stages.transport.queues import WINDOW
from test.unit.stages.transport.conftest import PATIENCE_S

pytestmark = pytest.mark.usefixtures("must_not_hang")

LIMIT = 50
BLOCK = bytes(32_768)


@pytest.fixture(autouse=True)
def short_queues(monkeypatch):
    monkeypatch.setattr(queues, "QUEUE_MESSAGES", LIMIT)
    monkeypatch.setattr(queues, "UNREAD_MESSAGES", LIMIT)


async def forever(job) -> None:
    await asyncio.Event().wait()


def read(job_id: str = "j") -> ScriptRequest:
    return ScriptRequest(job_id, "text", "key", 60.0)


def speak(job_id: str, session_id: str) -> TalkerRequest:
    return TalkerRequest(
        job_id,
        session_id=session_id,
        segment_keys=[],
        segments=[],
        voice="v",
        first_id=1,
        temperature=None,
        seed=1,
        timeout_s=60.0,
    )


class RawPeer:
    """A DEALER that sends and reads what a test wants, as no client of ours would."""

    def __init__(self, address: str):
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.RCVBUF, 4096)
        self._socket.connect(address)

    async def send(self, *messages) -> None:
        for message in messages:
            await self._socket.send_multipart(wire.encode(message))

    async def next(self):
        message, _ = wire.decode(await self._socket.recv_multipart())
        return message

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
async def raw(address) -> AsyncIterator[RawPeer]:
    peer = RawPeer(address)
    yield peer
    peer.close()


async def until_failed(peer: RawPeer) -> Failed:
    while not isinstance(message := await peer.next(), Failed):
        pass
    return message


# --- a peer that does not read ---


async def test_a_peer_that_does_not_read_fails_its_job_and_holds_up_no_other(serve, raw):
    async def run(job):
        if job.job_id == "other":
            return await job.send(VocoderDone("other"))
        while True:  # not streamed, so no window stops it
            await job.send(VocoderDone(BLOCK.decode()))

    stage = serve(run, patience_s=0.2)
    await raw.send(read())
    while not stage.server.counts.full:
        async with stage.peer().open("other") as job:
            await job.begin(read("other"))
            assert [m async for m, _ in job.events(VocoderDone)] == [VocoderDone("other")]
    assert (await until_failed(raw)).code == "queue_full"


async def test_what_is_posted_to_a_peer_that_does_not_read_ends_the_job(serve, raw):
    async def run(job):
        while True:
            job.post(StreamEvent("j", BLOCK.decode(), 0.0))
            await asyncio.sleep(0)

    stage = serve(run)
    await raw.send(read())
    while not stage.server.counts.full:
        await asyncio.sleep(0.01)
    assert (await until_failed(raw)).code == "queue_full"
    assert await stage.peer().ping(PATIENCE_S) is not None


async def test_a_failure_that_its_peer_never_reads_still_ends_the_job(serve, raw, caplog):
    async def run(job):
        while True:
            await job.send(VocoderDone(BLOCK.decode()))

    stage = serve(run, patience_s=0.1)
    await raw.send(read())
    while "failure_not_sent" not in caplog.text:
        await asyncio.sleep(0.01)
    while stage.server.n_jobs:
        await asyncio.sleep(0.01)
    assert stage.server.counts.full == 2, "the message, and that it failed"


async def test_pings_that_are_not_read_are_not_hoarded(serve, raw):
    stage = serve(forever)
    stage.server._ready = lambda: Ready("", stage=BLOCK.decode(), pid=1, startup_s=0.5)
    while not stage.server.counts.full:
        await raw.send(*[Ping("")] * 10)
        await asyncio.sleep(0)
    assert await stage.peer().ping(PATIENCE_S) is not None


# --- a peer that floods ---


@pytest.mark.parametrize(
    ("message", "n_allowed"),
    [(TalkerInput("j", [1]), WINDOW), (Heard("j", 1.0, True), LIMIT)],
    ids=["streamed", "other"],
)
async def test_a_job_with_more_input_than_it_may_have_fails_and_others_go_on(
    serve, raw, message, n_allowed
):
    stage = serve(forever)
    await raw.send(read(), *[message] * n_allowed, Ping(""))
    assert not isinstance(await raw.next(), Failed)
    assert stage.server.n_jobs == 1
    await raw.send(message)
    assert (await until_failed(raw)).code == "flooded"
    assert stage.server.counts.flooded == 1
    async with stage.peer().open("other") as job:
        await job.begin(read("other"))
        for _ in range(WINDOW):
            await job.send(TalkerInput("other", [1]))
        assert await stage.peer().ping(PATIENCE_S) is not None
        assert stage.server.n_jobs == 1


async def test_one_peer_can_have_a_limited_number_of_jobs(serve, raw, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_JOBS", 3)
    stage = serve(forever)
    await raw.send(*(read(f"j{n}") for n in range(5)), Ping(""))
    refused = [await raw.next(), await raw.next()]
    assert [(m.job_id, m.code) for m in refused] == [
        ("j3", "server_overloaded"),
        ("j4", "server_overloaded"),
    ]
    assert (stage.server.n_jobs, stage.server.n_refused) == (3, 2)
    async with stage.peer().open("j0") as job:
        await job.begin(read("j0"))
        assert await stage.peer().ping(PATIENCE_S) is not None
        assert stage.server.n_jobs == 4, "another peer has its own number"


async def test_jobs_run_while_a_peer_floods(serve, address):
    """A socket that always has a message must not keep the event loop from everything else."""
    n_ticks, stop = 0, threading.Event()

    async def run(job):
        nonlocal n_ticks
        for n_ticks in range(200):  # noqa: B007
            await asyncio.sleep(0)
        await job.send(VocoderDone(job.job_id))

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            while not stop.is_set():
                socket.send_multipart(wire.encode(Heard("none", 1.0, True)))

    stage = serve(run)
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        async with stage.peer().open("j") as job:
            await job.begin(read())
            assert [m async for m, _ in job.events(VocoderDone)] == [VocoderDone("j")]
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)


# --- sessions of others ---


async def test_another_servers_open_of_a_session_is_refused_and_the_first_goes_on(serve):
    async def run(job):
        async for message in job.inputs():
            await job.send(CodecFrames(job.job_id, bytes(message.ids)))

    stage = serve(run)
    owner, other = stage.peer(), stage.peer()
    async with owner.open("j") as first, other.open("j") as second:
        await first.begin(speak("j", "s"))
        await owner.ping(PATIENCE_S)
        for opener in (speak("j", "s"), RetainNative("j", "s", 1, 1, 1, 60.0)):
            await second.begin(opener)
            with pytest.raises(StageFailedError, match="another peer") as refused:
                async for _ in second.events(VocoderDone):
                    pass
            assert refused.value.reason == "foreign_session"
        assert (stage.server.n_refused, stage.server.n_jobs) == (2, 1)
        await first.send(TalkerInput("j", [7]))
        assert [m.codes async for m, _ in first.events(CodecFrames)] == [b"\x07"]


async def test_a_server_that_connects_anew_goes_on_with_its_sessions(serve, address):
    stage = serve(forever)
    clients = [StageClient("fake/0", address, same_host=True, run="r" * 32) for _ in range(2)]
    try:
        for client in clients:
            await client.send(speak("j", "s"))
            assert await client.ping(PATIENCE_S) is not None
        assert (stage.server.n_jobs, stage.server.n_refused) == (2, 0)
    finally:
        for client in clients:
            await client.close()


# --- a stage that does not read, or floods ---


class RawStage:
    """A ROUTER that reads only when a test asks it to."""

    def __init__(self, address: str):
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.RCVBUF, 4096)
        self._socket.bind(address)

    async def read(self) -> tuple[bytes, object]:
        peer, *parts = await self._socket.recv_multipart()
        return peer, wire.decode(parts)[0]

    async def send(self, peer: bytes, message) -> None:
        await self._socket.send_multipart([peer, *wire.encode(message)])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
async def deaf(address) -> AsyncIterator[RawStage]:
    stage = RawStage(address)
    yield stage
    stage.close()


@pytest.fixture
async def client(address) -> AsyncIterator[StageClient]:
    client = StageClient("fake/0", address, same_host=True, patience_s=0.1)
    yield client
    await client.close()


def big_note(job_id: str) -> StreamEvent:
    return StreamEvent(job_id, BLOCK.decode(), 0.0)


@pytest.mark.parametrize("way", ["send", "post"])
async def test_a_stage_that_reads_nothing_fails_all_its_jobs(deaf, client, way):
    async with client.open("j") as job, client.open("other") as other:
        await job.begin(read())
        await other.begin(read("other"))
        hearing = asyncio.create_task(anext(other.events(VocoderDone)))
        with pytest.raises(StageUnavailableError, match="does not read"):
            while not client.is_down:
                await job.send(big_note("j")) if way == "send" else job.post(big_note("j"))
                await asyncio.sleep(0)
            await job.send(big_note("j"))
        with pytest.raises(StageUnavailableError, match="does not read"):
            await hearing
    assert client.counts.full == 1
    with pytest.raises(StageUnavailableError):
        client.open("new")


async def test_a_stage_that_sends_more_than_its_window_fails_that_job_alone(deaf, client):
    async with client.open("j") as job, client.open("other") as other:
        await job.begin(read())
        await other.begin(read("other"))
        peer, _ = await deaf.read()
        await deaf.read()
        for _ in range(WINDOW + 10):
            await deaf.send(peer, Pcm("j", b"ab"))
        await deaf.send(peer, VocoderDone("other"))
        assert [m async for m, _ in other.events(VocoderDone)] == [VocoderDone("other")]
        with pytest.raises(StageFailedError, match="more than its window"):
            async for _ in job.events(VocoderDone):
                pass
        assert client.counts.flooded == 1
        cancel = await deaf.read()
        assert type(cancel[1]).__name__ in ("Credit", "Cancel")


async def test_queues_of_both_ends_have_a_limit(client, serve):
    stage = serve(forever)
    for socket in (client._socket, stage.server._socket):
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            assert socket.getsockopt(option) == LIMIT


def test_what_met_a_limit_is_told_by_kind():
    registry, counts = CollectorRegistry(), queues.QueueCounts()
    registry.register(counts)
    counts.full, counts.flooded = 3, 2
    name = "sglang_live_stage_queue_limits_total"
    assert registry.get_sample_value(name, {"what": "full"}) == 3
    assert registry.get_sample_value(name, {"what": "flooded"}) == 2


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_a_peer_that_reads_nothing_costs_no_more_than_its_queue(serve, raw):
    async def run(job):
        while True:
            await job.send(VocoderDone((BLOCK * 8).decode()))

    stage = serve(run, patience_s=0.3)
    before = peak_bytes()
    await raw.send(read())
    while stage.server.counts.full < 2:
        await asyncio.sleep(0.01)
    assert peak_bytes() - before < 8 * LIMIT * 8 * len(BLOCK)
