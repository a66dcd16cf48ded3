"""The prompts that prefill in a round, with fakes of SGLang's requests and scheduler."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from sglang_live.bridge.scheduler.sliced_prefill import SlicedPrefill, prefill_tokens_left
from sglang_live.bridge.stream_table import StreamTable
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
    def prefix_len(self) -> int:
        return self.n_done

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
            table=StreamTable(0.08),
            now_s=100.0,
            # A slice takes 50 ms: 16.5 ms and 100 tokens.
            rates=StageRates(prefill_s_fixed=0.0165, prefill_s_per_token=3.35e-4),
            config=PolicyConfig(),
            is_well_buffered=lambda rid: False,
        )

    def _tokens_to_prefill(self, req: FakeReq) -> int:
        return prefill_tokens_left(req)

    _tokens_to_hold = _tokens_to_prefill

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
def sliced_prefill(scheduler) -> SlicedPrefill:
    return SlicedPrefill(scheduler)


def begun(scheduler: FakeScheduler, sliced_prefill: SlicedPrefill, rid: str = "long") -> FakeReq:
    """A prompt of which a slice was computed just now."""
    req = scheduler.chunked_req = FakeReq(rid, 20_000, 100)
    sliced_prefill.launched([req])
    sliced_prefill._decodes_next = False
    return req


def test_without_long_prompts_rounds_are_sglangs_own(sliced_prefill):
    queue = [FakeReq("a", 50), FakeReq("b", 300)]
    assert sliced_prefill.choose(queue, []) == (queue, [], None)


def test_a_long_prompt_begins_with_a_slice(sliced_prefill):
    queue = [FakeReq("long", 20_000)]
    assert sliced_prefill.choose(queue, []) == (queue, [], 100)


def test_a_shorter_prompt_preempts_and_the_long_one_resumes(scheduler, sliced_prefill):
    long, short = begun(scheduler, sliced_prefill), FakeReq("short", 60)
    assert sliced_prefill.choose([short], []) == ([short], [], None)
    assert scheduler.chunked_req is None
    assert sliced_prefill.partial_prefills() == [long]
    assert sliced_prefill.choose([], []) == ([], [], 100)
    assert scheduler.chunked_req is long
    assert not sliced_prefill.preempted
    assert sliced_prefill.totals["prefills_preempted"] == 1


def test_prompts_that_do_not_preempt_stay_in_the_queue(scheduler, sliced_prefill):
    begun(scheduler, sliced_prefill)
    short, other = FakeReq("short", 60), FakeReq("other", 18_000)
    assert sliced_prefill.choose([other, short], []) == ([short], [other], None)


def test_no_prompt_takes_the_memory_that_the_long_one_still_needs(scheduler, sliced_prefill):
    long = begun(scheduler, sliced_prefill)
    scheduler.free = 19_900 + 20 + 1 + 81
    short = FakeReq("short", 60)
    assert sliced_prefill.choose([short], [])[0] == [short]
    assert scheduler.chunked_req is not long


def test_a_preempting_prompt_that_does_not_fit_lets_the_long_one_resume(scheduler, sliced_prefill):
    long = begun(scheduler, sliced_prefill)
    scheduler.free = 19_900 + 20 + 1 + 80
    assert sliced_prefill.choose([FakeReq("short", 60)], [])[2] == 100
    assert scheduler.chunked_req is long


def test_new_requests_decode_for_a_quarter_of_a_second_before_a_slice(scheduler, sliced_prefill):
    begun(scheduler, sliced_prefill)
    answer = FakeReq("short", 60, 60, output_ids=[1, 2])
    assert sliced_prefill.choose([], [answer]) is None
    scheduler.rounds.now_s += 0.3
    assert sliced_prefill.choose([], [answer]) == ([], [], 100)


def test_decoding_has_a_round_between_two_slices(scheduler, sliced_prefill):
    long = begun(scheduler, sliced_prefill)
    answer = FakeReq("other", 60, 60, max_new_tokens=200, output_ids=[1] * 40)
    sliced_prefill.launched([long])
    assert sliced_prefill.choose([], [answer]) is None
    assert sliced_prefill.choose([], [answer]) == ([], [], 100)
    scheduler.rounds.is_well_buffered = lambda rid: True
    sliced_prefill.launched([long])
    assert sliced_prefill.choose([], [answer]) == ([], [], 100)


def test_without_memory_for_a_slice_running_requests_continue(scheduler, sliced_prefill):
    begun(scheduler, sliced_prefill)
    scheduler.free = 50
    answer = FakeReq("other", 60, 60, max_new_tokens=200, output_ids=[1] * 40)
    assert sliced_prefill.choose([], [answer]) is None
    assert sliced_prefill.choose([], []) == ([], [], 100)  # as upstream has it


def test_of_two_long_prompts_the_shorter_rest_resumes_and_no_other_is_admitted(
    scheduler, sliced_prefill
):
    long = begun(scheduler, sliced_prefill)
    middling = FakeReq("middling", 4_000)
    assert sliced_prefill.choose([middling], []) == ([middling], [], 100)
    scheduler.chunked_req, middling.n_done = middling, 100
    sliced_prefill.launched([middling])
    sliced_prefill._decodes_next = False
    waits = FakeReq("waits", 3_900)
    assert sliced_prefill.choose([waits], []) == ([], [waits], 100)
    assert scheduler.chunked_req is middling
    assert list(sliced_prefill.preempted.values()) == [long]


def test_an_abort_finds_a_preempted_prompt(scheduler, sliced_prefill):
    long = begun(scheduler, sliced_prefill)
    sliced_prefill.choose([short := FakeReq("short", 60)], [])
    scheduler.chunked_req = short
    sliced_prefill.abort("lo", every=False)
    assert long.aborted and not sliced_prefill.preempted
    assert scheduler.chunked_req is short and not short.aborted


def test_a_retracted_prompt_is_no_longer_half_prefilled(scheduler, sliced_prefill):
    long = begun(scheduler, sliced_prefill)
    sliced_prefill.retract(long)
    assert scheduler.chunked_req is None and not sliced_prefill.partial_prefills()
    assert sliced_prefill.totals["prefills_retracted"] == 1
