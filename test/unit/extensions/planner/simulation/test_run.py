"""The simulation: what it computes by hand, what it conserves, and that seeds determine it."""

import itertools
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import fmean

import pytest

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from sglang_live.extensions.planner.simulation.engine.engine import Engine
from sglang_live.extensions.planner.simulation.engine.pool import KvPool, PoolFullError
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Device, Events, Work
from sglang_live.extensions.planner.simulation.frontier import capacity
from sglang_live.extensions.planner.simulation.load.arrivals import PlannedTurn, UserPlan
from sglang_live.extensions.planner.simulation.load.interruptions import PlannedInterruption
from sglang_live.extensions.planner.simulation.load.stats import PointStats
from sglang_live.extensions.planner.simulation.placement import APART
from sglang_live.extensions.planner.simulation.run import Arm, World, point_of
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.server.vocoder import MISSING_S
from sglang_live.extensions.planner.simulation.spec import HostTimes, ServerSpec
from sglang_live.extensions.planner.simulation.users import User, UserSettings
from sglang_live.extensions.planner.simulation.workload import Clip, History, Workload
from sglang_live.policy.arbiter import lead_s
from sglang_live.policy.view import FRAME_S

ROOT = Path(__file__).parents[5]
MODEL = load_device_model(H100)
NO_HOST = HostTimes(**dict.fromkeys((one.name for one in fields(HostTimes)), 0.0))
CLIP = Clip(duration_s=2.0, onset_s=0.2, end_s=1.8, end_known_s=0.5)
ARMS = ("off", "urgency", "pacing", "urgency+pacing", "deadline", "startup-delay", "all")


def run_users(
    arm: str,
    *plans: UserPlan,
    spec: ServerSpec | None = None,
    settings: UserSettings | None = None,
) -> tuple[Server, list[User]]:
    events, of_arm = Events(), Arm.parse(arm)
    spec = of_arm.applied(spec or ServerSpec(model=MODEL, host=NO_HOST))
    server = Server(spec, of_arm.policies, events)
    users = [User(plan, {"clip": CLIP}, server, settings or UserSettings()) for plan in plans]
    try:
        server.run()
    finally:
        server.end()
    assert server.loop.errors == []
    return server, users


def pools_of(server: Server) -> list[KvPool]:
    replicas = server.replicas
    return [one.engine.pool for one in (*replicas.thinkers, *replicas.talkers)]


def busy_of(device: Device) -> float:
    return sum(device.busy_s.values())


def plan(user: int, *n_tokens: int, start_s: float = 0.0, cut_s: float | None = None) -> UserPlan:
    """Turns of these lengths; the first is interrupted after cut_s of its audio."""
    cut = None if cut_s is None else PlannedInterruption("barge_in", cut_s)
    turns = [
        PlannedTurn("clip", 0.3, cut if number == 0 else None, n)
        for number, n in enumerate(n_tokens)
    ]
    return UserPlan(user, start_s, tuple(turns))


def test_the_first_audio_of_a_single_user_takes_what_the_batches_before_it_cost():
    spec = ServerSpec(model=MODEL, host=NO_HOST, placement=APART, header_tokens=10)
    _, [user] = run_users("off", plan(0, 6), spec=spec)
    n_user = 25 + 9  # tokens of 2 s of audio, and their markup
    thinker_s = MODEL.thinker.prefill_s(n_user, 2.0)
    n_talker = n_user + 9
    talker_s = MODEL.talker.prefill_s(n_talker, 0.0)
    frames_s = sum(MODEL.talker.decode_s(1, n_talker + n) for n in (1, 2))
    header_s = MODEL.thinker.prefill_s(1, 0.0)  # in a request of its own
    expected_s = header_s + thinker_s + talker_s + frames_s + MODEL.vocoder.decode_s(1)
    record = user.rows[0].record
    assert record.ttfp_after_detection_ms == pytest.approx(1000 * expected_s)
    assert record.end_of_turn_ms == pytest.approx(500)
    assert record.audio_s == pytest.approx(7 * FRAME_S - MISSING_S)
    assert record.status == "completed" and not record.gaps_over_100ms


def test_a_shared_device_serves_its_stages_one_after_the_other():
    own = run_users("off", plan(0, 40), spec=ServerSpec(model=MODEL, host=NO_HOST, placement=APART))
    shared = run_users("off", plan(0, 40), spec=ServerSpec(model=MODEL, host=NO_HOST))
    busy_s = [
        sum(sum(d.busy_s.values()) for d in server.replicas.devices.values())
        for server, _ in (own, shared)
    ]
    assert busy_s[0] == pytest.approx(busy_s[1], rel=0.05)
    own_s, shared_s = (users[0].rows[0].record.generation_s for _, users in (own, shared))
    assert own_s < shared_s


