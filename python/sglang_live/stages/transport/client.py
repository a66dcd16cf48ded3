"""The orchestrator's end of one stage replica: jobs multiplexed over one DEALER socket."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from sglang_live.errors import DeadlineError, LiveError, StageFailedError, StageUnavailableError
from sglang_live.messages import STREAMED, AnyMessage, Cancel, Credit, Failed, Ping, Ready
from sglang_live.stages.transport import queues, stage_key, wire
from sglang_live.stages.transport.peers import connection_name, new_run
from sglang_live.stages.transport.queues import ReceiveCount, SendWindow, Unread

_CANCELLED = object()


class Job:
    """One job. An asynchronous context manager: leaving it cancels the job in its stage."""

    def __init__(self, client: "JobClient", job_id: str):
        self.job_id = job_id
        self._client = client
        self._unread = Unread()
        self._window = SendWindow()
        self._count = ReceiveCount()
        self._tensors: list[wire.TensorFrames] = []
        self._begun = self._over = self._broken = self.cancelled = False

    @property
    def in_stage(self) -> bool:
        return self._begun and not self._over

    async def begin(self, opener: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        """Open the job in the stage, or open it again after it Failed. Does nothing once cancelled.

        Raises:
            StageUnavailableError: the stage died.
        """
        if self.cancelled:
            return
        self._begun = True
        self._over = False
        self._window = SendWindow()
        self._count = ReceiveCount()
        await self._client.send(opener, tensors)

    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        """Send more input. It is dropped once the stage has ended the job.

        Raises:
            StageUnavailableError: the stage died.
        """
        if isinstance(message, STREAMED):
            await self._window.take()
        if not self._over:
            await self._client.send(message, tensors)

    def post(self, message: AnyMessage) -> None:
        """As send, without waiting, for a message that is not streamed. Dropped before `begin`."""
        if self._begun and not self._over:
            self._client.send_later(message)

    def cancel(self) -> None:
        """Stop the job in its stage now. Its events end, and later input is dropped."""
        if self.cancelled:
            return
        self._stop_stage()
        self.cancelled = True
        self._end()
        self._unread.end(_CANCELLED)

    async def events(
        self, *until: type, silence_limit_s: float | None = None
    ) -> AsyncGenerator[tuple[AnyMessage, list[bytes]], None]:
        """Yield the job's messages with their tensor frames, up to and including one of type
        `until`; fewer if the job is cancelled.

        Raises:
            StageFailedError, StageUnavailableError: the job has failed.
            DeadlineError: nothing came for silence_limit_s.
        """
        while True:
            try:
                async with asyncio.timeout(silence_limit_s):
                    message, frames = await self._unread.take()
            except TimeoutError as error:
                text = f"{self._client.name} was silent for {silence_limit_s:.0f} s"
                raise DeadlineError(text) from error
            if self.cancelled:
                wire.discard(message)
                return
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Failed):
                self._end()
                raise StageFailedError(
                    f"{self._client.name}: {message.message}", reason=message.code
                )
            if isinstance(message, STREAMED) and (n := self._count.took_one()):
                await self._client.send(Credit(self.job_id, n))
            is_last = isinstance(message, until)
            if is_last:
                self._end()
            yield message, frames
            if is_last:
                return

    def tensors(self) -> wire.TensorFrames:
        """Tensors for one message. Leaving the job removes those that the stage did not read."""
        self._tensors.append(self._client.tensors())
        return self._tensors[-1]

    def receive(self, message: AnyMessage, frames: list[bytes]) -> bool:
        """Returns False if the stage sent more than its window, which fails the job."""
        if isinstance(message, Credit):
            self._window.add(message.n)
        elif self.cancelled or self._broken:
            wire.discard(message)
        elif not self._unread.put(message, frames):
            wire.discard(message)
            self._stop_stage()
            self._end()
            self.fail(StageFailedError(f"{self._client.name} sent more than its window"))
            return False
        return True

    def fail(self, error: Exception) -> None:
        """End the job's events with an error."""
        self._broken = True
        self._unread.end(error)
        self._window.lift()  # its waiting senders then fail

    def replaced(self) -> None:
        """Fail, because another job is opened under this one's id. The stage's job is the other's
        from now on, so that it is not cancelled.
        """
        self._end()
        self.fail(StageFailedError(f"{self._client.name}: job {self.job_id} was opened again"))

    async def __aenter__(self) -> "Job":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.forget(self)
        self._stop_stage()
        for tensors in self._tensors:
            tensors.release()
        for message in self._unread.drain():
            wire.discard(message)

    def _stop_stage(self) -> None:
        if self._begun and not self._over:
            self._client.send_later(Cancel(self.job_id))

    def _end(self) -> None:
        self._over = True
        self._window.lift()


