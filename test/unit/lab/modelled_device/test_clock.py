"""The modelled device's clock: one queue for all stages, and honest counts of late results."""

import pytest

from lab.modelled_device import clock as clock_module
from lab.modelled_device.clock import (
    COMPUTE,
    TO_DEVICE,
    DeviceClock,
    ModelledEvent,
    Work,
)


class SimClock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def time(monkeypatch):
    time = SimClock()
    monkeypatch.setattr(clock_module, "time", time)
    return time


@pytest.fixture
def thinker(tmp_path):
    return DeviceClock(tmp_path / "clock", "thinker", 0)


def test_work_begins_when_it_is_launched_or_when_the_work_before_it_has_ended(thinker):
    assert thinker.book(COMPUTE, 2.0, launched_s=100.0) == Work(100.0, 102.0)
    assert thinker.book(COMPUTE, 1.0, launched_s=100.5) == Work(102.0, 103.0)
    assert thinker.book(COMPUTE, 1.0, launched_s=200.0) == Work(200.0, 201.0)


def test_stages_of_a_device_share_one_queue(thinker, tmp_path):
    talker = DeviceClock(tmp_path / "clock", "talker", 0)
    thinker.book(COMPUTE, 2.0, launched_s=100.0)
    assert talker.book(COMPUTE, 1.0, launched_s=101.0) == Work(102.0, 103.0)
    assert thinker.book(COMPUTE, 1.0, launched_s=101.0) == Work(103.0, 104.0)


def test_copies_do_not_wait_for_computation(thinker):
    thinker.book(COMPUTE, 2.0, launched_s=100.0)
    assert thinker.book(TO_DEVICE, 1.0, launched_s=100.0) == Work(100.0, 101.0)


def test_work_that_waits_for_something_else_holds_the_device(thinker):
    work = thinker.book(COMPUTE, 1.0, launched_s=100.0, not_before_s=105.0)
    assert work == Work(100.0, 105.0)
    assert thinker.book(COMPUTE, 1.0, launched_s=100.0).began_s == 105.0


def test_a_replica_has_counters_of_its_own(thinker, tmp_path):
    thinker.count_computation(0.5)
    second = DeviceClock(tmp_path / "clock", "thinker", 1)
    assert second.report()["device_computed_s"] == 0.0
    with pytest.raises(ValueError, match="at most 64 replicas"):
        DeviceClock(tmp_path / "clock", "talker", 64)


def test_an_event_ends_with_its_work(time):
    event = ModelledEvent(Work(100.0, 102.0))
    assert not event.query()
    event.synchronize()
    assert event.query() and time.now_s == pytest.approx(102.0)


def test_an_arrival_is_told_once_with_its_time(time):
    told: list[tuple[float, float]] = []
    event = ModelledEvent(Work(100.0, 101.0), lambda *times: told.append(times))
    time.now_s = 103.0
    event.synchronize()
    event.wait()
    assert event.query() and told == [(103.0, 103.0)]


def test_results_that_are_noticed_after_their_end_are_counted_with_their_lateness(
    thinker, tmp_path
):
    for launched_s, noticed_s in ((100.0, 102.0), (100.0, 104.0005), (110.0, 112.5)):
        work = thinker.book(COMPUTE, 2.0, launched_s=launched_s)
        thinker.count(launched_s, work, noticed_s - 0.25, noticed_s)
    thinker.count_computation(0.75)
    reader = DeviceClock(tmp_path / "clock", "thinker", 0)
    assert reader.report() == {
        "device_batches": 3.0,
        "device_late_batches": 1.0,
        "device_late_s": pytest.approx(0.5),
        "device_modelled_s": pytest.approx(6.0),
        "device_queued_s": pytest.approx(2.0),
        "device_computed_s": pytest.approx(0.75),
        "device_waited_s": pytest.approx(0.75),
    }
    assert DeviceClock(tmp_path / "clock", "talker", 0).report()["device_batches"] == 0.0
