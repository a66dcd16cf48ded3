"""One piece of speech as one request of an engine, and its frames as they come.

In: prompts of pieces. Out: their frames. Owner: PieceStage, which has one of these for its model.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from sglang_live.messages import (
    Feed,
    ForgetStates,
    Frames,
    TalkerForget,
    TalkerPrompt,
    TalkerStates,
    TalkerText,
)
from sglang_live.models.piece_talker import FrameTalker, StockTalker, WrongCodeError
from sglang_live.stages.engine_host import EngineHost
from sglang_live.stages.talker.mixed_text import MixedText
from sglang_live.stages.talker.response import FrameQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRequest:
    """
    text: that the prompt has; mixed: or that which it begins.
    rows: see PiecePrompt.
    temperature: None: the model's.
    most_frames: after which the piece has missed its end.
    """

    rid: str
    text: str
    prompt: list[int]
    seed: int
    temperature: float | None
    most_frames: int
    mixed: MixedText | None = None
    rows: np.ndarray | None = None


# Frames that have come, and how the request has finished; "" before.
PieceFrames = AsyncGenerator[tuple[list[list[int]], str], None]


class PieceEngine(Protocol):
    """
    Attributes:
        counts: by name, for the stage's load.
    """

    counts: dict[str, float]

    def frames(self, request: PieceRequest) -> PieceFrames:
        """Speak a piece. Closing early aborts it.

        Raises:
            StageFailedError: the engine refused or aborted it, or wrote what is no frame.
        """
        ...

    def take(self, report: Frames) -> None:
        """Frames that the scheduler reports."""
        ...


class StockPieces:
    """A PieceEngine of a model that SGLang serves by itself: its ids are codes."""

    def __init__(self, host: EngineHost, model: StockTalker):
        self._host = host
        self._model = model
        self.counts = {"codes_refused": 0.0}

    async def frames(self, request: PieceRequest) -> PieceFrames:
        model = self._model
        sampling = {
            **model.sampling,
            "stop_token_ids": list(model.stop_ids),
            "sampling_seed": request.seed,
            "max_new_tokens": min(
                _room(self._host, request), model.steps_per_frame * request.most_frames + 1
            ),
        }
        if request.temperature is not None:
            sampling["temperature"] = request.temperature
        reader, n_read = model.frames(), 0
        stream = self._host.stream(request.rid, input_ids=request.prompt, sampling_params=sampling)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                reason = chunk["meta_info"]["finish_reason"]
                found = chunk["output_ids"][n_read:]
                n_read += len(found)
                if reason is not None and found and found[-1] in model.stop_ids:
                    del found[-1]
                try:
                    frames = reader.add(found)
                except WrongCodeError:
                    self.counts["codes_refused"] += 1
                    raise
                yield frames, "" if reason is None else reason["type"]

    def take(self, report: Frames) -> None:
        raise AssertionError("its scheduler reports no frames")


class OwnPieces:
    """A PieceEngine of a model class of the family's own, which draws frames by itself."""

    def __init__(self, host: EngineHost, model: FrameTalker, feed: Callable[[Feed], None]):
        """feed: sends a message to the scheduler."""
        self._host = host
        self._model = model
        self._feed = feed
        self._queues: dict[str, FrameQueue] = {}
        self._states_ids = count(1)
        self.counts: dict[str, float] = {}

    async def frames(self, request: PieceRequest) -> PieceFrames:
        model, rid, mixed, rows = self._model, request.rid, request.mixed, request.rows
        lent: list[int] = []
        if rows is not None:
            lent = [next(self._states_ids)]
            self._feed(TalkerStates(lent[0], rows.dtype.str, len(rows), rows.tobytes()))
        self._feed(
            TalkerPrompt(
                rid,
                prompt_len=len(request.prompt),
                seed=request.seed,
                greedy=request.temperature == 0,
                temperature=request.temperature or model.temperature,
                penalty=model.repetition_penalty,
                least_frames=0 if mixed else model.least_frames(request.text),
                block=mixed.voice.block if mixed else -1,
                audio_at=[] if rows is None else list(range(len(rows))),
                states=lent,
            )
        )
        if lent:
            self._feed(ForgetStates(lent))  # the request has its own
        if mixed:
            mixed.pass_to(lambda ids, done: self._feed(TalkerText(rid, ids, done)))
        else:
            self._feed(TalkerText(rid, [], done=True))
        queue = self._queues[rid] = FrameQueue()
        # The model samples by itself, with the piece's seed; at temperature 0 SGLang takes its
        # choice.
        n_most = min(_room(self._host, request), model.lag_steps + request.most_frames + 1)
        sampling = {"max_new_tokens": n_most, "temperature": 0.0}
        try:
            stream = self._host.stream(rid, input_ids=request.prompt, sampling_params=sampling)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    ids, reason = chunk["output_ids"], chunk["meta_info"]["finish_reason"]
                    # Of one that is retracted at once a chunk without ids can come.
                    n_frames = len(ids) - model.lag_steps - (ids[-1:] == [model.end_id])
                    await queue.expect(max(0, n_frames))
                    while frames := await queue.next():
                        yield frames, ""
                    if reason is not None:
                        yield [], reason["type"]
        finally:
            if mixed:
                mixed.pass_to(None)
            del self._queues[rid]
            self._feed(TalkerForget(rid))

    def take(self, report: Frames) -> None:
        for rid, index, codes in zip(report.rids, report.index, report.codes, strict=True):
            # Also the frames of cancelled jobs.
            if (queue := self._queues.get(rid)) is not None:
                queue.put(index, codes)


def _room(host: EngineHost, request: PieceRequest) -> int:
    """Tokens that the context takes behind the prompt; the engine refuses without any."""
    return max(1, host.context_tokens - len(request.prompt) - 1)
