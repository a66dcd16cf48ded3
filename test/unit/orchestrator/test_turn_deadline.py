"""When a turn counts as late: an engine that answers nothing is noticed whatever is asked of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sglang_live.capacity.aimd import AimdConfig
from sglang_live.capacity.control import CapacityConfig, CapacityControl
from sglang_live.clock import SimClock
from sglang_live.core import Tools
from sglang_live.errors import CapacityError
from sglang_live.orchestrator.turn_deadline import TurnDeadline

from .fakes import ask, user

FIRST = AimdConfig().first
TURN = ask("t", user("u", "hi"))
TOOLS = Tools(functions=("{}",))


class Server:
    """One session's turns, and what admission says of them.

    share: of all deadlines since the last call; None: there was none.
    """

    def __init__(self):
        self.clock = SimClock()
        self.control = CapacityControl(CapacityConfig(max_sessions=1000), self.clock)
        self.control.report()

    def turn(self, session_id: str = "s", **changes) -> TurnDeadline:
        return TurnDeadline(self.control, session_id, replace(TURN, **changes))

    def share(self) -> float | None:
        self.control._share = None
        self.clock.advance(30.0)
        return self.control.report().share


@pytest.fixture
def server() -> Server:
    return Server()


ASKED = {
    "audio": {},
    "audio, tools": {"tools": TOOLS},
    "audio, a forced call": {"tools": Tools(functions=("{}",), must_call="")},
    "text": {"wants_audio": False},
    "text, tools": {"wants_audio": False, "tools": TOOLS},
    "out of band": {"stateless": True, "tools": TOOLS},
    "out of band, text": {"stateless": True, "wants_audio": False},
    "frames": {"wants_audio": False, "frame_s": 1.0},
    "speculative": {"speculative": True, "tools": TOOLS},
}


@pytest.mark.parametrize("leaves_s", [None, 20.0])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_an_engine_that_answers_nothing_admits_few_sessions(server, asked, leaves_s):
    """For a quarter of an hour six sessions come every 5 s. They wait, or cancel and ask again."""
    waiting: list[tuple[str, float, TurnDeadline]] = []
    n_admitted = 0

    def begin(session_id: str) -> None:
        deadline = server.turn(session_id, **asked)
        deadline.confirm()
        waiting.append((session_id, server.clock.now_s(), deadline))

    for _ in range(180):
        for _ in range(6):
            try:
                server.control.admit(f"s{n_admitted}")
            except CapacityError:
                break
            begin(f"s{n_admitted}")
            n_admitted += 1
        server.clock.advance(5.0)
        for session_id, began_s, deadline in waiting[:]:
            if leaves_s is not None and server.clock.now_s() - began_s >= leaves_s:
                waiting.remove((session_id, began_s, deadline))
                deadline.over()
                begin(session_id)
    assert n_admitted <= 1.5 * FIRST
    assert server.control.report().limit <= n_admitted


CALLS: dict[str, Callable[[TurnDeadline], None]] = {
    "while it comes": lambda deadline: deadline.call_came(),
    "at its end": lambda deadline: deadline.done(),
}


@pytest.mark.parametrize("came", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("wants_audio", [True, False])
def test_a_response_that_is_a_function_call_is_not_overdue(server, came, wants_audio):
    turns = [server.turn(f"s{n}", tools=TOOLS, wants_audio=wants_audio) for n in range(10)]
    server.clock.advance(0.5)
    for deadline in turns:
        came(deadline)
    assert server.share() is None  # 30 s later: its arguments are long
    for deadline in turns:
        deadline.done()
        deadline.over()
    assert server.share() is None


def test_a_call_behind_spoken_text_leaves_the_sound_of_the_text_due(server):
    turns = [server.turn(f"s{n}", tools=TOOLS) for n in range(10)]
    for deadline in turns:
        deadline.text_came()
        deadline.call_came()
    assert server.share() == pytest.approx(30.0)
    for deadline in turns:
        deadline.audio_came()
        deadline.over()
    assert server.share() == pytest.approx(30.0)


def test_sound_counts_with_tools_as_without(server):
    for tools in (Tools(), TOOLS):
        turns = [server.turn(f"s{n}", tools=tools) for n in range(10)]
        server.clock.advance(0.4)
        for deadline in turns:
            deadline.text_came()
            deadline.audio_came()
            deadline.done()
            deadline.over()
        assert server.share() == pytest.approx(0.4)


def test_text_that_waits_behind_listeners_is_in_time(server):
    turns = [server.turn(f"s{n}", wants_audio=False) for n in range(10)]
    server.clock.advance(10.0)
    for deadline in turns:
        deadline.text_came()
    server.clock.advance(60.0)  # it is long
    for deadline in turns:
        deadline.done()
        deadline.over()
    assert server.share() is None


def test_a_turn_that_is_cancelled_counts_if_its_sound_was_overdue(server):
    for waited_s, share in ((0.9, None), (1.5, 1.5)):
        turns = [server.turn(f"s{n}", tools=TOOLS) for n in range(10)]
        server.clock.advance(waited_s)
        for deadline in turns:
            deadline.withdrawn()
            deadline.over()
        assert server.share() == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize("changes", [{"flex": True}, {"transcribes": True}])
def test_what_may_take_its_time_has_no_deadline(server, changes):
    turns = [server.turn(f"s{n}", wants_audio=False, **changes) for n in range(10)]
    assert server.share() is None
    for deadline in turns:
        deadline.over()
    assert server.share() is None


def test_what_came_before_a_speculative_turn_was_confirmed_is_in_time(server):
    turns = [server.turn(f"s{n}", speculative=True, tools=TOOLS) for n in range(10)]
    for deadline in turns:
        deadline.text_came()
        deadline.audio_came()
        deadline.done()
        deadline.over()
    assert server.share() is None
    for deadline in turns:
        deadline.confirm()
    assert server.share() == 0.0


def test_a_call_before_a_speculative_turn_was_confirmed_is_not_overdue(server):
    turns = [server.turn(f"s{n}", speculative=True, tools=TOOLS) for n in range(10)]
    for deadline in turns:
        deadline.call_came()
        deadline.confirm()
    assert server.share() is None
