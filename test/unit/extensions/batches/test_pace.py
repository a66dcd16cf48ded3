"""Claims about the number of lines in flight beside engines that say what they take."""

from dataclasses import dataclass, field

import pytest

from sglang_live.capacity.best_effort import BestEffort
from sglang_live.extensions.batches.pace import MOST_UNTOLD, Load, lines_at_once


@dataclass
class Engine:
    """Takes `room` requests at a time, and reports every second tick."""

    room: int
    told: BestEffort = field(default_factory=lambda: BestEffort(n_running=0, n_waiting=0))

    def run(self, n_ticks: int, n_lines: int, before: int = 0, most: int = 256) -> list[int]:
        """The allowed numbers; each of them is used if there are as many lines."""
        allowed = [before]
        for tick in range(n_ticks):
            n_running = min(allowed[-1], n_lines)
            if tick % 2 == 0:
                taken = min(self.room, n_running)
                self.told = BestEffort(n_running=taken, n_waiting=n_running - taken)
            load = Load(n_sessions=3, n_more=0, best_effort=self.told)
            allowed.append(lines_at_once(load, most, allowed[-1], n_running))
        return allowed[1:]


@pytest.mark.parametrize("room", [1, 3, 20, 100])
def test_the_engine_always_has_work_and_little_waits(room):
    late = Engine(room).run(60, 10_000)[30:]
    assert min(late) >= room
    assert max(late) <= 3 * room + 4


def test_a_full_server_takes_lines_while_its_engine_does():
    """Sessions that may come are not limited by them."""
    assert Engine(16).run(20, 10_000)[-1] >= 16


def test_fewer_run_when_users_come():
    engine = Engine(64)
    before = engine.run(40, 10_000)[-1]
    engine.room = 2
    after = engine.run(40, 10_000, before)[-1]
    assert before >= 64 and 2 <= after <= 12


def test_lines_never_cease_while_the_engine_is_full():
    assert min(Engine(0).run(40, 10_000)) == 1


def test_a_short_batch_does_not_raise_the_number():
    assert max(Engine(100).run(40, 2)) == 4


def test_the_flag_bounds_it():
    assert max(Engine(1000).run(40, 10_000, most=24)) == 24


def test_an_engine_that_says_nothing_gets_few():
    load = Load(n_sessions=0, n_more=64)
    assert lines_at_once(load, 256, 0, 0) == MOST_UNTOLD