@pytest.mark.parametrize("arm", ARMS)
def test_every_frame_is_made_once_and_every_sample_is_heard(arm):
    lengths = [(40, 25), (10, 90), (61, 7), (33, 12), (80, 80), (1, 2)]
    plans = [plan(n, *tokens, start_s=0.2 * n) for n, tokens in enumerate(lengths)]
    server, users = run_users(arm, *plans)
    n_frames = sum(n + 1 for tokens in lengths for n in tokens)
    assert server.n_frames == n_frames
    records = [row.record for user in users for row in user.rows]
    assert [r.status for r in records] == ["completed"] * 12
    assert sum(r.heard_in_all_s for r in records) == pytest.approx(
        n_frames * FRAME_S - len(records) * MISSING_S
    )
    for pool in pools_of(server):
        assert (pool.used, pool.rows_used) == (0, 0)


SPECULATES = ServerSpec(model=MODEL, host=NO_HOST, speculate_ms=200)


def paused(user: UserPlan, *pauses_s: tuple[float, float]) -> UserPlan:
    turns = tuple(replace(turn, pauses_s=pauses_s) for turn in user.turns)
    return replace(user, turns=turns)


def test_a_turn_that_begins_in_the_pause_has_its_first_audio_at_once():
    _, [user] = run_users("all", plan(0, 30, 20, 40), spec=SPECULATES)
    _, [waiting] = run_users(
        "all", plan(0, 30, 20, 40), spec=replace(SPECULATES, speculate_ms=None)
    )
    for row, other in zip(user.rows, waiting.rows, strict=True):
        assert row.record.end_of_turn_ms == other.record.end_of_turn_ms
        assert row.record.ttfp_after_detection_ms < 5 < other.record.ttfp_after_detection_ms
        assert row.record.audio_s == pytest.approx(other.record.audio_s)


def test_a_user_who_goes_on_hears_nothing_of_a_withdrawn_turn():
    plans = [plan(n, 40, 25, 30, start_s=0.7 * n) for n in range(4)]
    going_on = [paused(one, (0.5, 0.3), (1.1, 0.4)) for one in plans]
    server, users = run_users("all", *going_on, spec=SPECULATES)
    alike, others = run_users("all", *plans, spec=SPECULATES)
    for user, other in zip(users, others, strict=True):
        for row, alone in zip(user.rows, other.rows, strict=True):
            assert row.record.status == "completed"
            assert row.record.audio_s == pytest.approx(alone.record.audio_s)
    assert server.n_frames > alike.n_frames  # what was withdrawn
    for pool in pools_of(server):
        assert (pool.used, pool.rows_used) == (0, 0)


def test_no_turn_begins_in_a_pause_without_truncation():
    server, [user] = run_users("off", paused(plan(0, 30), (0.5, 0.3)), spec=SPECULATES)
    assert server.n_frames == 31
    assert user.rows[0].record.ttfp_after_detection_ms > 5


@pytest.mark.parametrize("arm", ARMS)
def test_an_interrupted_response_ends_and_its_memory_is_released(arm):
    plans = [plan(n, 100, 20, start_s=0.1 * n, cut_s=1.5) for n in range(4)]
    server, users = run_users(arm, *plans)
    for user in users:
        cut, second = (row.record for row in user.rows)
        assert cut.barged and cut.cut_short and cut.status in ("cancelled", "completed")
        # From the interruption to the onset of the voice 0.2 s, and to its detection 0.263 s.
        assert cut.heard_s == pytest.approx(1.5 + 0.2 + 0.263, abs=0.1)
        assert second.status == "completed" and second.audio_s == pytest.approx(
            21 * FRAME_S - MISSING_S
        )
    for pool in pools_of(server):
        assert (pool.used, pool.rows_used) == (0, 0)


def test_without_overlap_a_batch_is_launched_when_the_one_before_it_has_ended():
    spec = ServerSpec(model=MODEL, host=NO_HOST)
    plans = [plan(n, 40, 30, start_s=0.1 * n) for n in range(8)]
    with_overlap, without = (
        run_users("off", *plans, spec=replace(spec, overlap=overlap)) for overlap in (True, False)
    )
    assert with_overlap[0].n_frames == without[0].n_frames
    waits = [
        sum(row.record.ttfp_ms for user in users for row in user.rows)
        for _, users in (with_overlap, without)
    ]
    # A new prompt has one batch of its engine less before it on the device.
    assert waits[1] < waits[0]


