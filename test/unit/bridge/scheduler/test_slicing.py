"""The prompts that prefill in a round, with fakes of SGLang's requests and scheduler."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from sglang_live.bridge.scheduler.memory import prefill_tokens_left
from sglang_live.bridge.scheduler.part import Prefill
from sglang_live.bridge.scheduler.slicing import Slicing
from sglang_live.bridge.stream_table import StreamTable
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import StageRates
from test.unit.bridge.scheduler import fake_scheduler


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


class FakeScheduler(fake_scheduler.FakeScheduler):
    def __init__(self, free: int = 10**6):
        super().__init__(_pending_chunked_abort_req=None)
        self.free = free
        self.rounds = SimpleNamespace(
            table=StreamTable(0.08),
            now_s=100.0,
            # A slice takes 50 ms: 16.5 ms and 100 tokens.
            rates=StageRates(prefill_s_fixed=0.0165, prefill_s_per_token=3.35e-4),
            config=PolicyConfig(),
            is_well_buffered=lambda rid: False,
        )
        self.slicing = Slicing(self, self.rounds)
        self.compose(self.slicing)
        self.memory = SimpleNamespace(
            state=lambda: SimpleNamespace(free=self.free),
            tokens_to_prefill=prefill_tokens_left,
            tokens_to_hold=prefill_tokens_left,
        )

    def process_pending_chunked_abort(self) -> None:
        assert self.chunked_req is self._pending_chunked_abort_req
        self.chunked_req.aborted = True
        self.chunked_req = self._pending_chunked_abort_req = None


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def slicing(scheduler) -> Slicing:
    return scheduler.slicing


def begun(scheduler: FakeScheduler, slicing: Slicing, rid: str = "long") -> FakeReq:
    """A prompt of which a slice was computed just now."""
    req = scheduler.chunked_req = FakeReq(rid, 20_000, 100)
    slicing.launches_prefill([req])
    slicing._decodes_next = False
    return req


def test_without_long_prompts_rounds_are_sglangs_own(slicing):
    queue = [FakeReq("a", 50), FakeReq("b", 300)]
    assert slicing.choose(queue, []) == (queue, [], None)


def test_a_long_prompt_begins_with_a_slice(slicing):
    queue = [FakeReq("long", 20_000)]
    assert slicing.choose(queue, []) == (queue, [], 100)


def test_a_shorter_prompt_preempts_and_the_long_one_resumes(scheduler, slicing):
    long, short = begun(scheduler, slicing), FakeReq("short", 60)
    assert slicing.choose([short], []) == ([short], [], None)
    assert scheduler.chunked_req is None
    assert scheduler.partial_prefills() == [long]
    assert slicing.choose([], []) == ([], [], 100)
    assert scheduler.chunked_req is long
    assert not slicing.preempted
    assert slicing.totals()["prefills_preempted"] == 1


def test_prompts_that_do_not_preempt_stay_in_the_queue(scheduler, slicing):
    begun(scheduler, slicing)
    short, other = FakeReq("short", 60), FakeReq("other", 18_000)
    assert slicing.choose([other, short], []) == ([short], [other], None)


def test_no_prompt_takes_the_memory_that_the_long_one_still_needs(scheduler, slicing):
    long = begun(scheduler, slicing)
    scheduler.free = 19_900 + 20 + 1 + 81
    short = FakeReq("short", 60)
    assert slicing.choose([short], [])[0] == [short]
    assert scheduler.chunked_req is not long


def test_a_preempting_prompt_that_does_not_fit_lets_the_long_one_resume(scheduler, slicing):
    long = begun(scheduler, slicing)
    scheduler.free = 19_900 + 20 + 1 + 80
    assert slicing.choose([FakeReq("short", 60)], [])[2] == 100
    assert scheduler.chunked_req is long


def test_new_requests_decode_for_a_quarter_of_a_second_before_a_slice(scheduler, slicing):
    begun(scheduler, slicing)
    answer = FakeReq("short", 60, 60, output_ids=[1, 2])
    assert slicing.choose([], [answer]) is None
    scheduler.rounds.now_s += 0.3
    assert slicing.choose([], [answer]) == ([], [], 100)


def test_decoding_has_a_round_between_two_slices(scheduler, slicing):
    long = begun(scheduler, slicing)
    answer = FakeReq("other", 60, 60, max_new_tokens=200, output_ids=[1] * 40)
    slicing.launches_prefill([long])
    assert slicing.choose([], [answer]) is None
    assert slicing.choose([], [answer]) == ([], [], 100)
    scheduler.rounds.is_well_buffered = lambda rid: True
    slicing.launches_prefill([long])
    assert slicing.choose([], [answer]) == ([], [], 100)


def test_without_memory_for_a_slice_running_requests_continue(scheduler, slicing):
    begun(scheduler, slicing)
    scheduler.free = 50
    answer = FakeReq("other", 60, 60, max_new_tokens=200, output_ids=[1] * 40)
    assert slicing.choose([], [answer]) is None
    assert slicing.choose([], []) == ([], [], 100)  # as upstream has it


def test_of_two_long_prompts_the_shorter_rest_resumes_and_no_other_is_admitted(scheduler, slicing):
    long = begun(scheduler, slicing)
    middling = FakeReq("middling", 4_000)
    assert slicing.choose([middling], []) == ([middling], [], 100)
    scheduler.chunked_req, middling.n_done = middling, 100
    slicing.launches_prefill([middling])
    slicing._decodes_next = False
    waits = FakeReq("waits", 3_900)
    assert slicing.choose([waits], []) == ([], [waits], 100)
    assert scheduler.chunked_req is middling
    assert list(slicing.preempted.values()) == [long]


def test_an_abort_finds_a_preempted_prompt(scheduler, slicing):
    long = begun(scheduler, slicing)
    slicing.choose([short := FakeReq("short", 60)], [])
    scheduler.chunked_req = short
    slicing.abort("lo", every=False)
    assert long.aborted and not slicing.preempted
    assert scheduler.chunked_req is short and not short.aborted


def test_a_retracted_prompt_is_no_longer_half_prefilled(scheduler, slicing):
    long = begun(scheduler, slicing)
    slicing.removes_prefill(long, retracts=True)
    assert scheduler.chunked_req is None and not scheduler.partial_prefills()
    assert slicing.totals()["prefills_retracted"] == 1


def test_no_slice_is_chosen_in_a_round_without_prefill(scheduler, slicing):
    long, prefill = begun(scheduler, slicing), Prefill([FakeReq("short", 60)], [])
    prefill.at_most(0)
    slicing.narrow(prefill)
    assert scheduler.chunked_req is long and len(prefill.queue) == 1
