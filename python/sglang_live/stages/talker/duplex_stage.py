"""The talker stage of a model that hears while it speaks: one endless request is a whole call.

In: the user's frames of codes, as they come. Out: a frame of the model for each. A step whose frame
of the user has not come is blocked, as one without text is for other talkers.
KV of a call is its prompt and its newest frames. What it can have at most is reserved when it
begins, so that no call is retracted: KV behind dropped frames cannot be computed again.
"""

import asyncio
import logging
import os
from contextlib import aclosing
from pathlib import Path

import numpy as np

from sglang_live import ids
from sglang_live.aio import result_with, vital
from sglang_live.engine_channel.inbox import (
    INBOX_ENV,
    OUTBOX_ENV,
    POLICIES_ENV,
    STEPS_ENV,
    steps_text,
)
from sglang_live.errors import BadInputError, CapacityError, StageFailedError
from sglang_live.ids import SPEAK_PREFIX, WARM_UP
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import (
    DuplexFrames,
    DuplexRequest,
    Frames,
    HeardFrame,
    PolicyReport,
    TalkerForget,
    TalkerPrompt,
    TalkerText,
)
from sglang_live.models.duplex_talker import DuplexTalker
from sglang_live.stages.engine_host import EXTERNAL_MODELS_ENV, EngineHost
from sglang_live.stages.engine_link import FeedSocket, PolicyTotals, Reports
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport.server import ServedJob

log = logging.getLogger(__name__)

MAX_RUNNING = 32
# One compaction drops at least this number of frames: 5 s.
SLACK_FRAMES = 64
# Frames of the user that may wait for their step. One who sends more at once is not in real time.
MOST_AHEAD = 64
# Of a row, beside the model's context: frames that wait, and whole pages.
_SPARE_FRAMES = 512
# Without a window of its own a call still has this one at least.
_LEAST_WINDOW = 8


class DuplexStage:
    def __init__(self, spec: StageSpec, model: DuplexTalker):
        inbox, outbox = spec.socket_path("inbox"), spec.socket_path("outbox")
        self.model = model
        os.environ |= {
            INBOX_ENV: inbox,
            OUTBOX_ENV: outbox,
            # All calls are due at the same time, one step of each per frame: nothing to order.
            POLICIES_ENV: "",
            STEPS_ENV: steps_text(model.frame_s, 1),
            EXTERNAL_MODELS_ENV: model.external_models,
        }
        args = dict(spec.engine_args)
        n_running = args.setdefault("max_running_requests", MAX_RUNNING)
        n_frames = model.context_frames + _SPARE_FRAMES
        self.host = EngineHost(
            spec,
            {
                "skip_tokenizer_init": True,
                # All ids so far, at each of them, would be a copy that grows for hours.
                "incremental_streaming_output": True,
                **model.engine_args(Path(spec.cache_dir), n_running + 2, n_frames),
                **args,
            },
        )
        self.engine = self.host.engine
        self._outbox = outbox
        self._feed = FeedSocket(inbox)
        self._calls: dict[str, _Call] = {}
        self._totals = PolicyTotals()
        self._counts = {"frames": 0.0, "calls_refused": 0.0}

    async def start(self) -> None:
        self._reader = vital(self._read_reports(), "read reports")
        rid, prompt = (
            ids.new_rid(SPEAK_PREFIX, WARM_UP),
            self.model.prompt(self.model.voices[0], ""),
        )
        self._feed.send(TalkerPrompt(rid, prompt_len=len(prompt), seed=0, greedy=False))
        silence = [[0] * self.model.n_heard] * 4
        self._feed.send(TalkerText(rid, [], done=True, heard=silence))
        sampling = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        await self.host.run(rid, input_ids=prompt, sampling_params=sampling)
        self._feed.send(TalkerForget(rid))
        await self.host.freeze()
        self.host.watch_over()

    async def run(self, job: ServedJob) -> None:
        request = job.opener
        assert isinstance(request, DuplexRequest)
        prompt = self.model.prompt(request.voice, request.role)
        call = _Call(self.model, request, len(prompt), self._page_size)
        self._reserve(call)
        rid = ids.new_rid(SPEAK_PREFIX, job.job_id)
        self._calls[rid] = call
        self._announce(rid, request, call)
        reading = asyncio.create_task(self._read(job, rid, call))
        sending = asyncio.create_task(call.send(job))
        try:
            await result_with(self._step_forever(rid, prompt), reading, sending)
        finally:
            for task in (reading, sending):
                task.cancel()
            await asyncio.gather(reading, sending, return_exceptions=True)
            del self._calls[rid]
            self._feed.send(TalkerForget(rid))

    async def close_session(self, session_id: str) -> None:
        """It keeps nothing of a session."""

    def load(self) -> dict[str, float]:
        own = {"replies": float(len(self._calls)), **self._counts}
        reserved = {"kv_tokens_reserved": float(self._reserved_tokens)}
        return {**self.host.load(), **self._totals.load(), **own, **reserved}

    # --- memory ---

    @property
    def _page_size(self) -> int:
        return int(self.engine.server_args.page_size or 1)

    @property
    def _reserved_tokens(self) -> int:
        return sum(call.most_tokens for call in self._calls.values())

    def _reserve(self, call: "_Call") -> None:
        """Raises CapacityError if the pool could not hold all that the call may need."""
        room = self.host.load().get("kv_tokens_total", 0.0) - self._reserved_tokens
        if call.most_tokens > room:
            self._counts["calls_refused"] += 1
            raise CapacityError(
                f"the talker has {len(self._calls)} calls, and memory for {room:.0f} tokens more; "
                f"this one may need {call.most_tokens}"
            )

    # --- a call ---

    def _announce(self, rid: str, request: DuplexRequest, call: "_Call") -> None:
        self._feed.send(
            TalkerPrompt(
                rid,
                prompt_len=call.prompt_len,
                seed=request.seed,
                greedy=request.temperature == 0,
                temperature=request.temperature or self.model.temperature,
                window_frames=call.window_frames,
                slack_frames=SLACK_FRAMES,
                codes=call.own.tobytes(),
                n_frames=len(call.own),
            )
        )
        if len(call.heard):
            self._feed.send(TalkerText(rid, [], heard=call.heard.tolist()))

    async def _step_forever(self, rid: str, prompt: list[int]) -> None:
        room = self.host.context_tokens - len(prompt) - 1
        sampling = {"max_new_tokens": room, "temperature": 0.0, "ignore_eos": True}
        stream = self.host.stream(rid, input_ids=prompt, sampling_params=sampling)
        states = self.engine.tokenizer_manager.rid_to_state
        async with aclosing(stream) as chunks:
            async for _ in chunks:
                if (state := states.get(rid)) is not None:
                    state.output_ids.clear()  # frames come through the scheduler's reports
        raise StageFailedError("the engine has ended a call")

    async def _read(self, job: ServedJob, rid: str, call: "_Call") -> None:
        async for message in job.inputs():
            if isinstance(message, HeardFrame):
                codes = np.frombuffer(message.codes, "<i2").tolist()
                call.check(codes)
                self._feed.send(TalkerText(rid, [], heard=[codes]))
        # Nothing else ends a call.
        await asyncio.Event().wait()

    async def _read_reports(self) -> None:
        async for report in Reports(self._outbox):
            if isinstance(report, Frames):
                for rid, index, codes in zip(report.rids, report.index, report.codes, strict=True):
                    if (call := self._calls.get(rid)) is not None:
                        self._counts["frames"] += 1
                        call.put(index, codes)
            elif isinstance(report, PolicyReport):
                self._totals.take(report)


