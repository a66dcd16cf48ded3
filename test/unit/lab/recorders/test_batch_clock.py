"""When a batch was chosen, began and was done, on a device that is asked later."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from lab.recorders import batch_clock
from lab.recorders.batch_clock import Batch, BatchClock, launch_times_s, read_batches


@dataclass
class FakeMarks:
    """A device whose clock the test moves, and that is behind until it is told how far it is."""

    now_s: float = 0.0
    reached_s: float = -1.0

    def mark(self) -> float:
        return self.now_s

    def at_s(self, mark: float) -> float | None:
        return mark if mark <= self.reached_s else None


@pytest.fixture
def clock(tmp_path, monkeypatch):
    marks = FakeMarks()
    monkeypatch.setattr(batch_clock, "facts_of", lambda batch: batch)
    monkeypatch.setattr(batch_clock.time, "monotonic", lambda: marks.now_s)
    return BatchClock(tmp_path / "thinker.jsonl", marks)


def _run(clock: BatchClock, batch, *, launch_s: float, compute_s: float, overlap=True) -> None:
    marks = clock._marks
    scheduler = SimpleNamespace(enable_overlap=overlap, forward_stream_ctx=nullcontext())

    def forward(_runner):
        marks.now_s += compute_s

    def run(_scheduler, _batch):
        marks.now_s += launch_s
        clock.forward(forward, None)
        return "result"

    assert clock.run_batch(run, scheduler, batch) == "result"


def _decode(n: int) -> dict:
    return {"is_decode": True, "n_streams": n, "kv_tokens": 9, "n_tokens": 0, "audio_s": 0.0}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_batch_is_written_when_the_device_has_done_it(clock, tmp_path, overlap):
    _run(clock, _decode(1), launch_s=2.0, compute_s=5.0, overlap=overlap)
    _run(clock, _decode(2), launch_s=1.0, compute_s=1.0, overlap=overlap)
    assert read_batches(tmp_path, "thinker") == []
    clock._marks.reached_s = 7.0
    _run(clock, _decode(3), launch_s=1.0, compute_s=1.0, overlap=overlap)
    [batch] = read_batches(tmp_path, "thinker")
    assert (batch.n_streams, batch.chosen_s, batch.began_s, batch.done_s) == (1, 0.0, 2.0, 7.0)
    assert batch.ms == 5000.0


def test_what_computes_nothing_is_not_recorded(clock, tmp_path):
    _run(clock, None, launch_s=1.0, compute_s=1.0)
    clock._marks.reached_s = 99.0
    _run(clock, _decode(1), launch_s=1.0, compute_s=1.0)
    assert read_batches(tmp_path, "thinker") == []


def test_a_launch_counts_where_the_device_was_free():
    def batch(chosen_s: float, began_s: float, done_s: float) -> Batch:
        return Batch(**_decode(1), chosen_s=chosen_s, began_s=began_s, done_s=done_s)

    behind = batch(0.5, 1.0, 2.0)
    free = batch(3.0, 3.25, 4.0)
    assert launch_times_s([batch(0.0, 0.1, 1.0), behind, free]) == [0.25]
