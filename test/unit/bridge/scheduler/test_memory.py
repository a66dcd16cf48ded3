"""Who is retracted where memory is short: by the policy's order, without an engine."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.rounds import rounds_of
from sglang_live.bridge.scheduler.deciding import Deciding
from sglang_live.bridge.scheduler.part import Part, Prefill
from sglang_live.bridge.scheduler.paused import PausedRequest
from sglang_live.messages import HeardOfMany
from sglang_live.policy.config import TALKER
from sglang_live.policy.policies import Policies
from test.unit.bridge.scheduler.fake_scheduler import FakeScheduler

NOW_S = 100.0
N_PROMPT = 20


class FakeReq:
    def __init__(self, rid: str, n_output: int):
        self.rid = rid
        self.origin_input_ids = [0] * N_PROMPT
        self.output_ids = [0] * n_output
        self.kv = SimpleNamespace(kv_committed_len=N_PROMPT + n_output - 1)
        self.sampling_params = SimpleNamespace(max_new_tokens=200, ignore_eos=False)
        self.session = self.to_finish = self.beam_group = None
        self.has_ended = False

    def finished(self) -> bool:
        return self.has_ended


class FakeBatch:
    """Can decode while the pool has a token for each of its requests."""

    def __init__(self, pool: "FakePool", reqs: list[FakeReq]):
        self.pool, self.reqs, self.batch_is_full = pool, reqs, True

    def check_decode_mem(self) -> bool:
        return self.pool.free >= len(self.reqs)

    def filter_batch(self, keep_indices: list[int] | None = None) -> None:
        if keep_indices is None:
            keep_indices = [i for i, req in enumerate(self.reqs) if not req.finished()]
        self.reqs = [self.reqs[i] for i in keep_indices]


class FakePool:
    def __init__(self, free: int):
        self.free = free

    def available_size(self) -> int:
        return self.free

    def evictable_size(self) -> int:
        return 0


class FakeBlocking(Part):
    """rids: requests whose input does not exist yet."""

    def __init__(self, scheduler, rids):
        super().__init__(scheduler)
        self.rids = rids

    def blocks(self, req) -> bool:
        return req.rid in self.rids


class World:
    """Streams of the talker: (buffered seconds or None before the first sound, frames, paused)."""

    def __init__(
        self,
        streams: dict[str, tuple[float | None, int, bool]],
        free: int = 0,
        blocked: tuple[str, ...] = (),
    ):
        self.retracted: list[str] = []
        self.pool = FakePool(free)
        self.tracker = SimpleNamespace(
            current=0.5, estimate_new_token_ratio_after_retract=lambda reqs: 0.5 + len(reqs) / 10
        )
        self.scheduler = FakeScheduler(
            tree_cache=FakePool(0),
            token_to_kv_pool_allocator=self.pool,
            req_to_token_pool=FakePool(3),
            max_total_num_tokens=1000,
            new_token_ratio_tracker=self.tracker,
        )
        self.rounds = rounds_of(Policies.parse(("urgency", "pacing")), TALKER, None)
        self.deciding = Deciding(self.scheduler, self.rounds, kv_by_tokens=False)
        self.scheduler.compose(self.deciding, FakeBlocking(self.scheduler, blocked))
        self.memory = self.scheduler.memory
        self.memory.retract = self._retract
        self.paused = self.scheduler.pausing.requests
        self.rounds.now_s = NOW_S
        running = []
        for rid, (buffered_s, n_frames, is_paused) in streams.items():
            req = FakeReq(rid, n_frames)
            self.wait(req, True)
            self.rounds.table.admit(req.rid, NOW_S)
            for _ in range(n_frames):
                self.rounds.table.step([req], NOW_S)
            if buffered_s is not None:
                heard_s = 0.08 * n_frames - buffered_s
                self.rounds.table.progress(HeardOfMany.of([rid], [heard_s], [False]), NOW_S)
            if is_paused:
                self.paused[rid] = PausedRequest(req)
                self.rounds.table.pause(rid, NOW_S)
            else:
                running.append(req)
        self.batch = FakeBatch(self.pool, running)

    def wait(self, req: FakeReq, managed: bool = True) -> FakeReq:
        self.rounds.table.wait(
            req.rid,
            now_s=NOW_S,
            managed=managed,
            prompt_tokens=N_PROMPT,
            prefill_tokens=N_PROMPT,
        )
        return req

    def _retract(self, req: FakeReq, n_running: int) -> None:
        self.retracted.append(req.rid)
        self.pool.free += N_PROMPT

    def make_room(self) -> bool:
        return self.memory.make_room(self.batch)

    def find_no_room(self, *waiting: FakeReq) -> None:
        """A round in which SGLang admits none of these."""
        self.rounds.decide(self.memory.state(), prefill_running=False)
        self.deciding.narrow(Prefill(list(waiting), self.batch.reqs))
        self.deciding.after_no_prefill(self.batch)

    def counts(self) -> dict[str, float]:
        totals = self.memory.totals()
        return {name: totals[name] for name in ("paused_retracted", "running_retracted")}


FAR, NEAR, DRY, SILENT = (5.0, 90, False), (1.0, 30, False), (0.1, 30, False), (None, 2, False)
""" a running stream far ahead, a little ahead, about to run dry, not heard yet"""


def test_running_streams_with_time_are_retracted_by_utility():
    world = World({"dry": DRY, "near": NEAR, "far": FAR, "silent": SILENT})
    world.make_room()
    assert world.retracted == ["far"]
    assert [req.rid for req in world.batch.reqs] == ["dry", "near", "silent"]
    assert world.counts() == {"paused_retracted": 0, "running_retracted": 1}
    assert world.tracker.current == 0.8, "no other is admitted as easily"


def test_a_paused_stream_is_retracted_by_utility_as_well():
    world = World({"far": FAR, "farther": (6.0, 90, True), "dry": DRY})
    world.make_room()
    assert world.retracted == ["farther"] and not world.paused
    assert world.counts() == {"paused_retracted": 1, "running_retracted": 0}


def test_a_request_that_waits_for_text_is_retracted_before_running_ones():
    world = World({"silent": SILENT, "empty": (0.0, 9, True), "dry": DRY}, blocked=("empty",))
    world.make_room()
    assert world.retracted == ["empty"]


def test_with_memory_none_is_retracted():
    world = World({"far": FAR, "dry": DRY}, free=2)
    world.make_room()
    assert not world.retracted
    assert world.tracker.current == 0.5


def test_a_request_that_has_ended_needs_no_memory():
    world = World({"far": FAR, "ended": DRY, "dry": DRY}, free=2)
    world.batch.reqs[1].has_ended = True
    world.make_room()
    assert not world.retracted and not world.batch.batch_is_full


def test_one_request_stays_in_the_batch():
    world = World({"far": FAR})
    world.make_room()
    assert not world.retracted  # upstream ends it with an error


def test_a_batch_waits_for_the_memory_of_a_paused_request_whose_step_is_in_flight():
    world = World({"far": FAR, "paused": (3.0, 60, True)})
    world.paused["paused"] = SimpleNamespace(req=world.paused["paused"].req, step_in_flight=True)
    assert not world.make_room()  # upstream would abort it
    assert not world.retracted and [req.rid for req in world.batch.reqs] == ["far"]
    world.paused["paused"].step_in_flight = False
    assert world.make_room()
    assert world.retracted == ["paused"]


def test_streams_at_risk_are_retracted_last_and_the_driest_of_them_never():
    world = World({"dry": DRY, "drier": (0.0, 30, False), "silent": SILENT})
    world.pool.free = -2 * N_PROMPT
    world.make_room()
    assert world.retracted == ["silent", "dry"]


@pytest.mark.parametrize("managed", [True, False])
def test_a_running_stream_gives_its_memory_to_a_listener_who_waits(managed):
    world = World({"near": (0.6, 40, False), "far": FAR})
    waiting = world.wait(FakeReq("waits", 0), managed)
    world.find_no_room(waiting)
    assert world.retracted == (["far"] if managed else [])
    assert world.batch.batch_is_full != managed


def test_a_stream_with_time_that_waits_takes_no_memory():
    world = World({"far": FAR})
    waiting = world.wait(FakeReq("waits", 0))
    world.rounds.table.progress(HeardOfMany.of(["waits"], [0.0], [False]), NOW_S)
    for _ in range(50):
        world.rounds.table.step([waiting], NOW_S)
    world.find_no_room(waiting)
    assert not world.retracted


class FakeSessions:
    """Slots of sessions, in the role of SGLang's."""

    def __init__(self, n_on_device: int):
        self.slots = {"talks": SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n_on_device))}


@pytest.mark.parametrize(
    ("n_on_device", "free", "fits"), [(0, 90, False), (0, 120, True), (80, 30, True)]
)
def test_a_session_needs_memory_for_all_that_is_not_on_the_device(n_on_device, free, fits):
    world = World({})
    world.scheduler.tree_cache.session = FakeSessions(n_on_device)
    req = FakeReq("waits", 0)
    req.origin_input_ids = [0] * 90
    req.sampling_params.max_new_tokens = 10
    req.session = SimpleNamespace(session_id="talks")
    assert world.memory.fits(req, [], free) == fits
