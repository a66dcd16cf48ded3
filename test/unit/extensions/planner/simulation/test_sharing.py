"""Processes that share a device: by one queue, by time slices, or all at once."""

import pytest

from sglang_live.extensions.planner.simulation.events import ArbitratedDevice, Device, Events
from sglang_live.extensions.planner.simulation.sharing import SLICE_S, TOGETHER, SharedDevice


def ends_s(events: Events, device: Device, *works: tuple[str, float, float]) -> list[float]:
    """When each (process, duration, launch) ends."""
    ends: list[float] = [0.0] * len(works)

    def note(number: int) -> None:
        ends[number] = events.now_s()

    for number, (who, cost_s, launched_s) in enumerate(works):
        device.book(who, cost_s, launched_s).when_done(lambda number=number: note(number))
    events.run()
    return ends


@pytest.mark.parametrize("by_slices", [True, False])
def test_a_process_alone_has_the_device_as_if_it_were_a_queue(by_slices):
    works = [("talker", 0.02, 0.0), ("talker", 0.01, 0.005), ("talker", 0.01, 0.05)]
    events = Events()
    shared = ends_s(events, SharedDevice(events, by_slices=by_slices), *works)
    events = Events()
    assert shared == pytest.approx(ends_s(events, Device(events), *works))
    assert shared == pytest.approx([0.02, 0.03, 0.06])


def test_with_slices_a_short_batch_ends_before_a_long_one_that_came_first():
    events = Events()
    device = SharedDevice(events, by_slices=True)
    long_s, short_s = ends_s(events, device, ("thinker", 0.05, 0.0), ("talker", 0.003, 0.01))
    # It waits for no slice, has three, and waits for two of the other process between them.
    assert short_s == pytest.approx(0.01 + 0.003 + 2 * SLICE_S)
    assert long_s == pytest.approx(0.053)


def test_with_slices_three_processes_advance_alike():
    events = Events()
    device = SharedDevice(events, by_slices=True)
    works = [(who, 100 * SLICE_S, 0.0) for who in ("thinker", "talker", "vocoder")]
    found = ends_s(events, device, *works)
    assert found == pytest.approx([298 * SLICE_S, 299 * SLICE_S, 300 * SLICE_S])


def test_with_mps_batches_compute_together_and_slow_each_other_down():
    events = Events()
    device = SharedDevice(events, by_slices=False)
    long_s, short_s = ends_s(events, device, ("thinker", 0.05, 0.0), ("talker", 0.003, 0.01))
    assert short_s == pytest.approx(0.01 + 2 * 0.003 / TOGETHER)
    assert long_s == pytest.approx(0.05 + (short_s - 0.01) - 0.003)


def test_work_of_one_process_is_in_order_beside_others():
    events = Events()
    device = SharedDevice(events, by_slices=False)
    works = [("talker", 0.01, 0.0), ("talker", 0.01, 0.0), ("thinker", 0.06, 0.0)]
    first_s, second_s, other_s = ends_s(events, device, *works)
    assert first_s == pytest.approx(0.02 / TOGETHER)
    assert second_s == pytest.approx(0.04 / TOGETHER)
    assert other_s == pytest.approx(second_s + 0.06 - 0.02)


@pytest.mark.parametrize("by_slices", [True, False])
def test_a_pause_of_the_host_stops_all_processes(by_slices):
    events = Events()
    device = SharedDevice(events, by_slices=by_slices)
    events.at(0.01, lambda: device.stall(0.1))
    assert ends_s(events, device, ("thinker", 0.05, 0.0)) == pytest.approx([0.15])


@pytest.mark.parametrize("by_slices", [True, False])
def test_a_result_that_waits_for_its_load_is_late_alone(by_slices):
    events, ends = Events(), []
    device = SharedDevice(events, by_slices=by_slices)
    device.book("thinker", 0.01, 0.0, 0.1).when_done(lambda: ends.append(events.now_s()))
    device.book("talker", 0.01, 0.02).when_done(lambda: ends.append(events.now_s()))
    events.run()
    assert ends == pytest.approx([0.03, 0.1])


@pytest.mark.parametrize("by_slices", [True, False])
def test_by_turns_a_shared_device_has_one_piece_of_work_at_a_time(by_slices):
    events, ends = Events(), []
    device = ArbitratedDevice(events, 0.0, SharedDevice(events, by_slices=by_slices))

    def launch(who: str) -> None:
        work = device.book(who, 0.01, events.now_s())
        work.when_done(lambda: ends.append(events.now_s()))

    for who in ("thinker", "talker"):
        device.ask(who, 1.0, lambda who=who: launch(who))
    events.run()
    assert ends == pytest.approx([0.01, 0.02])
    assert dict(device.busy_s) == {"thinker": 0.01, "talker": 0.01}
