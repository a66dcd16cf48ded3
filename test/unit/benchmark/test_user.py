"""A user's plan against a scripted client."""

import json

import pytest
from websockets.exceptions import ConnectionClosedError

from benchmark.load import user as user_module
from benchmark.load.history import history_message
from benchmark.load.user import User
from sglang_live.client.connection import SessionError
from sglang_live.extensions.planner.simulation.load.arrivals import PlannedTurn, UserPlan
from sglang_live.extensions.planner.simulation.load.interruptions import PlannedInterruption
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord

BARGE_IN = PlannedInterruption("barge_in", 1.5)
AUDIO = {"a": "clip a", "b": "clip b", "c": "clip c", "cough": "sound of a cough"}


class InstantClock:
    def __init__(self):
        self.slept_s: list[float] = []

    def now_s(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


class Turn:
    def __init__(self, status: str, interruption: str | None):
        self.barged = interruption == "barge_in"
        self._record = TurnRecord(
            kind="speech", status=status, interruption=interruption, reply_pcm=b"audio"
        )

    def record(self) -> TurnRecord:
        return self._record


class ScriptedClient:
    """Reaches every planned barge-in. The statuses of its turns are scripted."""

    statuses: list[str] = []  # noqa: RUF012 (set anew by each test)
    opened = 0
    calls: list[tuple] = []  # noqa: RUF012

    def __init__(self, _options, _clock):
        self.frames_sent_late = (10, 1)
        self.side_errors = ["invalid_value"]

    async def __aenter__(self):
        ScriptedClient.opened += 1
        if self.statuses and self.statuses[0] == "refused":
            raise SessionError(self.statuses.pop(0))
        return self

    async def __aexit__(self, *_exc):
        pass

    async def post(self, item, max_output_tokens):
        self.calls.append(("posted", item))
        status = self.statuses.pop(0) if self.statuses else "completed"
        return TurnRecord(kind="posted", status=status, error="no room" * (status == "failed"))

    async def take_turn(self, said, cut):
        self.calls.append((said, cut and cut.after_s, cut and cut.sound))
        if self.statuses and self.statuses[0] == "lost":
            self.statuses.pop(0)
            raise ConnectionClosedError(None, None)
        status = self.statuses.pop(0) if self.statuses else "completed"
        return Turn(status, "barge_in" if cut and cut.sound is None else None)

    async def wait_until_played(self):
        self.calls.append(("played",))


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(user_module, "RealtimeClient", ScriptedClient)

    async def run(*turns: PlannedTurn, statuses=(), history="") -> User:
        ScriptedClient.statuses, ScriptedClient.calls, ScriptedClient.opened = [*statuses], [], 0
        user = User(UserPlan(0, 0.5, turns), AUDIO, None, InstantClock(), history)
        await user.run()
        return user

    return run


async def test_each_session_begins_with_its_history(run):
    turns = [PlannedTurn(clip=clip, response_gap_s=1.0) for clip in "ab"]
    user = await run(*turns, history="long ago", statuses=["completed", "lost"])
    assert [row.record.status for row in user.rows] == ["failed", "completed"]
    posted = ("posted", "long ago")
    assert [call for call in user_module.RealtimeClient.calls if call == posted] == [posted] * 2


async def test_a_history_that_fails_is_a_turn_that_fails(run):
    user = await run(PlannedTurn(clip="a", response_gap_s=1.0), history="x", statuses=["failed"])
    assert [(row.record.status, row.record.error) for row in user.rows] == [("refused", "no room")]


def test_users_have_histories_of_their_own():
    texts = [
        json.loads(history_message(50, (1, 0), user))["item"]["content"][0]["text"]
        for user in range(8)
    ]
    assert {len(text.split()) for text in texts} == {50}
    assert len(set(texts)) == 8
    assert texts[3] == json.loads(history_message(50, (1, 0), 3))["item"]["content"][0]["text"]


async def test_a_barge_in_is_the_next_clip_spoken_at_once(run):
    user = await run(PlannedTurn("a", 0.7, BARGE_IN), PlannedTurn("b", 0.9), statuses=["cancelled"])
    assert ScriptedClient.calls == [("clip a", 1.5, None), ("clip b", None, None), ("played",)]
    assert user._clock.slept_s == [0.5, 0.9], "no pause after the turn that was interrupted"
    assert [(row.turn, row.clip, row.record.interruption) for row in user.rows] == [
        (0, "a", "barge_in"),
        (1, "b", None),
    ]
    assert user.rows[0].planned == BARGE_IN


async def test_barge_ins_may_follow_each_other(run):
    user = await run(
        PlannedTurn("a", 0.7, BARGE_IN), PlannedTurn("b", 0.7, BARGE_IN), PlannedTurn("c", 0.7)
    )
    assert [row.clip for row in user.rows] == ["a", "b", "c"]


async def test_a_false_trigger_is_a_sound_not_a_turn(run):
    noise = PlannedInterruption("false_trigger", 2.0, "cough")
    user = await run(PlannedTurn("a", 0.7, noise))
    assert ScriptedClient.calls[0] == ("clip a", 2.0, "sound of a cough")
    assert len(user.rows) == 1


async def test_a_failed_turn_ends_the_session_and_the_next_opens_another(run):
    user = await run(PlannedTurn("a", 0.7), PlannedTurn("b", 0.7), statuses=["failed"])
    assert [row.record.status for row in user.rows] == ["failed", "completed"]
    assert ScriptedClient.opened == 2
    assert user.side_errors == ["invalid_value"] * 2


async def test_a_refused_session_costs_one_turn(run):
    user = await run(PlannedTurn("a", 0.7), PlannedTurn("b", 0.7), statuses=["refused"])
    assert [row.record.status for row in user.rows] == ["refused", "completed"]


async def test_a_lost_connection_costs_one_turn(run):
    user = await run(
        PlannedTurn("a", 0.7, BARGE_IN),
        PlannedTurn("b", 0.7),
        PlannedTurn("c", 0.7),
        statuses=["cancelled", "lost"],
    )
    statuses = [(row.clip, row.record.status) for row in user.rows]
    assert statuses == [("a", "cancelled"), ("b", "failed"), ("c", "completed")]


async def test_the_audio_of_responses_is_not_kept(run):
    user = await run(PlannedTurn("a", 0.7))
    assert user.rows[0].record.reply_pcm == b""