def test_without_truncate_an_interruption_costs_the_conversation_again():
    plans = [plan(0, 100, 20, cut_s=1.0)]
    assert run_users("off", *plans)[0].replicas.thinkers[0].kv.n_rebuilt == 1
    assert run_users("truncate", *plans)[0].replicas.thinkers[0].kv.n_rebuilt == 0


@pytest.fixture
def thought(monkeypatch) -> list[Request]:
    """Requests that came to a thinker, in order."""
    came, add = [], Engine.add

    def noted(engine: Engine, req: Request) -> None:
        if engine.spec.name == "thinker":
            came.append(req)
        add(engine, req)

    monkeypatch.setattr(Engine, "add", noted)
    return came


def sizes_of(reqs: list[Request]) -> list[tuple[int, float, int]]:
    """Tokens to prefill, seconds of audio to encode, and tokens of the response."""
    return [(r.prompt_tokens - r.cached_tokens, r.audio_s, r.max_new) for r in reqs]


# The header's last token; a clip of 2 s with its markup, and behind a response with its end.
HEADER, CLIP_TOKENS, NEXT_TOKENS = (1, 0.0, 0), 25 + 9, 25 + 9 + 2


def test_a_lost_conversation_is_computed_in_one_request(thought):
    spec = ServerSpec(model=MODEL, host=NO_HOST, placement=APART, header_tokens=10)
    _, [user] = run_users("off", plan(0, 60, 6, cut_s=0.5), spec=spec)
    *first, again, last = sizes_of(thought)
    assert first == [HEADER, (CLIP_TOKENS, 2.0, 60)]
    n_again, again_audio_s, _ = again
    assert CLIP_TOKENS < n_again < CLIP_TOKENS + 60 and again_audio_s == 2.0
    assert last == (NEXT_TOKENS, 2.0, 6)
    # One after another, on a device that has nothing else to do.
    thinker_s = sum(MODEL.thinker.prefill_s(n, audio_s) for n, audio_s, _ in (again, last))
    n_talker = CLIP_TOKENS + CLIP_TOKENS + 9
    talker_s = MODEL.talker.prefill_s(CLIP_TOKENS + 9, 0.0)
    frames_s = sum(MODEL.talker.decode_s(1, n_talker + n) for n in (1, 2))
    expected_s = thinker_s + talker_s + frames_s + MODEL.vocoder.decode_s(1)
    record = user.rows[1].record
    assert record.ttfp_after_detection_ms == pytest.approx(1000 * expected_s)


def test_a_stateless_client_computes_what_is_behind_the_heard_part(thought):
    run_users("stock", plan(0, 60, 6, cut_s=0.5), plan(1, 60, 6, start_s=20.0))
    sizes = sizes_of(thought)
    assert sizes[0] == (CLIP_TOKENS, 2.0, 60)
    assert sizes[1] == (NEXT_TOKENS, 2.0, 6)
    assert len(sizes) == 4, "one request a turn"


def test_an_arm_is_policies_and_how_the_server_is_run():
    spec = ServerSpec(model=MODEL)
    plain = Arm.parse("stock+no-overlap")
    assert plain.is_baseline and not plain.policies
    assert plain.applied(spec) == replace(spec, stateless=True, overlap=False)
    assert Arm.parse("truncate+preheat").is_baseline
    assert not Arm.parse("all+no-overlap").is_baseline
    assert Arm.parse("urgency+pacing").applied(spec) == spec
    with pytest.raises(BadInputError):
        Arm.parse("stock+pacing")


def test_a_truncated_session_goes_on_with_one_request(thought):
    run_users("urgency+truncate", plan(0, 60, 6, cut_s=0.5))
    assert [req.max_new for req in thought] == [0, 58, 6]
    assert sizes_of(thought)[2] == (NEXT_TOKENS, 2.0, 6)


