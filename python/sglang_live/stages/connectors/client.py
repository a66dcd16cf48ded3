"""The orchestrator's end of one stage replica: jobs multiplexed over one DEALER socket."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from sglang_live.errors import DeadlineError, LiveError, StageFailedError, StageUnavailableError
from sglang_live.messages import STREAMED, AnyMessage, Cancel, Credit, Failed, Ping, Ready
from sglang_live.stages.connectors import stage_key, wire
from sglang_live.stages.connectors.window import ReceiveCount, SendWindow

log = logging.getLogger(__name__)

_CANCELLED = object()


class Job:
    """One job as the orchestrator sees it. Use as a context manager: leaving it cancels."""

    def __init__(self, client: "StageClient", job_id: str):
        self.job_id = job_id
        self._client = client
        self._events: asyncio.Queue = asyncio.Queue()
        self._window, self._count = SendWindow(), ReceiveCount()
        self._tensors: list[wire.TensorFrames] = []
        self._begun = self._over = self.cancelled = False

    @property
    def in_stage(self) -> bool:
        return self._begun and not self._over

    async def begin(self, opener: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        """Open the job in the stage, or open it anew after it Failed. Not once it was cancelled.

        Raises:
            StageUnavailableError: the stage died.
        """
        if self.cancelled:
            return
        self._begun, self._over = True, False
        self._window, self._count = SendWindow(), ReceiveCount()
        await self._client.send(opener, tensors)

    async def send(self, message: AnyMessage) -> None:
        """More input; dropped once the stage has said its last word.

        Raises:
            StageUnavailableError: the stage died.
        """
        if isinstance(message, STREAMED):
            await self._window.take()
        if not self._over:
            await self._client.send(message)

    def post(self, message: AnyMessage) -> None:
        """As send, for a message that needs no window, without waiting; dropped before `begin`."""
        if self._begun and not self._over:
            self._client.send_later(message)

    def cancel(self) -> None:
        """Stop the job in its stage now. Its events end; what is sent from here on is dropped."""
        if self.cancelled:
            return
        if self._begun and not self._over:
            self._client.send_later(Cancel(self.job_id))
        self.cancelled = True
        self._end()
        self._events.put_nowait((_CANCELLED, []))

    async def events(
        self, *until: type, silence_limit_s: float | None = None
    ) -> AsyncIterator[tuple[AnyMessage, list[bytes]]]:
        """Messages of the job with their tensor frames, up to and with one of type `until`.

        They end early when the job is cancelled.

        Raises:
            StageFailedError, StageUnavailableError: the job will send nothing more.
            DeadlineError: nothing came for silence_limit_s.
        """
        while True:
            try:
                async with asyncio.timeout(silence_limit_s):
                    message, frames = await self._events.get()
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
        """For one message of this job; what is not taken is removed when the job is left."""
        self._tensors.append(wire.TensorFrames(self._client.same_host))
        return self._tensors[-1]

    def receive(self, message: AnyMessage | Exception, frames: list[bytes]) -> None:
        if isinstance(message, Credit):
            self._window.give(message.n)
        else:
            self._events.put_nowait((message, frames))
            if isinstance(message, Exception):
                self._window.lift()  # wake a sender; its send then fails

    async def __aenter__(self) -> "Job":
        return self

    async def __aexit__(self, *_) -> None:
        self._client.forget(self.job_id)
        if self._begun and not self._over:
            self._client.send_later(Cancel(self.job_id))
        for tensors in self._tensors:
            tensors.release()
        while not self._events.empty():
            wire.discard(self._events.get_nowait()[0])

    def _end(self) -> None:
        self._over = True
        self._window.lift()


class StageClient:
    """
    Args:
        name: for messages, e.g. "talker/0".
        address: ZMQ endpoint the stage binds.
        same_host: large tensors may go through shared memory.
        key_file: secret shared with a stage on another host; empty: none.
    """

    def __init__(self, name: str, address: str, *, same_host: bool, key_file: str = ""):
        self.name, self.same_host = name, same_host
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        # The stage knows this caller again when the connection broke and is there again.
        self._socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().hex.encode())
        if not same_host:
            wire.harden(self._socket)
        if key_file:
            stage_key.unlock(self._socket, key_file)
        self._socket.connect(address)
        self._jobs: dict[str, Job] = {}
        self._ready: asyncio.Future[Ready] | None = None
        self._down: Exception | None = None
        self._reader = asyncio.create_task(self._read(), name=f"read {name}")

    def open(self, job_id: str) -> Job:
        """Raises StageUnavailableError while the stage is down."""
        if self._down is not None:
            raise self._down
        job = Job(self, job_id)
        self._jobs[job_id] = job
        return job

    @property
    def n_jobs(self) -> int:
        return len(self._jobs)

    def unfinished(self) -> list[str]:
        """Ids of jobs that the stage has begun and not ended."""
        return [job_id for job_id, job in self._jobs.items() if job.in_stage]

    def forget(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)

    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        if self._down is not None:
            raise self._down
        await self._socket.send_multipart(wire.encode(message, tensors))

    def send_later(self, message: AnyMessage) -> None:
        """For callers that must not wait; nothing to tell a stage that is down."""
        if self._down is None:
            self._socket.send_multipart(wire.encode(message))

    async def ping(self, timeout_s: float) -> Ready | None:
        """None when no answer came in time."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        await self._socket.send_multipart(wire.encode(Ping("")))
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            return None

    def fail_all(self, reason: str) -> None:
        """The stage is gone: end every job now, and refuse new ones."""
        self._down = StageUnavailableError(f"{self.name}: {reason}", retry_after_s=10)
        self._fail_jobs(self._down)

    def _fail_jobs(self, error: LiveError) -> None:
        for job in self._jobs.values():
            job.receive(error, [])
        self._jobs.clear()

    async def close(self) -> None:
        if self._down is None:
            self.fail_all("closed")
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()

    async def _read(self) -> None:
        while True:
            try:
                message, frames = wire.decode(await self._socket.recv_multipart(), self.same_host)
            except wire.MalformedError as error:
                # Whose answer it was is not known: no job may wait for it.
                log.error("bad_answer stage=%s: %.200r", self.name, str(error))
                self._fail_jobs(StageFailedError(f"{self.name}: unreadable answer"))
                continue
            if isinstance(message, Ready):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
                self._ready = None
                continue
            job = self._jobs.get(message.job_id)
            if job is not None:
                job.receive(message, frames)
            else:
                wire.discard(message)
