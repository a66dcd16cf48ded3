"""Ranks close the same sessions in the same round, whatever their own clocks say."""

import pytest

from sglang_live.bridge.scheduler.sessions import SessionReaper


class FakeSession:
    def __init__(self, *, late: bool = False, closing: bool = False, runs: bool = False):
        self.late, self.close_on_finish, self.runs = late, closing, runs

    def is_timed_out(self) -> bool:
        return self.late


class FakeController:
    """SGLang's, as far as it closes sessions; `_close` defers a close behind a request."""

    def __init__(self, **sessions: FakeSession):
        self.sessions, self.closed = sessions, []

    def __contains__(self, session_id: str) -> bool:
        return session_id in self.sessions

    def maybe_reap(self, now: float, interval: float = 1.0) -> None:
        raise AssertionError("closed by a rank's own clock")

    def _all_requests_finished(self, session: FakeSession) -> bool:
        return not session.runs

    def _close(self, session_id: str) -> None:
        if self.sessions[session_id].runs:
            self.sessions[session_id].close_on_finish = True
            return
        del self.sessions[session_id]
        self.closed.append(session_id)


def test_a_rank_closes_what_rank_0_found_and_not_what_its_own_clock_says():
    ranks = [
        FakeController(a=FakeSession(late=True), b=FakeSession(), c=FakeSession(closing=True)),
        FakeController(a=FakeSession(), b=FakeSession(late=True), c=FakeSession(closing=True)),
    ]
    reapers = [SessionReaper(controller) for controller in ranks]
    for controller in ranks:
        controller.maybe_reap(100.0)
    [order] = reapers[0].due(100.0)
    for reaper in reapers:
        reaper.reap(order)
    assert [controller.closed for controller in ranks] == [["c", "a"], ["c", "a"]]


@pytest.mark.parametrize("runs", [True, False])
def test_a_session_is_closed_once_its_request_has_ended(runs):
    controller = FakeController(a=FakeSession(closing=True, runs=runs))
    reaper = SessionReaper(controller)
    [order] = reaper.due(100.0)
    reaper.reap(order)
    assert controller.closed == ([] if runs else ["a"])


def test_a_session_that_is_closed_on_the_way_is_no_error():
    controller = FakeController(a=FakeSession(late=True))
    reaper = SessionReaper(controller)
    [order] = reaper.due(100.0)
    controller._close("a")
    reaper.reap(order)
    assert controller.closed == ["a"]


def test_rank_0_looks_once_a_second_and_orders_nothing_in_vain():
    controller = FakeController(a=FakeSession())
    reaper = SessionReaper(controller)
    assert reaper.due(100.0) == []
    controller.sessions["a"].late = True
    assert reaper.due(100.9) == [] and reaper.due(101.1)
