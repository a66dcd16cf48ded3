"""Who prefills in a round, of requests and a scheduler that only stand for SGLang's."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from sglang_live.bridge.scheduler.sliced_prefill import PutBack, prefill_tokens_left
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import StageRates


@dataclass(eq=False)
class FakeReq:
    rid: str
    n_prompt: int
    n_done: int = 0
    max_new_tokens: int = 20
    output_ids: list[int] = field(default_factory=list)
    aborted: bool = False

    @property
    def origin_input_ids(self) -> list[int]:
        return [0] * self.n_prompt

    @property
    def prefix_indices(self) -> list[int]:
        return [0] * self.n_done

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(max_new_tokens=self.max_new_tokens)

    def finished(self) -> bool:
        return self.aborted or len(self.output_ids) >= self.max_new_tokens


class FakeScheduler:
    page_size = 1

    def __init__(self, free: int = 10**6):
        self.chunked_req: FakeReq | None = None
        self._pending_chunked_abort_req = None
        self.free = free
        self.rounds = SimpleNamespace(
            now_s=100.0,
            rates=StageRates(prefill_s_per_token=5e-4),
            config=PolicyConfig(),
            is_ahead=lambda rid: False,
        )

    def _tokens_to_prefill(self, req: FakeReq) -> int:
        return prefill_tokens_left(req)

    def _pool(self) -> SimpleNamespace:
        return SimpleNamespace(free=self.free)

    def process_pending_chunked_abort(self) -> None:
        assert self.chunked_req is self._pending_chunked_abort_req
        self.chunked_req.aborted = True
        self.chunked_req = self._pending_chunked_abort_req = None


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def put_back(scheduler) -> PutBack:
    return PutBack(scheduler)


def begun(scheduler: FakeScheduler, put_back: PutBack, rid: str = "long") -> FakeReq:
    """A prompt of which a slice was computed just now."""
    req = scheduler.chunked_req = FakeReq(rid, 20_000, 100)
    put_back.launched([req])
    put_back._decodes_next = False
    return req


def test_without_long_prompts_rounds_are_sglangs_own(put_back):
    queue = [FakeReq("a", 50), FakeReq("b", 300)]
    assert put_back.choose(queue, []) == (queue, [], None)


def test_a_long_prompt_is_begun_with_a_slice(put_back):
    queue = [FakeReq("long", 20_000)]
    assert put_back.choose(queue, []) == (queue, [], 100)


def test_a_shorter_prompt_takes_the_place_and_gives_it_back(scheduler, put_back):
    long, short = begun(scheduler, put_back), FakeReq("short", 60)
    assert put_back.choose([short], []) == ([short], [], None)
    assert scheduler.chunked_req is None
    assert put_back.half_way() == [long]
    assert put_back.choose([], []) == ([], [], 100)
    assert scheduler.chunked_req is long
    assert not put_back.waiting
    assert put_back.totals["put_backs"] == 1


def test_those_who_do_not_pass_stay_in_the_queue(scheduler, put_back):
    begun(scheduler, put_back)
    short, other = FakeReq("short", 60), FakeReq("other", 18_000)
    assert put_back.choose([other, short], []) == ([short], [other], None)


def test_nobody_passes_into_what_the_long_prompt_needs_still(scheduler, put_back):
    long = begun(scheduler, put_back)
    scheduler.free = 19_900 + 20 + 1 + 81
    short = FakeReq("short", 60)
    assert put_back.choose([short], [])[0] == [short]
    assert scheduler.chunked_req is not long


def test_and_if_it_does_not_fit_the_long_one_goes_on(scheduler, put_back):
    long = begun(scheduler, put_back)
    scheduler.free = 19_900 + 20 + 1 + 80
    assert put_back.choose([FakeReq("short", 60)], [])[2] == 100
    assert scheduler.chunked_req is long


def test_answers_that_begin_have_their_rounds_for_a_quarter_of_a_second(scheduler, put_back):
    begun(scheduler, put_back)
    answer = FakeReq("short", 60, 60, output_ids=[1, 2])
    assert put_back.choose([], [answer]) is None
    scheduler.rounds.now_s += 0.3
    assert put_back.choose([], [answer]) == ([], [], 100)


def test_decodes_have_a_round_between_two_slices(scheduler, put_back):
    long = begun(scheduler, put_back)
    answer = FakeReq("other", 60, 60, max_new_tokens=200, output_ids=[1] * 40)
    put_back.launched([long])
    assert put_back.choose([], [answer]) is None
    assert put_back.choose([], [answer]) == ([], [], 100)
    scheduler.rounds.is_ahead = lambda rid: True
    put_back.launched([long])
    assert put_back.choose([], [answer]) == ([], [], 100)


def test_without_room_for_a_slice_answers_run_until_there_is(scheduler, put_back):
    begun(scheduler, put_back)
    scheduler.free = 50
    answer = FakeReq("other", 60, 60, max_new_tokens=200, output_ids=[1] * 40)
    assert put_back.choose([], [answer]) is None
    assert put_back.choose([], []) == ([], [], 100)  # as upstream has it


def test_of_two_the_one_with_less_left_goes_on_and_nobody_is_admitted_beside(scheduler, put_back):
    long = begun(scheduler, put_back)
    middling = FakeReq("middling", 4_000)
    assert put_back.choose([middling], []) == ([middling], [], 100)
    scheduler.chunked_req, middling.n_done = middling, 100
    put_back.launched([middling])
    put_back._decodes_next = False
    waits = FakeReq("waits", 3_900)
    assert put_back.choose([waits], []) == ([], [waits], 100)
    assert scheduler.chunked_req is middling
    assert list(put_back.waiting.values()) == [long]


def test_an_abort_finds_it_where_it_waits(scheduler, put_back):
    long = begun(scheduler, put_back)
    put_back.choose([short := FakeReq("short", 60)], [])
    scheduler.chunked_req = short
    put_back.abort("lo", every=False)
    assert long.aborted and not put_back.waiting
    assert scheduler.chunked_req is short and not short.aborted


def test_what_gives_its_kv_back_is_half_way_no_more(scheduler, put_back):
    long = begun(scheduler, put_back)
    put_back.leave(long)
    assert scheduler.chunked_req is None and not put_back.half_way()
    assert put_back.totals["put_back_gave_way"] == 1
