"""The vocoder: chunks of many jobs in batches, on the device that all stages share.

Sizes and order of chunks are those of stages/vocoder/batcher.py; chunks of one batch have the same
shape.
"""

from collections.abc import Callable

from sglang_live.extensions.planner.device_model.costs import EagerCosts, VocoderCosts
from sglang_live.extensions.planner.simulation.events import Device, Events
from sglang_live.policy.chunks import Ahead, ChunkRule, chunk_frames
from sglang_live.policy.view import FRAME_S
from sglang_live.stages.vocoder.config import VocoderConfig


class Decoding:
    """
    Args:
        emit: called with the frames of a chunk whose audio exists.
        ended: called when all frames have been decoded.
        rule: of its chunks; None: they may have any size.
        n_seen: codes that are computed again with each chunk.
    """

    def __init__(
        self,
        emit: Callable[[int], None],
        ended: Callable[[], None],
        rule: ChunkRule | None = None,
        n_seen: int = 0,
    ):
        self.emit = emit
        self.ended = ended
        self.rule = rule
        self.n_seen = n_seen
        self.n_pending = self.n_emitted = 0
        self.is_begun = self.is_complete = False
        self.ahead = Ahead()
        self.ready_s = 0.0

    @property
    def due_s(self) -> float:
        return self.ahead.due_s(self.ready_s)


class Vocoder:
    """
    Args:
        host_s: for which a thread launches a batch; it launches one at a time.
        launch_s: see HostTimes.
        eager: beside costs; None: nothing.
    """

    def __init__(
        self,
        events: Events,
        device: Device,
        costs: VocoderCosts,
        config: VocoderConfig,
        host_s: float = 0.0,
        launch_s: float = 0.0,
        eager: EagerCosts | None = None,
    ):
        self._events = events
        self._device = device
        self._costs = costs
        self._config = config
        self._host_s = host_s + (0.0 if eager is None else eager.launch_ms / 1e3)
        self._launch_s = launch_s
        self._eager = eager
        self._launches = False
        self._ready: dict[Decoding, None] = {}
        self._in_flight: list[list[Decoding]] = []
        self._is_dead = False

    def stop(self) -> None:
        """The process has died."""
        self._is_dead = True
        self._device.leave(self)

    def feed(self, job: Decoding, n_frames: int) -> None:
        job.n_pending += n_frames
        self._note(job)
        self._begin()

    def end(self, job: Decoding) -> None:
        """No more frames will come."""
        job.is_complete = True
        self._note(job)
        self._begin()

    def cancel(self, job: Decoding) -> None:
        job.is_complete = False
        job.n_pending = 0
        job.emit = _ignore
        job.ended = _ignore
        self._ready.pop(job, None)

    def _wanted(self, job: Decoding) -> int:
        config = self._config
        if job.rule is not None:
            return job.rule.frames(job.n_emitted)
        is_short = job.ahead.is_short(self._events.now_s())
        return config.first_chunk_frames if is_short else config.chunk_frames

    def _note(self, job: Decoding) -> None:
        is_ready = job.is_complete or job.n_pending >= self._wanted(job)
        if is_ready and job not in self._ready:
            job.ready_s = self._events.now_s()
            self._ready[job] = None

    def _begin(self) -> None:
        if not self._device.is_arbitrated:
            while self._begin_batch():
                pass
        elif self._ready and not (self._is_dead or self._launches or self._in_flight):
            due_s = min(job.due_s for job in self._ready)
            self._device.ask(self, due_s, self._begin_batch)

    def _begin_batch(self) -> bool:
        """Whether a batch was launched."""
        if self._is_dead or self._launches:
            return False
        if len(self._in_flight) >= self._config.max_in_flight:
            return False
        batch = self._choose()
        if batch:
            self._in_flight.append(batch)
            self._launch(batch, [self._n_frames(job) for job in batch])
        return bool(batch)

    def _choose(self) -> list[Decoding]:
        decoding = [job for batch in self._in_flight for job in batch]
        shapes = {self._shape(job) for job in decoding}
        ready = [job for job in self._ready if job not in decoding]
        ready = [job for job in ready if self._shape(job) not in shapes]
        ready.sort(key=lambda job: (job.due_s, job.ready_s))
        alike = [job for job in ready if self._shape(job) == self._shape(ready[0])]
        return alike[: self._config.max_batch]

    def _launch(self, batch: list[Decoding], n_frames: list[int]) -> None:
        if not n_frames[0]:
            self._events.after(0.0, lambda: self._end_batch(batch, n_frames))
            return
        now_s = self._events.now_s()
        self._launches = self._host_s > 0
        if self._launches:
            self._events.after(self._host_s, self._launched)
        cost_s = self._costs.decode_s(len(batch))
        if self._eager is not None:
            longest = max(job.n_seen + n for job, n in zip(batch, n_frames, strict=True))
            cost_s += self._eager.decode_s(len(batch), longest)
        if self._device.is_arbitrated:  # its turn lasts until all of it was launched
            cost_s = max(cost_s, self._host_s)
        work = self._device.book("vocoder", cost_s, now_s + self._launch_s)
        work.when_done(lambda: self._end_batch(batch, n_frames), now_s + self._host_s)

    def _launched(self) -> None:
        self._launches = False
        self._begin()

    def _n_frames(self, job: Decoding) -> int:
        """Of its next chunk."""
        if job.rule is not None:
            return min(job.rule.frames(job.n_emitted), job.n_pending)
        small, large = self._config.first_chunk_frames, self._config.chunk_frames
        is_first, ends = not job.ahead.has_sound, job.is_complete
        return chunk_frames(job.n_pending, small, large, is_first=is_first, ends=ends)

    def _shape(self, job: Decoding) -> tuple[bool, int]:
        n_frames = self._n_frames(job)
        if job.rule is None:
            return job.is_begun, n_frames
        return n_frames > 0, (job.n_seen + n_frames).bit_length()

    def _end_batch(self, batch: list[Decoding], sizes: list[int]) -> None:
        if self._is_dead:
            return
        self._in_flight.remove(batch)
        # Others were cancelled meanwhile.
        live = [(job, n) for job, n in zip(batch, sizes, strict=True) if job in self._ready]
        for job, n_frames in live:
            del self._ready[job]
            job.n_pending -= n_frames
            job.is_begun = job.is_begun or n_frames > 0
            if n_frames:
                job.n_emitted += 1
                job.n_seen += n_frames
                job.ahead.made(self._events.now_s(), n_frames * FRAME_S)
        for job, n_frames in live:
            if n_frames:
                job.emit(n_frames)
            if job.is_complete and not job.n_pending:
                job.ended()
            else:
                self._note(job)
        self._begin()


def _ignore(*_: object) -> None:
    """The job is not heard any more."""
