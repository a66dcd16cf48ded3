"""What is no load lowers no limit, and what lowered it is forgotten. In simulated time."""

import pytest

from sglang_live.capacity.aimd import AimdConfig
from sglang_live.capacity.control import CapacityConfig, CapacityControl
from sglang_live.capacity.deadlines import DeadlineConfig
from sglang_live.clock import SimClock
from sglang_live.errors import CapacityError

FIRST, LEAST = AimdConfig().first, AimdConfig().least
# Rises from the least to the first limit.
FORGOTTEN_IDLE_S = (FIRST - LEAST) * AimdConfig().idle_s
FORGOTTEN_CALM_S = (FIRST - LEAST) * AimdConfig().calm_s
# The window with the last lateness, and the one that is not over at the end.
WINDOWS_S = 2 * DeadlineConfig().patience_s


class Server:
    """With its default settings.

    n_refused: of the sessions that came.
    """

    def __init__(self):
        self.clock = SimClock()
        self.control = CapacityControl(CapacityConfig(max_sessions=200), self.clock)
        self.control.report()
        self.n_refused = self._n_came = 0

    @property
    def limit(self) -> int:
        return self.control.report().limit

    def come(self, n: int) -> list[str]:
        """Returns those that are admitted."""
        admitted = []
        for _ in range(n):
            self._n_came += 1
            try:
                self.control.admit(f"s{self._n_came}")
            except CapacityError:
                self.n_refused += 1
            else:
                admitted.append(f"s{self._n_came}")
        return admitted

    def go(self, sessions: list[str]) -> None:
        for session_id in sessions:
            self.control.release(session_id)

    def turns(self, sessions: list[str], first_packet_s: float) -> None:
        due = []
        for session_id in sessions:
            self.control.turn_begins(session_id)
            due.append(self.control.first_packet_due(session_id))
        self.clock.advance(first_packet_s)
        for deadline in due:
            self.control.came(deadline)
        self.control.report()

    def short_sessions(self, at_once: int, seconds: float, first_packet_s: float) -> None:
        """Sessions of one turn, at_once at a time, one after another."""
        until_s = self.clock.now_s() + seconds
        while self.clock.now_s() < until_s:
            sessions = self.come(at_once)
            self.turns(sessions, first_packet_s)
            self.clock.advance(0.5)
            self.go(sessions)

    def overload(self, n: int) -> None:
        """Lower the limit: all turns of n sessions are late, until most of them are too many."""
        while self.limit > LEAST:
            sessions = self.come(n)
            n = min(n, self.limit)
            for _ in range(30):
                self.turns(sessions, first_packet_s=3.0)
            self.go(sessions)


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_cold_start_refuses_no_session(server):
    server.short_sessions(at_once=4, seconds=25.0, first_packet_s=3.0)
    server.short_sessions(at_once=4, seconds=60.0, first_packet_s=0.3)
    assert (server.n_refused, server.limit) == (0, FIRST)


def test_lateness_that_is_no_cold_start_counts(server):
    server.short_sessions(at_once=4, seconds=120.0, first_packet_s=3.0)
    assert server.limit < 4
    assert server.n_refused > 0


def test_a_disturbance_of_seconds_does_not_lower_the_limit_of_few_sessions(server):
    for _ in range(10):
        server.short_sessions(at_once=4, seconds=30.0, first_packet_s=0.3)
        server.short_sessions(at_once=4, seconds=15.0, first_packet_s=2.0)
    assert (server.n_refused, server.limit) == (0, FIRST)


def test_short_sessions_without_turns_do_not_lower_the_limit(server):
    for _ in range(200):
        sessions = server.come(4)
        server.clock.advance(0.5)
        server.go(sessions)
        assert server.limit == FIRST
    assert server.n_refused == 0


def test_sessions_that_leave_before_their_first_sound_is_due_do_not_lower_the_limit(server):
    for _ in range(100):
        sessions = server.come(14)
        due = [server.control.first_packet_due(session_id) for session_id in sessions]
        server.clock.advance(0.9)
        for deadline in due:
            server.control.abandoned(deadline)
        server.go(sessions)
    assert (server.n_refused, server.limit) == (0, FIRST)


def test_an_idle_server_forgets_a_lowered_limit_in_bounded_time(server):
    server.overload(14)
    assert server.limit == LEAST
    limits = []
    for _ in range(int(FORGOTTEN_IDLE_S)):
        server.clock.advance(1.0)
        limits.append(server.limit)
    assert limits == sorted(limits)
    assert limits[len(limits) // 2] < FIRST
    assert server.limit == server.control.report().n_more == FIRST


def test_an_idle_server_that_is_not_asked_forgets_as_well(server):
    server.overload(14)
    server.clock.advance(FORGOTTEN_IDLE_S)
    assert len(server.come(FIRST + 1)) == FIRST


def test_lateness_before_a_long_pause_does_not_refuse_those_who_come_after_it(server):
    server.short_sessions(at_once=4, seconds=60.0, first_packet_s=0.3)
    sessions = server.come(14)
    for _ in range(30):
        server.turns(sessions, first_packet_s=3.0)
    server.go(sessions)
    server.clock.advance(600.0)
    assert len(server.come(FIRST)) == FIRST


def test_sessions_well_in_time_raise_a_lowered_limit_to_the_first_in_bounded_time(server):
    server.overload(14)
    sessions = server.come(1)
    began_s = server.clock.now_s()
    while server.clock.now_s() < began_s + FORGOTTEN_CALM_S + WINDOWS_S:
        server.turns(sessions, first_packet_s=0.3)
        server.clock.advance(2.0)
    assert server.limit == FIRST
    assert len(server.come(FIRST)) == FIRST - 1


def test_silent_sessions_let_a_lowered_limit_rise_to_the_first(server):
    server.overload(14)
    server.come(1)
    for _ in range(int(FORGOTTEN_CALM_S + WINDOWS_S)):
        server.clock.advance(1.0)
        server.control.report()
    assert server.limit == FIRST


def test_sessions_that_nearly_use_their_budget_leave_a_lowered_limit(server):
    server.overload(14)
    sessions = server.come(1)
    for _ in range(200):
        server.turns(sessions, first_packet_s=0.8)
        server.clock.advance(2.0)
    assert server.limit == LEAST


def test_a_limit_that_was_found_above_the_first_is_kept(server):
    sessions = server.come(FIRST)
    for _ in range(20):
        server.turns(sessions, first_packet_s=0.2)
        server.clock.advance(5.0)
        sessions += server.come(4)
    limit = server.limit
    assert limit > 2 * FIRST
    server.go(sessions)
    server.clock.advance(1000.0)
    assert server.limit == limit
