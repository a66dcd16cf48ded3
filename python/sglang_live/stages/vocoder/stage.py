"""The vocoder stage: decodes codec frames of many jobs to PCM, in batches, in a worker thread."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from sglang_live.aio import result_with, vital
from sglang_live.bridge.platform import cpu
from sglang_live.engine_channel.device_turn import DeviceTurn
from sglang_live.errors import BadInputError, CapacityError
from sglang_live.messages import (
    HearRequest,
    Pcm,
    VocoderDone,
    VocoderEnd,
    VocoderFrames,
    VocoderRequest,
)
from sglang_live.models.codecs import END_CODE
from sglang_live.models.family import family_at, part
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport.server import ServedJob
from sglang_live.stages.vocoder.batcher import Decoding, VocoderBatch, VocoderEngine
from sglang_live.stages.vocoder.config import Precision, VocoderConfig
from sglang_live.stages.vocoder.decoders import VoiceDecoder
from sglang_live.stages.vocoder.hearing import Hearing

T = TypeVar("T")

log = logging.getLogger(__name__)

# Without a GPU a batch takes almost as long as its chunks one by one, and delays the next ones.
CPU_MAX_BATCH = 4
# Of chunks; a VoiceDecoder has a rule instead.
_SIZES = {"first_chunk_frames", "chunk_frames", "flex_chunk_frames"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Chunks of a job that wait for its consumer; with as many, none of its frames is read.
_MOST_UNSENT = 4
# Weight of the newest batch in the mean time of a batch.
_EMA = 0.1


class VocoderStage:
    def __init__(self, spec: StageSpec):
        on_cpu = cpu.is_active()
        if on_cpu:
            torch.set_num_threads(1)
        name = family_at(spec.family).decoder
        assert name is not None, "codes are decoded"
        defaults = {"max_batch": CPU_MAX_BATCH} if on_cpu else {}
        config = VocoderConfig(**(defaults | spec.engine_args))
        kind = part(name)
        decoder = kind.from_pretrained(
            spec.model_path,
            device=torch.device("cpu" if on_cpu else spec.device),
            dtype=torch.float32,
            **({"voices": Path(spec.voices)} if spec.voices else {}),
            **_precision(kind, config.precision, on_cpu),
        )
        if isinstance(decoder, VoiceDecoder) and (sizes := _SIZES & spec.engine_args.keys()):
            flags = ", ".join(f"--vocoder.{name.replace('_', '-')}" for name in sorted(sizes))
            raise BadInputError(f"{flags}: this model's decoder has sizes of its own for chunks")
        self._n_quantizers = decoder.n_quantizers
        on_graphs = not on_cpu and not config.disable_cuda_graph
        self._graphs = decoder.use_graphs(config.max_batch) if on_graphs else None
        self._engine, self._max_batch = VocoderEngine(decoder, config), config.max_batch
        encoder = getattr(decoder, "encoder", None)
        self._hearing = None if encoder is None else Hearing(encoder, config, self._compute)
        begin = cpu.begin_computing if on_cpu else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vocoder", initializer=begin)
        # Threads that wait for results on a device.
        self._waiters = ThreadPoolExecutor(config.max_in_flight, thread_name_prefix="vocoder-wait")
        self._outputs: dict[str, asyncio.Queue] = {}
        self._fed = asyncio.Event()
        # One that runs kernel by kernel leaves the device idle between them, where engines compute.
        has_turns = on_cpu or self._graphs is not None
        self._turn = DeviceTurn.from_env() if has_turns else None
        self._watched: int | None = None
        self._usual_s = 0.0  # mean time of the latest batches on the device
        self._stepped = asyncio.Condition()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        # Without graphs a chunk in a voice takes too long for each number of streams.
        most_voices = 1 if self._graphs is None else self._max_batch
        await loop.run_in_executor(self._worker, self._engine.warm_up, most_voices)
        if self._graphs is not None:
            self._graphs.freeze()
            log.info("vocoder_graphs %s", self._graphs.counts)
        self._stepping = vital(self._step_forever(), "vocoder steps")
        if self._hearing is not None:
            await self._hearing.start()

    async def run(self, job: ServedJob) -> None:
        request = job.opener
        if isinstance(request, HearRequest):
            await self._hearing_of_users().run(job)
            return
        assert isinstance(request, VocoderRequest)
        self._engine.open(  # raises if it is full
            job.job_id,
            voice=request.voice,
            speaker=np.frombuffer(request.speaker, "<f4") if request.speaker else None,
            flex=request.flex,
            each_frame=request.each_frame,
            sent=request.sent,
        )
        outputs = self._outputs[job.job_id] = asyncio.Queue()  # _feed_when_room bounds it
        feeding = asyncio.create_task(self._feed(job))
        try:
            while True:
                chunk = await result_with(outputs.get(), feeding)
                if outputs.qsize() == _MOST_UNSENT - 1:
                    await self._tell_room()
                if chunk.pcm:
                    await job.send(Pcm(job.job_id, chunk.pcm, place=chunk.place))
                if chunk.is_last:
                    break
        finally:
            feeding.cancel()
            self._engine.cancel(job.job_id)
            self._outputs.pop(job.job_id, None)
        await job.send(VocoderDone(job.job_id))

    async def close_session(self, session_id: str) -> None:
        """A vocoder keeps nothing between jobs."""

    def _hearing_of_users(self) -> Hearing:
        if self._hearing is None:
            raise BadInputError("this model's codec does not encode")
        return self._hearing

    async def _compute(self, work: Callable[[], T]) -> T:
        """Run in the thread that decodes, behind what it does."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def load(self) -> dict[str, float]:
        graphs = {} if self._graphs is None else self._graphs.counts
        counts = {f"graph_{name}": float(n) for name, n in graphs.items()}
        turns = {} if self._turn is None else self._turn.counts
        heard = {} if self._hearing is None else self._hearing.load()
        return {"streams": float(len(self._outputs)), **counts, **turns, **heard}

    async def _feed(self, job: ServedJob) -> None:
        assert isinstance(job.opener, VocoderRequest)
        sent = job.opener.sent
        n_before = 0 if sent is None else sent.utterance  # utterances that have sounded
        async for message in job.inputs():
            if isinstance(message, VocoderFrames):
                codes = np.frombuffer(message.codes, dtype="<i2").reshape(-1, self._n_quantizers)
                n_ends = int((codes[:, 0] == END_CODE).sum())
                codes, n_before = _behind(codes, n_before), max(0, n_before - n_ends)
                await self._feed_codes(job.job_id, torch.from_numpy(codes.astype(np.int64)))
            elif isinstance(message, VocoderEnd):
                self._engine.finish(job.job_id)
                self._fed.set()
                return
            self._fed.set()

    async def _feed_codes(self, job_id: str, codes: torch.Tensor) -> None:
        begin = 0
        for end in (codes[:, 0] == END_CODE).nonzero().flatten().tolist():
            await self._feed_when_room(job_id, codes[begin:end])
            self._engine.end_utterance(job_id)
            begin = end + 1
        await self._feed_when_room(job_id, codes[begin:])

    async def _feed_when_room(self, job_id: str, codes: torch.Tensor) -> None:
        # Until there is room no message is read, which slows the sender down.
        outputs = self._outputs[job_id]
        async with self._stepped:
            await self._stepped.wait_for(lambda: outputs.qsize() < _MOST_UNSENT)
        while True:
            try:
                return self._engine.feed(job_id, codes)
            except CapacityError:
                async with self._stepped:
                    await self._stepped.wait()

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as results:
            while True:
                batch = self._engine.begin() if self._may_begin() else None
                if batch is None:
                    self._fed.clear()
                    await self._fed.wait()
                    continue
                decoding = await loop.run_in_executor(self._worker, batch.launch)
                if decoding.arrived is None:
                    self._release()
                    await self._end(batch, decoding.pcm())
                else:
                    results.create_task(self._end_when_done(batch, decoding))

    async def _end_when_done(self, batch: VocoderBatch, decoding: Decoding) -> None:
        launched_s = time.monotonic()
        if self._turn is not None:
            self._turn.ends_at(launched_s + self._usual_s)
        loop = asyncio.get_running_loop()
        pcm = await loop.run_in_executor(self._waiters, decoding.pcm)
        self._usual_s += _EMA * (time.monotonic() - launched_s - self._usual_s)
        self._release()
        await self._end(batch, pcm)
        self._fed.set()

    def _may_begin(self) -> bool:
        """Whether the device is this stage's, if it has it by turns; if not, ask for it."""
        if self._turn is None:
            return True
        due_s = self._engine.due_s()
        if due_s is None:
            self._turn.release()
            return False
        if self._engine.is_decoding:
            return False
        self._turn.ask(due_s)
        self._watch(self._turn)
        return self._turn.poll()

    def _watch(self, turn: DeviceTurn) -> None:
        """Have a grant go on with the stepping."""
        now = None if turn.socket is None else turn.socket.fileno()
        if now != self._watched:
            loop = asyncio.get_running_loop()
            if self._watched is not None:
                loop.remove_reader(self._watched)
            if now is not None:
                loop.add_reader(now, self._fed.set)
            self._watched = now

    def _release(self) -> None:
        if self._turn is not None:
            self._turn.release()

    async def _end(self, batch: VocoderBatch, pcm: list[bytes]) -> None:
        for chunk in self._engine.end(batch, pcm):
            if (outputs := self._outputs.get(chunk.job_id)) is not None:
                outputs.put_nowait(chunk)
        await self._tell_room()

    async def _tell_room(self) -> None:
        async with self._stepped:
            self._stepped.notify_all()


def _precision(kind: Any, precision: Precision, on_cpu: bool) -> dict[str, torch.dtype]:
    """What from_pretrained is given beside the usual type.

    Raises:
        BadInputError: it would have no effect.
    """
    if precision == "float32":
        return {}
    if not getattr(kind, "has_flow", False):
        raise BadInputError(f"--vocoder.precision {precision}: this model's decoder has no flow")
    if precision != "tf32":
        return {"flow_dtype": _DTYPES[precision]}
    if on_cpu:
        raise BadInputError("--vocoder.precision tf32: a CPU has none")
    torch.backends.cuda.matmul.allow_tf32 = True  # of the whole process, which decodes alone
    return {}


def _behind(codes: np.ndarray, n_utterances: int) -> np.ndarray:
    """The rows behind the first n_utterances ends; none if there are fewer ends."""
    ends = np.flatnonzero(codes[:, 0] == END_CODE)
    if n_utterances > len(ends):
        return codes[:0]
    return codes[ends[n_utterances - 1] + 1 :] if n_utterances else codes
