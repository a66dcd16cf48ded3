"""Who is retracted where memory is short: by the policy's order, without an engine."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.rounds import rounds_of
from sglang_live.bridge.scheduler.memory import MemoryScheduler
from sglang_live.bridge.scheduler.paused import PausedRequest
from sglang_live.engine_channel.messages import Progress
from sglang_live.policy.config import TALKER
from sglang_live.policy.policies import Policies

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


class FakeScheduler(MemoryScheduler):
    """Streams of the talker: (buffered seconds or None before the first sound, frames, paused)."""

    def __init__(self, streams: dict[str, tuple[float | None, int, bool]], free: int = 0):
        self.retracted: list[str] = []
        self.sliced_prefill = self.best_effort = None
        self.chunked_req = None
        self.tree_cache = FakePool(0)
        self.token_to_kv_pool_allocator = FakePool(free)
        self.req_to_token_pool = FakePool(3)
        self.page_size, self.max_total_num_tokens = 1, 1000
        self.new_token_ratio_tracker = SimpleNamespace(
            current=0.5, estimate_new_token_ratio_after_retract=lambda reqs: 0.5 + len(reqs) / 10
        )
        self._counts = {"paused_retracted": 0, "running_retracted": 0}
        self.paused = {}
        self.rounds = rounds_of(Policies.parse(("urgency", "pacing")), TALKER, None)
        self.rounds.now_s = NOW_S
        running = []
        for rid, (buffered_s, n_frames, is_paused) in streams.items():
            req = FakeReq(rid, n_frames)
            self._begin(req)
            for _ in range(n_frames):
                self.rounds.table.step([req])
            if buffered_s is not None:
                heard_s = 0.08 * n_frames - buffered_s
                self.rounds.table.progress(Progress.of([rid], [heard_s], [False], [0.0]), NOW_S)
            if is_paused:
                self.paused[rid] = PausedRequest(req)
                self.rounds.table.pause(rid, NOW_S)
            else:
                running.append(req)
        self.batch = FakeBatch(self.token_to_kv_pool_allocator, running)

    def _begin(self, req: FakeReq, managed: bool = True) -> None:
        self.wait(req, managed)
        self.rounds.table.admit(req.rid, NOW_S)

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
        self.token_to_kv_pool_allocator.free += N_PROMPT

    def decide(self) -> None:
        self.rounds.decide(self._pool(), prefill_running=False)


FAR, NEAR, DRY, SILENT = (5.0, 90, False), (1.0, 30, False), (0.1, 30, False), (None, 2, False)
""" a running stream far ahead, a little ahead, about to run dry, not heard yet"""


def test_running_streams_with_time_are_retracted_by_utility():
    scheduler = FakeScheduler({"dry": DRY, "near": NEAR, "far": FAR, "silent": SILENT})
    scheduler._make_room(scheduler.batch)
    assert scheduler.retracted == ["far"]
    assert [req.rid for req in scheduler.batch.reqs] == ["dry", "near", "silent"]
    assert scheduler._counts == {"paused_retracted": 0, "running_retracted": 1}
    assert scheduler.new_token_ratio_tracker.current == 0.8, "no other is admitted as easily"


def test_a_paused_stream_is_retracted_by_utility_as_well():
    scheduler = FakeScheduler({"far": FAR, "farther": (6.0, 90, True), "dry": DRY})
    scheduler._make_room(scheduler.batch)
    assert scheduler.retracted == ["farther"] and not scheduler.paused
    assert scheduler._counts == {"paused_retracted": 1, "running_retracted": 0}


def test_a_request_that_waits_for_text_is_retracted_before_running_ones():
    scheduler = FakeScheduler({"silent": SILENT, "empty": (0.0, 9, True), "dry": DRY})
    scheduler._blocked = lambda req: req.rid == "empty"
    scheduler._make_room(scheduler.batch)
    assert scheduler.retracted == ["empty"]


def test_with_memory_none_is_retracted():
    scheduler = FakeScheduler({"far": FAR, "dry": DRY}, free=2)
    scheduler._make_room(scheduler.batch)
    assert not scheduler.retracted
    assert scheduler.new_token_ratio_tracker.current == 0.5


def test_a_request_that_has_ended_needs_no_memory():
    scheduler = FakeScheduler({"far": FAR, "ended": DRY, "dry": DRY}, free=2)
    scheduler.batch.reqs[1].has_ended = True
    scheduler._make_room(scheduler.batch)
    assert not scheduler.retracted and not scheduler.batch.batch_is_full


def test_one_request_stays_in_the_batch():
    scheduler = FakeScheduler({"far": FAR})
    scheduler._make_room(scheduler.batch)
    assert not scheduler.retracted  # upstream ends it with an error


def test_a_batch_waits_for_the_memory_of_a_paused_request_whose_step_is_in_flight():
    scheduler = FakeScheduler({"far": FAR, "paused": (3.0, 60, True)})
    scheduler.paused["paused"] = SimpleNamespace(
        req=scheduler.paused["paused"].req, step_in_flight=True
    )
    assert not scheduler._make_room(scheduler.batch)  # upstream would abort it
    assert not scheduler.retracted and [req.rid for req in scheduler.batch.reqs] == ["far"]
    scheduler.paused["paused"].step_in_flight = False
    assert scheduler._make_room(scheduler.batch)
    assert scheduler.retracted == ["paused"]


def test_streams_at_risk_are_retracted_last_and_the_driest_of_them_never():
    scheduler = FakeScheduler({"dry": DRY, "drier": (0.0, 30, False), "silent": SILENT})
    scheduler.token_to_kv_pool_allocator.free = -2 * N_PROMPT
    scheduler._make_room(scheduler.batch)
    assert scheduler.retracted == ["silent", "dry"]


@pytest.mark.parametrize("managed", [True, False])
def test_a_running_stream_gives_its_memory_to_a_listener_who_waits(managed):
    scheduler = FakeScheduler({"near": (0.6, 40, False), "far": FAR})
    waiting = scheduler.wait(FakeReq("waits", 0), managed)
    scheduler.decide()
    scheduler._retract_for([waiting], scheduler.batch)
    assert scheduler.retracted == (["far"] if managed else [])
    assert scheduler.batch.batch_is_full != managed


def test_a_stream_with_time_that_waits_takes_no_memory():
    scheduler = FakeScheduler({"far": FAR})
    waiting = scheduler.wait(FakeReq("waits", 0))
    scheduler.rounds.table.progress(Progress.of(["waits"], [0.0], [False], [0.0]), NOW_S)
    for _ in range(50):
        scheduler.rounds.table.step([waiting])
    scheduler.decide()
    scheduler._retract_for([waiting], scheduler.batch)
    assert not scheduler.retracted


class FakeSessions:
    """Slots of sessions, in the role of SGLang's."""

    def __init__(self, n_on_device: int):
        self.slots = {"talks": SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n_on_device))}


@pytest.mark.parametrize(
    ("n_on_device", "free", "fits"), [(0, 90, False), (0, 120, True), (80, 30, True)]
)
def test_a_session_needs_memory_for_all_that_is_not_on_the_device(n_on_device, free, fits):
    scheduler = FakeScheduler({})
    scheduler.tree_cache.session = FakeSessions(n_on_device)
    req = FakeReq("waits", 0)
    req.origin_input_ids = [0] * 90
    req.sampling_params.max_new_tokens = 10
    req.session = SimpleNamespace(session_id="talks")
    assert scheduler.fits(req, [], free) == fits
