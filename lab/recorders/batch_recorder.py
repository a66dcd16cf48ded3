"""Records each batch of an engine on a modelled device, for a test.

The rates that a RateMeter finds depend on when the machine notices a batch's end, which two busy
cores do late. With the record a test knows what the meter was told, and what it would have been
told on time, and needs no assumption about the machine's speed.
In: LAB_BATCH_RECORD, a file. Out: one BatchRecord per line, as JSON, in the order of the
arrivals.
"""

import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.attachment import around
from lab.modelled_device.clock import Work
from lab.modelled_device.device import modelled_device
from sglang_live.attachment import ATTACH_ENV
from sglang_live.bridge.batch_work import BatchWork, Launch
from sglang_live.bridge.rate_meter import RateMeter

BATCH_RECORD_ENV = "LAB_BATCH_RECORD"


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
    """Appends the batches that a process books on a modelled device to a file."""

    def __init__(self, path: Path):
        self._path = path
        self._in_flight = deque[Work]()

    def launched(self, work: Work) -> None:
        """Note the device's times of a batch. Results arrive in the order of launches."""
        self._in_flight.append(work)

    def arrived(
        self, book: Callable[..., None], meter: RateMeter, launch: Launch, now_s: float
    ) -> None:
        """Around RateMeter.arrived."""
        device = self._in_flight.popleft()
        times = launch.at_s, now_s, device.began_s, device.done_s
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(BatchRecord(launch.work, *times))) + "\n")
        book(meter, launch, now_s)


def environment(path: Path) -> dict[str, str]:
    return {ATTACH_ENV: "lab.recorders.batch_recorder:attach", BATCH_RECORD_ENV: str(path)}


def attach(place: str) -> None:
    if place == "sglang":
        recorder = BatchRecorder(Path(os.environ[BATCH_RECORD_ENV]))
        modelled_device().observers.append(recorder.launched)
        around(RateMeter, "arrived", recorder.arrived)


def read_record(path: Path) -> list[BatchRecord]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [BatchRecord(**{**row, "work": BatchWork(**row["work"])}) for row in rows]
