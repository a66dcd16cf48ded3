"""One job as the orchestrator sees it: what it sends, and the events that come of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from sglang_live.errors import DeadlineError, StageFailedError
from sglang_live.messages import STREAMED, AnyMessage, Cancel, Credit, Failed
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.flow_control import ReceiveCount, SendWindow
from sglang_live.stages.transport.queues import Unread

_CANCELLED = object()


class Sender(Protocol):
    """The client that a job belongs to."""

    name: str

    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None: ...

    def send_later(self, message: AnyMessage) -> None: ...

    def forget(self, job_id: str) -> None: ...

    def tensors(self) -> wire.TensorFrames: ...


class Job:
    """One job as the orchestrator sees it. Use as a context manager: leaving it cancels."""

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
        self._stop_stage()
        self.cancelled = True
        self._end()
        self._unread.end(_CANCELLED)

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
        """For one message of this job; what is not taken is removed when the job is left."""
        self._tensors.append(self._client.tensors())
        return self._tensors[-1]

    def receive(self, message: AnyMessage, frames: list[bytes]) -> bool:
        """Returns False if the stage sends more than it may: the job has failed then."""
        if isinstance(message, Credit):
            self._window.give(message.n)
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
        """The job will get nothing more; its events end with the error."""
        self._broken = True
        self._unread.end(error)
        self._window.lift()  # wake a sender; its send then fails

    async def __aenter__(self) -> "Job":
        return self

    async def __aexit__(self, *_) -> None:
        self._client.forget(self.job_id)
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
