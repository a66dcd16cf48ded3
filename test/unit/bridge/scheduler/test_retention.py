"""The sessions of an engine that are bounded, and the lifetime of their bounds."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.scheduler.retention import Retention
from sglang_live.messages import RetainSession


class FakeCompaction:
    """made: by session, the windows that it was compacted to."""

    def __init__(self):
        self.made: list[tuple[str, int]] = []

    def compact(self, session: SimpleNamespace, config) -> None:
        self.made.append((session.session_id, config.window_tokens))


class FakeSessions:
    evicts_idle = False

    def __init__(self):
        self.compaction = FakeCompaction()
        self.slots: dict = {}


class World:
    def __init__(self):
        self.open_sessions: dict[str, SimpleNamespace] = {}
        self.sessions = FakeSessions()
        self.retention = Retention(
            SimpleNamespace(
                session_controller=self.open_sessions,
                tree_cache=SimpleNamespace(session=self.sessions),
            )
        )
        self.retention.start()

    def open(self, session_id: str) -> None:
        self.retention.before_session()
        self.open_sessions.setdefault(session_id, SimpleNamespace(session_id=session_id))

    def bound(self, session_id: str, window_tokens: int) -> None:
        self.retention.retain(RetainSession(session_id, 4, window_tokens, 1, every_request=True))

    def after_a_request(self, session_id: str) -> list[tuple[str, int]]:
        self.sessions.compaction.made.clear()
        session = SimpleNamespace(session_id=session_id)
        self.retention.ended(SimpleNamespace(session=session), True)
        self.retention.before_round()
        return self.sessions.compaction.made


@pytest.fixture
def world() -> World:
    return World()


def test_a_bound_holds_after_every_request_of_the_session(world):
    world.open("s")
    world.bound("s", 64)
    for _ in range(2):
        assert world.after_a_request("s") == [("s", 64)]
    assert world.after_a_request("another") == []


def test_a_session_under_a_used_id_begins_without_bound(world):
    world.open("s")
    world.bound("s", 64)
    del world.open_sessions["s"]
    world.open("s")
    assert world.after_a_request("s") == []
    world.bound("s", 32)
    assert world.after_a_request("s") == [("s", 32)]


def test_sessions_that_open_leave_the_bounds_of_others_alone(world):
    world.open("s")
    world.bound("s", 64)
    world.open("another")
    world.open("s")  # refused, as it is open
    assert world.after_a_request("s") == [("s", 64)]