@pytest.mark.parametrize(
    ("arm", "host", "first_s", "second_s"),
    [
        ("off", {"answer_s": 0.01}, 0.01, 0.01),
        ("off", {"result_s": 0.01}, 0.01, 0.01),
        ("off", {"features_per_s": 0.01}, 0.02, 0.04),
        ("stock", {"result_s": 0.01}, 0.0, 0.0),
        ("stock", {"answer_s": 0.01}, 0.0, 0.0),
        ("stock", {"features_per_s": 0.01}, 0.02, 0.02),
        ("urgency+truncate", {"answer_s": 0.01}, 0.01, 0.01),
        ("urgency+truncate", {"result_s": 0.01}, 0.01, 0.0),
    ],
)
def test_each_request_takes_the_time_of_the_host(arm, host, first_s, second_s):
    def firsts_ms(times: HostTimes) -> list[float]:
        spec = ServerSpec(model=MODEL, host=times, placement=APART)
        _, [user] = run_users(arm, plan(0, 30, 6, cut_s=0.5), spec=spec)
        return [row.record.ttfp_after_detection_ms for row in user.rows]

    longer = zip(firsts_ms(replace(NO_HOST, **host)), firsts_ms(NO_HOST), strict=True)
    assert [one - other for one, other in longer] == pytest.approx(
        [1000 * first_s, 1000 * second_s], abs=0.5
    )


def test_a_turn_that_ends_before_its_last_request_leaves_no_memory(thought):
    spec = ServerSpec(model=MODEL, host=replace(NO_HOST, result_s=3.0))
    settings = UserSettings(timeout_s=2.5)
    server, [user] = run_users("off", plan(0, 30, 6, cut_s=0.5), spec=spec, settings=settings)
    assert user.rows[1].record.status == "timeout"
    assert all(req.is_finished for req in thought)
    assert not server.sessions
    assert [(pool.used, pool.rows_used) for pool in pools_of(server)] == [(0, 0), (0, 0)]


def test_pacing_makes_less_speech_that_is_not_heard():
    plans = [plan(n, 190, 20, start_s=0.3 * n, cut_s=1.0) for n in range(4)]
    free, paced = (run_users(arm, *plans)[0].n_frames for arm in ("off", "urgency+pacing"))
    assert paced < 0.8 * free


@pytest.mark.parametrize(
    ("arm", "host_tokens", "counted"),
    [
        ("urgency+truncate+next-use", 0, "tokens_lost"),
        ("urgency+truncate+next-use", 10_000, "tokens_loaded"),
        ("urgency+truncate+next-use+preload", 10_000, "tokens_preloaded"),
    ],
)
def test_idle_sessions_are_evicted_and_their_next_turns_get_their_kv_again(
    arm, host_tokens, counted
):
    spec = ServerSpec(model=MODEL, host=NO_HOST, thinker_tokens=700, host_tokens=host_tokens)
    plans = [plan(n, 60, 50, 40, start_s=1.1 * n) for n in range(8)]
    server, users = run_users(arm, *plans, spec=spec)
    records = [row.record for user in users for row in user.rows]
    assert [r.status for r in records] == ["completed"] * 24
    counts = server.replicas.thinkers[0].kv.tiers.counts
    assert counts["tokens_evicted"] > 0 and counts[counted] > 0
    assert pools_of(server)[0].used == 0
    # Without eviction the pool is full of idle sessions, and new turns wait for them.
    _, users = run_users("off", *plans, spec=replace(spec, thinker_reserves_all=True))
    # The orchestrator ends a turn whose thinker is silent.
    assert "failed" in {row.record.status for user in users for row in user.rows}


def test_a_load_overlaps_with_its_prefill_by_the_layers_of_the_model():
    plans = [plan(n, 60, 50, 40, start_s=1.1 * n) for n in range(8)]

    def loaded_ms(n_layers: int) -> float:
        """Mean of the turns; loads take three times as long as prefills."""
        thinker = replace(MODEL.thinker, n_layers=n_layers, kv_token_bytes=2e7)
        model = replace(MODEL, thinker=thinker)
        spec = ServerSpec(model=model, host=NO_HOST, thinker_tokens=700, host_tokens=10_000)
        server, users = run_users("urgency+truncate+next-use", *plans, spec=spec)
        assert server.replicas.thinkers[0].kv.tiers.counts["tokens_loaded"] > 0
        return fmean(row.record.ttfp_ms for user in users for row in user.rows)

    one, many = loaded_ms(1), loaded_ms(48)
    # Each prefill of 15 ms is behind its load but for the last layer.
    assert 5 < one - many < 15


def test_a_pool_that_is_too_small_is_an_error_and_no_result():
    spec = ServerSpec(model=MODEL, thinker_tokens=280)
    with pytest.raises(PoolFullError, match="simulate a larger one"):
        run_users("off", plan(0, 120), plan(1, 120, start_s=0.2), spec=spec)


@pytest.fixture(scope="module")
def world() -> World:
    workload = Workload.load(turns=2, barge_in=0.5, seed=1)
    return World(workload, ServerSpec(model=MODEL), UserSettings())


def point(world: World, arm: str, n_users: int, repeat: int = 0) -> PointStats:
    return point_of(arm, n_users, [world.simulate(arm, n_users, repeat)])


