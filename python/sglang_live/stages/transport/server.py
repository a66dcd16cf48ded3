"""A stage's end of its jobs: a ROUTER socket, one task per job, failures reported to the server."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import zmq
import zmq.asyncio

from sglang_live.aio import background, vital
from sglang_live.errors import CapacityError, DeadlineError, LiveError
from sglang_live.ids import FRAME_MARK
from sglang_live.messages import (
    STREAMED,
    AnyMessage,
    Cancel,
    CloseSession,
    Credit,
    Failed,
    Interrupt,
    Opener,
    Ping,
    Ready,
    RetainNative,
    SessionHint,
    TalkerRequest,
    ThinkerRequest,
)
from sglang_live.stages.transport import queues, stage_key, wire
from sglang_live.stages.transport.peers import TICK_S, ForeignSessionError, Peers
from sglang_live.stages.transport.queues import ReceiveCount, SendWindow
from sglang_live.telemetry.log_context import set_log_ids

log = logging.getLogger(__name__)

# Jobs of one peer at once. A session has a few at each stage.
MAX_JOBS = 16_384


class ServedJob:
    """The stage's end of one job.

    frames: raw frames of its newest message with tensors.
    """

    def __init__(self, server: "StageServer", peer: bytes, opener: Opener, frames: list[bytes]):
        self.job_id = opener.job_id
        self.opener = opener
        self.frames = frames
        self.key = peer, opener.job_id
        self._server = server
        self._peer = peer
        self._unread = queues.Unread()
        self._window = SendWindow()
        self._count = ReceiveCount()
        self._is_ending = False
        self.task: asyncio.Task[None] | None = None
        self.error: LiveError | None = None

    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        """Raises QueueFullError if the peer does not read."""
        if isinstance(message, STREAMED):
            await self._window.take()
        await self._server.send(self._peer, message, tensors)

    def post(self, message: AnyMessage) -> None:
        """As send, without waiting, for a message that is not streamed."""
        if not self._server.post(self._peer, message):
            self.fail(queues.QueueFullError("the peer does not read"))

    def fail(self, error: LiveError) -> None:
        """End the job by an error of its connection."""
        self.error = error
        self.cancel()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def end_softly(self) -> None:
        """No one waits for it any more. A session of the thinker keeps its KV, for another server:
        cancelling its turn would lose it."""
        is_turn = isinstance(self.opener, ThinkerRequest) and bool(self.opener.session_id)
        if not (is_turn and self._server.interrupts):
            self.cancel()
        elif not self._is_ending:
            self._is_ending = True
            self._window.lift()
            self.receive(Interrupt(self.job_id), [])

    def tensors(self) -> wire.TensorFrames:
        return wire.TensorFrames(self._server.same_host, self._server.shm_run)

    async def inputs(self) -> AsyncGenerator[AnyMessage, None]:
        """Yield what the orchestrator sends after opening the job. Never ends by itself."""
        while True:
            message, frames = await self._unread.take()
            self.frames = frames or self.frames
            if isinstance(message, STREAMED) and (n := self._count.took_one()):
                await self._server.send(self._peer, Credit(self.job_id, n))
            yield message

    def receive(self, message: AnyMessage, frames: list[bytes]) -> None:
        if isinstance(message, Credit):
            self._window.add(message.n)
        elif self.error is None and not self._unread.put(message, frames):
            self.fail(queues.FloodedError("the peer sent more than its window"))


class StageServer:
    """
    Args:
        address: endpoint to bind.
        same_host: whether large tensors may go through shared memory. A silent peer on another
            host is lost after a while, with its jobs and sessions; one on this host is not.
        interrupts: whether a turn ends by an Interrupt, with its KV.
        shm_run: name of the server's run in its files in shared memory (run_dir.run_of).
        key_file: secret shared with servers on other hosts. "": none.
        run: the coroutine of one job. Its return ends the job; a LiveError becomes Failed.
        close_session: called for CloseSession.
        on_hint: called for UserSpeaking and NextUseHint. None: the stage ignores them.
        ready: the answer to a Ping.
        tick_s: seconds between two searches for lost peers.
        patience_s: seconds that a message waits for a peer that does not read.
    """

    def __init__(
        self,
        address: str,
        *,
        same_host: bool,
        run: Callable[[ServedJob], Awaitable[None]],
        close_session: Callable[[str], Coroutine[Any, Any, None]],
        ready: Callable[[], Ready],
        on_hint: Callable[[SessionHint], None] | None = None,
        interrupts: bool = False,
        shm_run: str = wire.NO_RUN,
        key_file: str = "",
        tick_s: float = TICK_S,
        patience_s: float = queues.PATIENCE_S,
    ):
        self.interrupts = interrupts
        self.shm_run = shm_run
        self.same_host = same_host
        self._tick_s = tick_s
        self._patience_s = patience_s
        self._run = run
        self._close_session = close_session
        self._ready = ready
        self._on_hint = on_hint
        # By peer and job id: two servers may give their jobs the same id.
        self._jobs: dict[tuple[bytes, str], ServedJob] = {}
        self._n_jobs: Counter[bytes] = Counter()
        self.n_malformed = self.n_refused = self.n_taken_over = 0
        self.counts = queues.QueueCounts()
        self._chores: set[asyncio.Task[None]] = set()
        self._peers = Peers()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        queues.bound(self._socket)
        # A message to a peer that is gone is an error, instead of being dropped.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer whose connection broke continues under its own id.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if not same_host:
            wire.harden(self._socket, wire.SERVER_SILENT_MS)
        if key_file:
            stage_key.guard(self._socket, key_file)
        self._socket.bind(address)

    @property
    def n_jobs(self) -> int:
        return len(self._jobs)

    async def serve(self) -> None:
        """Serve until cancelled; that ends every job and frees the address."""
        watch = None if self.same_host else vital(self._watch_peers(), "peers")
        n_read = 0
        try:
            while True:
                n_read += 1
                if n_read % queues.READ_AT_ONCE == 0:
                    await asyncio.sleep(0)
                peer, *parts = await self._socket.recv_multipart()
                if watch is not None:
                    self._peers.heard(peer)
                try:
                    message, frames = wire.decode(parts, self.same_host, self.shm_run)
                    self._receive(peer, message, frames)
                except wire.MalformedError as error:
                    self.n_malformed += 1
                    log.warning("bad_message peer=%s: %.200r", peer.hex(), str(error))
                except Exception:
                    # One message must not end the jobs of all peers.
                    self.n_malformed += 1
                    log.exception("message_failed peer=%s", peer.hex())
        finally:
            if watch is not None:
                watch.cancel()
            for job in self._jobs.values():
                job.cancel()
            self._socket.close(linger=0)

    async def _watch_peers(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            for peer, sessions in self._peers.tick():
                jobs = [job for job in self._jobs.values() if job.key[0] == peer]
                log.error("peer_lost jobs=%d sessions=%d", len(jobs), len(sessions))
                for job in jobs:
                    job.cancel()
                for session_id in sessions:
                    self._begin_closing(session_id)

    def _receive(self, peer: bytes, message: AnyMessage, frames: list[bytes]) -> None:
        job = self._jobs.get((peer, message.job_id))
        if isinstance(message, Ping):
            self.post(peer, self._ready())
        elif isinstance(message, Opener):
            # The event loop orders its timers by comparing them, which fails with NaN.
            if not 0 < message.timeout_s < math.inf:
                raise wire.MalformedError(f"timeout_s is {message.timeout_s}")
            try:
                self._admit(peer, message)
            except LiveError as error:
                self.n_refused += 1
                log.warning("job_refused job=%.80r code=%s", message.job_id, error.code)
                self.post(peer, Failed(message.job_id, error.code, str(error)))
                return
            if job is not None:
                job.cancel()  # opened again: nothing else would end the earlier one
            self._begin(ServedJob(self, peer, message, frames))
        elif isinstance(message, CloseSession | SessionHint) and not (
            self._peers.may_touch(peer, message.session_id)
        ):
            self.n_refused += 1
            kind = type(message).__name__
            log.warning("message_refused kind=%s session=%.80r", kind, message.session_id)
        elif isinstance(message, CloseSession):
            self._peers.closes(message.session_id)
            self._begin_closing(message.session_id)
        elif isinstance(message, SessionHint):
            if self._on_hint is not None:
                self._on_hint(message)
        elif job is None:
            pass  # the job is over; its peer sent this before it received the end
        elif isinstance(message, Cancel):
            job.cancel()
        else:
            job.receive(message, frames)

    def _admit(self, peer: bytes, opener: Opener) -> None:
        """Raises LiveError if the session is another server's, or the peer has too much open."""
        if self._n_jobs[peer] >= MAX_JOBS:
            raise CapacityError(f"{MAX_JOBS} jobs of one peer are open")
        if isinstance(opener, ThinkerRequest | TalkerRequest):
            if self._peers.opens(peer, opener.session_id, opener.epoch):
                self._end_earlier(opener.session_id, opener.epoch)
        elif isinstance(opener, RetainNative) and not (
            self._peers.may_touch(peer, opener.session_id)
        ):
            raise ForeignSessionError("the session is another peer's")

    def _end_earlier(self, session_id: str, epoch: int) -> None:
        """End the jobs of a session's earlier owner."""
        log.warning("session_taken_over session=%s epoch=%d", session_id, epoch)
        self.n_taken_over += 1
        for job in self._jobs.values():
            own = job.opener
            if not isinstance(own, ThinkerRequest | TalkerRequest) or own.epoch >= epoch:
                continue
            if own.session_id == session_id:
                job.end_softly()

    def _begin(self, job: ServedJob) -> None:
        self._jobs[job.key] = job
        self._n_jobs[job.key[0]] += 1
        job.task = asyncio.create_task(self._serve_job(job), name=job.job_id)
        # Not in the task itself: a task that is cancelled at once never runs.
        job.task.add_done_callback(lambda _: self._forget(job))

    async def send(
        self, peer: bytes, message: AnyMessage, tensors: wire.TensorFrames | None = None
    ) -> None:
        """Raises QueueFullError if the peer does not read."""
        parts = [peer, *wire.encode(message, tensors)]
        try:
            in_time = await queues.send_in_time(self._socket, parts, self._patience_s)
        except zmq.ZMQError as error:
            self._gone(peer, message, error)
            return
        if not in_time:
            self.counts.full += 1
            raise queues.QueueFullError("the peer does not read")

    def post(self, peer: bytes, message: AnyMessage) -> bool:
        """As send, without waiting. Returns False, and counts it, if the peer does not read."""
        try:
            has_room = queues.try_send(self._socket, [peer, *wire.encode(message)])
        except zmq.ZMQError as error:
            self._gone(peer, message, error)
            return True
        self.counts.full += not has_room
        return has_room

    def _gone(self, peer: bytes, message: AnyMessage, error: zmq.ZMQError) -> None:
        log.warning("peer_gone job=%s: %s", message.job_id, error)
        if (job := self._jobs.get((peer, message.job_id))) is not None:
            job.end_softly()

    async def _serve_job(self, job: ServedJob) -> None:
        timeout_s = job.opener.timeout_s
        set_log_ids(job=job.job_id)
        is_logged = not job.job_id.endswith(FRAME_MARK)  # 12.5 of them a second
        if is_logged:
            log.info("job_started job=%s kind=%s", job.job_id, type(job.opener).__name__)
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                await self._run(job)
            if is_logged:
                log.info("job_done job=%s", job.job_id)
        except asyncio.CancelledError:
            if job.error is not None:
                self.counts.flooded += isinstance(job.error, queues.FloodedError)
                await self._fail(job, job.error.code, str(job.error))
            else:
                log.info("job_cancelled job=%s", job.job_id)
        except LiveError as error:
            await self._fail(job, error.code, str(error))
        except Exception as error:
            if deadline.expired():
                await self._fail(job, DeadlineError.code, f"took longer than {timeout_s:.0f} s")
                return
            log.exception("job_failed job=%s", job.job_id)
            await self._fail(job, LiveError.code, f"{type(error).__name__}: {error}")

    def _begin_closing(self, session_id: str) -> None:
        chore = background(self._close_session(session_id), "session closing")
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    def _forget(self, job: ServedJob) -> None:
        self._n_jobs[job.key[0]] -= 1
        if not self._n_jobs[job.key[0]]:
            del self._n_jobs[job.key[0]]
        # The peer may have opened the same job again by now.
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    async def _fail(self, job: ServedJob, code: str, text: str) -> None:
        log.warning("job_failed job=%s code=%s: %s", job.job_id, code, text)
        try:
            await job.send(Failed(job.job_id, code, text))
        except queues.QueueFullError:
            log.error("failure_not_sent job=%s", job.job_id)  # send has counted it