log = logging.getLogger(__name__)


class JobClient(ABC):
    """The open jobs of one stage replica. How messages reach it and come back is a subclass's.

    Args:
        name: of the replica, e.g. "talker/0".
        counts: of limits that were met; they outlive this client.
    """

    def __init__(self, name: str, counts: queues.QueueCounts | None = None):
        self.name = name
        self.counts = counts or queues.QueueCounts()
        self._jobs: dict[str, Job] = {}
        self._down: StageUnavailableError | None = None

    @abstractmethod
    def tensors(self) -> wire.TensorFrames:
        """Tensors for one message."""

    @abstractmethod
    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        """Raises StageUnavailableError if the stage is down, or reads nothing."""

    @abstractmethod
    def send_later(self, message: AnyMessage) -> None:
        """As send, without waiting. Does nothing if the stage is down."""

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

    def receive(self, message: AnyMessage, frames: list[bytes]) -> None:
        """A message of the stage has come."""
        job = self._jobs.get(message.job_id)
        if job is None:
            wire.discard(message)
        elif not job.receive(message, frames):
            self.counts.flooded += 1
            log.error("stage_floods %s job=%s", self.name, job.job_id)

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

    def fail_all(self, reason: str) -> None:
        """End every job now and refuse new ones, because the stage has ended."""
        self._down = StageUnavailableError(f"{self.name}: {reason}", retry_after_s=10)
        self._fail_jobs(self._down)

    def _fail_jobs(self, error: LiveError) -> None:
        for job in self._jobs.values():
            job.fail(error)
        self._jobs.clear()


class StageClient(JobClient):
    """A client over one DEALER socket.

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

    Attributes:
        broken: set when the connection breaks, to a stage on another host. It may return, but what
            was on its way is lost.
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
        super().__init__(name, counts)
        self.same_host = same_host
        self._patience_s = patience_s
        self._shm_run = shm_run
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        queues.bound(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        # By this id the stage recognises the server when a broken connection is back.
        self._socket.setsockopt(zmq.ROUTING_ID, connection_name(run or new_run()))
        if not same_host:
            wire.harden(self._socket, wire.STAGE_SILENT_MS)
        if key_file:
            stage_key.unlock(self._socket, key_file)
        self.broken = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        if not same_host:  # others are watched as processes
            # Of its heartbeats, too: a stage that has died says nothing, nor does its host.
            monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._watcher = asyncio.create_task(self._watch(monitor), name=f"watch {name}")
        self._socket.connect(address)
        self._ready: asyncio.Future[Ready] | None = None
        self._reader = asyncio.create_task(self._read(), name=f"read {name}")

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
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            return None

    async def close(self) -> None:
        if self._down is None:
            self.fail_all("closed")
        tasks = [self._reader] if self._watcher is None else [self._reader, self._watcher]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._watcher is not None:
            self._socket.disable_monitor()
        self._socket.close()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await monitor.recv_multipart()
            log.warning("connection_broken %s", self.name)
            self.broken.set()

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
            self.receive(message, frames)
