"""Records when each batch of an engine was chosen, began on the device and was done there.

On a GPU by events in the stream of the forward pass, so that a batch that is replayed from a graph
has its time, too; on a CPU by the clock.
In: LAB_BATCH_CLOCK, a folder. Out: STAGE.jsonl there, one Batch per line, in the order of launches.
A line is written when a later batch is launched.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lab.attachment import around, sglangs_scheduler
from sglang_live.attachment import ATTACH_ENV
from sglang_live.engine_channel.inbox import STAGE_ENV

BATCH_CLOCK_ENV = "LAB_BATCH_CLOCK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Times are of time.monotonic().

    Attributes:
        is_decode: whether it computes one token of each stream; otherwise it is a prefill.
        kv_tokens: of the streams of a decode round, in all.
        n_tokens, audio_s: of a prefill.
        chosen_s: the scheduler begins to launch it.
    """

    is_decode: bool
    n_streams: int
    kv_tokens: int
    n_tokens: int
    audio_s: float
    chosen_s: float
    began_s: float
    done_s: float

    @property
    def ms(self) -> float:
        return 1e3 * (self.done_s - self.began_s)


class HostMarks:
    """Marks of a device that computes in the calls themselves."""

    def mark(self) -> float:
        return time.monotonic()

    def at_s(self, mark: float) -> float | None:
        return mark


class CudaMarks:
    """Events in the current stream."""

    def __init__(self) -> None:
        self._first: Any = None
        self._first_s = 0.0

    def mark(self) -> Any:
        if self._first is None:
            torch.cuda.synchronize()
            self._first = self._record()
            self._first.synchronize()
            self._first_s = time.monotonic()
        return self._record()

    def at_s(self, mark: Any) -> float | None:
        """None: the device has not come there yet."""
        if not mark.query():
            return None
        return self._first_s + float(self._first.elapsed_time(mark)) / 1e3

    def _record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class BatchClock:
    def __init__(self, path: Path, marks: Any):
        self._path = path
        self._marks = marks
        self._facts: dict[str, Any] | None = None  # of the batch that is being launched
        self._in_flight = deque[dict[str, Any]]()

    def run_batch(
        self, run: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **named: Any
    ) -> Any:
        """Around Scheduler.run_batch."""
        self._write_done()
        facts = facts_of(batch)
        if facts is None:
            return run(scheduler, batch, *args, **named)
        self._facts = facts | {"chosen_s": time.monotonic()}
        result = run(scheduler, batch, *args, **named)
        if scheduler.enable_overlap:
            with scheduler.forward_stream_ctx:
                self._facts["done_s"] = self._marks.mark()
        else:
            self._facts["done_s"] = self._marks.mark()
        self._in_flight.append(self._facts)
        self._facts = None
        return result

    def forward(self, forward: Callable[..., Any], runner: Any, *args: Any, **named: Any) -> Any:
        """Around ModelRunner.forward."""
        if self._facts is not None and "began_s" not in self._facts:
            self._facts["began_s"] = self._marks.mark()
        return forward(runner, *args, **named)

    def _write_done(self) -> None:
        lines = []
        while self._in_flight:
            facts = self._in_flight[0]
            times = {name: self._marks.at_s(facts[name]) for name in ("began_s", "done_s")}
            if None in times.values():
                break
            self._in_flight.popleft()
            lines.append(json.dumps(asdict(Batch(**(facts | times)))) + "\n")
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)


def facts_of(batch: Any) -> dict[str, Any] | None:
    """What SGLang's batch computes; None: nothing that is measured."""
    # Imported where SGLang runs: readers of the record do without it.
    from sglang_live.bridge.scheduler.batch_times import encoded_audio_s

    facts = {"n_streams": len(batch.reqs), "kv_tokens": 0, "n_tokens": 0, "audio_s": 0.0}
    if batch.forward_mode.is_decode():
        return facts | {"is_decode": True, "kv_tokens": int(batch.seq_lens_cpu.sum())}
    if batch.forward_mode.is_extend():
        n_tokens, audio_s = batch.extend_num_tokens, encoded_audio_s(batch)
        return facts | {"is_decode": False, "n_tokens": n_tokens, "audio_s": audio_s}
    return None


def environment(folder: Path) -> dict[str, str]:
    return {ATTACH_ENV: "lab.recorders.batch_clock:attach", BATCH_CLOCK_ENV: str(folder)}


def attach(place: str) -> None:
    stage = os.environ.get(STAGE_ENV)
    if place != "sglang" or stage not in ("thinker", "talker"):
        return
    from sglang.srt.model_executor.model_runner import ModelRunner

    marks = CudaMarks() if torch.cuda.is_available() else HostMarks()
    clock = BatchClock(Path(os.environ[BATCH_CLOCK_ENV]) / f"{stage}.jsonl", marks)
    around(sglangs_scheduler(), "run_batch", clock.run_batch)
    around(ModelRunner, "forward", clock.forward)


def read_batches(folder: Path, stage: str) -> list[Batch]:
    """Those that are written so far."""
    lines: list[str] = []
    with suppress(FileNotFoundError):
        lines = (folder / f"{stage}.jsonl").read_text("utf-8").splitlines()
    return [Batch(**json.loads(line)) for line in lines]


def launch_times_s(batches: list[Batch]) -> list[float]:
    """From the choice of a batch to its begin, of batches that found the device without work."""
    pairs = pairwise(batches)
    return [b.began_s - b.chosen_s for before, b in pairs if before.done_s <= b.chosen_s]
