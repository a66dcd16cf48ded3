"""The orchestrator's end of one job: the messages that it sends and receives."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from sglang_live.errors import DeadlineError, StageFailedError
from sglang_live.messages import STREAMED, AnyMessage, Cancel, Credit, Failed
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.flow_control import ReceiveCount, SendWindow
from sglang_live.stages.transport.queues import Unread

_CANCELLED = object()


class Sender(Protocol):
    """The StageClient that a job belongs to."""

    name: str

    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None: ...

    def send_later(self, message: AnyMessage) -> None: ...

    def forget(self, job: "Job") -> None: ...

    def tensors(self) -> wire.TensorFrames: ...


class Job:
    """One job. An asynchronous context manager: leaving it cancels the job in its stage."""

    def __init__(self, client: Sender, job_id: str):
        self.job_id = job_id
        self._client = client
        self._unread = Unread()
        self._window, self._count = SendWindow(), ReceiveCount()
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
        self._begun, self._over = True, False
        self._window, self._count = SendWindow(), ReceiveCount()
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
