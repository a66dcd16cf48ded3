"""Messages about sessions that are closed, and about speech that was none."""

import math
from types import SimpleNamespace

import pytest

from sglang_live.bridge.round_facts import LinkStamp
from sglang_live.bridge.scheduler.tiers import LOADING_WAIT_S, Tiers
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.tiers.no_tier import NoTier
from sglang_live.bridge.tiers.preload import Preloads
from sglang_live.messages import NextUseHint, UserSpeaking

START_S = 100.0


class World:
    """A scheduler with one open session, "open"."""

    def __init__(self):
        self.idle = IdleSessions(page_size=1)
        self.idle.tick(START_S)
        self.idle.put("open", 10)
        self.sessions = SimpleNamespace(evicts_idle=True, idle=self.idle, tier=NoTier())
        self.sessions.preloads = Preloads(self.sessions, is_on=False)
        self.events = Tiers(
            SimpleNamespace(
                tree_cache=SimpleNamespace(session=self.sessions), session_controller={"open": None}
            )
        )


@pytest.fixture
def world():
    return World()


def test_messages_about_a_closed_session_leave_nothing_behind(world):
    world.events.next_use(NextUseHint("closed", 5.0, 1.0, None))
    world.events.user_speaking(UserSpeaking("closed"))
    assert world.idle.expected_s("closed") is None
    assert not world.idle.is_speaking("closed")


def test_messages_about_an_open_session_count(world):
    world.events.next_use(NextUseHint("open", 5.0, 1.0, None))
    world.events.user_speaking(UserSpeaking("open"))
    assert world.idle.expected_s("open") > START_S + 6
    assert world.idle.is_speaking("open")


def test_speech_that_was_none_protects_no_longer(world):
    world.events.user_speaking(UserSpeaking("open"))
    assert world.idle.next_victim() is None
    world.events.user_speaking(UserSpeaking("open", False))
    assert world.idle.next_victim().key == "open"


class FakePreloads:
    def __init__(self):
        self.is_loading, self.next_review_s = False, math.inf

    def tick(self, *args) -> None: ...

    def load(self) -> None: ...


def test_the_next_round_comes_when_a_preload_is_judged_or_loaded_on(world):
    assert world.events.load_ahead() == math.inf
    world.sessions.preloads = preloads = FakePreloads()
    world.events.stamp(LinkStamp(START_S))
    assert world.events.load_ahead() == math.inf
    preloads.next_review_s = START_S + 0.05
    assert world.events.load_ahead() == pytest.approx(0.05)
    preloads.is_loading = True
    assert world.events.load_ahead() == LOADING_WAIT_S
    preloads.next_review_s = START_S - 1.0
    assert world.events.load_ahead() == 0.0
    preloads.is_loading, preloads.next_review_s = False, math.inf
    for fetches, copies in ((True, False), (False, True), (False, False)):
        world.sessions.tier = SimpleNamespace(
            fetches_any=fetches, copies_any=copies, is_draining=False
        )
        limit_s = LOADING_WAIT_S if fetches or copies else math.inf
        assert world.events.load_ahead() == limit_s
