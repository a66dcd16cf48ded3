"""Records each batch of an engine on a modelled device, for a test.

The rates that a RateMeter finds depend on when the machine notices a batch's end, which two busy
cores do late. With the record a test knows what the meter was told, and what it would have been
told on time, and needs no assumption about the machine's speed.
In: SGLANG_LIVE_BATCH_RECORD, a file. Out: one BatchRecord per line, as JSON, in the order of the
arrivals.
"""

import json
import os
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_live.bridge.batch_work import BatchWork, Launch
from sglang_live.bridge.modelled.clock import Work
from sglang_live.bridge.rate_meter import RateMeter

BATCH_RECORD_ENV = "SGLANG_LIVE_BATCH_RECORD"


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Times are of time.monotonic().

    Attributes:
        launched_s, arrived_s: what the meter was told.
        began_s, done_s: on the device.
    """

    work: BatchWork
    launched_s: float
    arrived_s: float
    began_s: float
    done_s: float


class BatchRecorder:
    """Appends the batches that a process books to a file."""

    def __init__(self, path: Path):
        self._path, self._in_flight = path, deque[Work]()

    def launched(self, work: Work) -> None:
        """Note the device's times of a batch. Results arrive in the order of launches."""
        self._in_flight.append(work)

    def arrived(self, launch: Launch, now_s: float) -> None:
        device = self._in_flight.popleft()
        times = launch.at_s, now_s, device.began_s, device.done_s
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(BatchRecord(launch.work, *times))) + "\n")


def batch_recorder() -> BatchRecorder | None:
    """A recorder that is told of all arrivals, if the environment names a file.

    To be called once in a process.
    """
    path = os.environ.get(BATCH_RECORD_ENV)
    if not path:
        return None
    recorder, book = BatchRecorder(Path(path)), RateMeter.arrived

    def book_and_record(meter: RateMeter, launch: Launch, now_s: float) -> None:
        recorder.arrived(launch, now_s)
        book(meter, launch, now_s)

    RateMeter.arrived = book_and_record  # type: ignore[method-assign, assignment]
    return recorder


def read_record(path: Path) -> list[BatchRecord]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [BatchRecord(**{**row, "work": BatchWork(**row["work"])}) for row in rows]
