"""Which sessions are admitted, which are refused, and what the report says."""

import math
from types import SimpleNamespace

import pytest

from sglang_live.capacity.aimd import AimdConfig
from sglang_live.capacity.control import CapacityConfig, CapacityControl, Pool
from sglang_live.clock import SimClock
from sglang_live.errors import BadInputError, CapacityError


class Server:
    def __init__(self, **config):
        aimd = AimdConfig(first=4, few_s=0.0)
        settings = {"max_sessions": 8, "admission_first_audio_ms": 500.0, "aimd": aimd, **config}
        self.clock, self.n_admitted = SimClock(), 0
        self.pools: dict[str, float] = {}  # share by replica
        self.control = CapacityControl(CapacityConfig(**settings), self.clock, self._read_pools)

    def _read_pools(self) -> dict[str, Pool]:
        """All sessions are on each replica."""
        n_sessions = self.control.report().n_sessions
        return {
            name: Pool(stage=name.split("/")[0], share=share, n_sessions=n_sessions)
            for name, share in self.pools.items()
        }

    def admit(self, n: int = 1) -> None:
        """Sessions s0, s1 and so on."""
        for _ in range(n):
            self.control.admit(f"s{self.n_admitted}")
            self.n_admitted += 1

    def turns(self, seconds: float, n: int = 10, n_sessions: int = 10) -> None:
        """A window of n turns of n_sessions, each of which takes this long to its first packet."""
        due = []
        for number in range(n):
            session_id = f"s{number % n_sessions}"
            self.control.turn_begins(session_id)
            due.append(self.control.first_packet_due(session_id))
        self.clock.advance(seconds)
        for deadline in due:
            self.control.came(deadline)
        self.clock.advance(5.0)
        self.control.report()


@pytest.fixture
def server() -> Server:
    server = Server()
    server.control.report()
    return server


def test_sessions_beyond_the_limit_are_refused_with_a_time_to_retry(server):
    server.admit(4)
    with pytest.raises(CapacityError, match="4 sessions, and 4 can be served in time") as caught:
        server.admit()
    assert caught.value.retry_after_s > 0
    server.control.release("s0")
    server.admit()
    assert server.control.report().n_sessions == 4


def test_turns_in_time_raise_the_limit(server):
    server.admit(4)
    server.turns(0.1)
    now = server.control.report()
    assert (now.limit, now.n_more, now.why) == (5, 1, "")
    assert now.share == pytest.approx(0.2)


def test_sessions_that_have_taken_no_turn_yet_hold_the_limit(server):
    server.admit(4)
    server.turns(0.3, n_sessions=2)
    assert server.control.report().limit == 4
    server.turns(0.3, n_sessions=4)
    assert server.control.report().limit == 5


def test_sessions_that_stay_silent_hold_the_limit_for_a_while(server):
    server.admit(4)
    server.clock.advance(31.0)
    server.turns(0.3, n_sessions=2)
    assert server.control.report().limit == 5


def test_late_turns_lower_the_limit(server):
    server.admit(3)
    server.turns(0.6)
    assert server.control.report().limit == 2
    assert server.control.report().n_more == 0


@pytest.mark.parametrize(("gap_s", "limit"), [(0.15, 2), (0.05, 4)])
def test_audible_gaps_in_responses_count_as_late(server, gap_s, limit):
    server.admit(3)
    for n in range(10):
        server.control.flowed(f"s{n}", gap_s)
    server.turns(0.1)
    assert server.control.report().limit == limit


def test_failed_turns_are_infinitely_late(server):
    server.admit(3)
    for n in range(10):
        server.control.failed(server.control.first_packet_due(f"s{n}"))
    server.clock.advance(5.0)
    assert server.control.report().limit == 2
    assert server.control.report().share == math.inf


def test_sessions_closed_within_the_window_count_in_it(server):
    server.admit(4)
    due = [server.control.first_packet_due(f"s{n}") for n in range(10)]
    server.clock.advance(0.6)
    for deadline in due:
        server.control.came(deadline)
    server.clock.advance(4.0)
    for n in range(4):
        server.control.release(f"s{n}")
    server.clock.advance(1.0)
    assert server.control.report().limit == 3


def test_a_server_without_responses_lowers_the_limit(server):
    server.admit(4)
    for n in range(10):
        server.control.first_packet_due(f"s{n}")
    server.clock.advance(5.0)
    assert server.control.report().limit == 3


def test_dropped_deadlines_are_not_late(server):
    server.admit(4)
    for deadline in [server.control.first_packet_due("s") for _ in range(10)]:
        server.control.gone(deadline)
    server.clock.advance(5.0)
    assert server.control.report().limit == 5


def test_the_limit_is_bounded_by_max_sessions():
    server = Server(max_sessions=4)
    server.admit(4)
    server.turns(0.1)
    with pytest.raises(CapacityError, match="4 of 4 sessions"):
        server.admit()


def test_without_the_policy_max_sessions_is_the_limit():
    server = Server(adapts=False)
    server.pools["thinker"] = 1.0
    server.admit(3)
    server.turns(30.0)
    server.admit(5)
    with pytest.raises(CapacityError, match="8 of 8 sessions"):
        server.admit()


def test_a_full_pool_refuses_every_session(server):
    server.pools["talker"] = 0.96
    server.clock.advance(2.0)
    with pytest.raises(CapacityError, match="talker's KV pool is 96 % full"):
        server.admit()
    server.pools["talker"] = 0.5
    server.clock.advance(2.0)
    server.admit()


