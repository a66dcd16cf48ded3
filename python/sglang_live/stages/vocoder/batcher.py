"""Chooses which chunks of many jobs the vocoder decodes next, together.

In: codec frames per job, as the talker makes them. Out: PCM chunks.
Owner: one VocoderEngine per vocoder worker; not thread-safe, never sleeps.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_live.clock import Clock, MonotonicClock
from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import BadInputError, CapacityError, LiveError
from sglang_live.messages import SoundPlace
from sglang_live.models.codecs import END_CODE
from sglang_live.policy.chunks import SHORT_BELOW_S, Ahead, ChunkRule, chunk_frames
from sglang_live.policy.flex import FlexConfig, FlexDebt
from sglang_live.stages.vocoder.config import VocoderConfig
from sglang_live.stages.vocoder.decoders import StreamDecoder, VoiceDecoder


class UnknownJobError(LiveError):
    """The job was never opened, or has ended."""

    code = "unknown_job"
    http_status = 404


@dataclass(frozen=True, slots=True)
class VocoderChunk:
    """The next piece of one job's audio.

    Attributes:
        pcm: int16 little-endian, mono, at the decoder's rate. Empty while a decoder that looks
            ahead has too few frames.
        n_frames: codec frames it was decoded from; 0 only in an empty last chunk.
        is_last: nothing of this job follows; the job has ended.
        place: at its end.
    """

    job_id: str
    pcm: bytes
    n_frames: int
    is_last: bool
    place: SoundPlace


@dataclass(slots=True)
class _Job:
    """One open job.

    Attributes:
        stream: the decoder's state.
        voice: of its streams, if the decoder has voices.
        speaker: see VoiceDecoder.new_stream.
        pending: [n, n_quantizers] int64 on the CPU, frames of the stream not yet decoded, oldest
            first.
        later: frames of the next utterances, each of which gets a stream of its own. The last of
            them, or `pending` if there are none, may grow.
        n_chunks: of the stream, that were decoded.
        utterance, n_done: number of the stream's, and frames of it that are done with.
        n_left_out: next frames of the utterance that the sound no longer depends on.
        n_silent: next frames of the stream whose sound was sent by another vocoder.
        ahead: of its listener.
        flex: whether it is not heard while it is made.
        each_frame: whether every frame is a chunk.
        ready_s: when the next chunk became ready. None: it is not ready.
    """

    job_id: str
    voice: str
    stream: Any
    pending: Tensor
    speaker: np.ndarray | None = None
    later: list[Tensor] = field(default_factory=list)
    n_chunks: int = 0
    utterance: int = 0
    n_done: int = 0
    n_left_out: int = 0
    n_silent: int = 0
    ahead: Ahead = field(default_factory=Ahead)
    is_finished: bool = False
    flex: bool = False
    each_frame: bool = False
    ready_s: float | None = None

    @property
    def n_pending(self) -> int:
        return len(self.pending) + sum(len(frames) for frames in self.later)

    @property
    def is_begun(self) -> bool:
        return self.n_chunks > 0

    @property
    def is_complete(self) -> bool:
        """Whether the stream gets no more frames."""
        return self.is_finished or bool(self.later)

    def append(self, codes: Tensor) -> None:
        """Add frames to the utterance that may grow."""
        if self.later:
            self.later[-1] = torch.cat((self.later[-1], codes))
        else:
            self.pending = torch.cat((self.pending, codes))


@dataclass(frozen=True, slots=True)
class Decoding:
    """A batch whose decoding was launched.

    Attributes:
        samples: [n] int16 on the host, of all chunks; a copy from the device that may not have
            arrived.
        ends: of each chunk, in samples.
        arrived: event behind the copy; None: there is nothing to wait for.
    """

    samples: Tensor
    ends: list[int]
    arrived: torch.cuda.Event | None

    def pcm(self) -> list[bytes]:
        """Wait for the result: one int16 PCM chunk per job."""
        if self.arrived is not None:
            self.arrived.synchronize()
        samples = self.samples.numpy().astype("<i2", copy=False)
        return [piece.tobytes() for piece in np.split(samples, self.ends[:-1])]


@dataclass(frozen=True, slots=True, eq=False)
class VocoderBatch:
    """Chunks decoded together.

    codes: [n_frames, n_quantizers] of each job; None for empty ends.
    shape: what is equal in all chunks, see VocoderEngine.
    """

    decoder: StreamDecoder | VoiceDecoder
    jobs: list[_Job]
    codes: list[Tensor] | None
    shape: tuple[bool, int]

    def launch(self) -> Decoding:
        """Decode, on a GPU without waiting for the result."""
        if self.codes is None:
            return Decoding(torch.empty(0, dtype=torch.int16), [0] * len(self.jobs), None)
        streams = [job.stream for job in self.jobs]
        if isinstance(self.decoder, VoiceDecoder):
            waves = list(self.decoder.decode(streams, self.codes))
        else:
            waves = list(self.decoder.decode(streams, torch.stack(self.codes)))
        ends = list(accumulate(len(wave) for wave in waves))
        # One copy from the device for all of them.
        samples = (torch.cat(waves) * 32767.0).round_().to(torch.int16)
        if not samples.is_cuda:
            return Decoding(samples, ends, None)
        host = torch.empty(samples.shape, dtype=torch.int16, pin_memory=True)
        host.copy_(samples, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Decoding(host, ends, arrived)


class VocoderEngine:
    """Owns the streams of all open jobs and decodes their chunks in batches."""

    def __init__(
        self,
        decoder: StreamDecoder | VoiceDecoder,
        config: VocoderConfig,
        clock: Clock | None = None,
    ):
        self._decoder = decoder
        self._config = config
        self._clock = clock or MonotonicClock()
        self._jobs: dict[str, _Job] = {}
        self._decoding: list[VocoderBatch] = []
        self._flex = FlexConfig()
        self._flex_debt = FlexDebt()

    def warm_up(self, most_voices: int = 1) -> None:
        """Decode once in every common shape.

        The kernels of a shape are chosen and compiled when it first comes: on a CPU that took up
        to half a second, a gap in all users' audio.

        Args:
            most_voices: streams at once, of a decoder with voices.
        """
        if isinstance(self._decoder, VoiceDecoder):
            for n_streams in range(1, most_voices + 1):
                self._warm_up_voice(self._decoder, n_streams)
            return
        config = self._config
        full = {config.first_chunk_frames, config.chunk_frames}
        shapes = [(n, frames) for n in range(1, config.max_batch + 1) for frames in full]
        shapes += [(1, frames) for frames in range(1, max(full)) if frames not in full]
        for n_streams, n_frames in shapes:
            streams = [self._decoder.new_stream() for _ in range(n_streams)]
            codes = torch.zeros(n_streams, n_frames, self._decoder.n_quantizers, dtype=torch.int64)
            for _ in range(2):  # a first chunk is shorter in samples than those that follow
                self._decoder.decode(streams, codes)

    def _warm_up_voice(self, decoder: VoiceDecoder, n_streams: int) -> None:
        """The first two chunks of streams: the lengths of the others are too many."""
        streams = [decoder.new_stream(decoder.voices[0]) for _ in range(n_streams)]
        for n_chunks in range(2):
            n_frames = streams[0].rule.frames(n_chunks)
            codes = torch.zeros(n_frames, decoder.n_quantizers, dtype=torch.int64)
            decoder.decode(streams, [codes] * n_streams)

    def open(
        self,
        job_id: str,
        *,
        voice: str = "",
        speaker: np.ndarray | None = None,
        flex: bool = False,
        each_frame: bool = False,
        sent: SoundPlace | None = None,
    ) -> None:
        """
        Args:
            voice: of a decoder that has voices.
            speaker: of a voice that is none of them (VoiceDecoder.new_stream).
            each_frame: whether it comes frame by frame.
            flex: whether it is not heard while it is made: it comes in large chunks, and beside
                heard ones has a small share (policy/flex.py).
            sent: where its sound begins, if another vocoder has sent the rest; in an utterance of
                which all frames are fed.
        Raises:
            CapacityError: it is full. BadInputError: the job is open already, there is no such
            voice, or another model made it, or a chunk of it cannot be buffered.
        """
        if job_id in self._jobs:
            raise BadInputError(f"vocoder job {job_id!r} is open already")
        if len(self._jobs) >= self._config.max_streams:
            raise CapacityError(
                f"vocoder full: {len(self._jobs)} of {self._config.max_streams} streams"
            )
        stream = self._new_stream(voice, speaker)
        job = _Job(
            job_id,
            voice,
            stream,
            self._no_frames(),
            speaker=speaker,
            flex=flex,
            each_frame=each_frame,
        )
        rule, cap = self._rule(job), self._config.max_buffered_frames
        if rule is not None and max(rule.first, rule.most) > cap:
            raise BadInputError(f"--vocoder.max-buffered-frames {cap} cannot hold a chunk: {rule}")
        self._jobs[job_id] = job
        if sent is not None:
            decoder = self._decoder
            context = None if isinstance(decoder, VoiceDecoder) else decoder.n_context_frames
            job.utterance = sent.utterance
            job.n_silent = sent.n_done if context is None else min(sent.n_done, context)
            job.n_left_out = job.n_done = sent.n_done - job.n_silent

    def feed(self, job_id: str, codes: Tensor) -> None:
        """Append frames to a job. An error changes nothing.

        Args:
            codes: [n, n_quantizers] int64, n >= 0, on any device; copied.
        Raises:
            UnknownJobError, BadInputError (codes, or fed after finish), CapacityError (buffer).
        """
        job = self._job(job_id)
        if job.is_finished:
            raise BadInputError(f"vocoder job {job_id!r} was fed after finish")
        if codes.ndim != 2:
            raise BadInputError(f"codes must be [n, n_quantizers], got {list(codes.shape)}")
        self._decoder.check_codes(codes)
        n_left_out = min(job.n_left_out, len(codes))
        codes = codes[n_left_out:]
        n_pending, cap = job.n_pending, self._config.max_buffered_frames
        if n_pending + len(codes) > cap:
            raise CapacityError(
                f"vocoder job {job_id!r}: {n_pending} + {len(codes)} frames exceed {cap}"
            )
        job.n_left_out -= n_left_out
        job.append(codes.cpu())
        self._note_readiness(job)

    def end_utterance(self, job_id: str) -> None:
        """The frames so far end here; those that follow are decoded apart from them."""
        job = self._job(job_id)
        self._add_tail(job)
        job.later.append(self._no_frames())
        self._go_on(job)
        self._note_readiness(job)

    def finish(self, job_id: str) -> None:
        """No more frames will come; `step` flushes the rest. Idempotent."""
        job = self._job(job_id)
        if not job.is_finished:
            self._add_tail(job)
        job.is_finished = True
        self._go_on(job)
        self._note_readiness(job)

    def cancel(self, job_id: str) -> None:
        """Drop a job. Idempotent: an interruption may race with the last chunk."""
        self._jobs.pop(job_id, None)

    def step(self) -> list[VocoderChunk]:
        """Decode one batch around the most urgent chunk. Empty if no chunk is ready.

        If the decoder raises, no job has changed.
        """
        batch = self.begin()
        if batch is None:
            return []
        try:
            pcm = batch.launch().pcm()
        except BaseException:
            self._decoding.remove(batch)
            raise
        return self.end(batch, pcm)

    def begin(self) -> VocoderBatch | None:
        """Choose the next batch, which may be launched and awaited in other threads; then call
        `end`. None: no chunk is ready, or as many batches are decoded as may be.

        Meanwhile jobs may be opened, fed, finished and cancelled, and batches of other shapes may
        begin. Chunks of the same shape gather for the next one.
        """
        if len(self._decoding) >= self._config.max_in_flight:
            return None
        jobs = self._pick_batch()
        if not jobs:
            return None
        contended = self._is_contended
        codes = [job.pending[: self._chunk_frames(job, contended)] for job in jobs]
        shape = self._chunk_shape(jobs[0], contended)
        batch = VocoderBatch(self._decoder, jobs, codes if len(codes[0]) else None, shape)
        self._decoding.append(batch)
        return batch

    @property
    def is_decoding(self) -> bool:
        return bool(self._decoding)

    def due_s(self) -> float | None:
        """Time by which the next batch should begin; None: no chunk is ready."""
        dues_s = [self._due_s(job) for job in self._ready()]
        return max(0.0, min(dues_s)) if dues_s else None

    def end(self, batch: VocoderBatch, pcm: list[bytes]) -> list[VocoderChunk]:
        """Account for a decoded batch; chunks of jobs cancelled meanwhile are dropped."""
        self._decoding.remove(batch)
        sizes = [0] * len(batch.jobs) if batch.codes is None else [*map(len, batch.codes)]
        n_flex = sum(n for job, n in zip(batch.jobs, sizes, strict=True) if job.flex)
        n_heard = sum(sizes) - n_flex
        waits = any(job.flex for job in self._ready())
        self._flex_debt = self._flex_debt.after(n_heard, n_flex, waits, self._flex)
        return [
            self._emit(job, data, n_frames)
            for job, data, n_frames in zip(batch.jobs, pcm, sizes, strict=True)
            if self._jobs.get(job.job_id) is job
        ]

    def _job(self, job_id: str) -> _Job:
        if job_id not in self._jobs:
            raise UnknownJobError(f"vocoder job {job_id!r} is not open")
        return self._jobs[job_id]

    def _no_frames(self) -> Tensor:
        return torch.empty(0, self._decoder.n_quantizers, dtype=torch.int64)

    def _add_tail(self, job: _Job) -> None:
        """Let the decoder know the end of the utterance that may grow, if it has any frame."""
        if job.later[-1].numel() if job.later else job.is_begun or job.pending.numel():
            shape = (self._decoder.n_tail_frames, self._decoder.n_quantizers)
            job.append(torch.full(shape, END_CODE))

    def _go_on(self, job: _Job) -> None:
        """Begin the next utterance, if no frame of the current one is left to be decoded."""
        while job.later and not len(job.pending):
            job.pending = job.later.pop(0)
            job.utterance += 1
            job.n_done = 0
            if job.is_begun:
                job.stream = self._new_stream(job.voice, job.speaker)
                job.n_chunks = 0

    def _new_stream(self, voice: str, speaker: np.ndarray | None) -> Any:
        if isinstance(self._decoder, VoiceDecoder):
            brought = [] if speaker is None else [speaker]
            return self._decoder.new_stream(voice, *brought)
        return self._decoder.new_stream()

    def _rule(self, job: _Job) -> ChunkRule | None:
        """None: chunks of any size sound alike."""
        return job.stream.rule if isinstance(self._decoder, VoiceDecoder) else None

    def _wanted_frames(self, job: _Job) -> int:
        """Frames that make the next chunk ready."""
        config, rule = self._config, self._rule(job)
        if rule is not None:
            return rule.frames(job.n_chunks)
        if job.each_frame:
            return 1
        if job.n_silent:
            return min(job.n_silent, config.flex_chunk_frames, config.max_buffered_frames)
        if job.flex:
            return min(config.flex_chunk_frames, config.max_buffered_frames)
        is_short = job.ahead.is_short(self._clock.now_s())
        return config.first_chunk_frames if is_short else config.chunk_frames

    def _chunk_shape(self, job: _Job, contended: bool) -> tuple[bool, int]:
        """Return what must be equal in a batch: later chunk of a stream or first, and its
        frames. With a rule: whether it has frames, and the magnitude of its whole stream, so that
        no shorter one is padded to more than twice its length."""
        n_frames = self._chunk_frames(job, contended)
        if self._rule(job) is None:
            return job.is_begun, n_frames
        return n_frames > 0, (job.stream.n_frames + n_frames).bit_length()

    def _chunk_frames(self, job: _Job, contended: bool) -> int:
        """Frames of its next chunk.

        contended: a heard chunk is ready, so that one of flex is no longer than it may be.
        """
        config, n_pending = self._config, len(job.pending)
        if self._rule(job) is not None:
            wanted = self._wanted_frames(job)
            is_last = job.is_complete and n_pending - self._decoder.n_tail_frames < wanted
            return n_pending if is_last else wanted
        if job.each_frame:
            return min(1, n_pending)
        if job.n_silent:
            return min(self._wanted_frames(job), n_pending)
        if job.flex:
            wanted = config.chunk_frames if contended else self._wanted_frames(job)
            return min(wanted, n_pending)
        small, large = config.first_chunk_frames, config.chunk_frames
        is_first = not job.ahead.has_sound
        ends = job.is_complete
        return chunk_frames(n_pending, small, large, is_first=is_first, ends=ends)

    def _note_readiness(self, job: _Job) -> None:
        is_ready = job.is_complete or len(job.pending) >= self._wanted_frames(job)
        if is_ready and job.ready_s is None:
            job.ready_s = self._clock.now_s()

    def _ready(self) -> list[_Job]:
        return [job for job in self._jobs.values() if job.ready_s is not None]

    @property
    def _is_contended(self) -> bool:
        return any(not job.flex for job in self._ready())

    def _pick_batch(self) -> list[_Job]:
        """Return the most urgent job and those whose chunks have its shape, by urgency."""
        ready, contended = self._ready(), self._is_contended
        if self._decoding:
            busy = {job.job_id for batch in self._decoding for job in batch.jobs}
            shapes = {batch.shape for batch in self._decoding}
            ready = [
                job
                for job in ready
                if job.job_id not in busy and self._chunk_shape(job, contended) not in shapes
            ]
        ready.sort(key=lambda job: (self._due_s(job), job.ready_s))
        if contended:
            n_due = self._flex_debt.n_due(self._config.chunk_frames)
            due = {job.job_id for job in [job for job in ready if job.flex][:n_due]}
            ready = [job for job in ready if not job.flex or job.job_id in due]
        if not ready:
            return []
        shape = self._chunk_shape(ready[0], contended)
        alike = [job for job in ready if self._chunk_shape(job, contended) == shape]
        return alike[: self._config.max_batch]

    def _due_s(self, job: _Job) -> float:
        """Time by which a ready chunk should begin. A user who has heard nothing waits; one who
        has heard much has audio left."""
        assert job.ready_s is not None
        if not job.flex:
            return job.ahead.due_s(job.ready_s)
        is_overdue = self._flex_debt.is_overdue(self._config.chunk_frames, self._flex)
        return -math.inf if is_overdue else self._clock.now_s() + SHORT_BELOW_S

    def _emit(self, job: _Job, pcm: bytes, n_frames: int) -> VocoderChunk:
        job.pending = job.pending[n_frames:]
        job.n_chunks += n_frames > 0
        job.n_done += n_frames
        place = SoundPlace(job.utterance, job.n_done)
        if job.n_silent:
            job.n_silent -= n_frames
            pcm = b""
        if pcm:
            job.ahead.made(self._clock.now_s(), len(pcm) / 2 / OUTPUT_RATE_HZ)
        job.ready_s = None
        self._go_on(job)
        is_last = job.is_finished and job.n_pending == 0
        if is_last:
            del self._jobs[job.job_id]
        else:
            self._note_readiness(job)  # behind all jobs that are ready
        return VocoderChunk(job.job_id, pcm, n_frames, is_last, place)
