"""The orchestrator's end of one stage replica: jobs multiplexed over one DEALER socket."""

import asyncio
import logging

import zmq
import zmq.asyncio

from sglang_live.errors import LiveError, StageFailedError, StageUnavailableError
from sglang_live.messages import AnyMessage, Ping, Ready
from sglang_live.stages.transport import queues, stage_key, wire
from sglang_live.stages.transport.job import Job
from sglang_live.stages.transport.peers import connection_name, new_run

log = logging.getLogger(__name__)


class StageClient:
    """
    Args:
        name: of the replica, e.g. "talker/0".
        address: ZMQ endpoint that the stage binds.
        same_host: whether large tensors may go through shared memory.
        key_file: secret shared with a stage on another host. "": none.
        run: name of the server's run, which owns its sessions (new_run). None: one for this client
            alone.
        shm_run: name of the server's run in its files in shared memory (run_dir.run_of).
        counts: of limits that were met; they outlive this client.
        patience_s: seconds that a message waits for a stage that does not read.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        same_host: bool,
        key_file: str = "",
        run: str | None = None,
        shm_run: str = wire.NO_RUN,
        counts: queues.QueueCounts | None = None,
        patience_s: float = queues.PATIENCE_S,
    ):
        self.name, self.same_host, self._patience_s = name, same_host, patience_s
        self._shm_run = shm_run
        self.counts = counts or queues.QueueCounts()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        queues.bound(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        # By this id the stage recognises the server when a broken connection is back.
        self._socket.setsockopt(zmq.ROUTING_ID, connection_name(run or new_run()))
        if not same_host:
            wire.harden(self._socket)
        if key_file:
            stage_key.unlock(self._socket, key_file)
        self._socket.connect(address)
        self._jobs: dict[str, Job] = {}
        self._ready: asyncio.Future[Ready] | None = None
        self._down: StageUnavailableError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"read {name}")

    def open(self, job_id: str) -> Job:
        """An open job with the same id fails: the stage serves the later one alone.

        Raises StageUnavailableError while the stage is down.
        """
        if self._down is not None:
            raise self._down
        if (earlier := self._jobs.get(job_id)) is not None:
            earlier.replaced()
        job = Job(self, job_id)
        self._jobs[job_id] = job
        return job

    @property
    def n_jobs(self) -> int:
        return len(self._jobs)

    def unfinished(self) -> list[str]:
        """Ids of jobs that the stage has begun and not ended."""
        return [job_id for job_id, job in self._jobs.items() if job.in_stage]

    def forget(self, job: Job) -> None:
        if self._jobs.get(job.job_id) is job:
            del self._jobs[job.job_id]

    @property
    def is_down(self) -> bool:
        """Whether it refuses jobs for good; a new client is needed then."""
        return self._down is not None

    def tensors(self) -> wire.TensorFrames:
        return wire.TensorFrames(self.same_host, self._shm_run)

    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        """Raises StageUnavailableError if the stage is down, or reads nothing."""
        if self._down is not None:
            raise self._down
        parts = wire.encode(message, tensors)
        if not await queues.send_in_time(self._socket, parts, self._patience_s):
            raise self._fail_unread()

    def send_later(self, message: AnyMessage) -> None:
        """As send, without waiting. Does nothing if the stage is down."""
        if self._down is None and not queues.try_send(self._socket, wire.encode(message)):
            # Without its Cancel or CloseSession the stage would keep the job's place.
            self._fail_unread()

    def _fail_unread(self) -> StageUnavailableError:
        """Fail all jobs of a stage that does not read; its supervisor then ends the stage."""
        self.counts.full += 1
        if self._down is None:
            log.error("stage_does_not_read %s messages=%d", self.name, queues.QUEUE_MESSAGES)
            self.fail_all("does not read what is sent to it")
        assert self._down is not None
        return self._down

    async def ping(self, timeout_s: float) -> Ready | None:
        """The stage's answer. None: it did not come in time."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        if not queues.try_send(self._socket, wire.encode(Ping(""))):
            self.counts.full += 1
            return None
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            return None

    def fail_all(self, reason: str) -> None:
        """End every job now and refuse new ones, because the stage has ended."""
        self._down = StageUnavailableError(f"{self.name}: {reason}", retry_after_s=10)
        self._fail_jobs(self._down)

    def _fail_jobs(self, error: LiveError) -> None:
        for job in self._jobs.values():
            job.fail(error)
        self._jobs.clear()

    async def close(self) -> None:
        if self._down is None:
            self.fail_all("closed")
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()

    async def _read(self) -> None:
        try:
            await self._read_all()
        except Exception:
            # Without a reader all jobs would wait for good. The supervisor restarts the stage.
            log.exception("reader_failed stage=%s", self.name)
            self.fail_all("reading its messages failed")

    async def _read_all(self) -> None:
        n_read = 0
        while True:
            n_read += 1
            if n_read % queues.READ_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                parts = await self._socket.recv_multipart()
                message, frames = wire.decode(parts, self.same_host, self._shm_run)
            except wire.MalformedError as error:
                # Its job is not known, so that every job has to fail.
                log.error("message_malformed stage=%s: %.200r", self.name, str(error))
                self._fail_jobs(StageFailedError(f"{self.name}: unreadable message"))
                continue
            if isinstance(message, Ready):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
                self._ready = None
                continue
            job = self._jobs.get(message.job_id)
            if job is None:
                wire.discard(message)
            elif not job.receive(message, frames):
                self.counts.flooded += 1
                log.error("stage_floods %s job=%s", self.name, job.job_id)