def test_a_session_that_would_fill_a_pool_soon_is_refused(server):
    server.admit(1)
    for n in range(30):
        server.pools["thinker"] = 0.1 + 0.02 * n
        server.clock.advance(2.0)
        now = server.control.report()
        if now.pools["thinker"][1] < 60:
            break
    # A second session fills it in half the time.
    with_two_s = now.pools["thinker"][1] / 2
    assert now.n_more == 0
    assert now.why == f"the thinker's KV pool would be full in {with_two_s:.0f} s"
    assert now.pools["thinker"][0] == pytest.approx(server.pools["thinker"])


def test_a_pool_that_fills_bounds_the_sessions_that_are_admitted(server):
    server.admit(1)
    for n in range(10):
        server.pools["talker"] = 0.005 * n
        server.clock.advance(2.0)
        now = server.control.report()
    # 0.0025 of it a second and session: with 12.7 it would be full in half a minute.
    assert now.n_more == 3
    server.admit(3)
    with pytest.raises(CapacityError, match="can be served in time"):
        server.admit()


def test_one_full_replica_of_several_refuses_no_session(server):
    server.pools.update({"talker/0": 0.97, "talker/1": 0.2, "talker/2": 0.2, "thinker/0": 0.3})
    server.clock.advance(2.0)
    now = server.control.report()
    assert (now.n_more, now.why) == (4, "")
    assert {stage: share for stage, (share, _) in now.pools.items()} == {
        "talker": 0.2,
        "thinker": 0.3,
    }
    assert not server.control.has_room_in(SimpleNamespace(name="talker/0"))
    assert server.control.has_room_in(SimpleNamespace(name="talker/1"))
    server.pools.update({"talker/1": 0.96, "talker/2": 0.98})
    server.clock.advance(2.0)
    with pytest.raises(CapacityError, match="talker's KV pool is 96 % full"):
        server.admit()


def test_replicas_with_room_for_some_sessions_have_room_for_their_sum(server):
    server.admit(1)
    for n in range(10):
        server.pools.update({"talker/0": 0.005 * n, "talker/1": 0.005 * n, "talker/2": 0.97})
        server.clock.advance(2.0)
        now = server.control.report()
    # Each fills in half a minute with 12.7 sessions; one is on each of them here.
    assert now.n_more == 3, "of the limit: the pools have room for 22"
    assert server.control._room_of("talker") == 22


def test_the_pool_of_a_replica_that_is_down_says_nothing(server):
    server.pools.update({"talker/0": 0.97})
    server.clock.advance(2.0)
    assert server.control.report().n_more == 0
    del server.pools["talker/0"]
    server.clock.advance(2.0)
    now = server.control.report()
    assert (now.n_more, now.pools) == (4, {})


def test_the_report_contains_the_pools(server):
    server.pools["thinker"] = 0.25
    assert server.control.report().pools == {}  # the first sample comes after 2 s
    server.clock.advance(2.0)
    assert server.control.report().pools == {"thinker": (0.25, math.inf)}


@pytest.mark.parametrize("bad", [{"max_sessions": 0}, {"admission_first_audio_ms": 0.0}])
def test_settings_that_cannot_be_are_refused(bad):
    with pytest.raises(BadInputError):
        CapacityConfig(**{"max_sessions": 1, **bad})


# --- boundaries ---


def test_a_pool_at_the_full_share_is_full(server):
    server.pools["talker"] = 0.95
    server.clock.advance(2.0)
    with pytest.raises(CapacityError, match="95 % full"):
        server.admit()
    server.pools["talker"] = 0.94
    server.clock.advance(2.0)
    assert server.control.report().n_more == 4


def test_pools_are_sampled_every_two_seconds(server):
    server.pools["talker"] = 0.3
    server.clock.advance(1.9)
    assert server.control.report().pools == {}
    server.clock.advance(0.1)
    assert server.control.report().pools["talker"][0] == 0.3


def test_a_frame_may_take_half_of_the_time_until_the_next(server):
    for n in range(10):
        deadline = server.control.frame_due(f"s{n}", 1.0)
        server.clock.advance(0.25)
        server.control.came(deadline)
    server.clock.advance(5.0)
    assert server.control.report().share == pytest.approx(0.5)


def test_a_response_without_sound_is_not_late(server):
    server.admit(4)
    due = [server.control.first_packet_due(f"s{n}") for n in range(10)]
    server.clock.advance(5.0)
    for deadline in due:
        server.control.gone(deadline)
    server.clock.advance(0.1)
    assert server.control.report().limit == 5


def test_a_server_without_deadlines_keeps_the_share_it_had(server):
    server.turns(0.1)
    server.clock.advance(5.0)
    assert server.control.report().share == pytest.approx(0.2)


def test_sessions_beyond_the_limit_leave_no_room(server):
    server.admit(4)
    server.turns(0.6)
    now = server.control.report()
    assert (now.n_sessions, now.limit, now.n_more) == (4, 3, 0)
    assert now.why == "4 sessions, and 3 can be served in time"
    server.control.release("s2")
    server.control.release("s3")
    assert server.control.report().n_more == 1


def test_the_bound_itself_is_named_where_the_limit_is_as_high():
    server = Server(max_sessions=4)
    server.admit(4)
    assert server.control.report().why == "4 of 4 sessions"


@pytest.mark.parametrize("bad", [{"max_sessions": -1}, {"admission_first_audio_ms": math.inf}])
def test_settings_beyond_their_bounds_are_refused(bad):
    with pytest.raises(BadInputError):
        CapacityConfig(**{"max_sessions": 1, **bad})


def test_one_session_is_enough():
    assert CapacityConfig(max_sessions=1)
