"""A stage server and its peers in one event loop, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sglang_live.messages import Ready, SessionHint
from sglang_live.stages.ports import free_port
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import StageClient
from sglang_live.stages.transport.server import ServedJob, StageServer

PATIENCE_S = 30.0  # how long a test waits for what must happen


class Stage:
    """Serves `run` at `address`; the peers that a test makes are closed with it."""

    def __init__(self, address: str, run: Callable[[ServedJob], Awaitable[None]], **settings):
        self.address = address
        self.closed_sessions: list[str] = []
        self.hints: list[SessionHint] = []
        self.cancelled: list[str] = []
        self.changed = asyncio.Condition()
        self._run, self._clients = run, []
        self.server = StageServer(
            address,
            run=self._watched,
            close_session=self._close_session,
            ready=lambda: Ready("", stage="fake", pid=1, startup_s=0.5, load={"jobs": 2.0}),
            on_hint=self.hints.append,
            **{"same_host": True} | settings,
        )
        self.task = asyncio.create_task(self.server.serve())

    def peer(self) -> StageClient:
        self._clients.append(StageClient("fake/0", self.address, same_host=True))
        return self._clients[-1]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that `cancelled`, `closed_sessions` or `tell` make true."""
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(holds)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _watched(self, job: ServedJob) -> None:
        try:
            await self._run(job)
        except asyncio.CancelledError:
            self.cancelled.append(job.job_id)
            raise
        finally:
            await self.tell()

    async def _close_session(self, session_id: str) -> None:
        self.closed_sessions.append(session_id)
        await self.tell()

    async def close(self) -> None:
        for peer in self._clients:
            await peer.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture(params=["ipc", "tcp"])
def address(request, run_dir) -> str:
    return f"ipc://{run_dir}/stage" if request.param == "ipc" else f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
async def serve(address) -> AsyncIterator[Callable[..., Stage]]:
    """Starts a stage whose jobs are served by the coroutine function given."""
    stages: list[Stage] = []

    def start(run: Callable[[ServedJob], Awaitable[None]], **settings) -> Stage:
        stages.append(Stage(address, run, **settings))
        return stages[-1]

    yield start
    for stage in stages:
        await stage.close()


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """Shared memory of our own, used for every tensor."""
    monkeypatch.setattr(wire, "SHM_DIR", tmp_path)
    monkeypatch.setattr(wire, "SHM_MIN_BYTES", 0)
    return tmp_path