class _Call:
    """
    Attributes:
        own, heard: the frames behind which it goes on, [n, 1 + n_codes] and [m, n_heard] int16.
        window_frames: of its KV.
        most_tokens: that its KV can have.
    """

    def __init__(
        self, model: DuplexTalker, request: DuplexRequest, prompt_len: int, page_size: int
    ):
        self._model = model
        self.prompt_len = prompt_len
        most = model.context_frames - prompt_len - SLACK_FRAMES
        self.window_frames = max(_LEAST_WINDOW, min(request.window_frames or most, most))
        n_known = min(request.n_frames, self.window_frames)
        own = np.frombuffer(request.own, "<i2").reshape(request.n_frames, 1 + model.n_codes)
        self.own = own[request.n_frames - n_known :]
        heard = np.frombuffer(request.heard, "<i2").reshape(-1, model.n_heard)
        self.heard = heard[request.n_frames - n_known :]
        bound = RetentionConfig(
            sink_tokens=prompt_len, window_tokens=self.window_frames, slack_tokens=SLACK_FRAMES
        )
        self.most_tokens = prompt_len + bound.most_frames(page_size)
        self._next, self._n_heard = n_known, len(self.heard)
        self._before: list[int] | None = self.own[-1].tolist() if n_known else None
        self._ready: asyncio.Queue[DuplexFrames] = asyncio.Queue()  # bounded by what is heard
        self._job_id = request.job_id

    def check(self, codes: list[int]) -> None:
        """A frame of the user that has come. Raises BadInputError if it cannot be one."""
        if len(codes) != self._model.n_heard:
            raise BadInputError(
                f"a frame of the user has {self._model.n_heard} codes, got {len(codes)}"
            )
        self._n_heard += 1
        if self._n_heard - self._next > MOST_AHEAD:
            raise BadInputError(f"more than {MOST_AHEAD} frames of the user are ahead of the call")

    def put(self, index: int, codes: list[int]) -> None:
        if index < self._next:
            return  # the engine reports the newest one that it prefills
        if index != self._next:
            # A frame is reported once and in order; any error would be audible.
            raise AssertionError(f"frame {index} came, {self._next} was next")
        self._next += 1
        frame = np.asarray(codes, "<i2").tobytes()
        text = self._model.text(codes[0])
        self._ready.put_nowait(DuplexFrames(self._job_id, frame, self._sound(codes), text))

    def _sound(self, codes: list[int]) -> bytes:
        """Delayed codes belong to the sound of the frame before."""
        before, self._before = self._before, codes
        if before is None:
            return b""
        whole = [
            new if delay else old
            for delay, old, new in zip(self._model.delays, before[1:], codes[1:], strict=True)
        ]
        return np.asarray(whole, "<i2").tobytes()

    async def send(self, job: ServedJob) -> None:
        while True:
            await job.send(await self._ready.get())
