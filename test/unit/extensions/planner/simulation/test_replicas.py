"""Replicas of stages, whole servers, and what a failure costs."""

from collections import Counter

import pytest

from sglang_live.errors import LiveError
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.placement import DividedCosts, Placement
from sglang_live.extensions.planner.simulation.run import Arm
from sglang_live.extensions.planner.simulation.server.replicas import Process
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.server.vocoder import MISSING_S
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.users import User, UserSettings
from sglang_live.policy.view import FRAME_S
from test.unit.extensions.planner.simulation.test_run import CLIP, MODEL, NO_HOST, plan, pools_of

TWO = Placement(thinkers=(0, 1), talkers=(2, 3, 4), vocoders=(5,))


def server_of(events: Events, placement: Placement, arm: str = "all") -> Server:
    return Server(
        ServerSpec(model=MODEL, host=NO_HOST, placement=placement), Arm.parse(arm).policies, events
    )


def users_of(service, n_users: int, *n_tokens: int) -> list[User]:
    plans = [plan(n, *n_tokens, start_s=0.1 * n) for n in range(n_users)]
    return [User(one, {"clip": CLIP}, service, UserSettings()) for one in plans]


def statuses(users: list[User]) -> Counter[str]:
    return Counter(row.record.status for user in users for row in user.rows)


def assert_empty(server: Server) -> None:
    assert [(pool.used, pool.rows_used) for pool in pools_of(server)] == [(0, 0)] * len(
        pools_of(server)
    )
    assert not any(replica.sessions for replica in server.replicas.replicas)
    assert server.loop.errors == []


def process_of(server: Server, name: str) -> Process:
    return next(one for one in server.replicas.processes if one.entry.name == name)


def sessions_of(server: Server, stage: str) -> list[int]:
    entries = (one for one in server.replicas.replicas if one.spec.stage == stage)
    return [len(entry.sessions) for entry in entries]


def test_sessions_are_divided_among_the_replicas_and_every_frame_is_made_once():
    events = Events()
    server = server_of(events, TWO)
    users = users_of(server, 12, 30, 50)
    server.run(until_s=1.5)
    assert sessions_of(server, "thinker") == [6, 6]
    assert sessions_of(server, "talker") == [4, 4, 4]
    server.run()
    assert statuses(users) == {"completed": 24}
    assert server.n_frames == 12 * (31 + 51)
    assert_empty(server)


def test_a_divided_thinker_shares_its_devices_with_no_other_stage():
    assert Placement(thinkers=(0,), thinker_tp=4, talkers=(4,), vocoders=(5,)).n_devices == 6
    with pytest.raises(ValueError, match="shares its devices"):
        Placement(thinkers=(0,), thinker_tp=2, talkers=(1,), vocoders=(2,))
    with pytest.raises(ValueError, match="shares its devices"):
        Placement(thinkers=(0, 1), thinker_tp=2, talkers=(4,), vocoders=(4,))


def test_a_divided_thinker_is_slower_for_one_stream_and_faster_for_many():
    divided = DividedCosts(whole=MODEL.thinker, n_devices=4)
    assert divided.decode_s(1, 100) > MODEL.thinker.decode_s(1, 100)
    assert divided.decode_s(64, 160_000) < 0.6 * MODEL.thinker.decode_s(64, 160_000)
    assert divided.prefill_s(4000, 2.0) < MODEL.thinker.prefill_s(4000, 2.0)


@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
def test_turns_of_a_stage_that_dies_go_on_in_another_replica(stage):
    events = Events()
    server = server_of(events, Placement(thinkers=(0, 1), talkers=(2, 3), vocoders=(4, 5)))
    users = users_of(server, 8, 60, 40, 40, 40)
    process = process_of(server, f"{stage}/0")
    events.at(4.0, lambda: server.kill(process, restart_s=3.0))
    server.run()
    assert statuses(users) == {"completed": 32}
    for number, n_tokens in enumerate((60, 40, 40, 40)):
        audio_s = [user.rows[number].record.audio_s for user in users]
        assert audio_s == pytest.approx([(n_tokens + 1) * FRAME_S - MISSING_S] * 8)
    assert server.orchestrator.lost_jobs.n[stage, "moved"] > 0
    assert server.is_up
    assert_empty(server)


@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
def test_turns_of_the_only_replica_fail_and_its_sessions_go_on(stage):
    events = Events()
    server = server_of(events, Placement(thinkers=(0,), talkers=(1,), vocoders=(2,)))
    users = users_of(server, 4, 60, 40, 40, 40)
    process = process_of(server, f"{stage}/0")
    events.at(4.0, lambda: server.kill(process, restart_s=3.0))
    server.run()
    found = statuses(users)
    assert found["failed"] >= 4 and found["completed"] == 16 - found["failed"]
    assert [user.rows[-1].record.status for user in users] == ["completed"] * 4
    # A thinker loses all its conversations; another stage's death aborts the thinker's running
    # requests, whose conversations are lost.
    assert 0 < server.replicas.n_rebuilt <= 4
    assert server.is_up
    assert_empty(server)


def test_new_sessions_are_refused_while_the_only_replica_is_down():
    events = Events()
    server = server_of(events, Placement())
    server.kill(process_of(server, "talker/0"), restart_s=5.0)
    with pytest.raises(LiveError, match="no talker is up"):
        server.open("a")
    server.run()
    assert server.is_up