def test_a_seed_determines_every_number(world):
    first, again = (asdict(point(world, "all", 6)) for _ in range(2))
    assert first == again
    assert asdict(point(world, "all", 6, repeat=1)) != first


def test_more_users_wait_longer_and_the_most_that_do_not_are_found(world):
    few, many = (point(world, "off", n) for n in (8, 96))
    assert few.ttfp_after_detection_ms.p50 < many.ttfp_after_detection_ms.p50
    assert few.within_slo and many.within_slo is False
    found = capacity(lambda arm, n: point(world, arm, n), "off", least=8)
    assert 8 <= found.users < found.fails_at <= 96
    assert found.fails_at - found.users <= max(1, round(0.03 * found.fails_at))


def test_turns_of_refused_sessions_are_recorded_and_no_session_stays_open():
    spec = ServerSpec(model=MODEL, host=NO_HOST, max_sessions=1)
    server, users = run_users("off", plan(0, 50), plan(1, 50, 50, 50, start_s=1.0), spec=spec)
    assert [[row.record.status for row in user.rows] for user in users] == [
        ["completed"],
        # It comes back at once, until the first session is over: for the whole of its plan.
        ["refused"] * 3,
    ]
    assert server.sessions == {}


def test_an_open_loop_records_every_turn_and_the_sessions_at_once():
    workload = replace(
        Workload.load(turns=2, barge_in=0.5, seed=1), arrive_s=20.0, arrival_shape=0.25
    )
    run = World(workload, ServerSpec(model=MODEL), UserSettings()).simulate("all", 12)
    assert len(run.rows) == 24 and run.sessions_left == 0
    assert 2 <= run.most_sessions <= 12


def test_room_for_whole_responses_lets_a_request_wait_instead_of_filling_the_pool():
    plans = [plan(user, 200, start_s=0.1 * user) for user in range(2)]
    spec = ServerSpec(model=MODEL, host=NO_HOST, thinker_tokens=420, header_tokens=0)
    with pytest.raises(PoolFullError):
        run_users("off", *plans, spec=spec)
    _, users = run_users("off", *plans, spec=replace(spec, thinker_reserves_all=True))
    first, second = (user.rows[0].record for user in users)
    assert first.ok and second.ok
    assert second.ttfp_ms > 1000 * first.audio_s


def test_a_conversation_without_kv_is_computed_with_the_first_turn():
    def first_ms(*, has_kv: bool) -> list[float]:
        settings = UserSettings(longest=History(8000, 0, has_kv=has_kv))
        _, [user] = run_users("off", plan(1, 10, 10), settings=settings)
        return [row.record.ttfp_ms for row in user.rows]

    without, kept = first_ms(has_kv=False), first_ms(has_kv=True)
    assert without[0] > kept[0] + 20
    assert without[1] == pytest.approx(kept[1], abs=1)


@pytest.mark.parametrize("arm", ["arbiter", "arbiter+urgency+pacing+truncate+preheat"])
def test_stages_by_turns_launch_at_most_one_piece_of_work_ahead(monkeypatch, arm):
    spans: list[tuple[float, float]] = []
    book = Device.book

    def noted(device: Device, stage: str, cost_s: float, launched_s: float, *rest: float) -> Work:
        work = book(device, stage, cost_s, launched_s, *rest)
        spans.append((launched_s, device.ends_s))
        return work

    monkeypatch.setattr(Device, "book", noted)
    workload = Workload.load(turns=2, barge_in=0.5, seed=3)
    found = World(workload, ServerSpec(model=MODEL), UserSettings()).simulate(arm, 6)
    assert all(row.record.ok for row in found.rows) and found.sessions_left == 0
    assert len(spans) > 500
    early_s = [done_s - begun_s for (_, done_s), (begun_s, _) in itertools.pairwise(spans)]
    assert 0 < max(early_s) <= lead_s([HostTimes().launch_s])


def test_turns_bring_the_first_sound_sooner_where_a_device_is_busy():
    world = World(
        Workload.load(turns=3, barge_in=0.5, seed=1), ServerSpec(model=MODEL), UserSettings()
    )
    arm = "urgency+pacing+truncate+preheat"
    queued, by_turns = (
        point_of(name, 40, [world.simulate(name, 40)]) for name in (arm, f"arbiter+{arm}")
    )
    assert by_turns.continuity >= queued.continuity
    ms = [one.ttfp_after_detection_ms.p90 for one in (queued, by_turns)]
    assert ms[1] < 0.8 * ms[0]
