"""Long prompts in slices: shorter ones pass, and no prompt starves."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_live.policy.sliced_prefill import (
    SlicingConfig,
    is_long,
    passing,
    rank_s,
    slice_s,
    slice_tokens,
)
from sglang_live.policy.stage import StageConstants
from sglang_live.policy.view import StageRates

STAGE, CONFIG = StageConstants(), SlicingConfig()
# A slice takes 50 ms: 16.5 ms and 100 tokens.
RATES = StageRates(prefill_s_fixed=0.0165, prefill_s_per_token=3.35e-4)
SLICE_S = 0.05
SHARE = SLICE_S / (SLICE_S + CONFIG.max_preempt_s)


def passed(left, waiting, *, idle_s=0.0, free=10**6, most=100):
    sizes = [(tokens, tokens + 10) for tokens in waiting]
    return passing(left, sizes, idle_s=idle_s, free=free, most=most, config=CONFIG)


def test_shorter_prompts_pass_a_long_one():
    assert passed(10_000, [30, 9_000, 40]) == [0, 2]


def test_as_many_pass_as_one_slice_takes_and_one_at_least():
    assert passed(10_000, [60, 60, 40]) == [0, 2]
    assert passed(10_000, [3_000, 10]) == [0]


def test_a_prompt_that_was_passed_for_long_goes_on():
    assert passed(10_000, [30], idle_s=CONFIG.max_preempt_s) == []


def test_a_prompt_that_is_nearly_done_goes_on():
    assert passed(50, [30]) == []


def test_no_prompt_passes_into_reserved_memory():
    assert passed(10_000, [30, 20], free=39) == [1]


@pytest.mark.parametrize(
    ("fixed_s", "duration_s"),
    [(0.0, 0.025), (0.008, 0.025), (0.0165, 0.05), (0.03, 0.0909), (0.2, 0.1)],
)
def test_a_slice_is_as_short_as_the_fixed_cost_allows(fixed_s, duration_s):
    assert slice_s(StageRates(prefill_s_fixed=fixed_s), CONFIG) == pytest.approx(
        duration_s, rel=1e-3
    )


@pytest.mark.parametrize(
    ("fixed_s", "per_token_s", "tokens"),
    [
        (0.0165, 3.35e-4, 100),
        (0.0165, 6.7e-6, 5000),
        (0.01, 1.0, 64),
        (0.005, 2e-4, 100),
        (0.2, 1e-4, 64),
    ],
)
def test_slices_follow_the_measured_cost(fixed_s, per_token_s, tokens):
    rates = StageRates(prefill_s_fixed=fixed_s, prefill_s_per_token=per_token_s)
    assert slice_tokens(rates, STAGE, CONFIG) == tokens
    assert not is_long(4 * tokens, tokens, CONFIG)
    assert is_long(4 * tokens + 1, tokens, CONFIG)


def test_the_prompt_with_least_left_goes_on_until_age_outweighs_it():
    def rank(since_s: float, left: int) -> float:
        return rank_s(since_s, left, RATES, CONFIG)

    assert rank(1.0, 2_000) < rank(0.0, 20_000)
    # 18,000 tokens are 6.03 s of work, and at a sixth of the time 36.2 s.
    assert rank(36.0, 2_000) < rank(0.0, 20_000)
    assert rank(36.4, 2_000) > rank(0.0, 20_000)


@given(
    left=st.integers(1, 50_000),
    waiting=st.lists(st.integers(1, 50_000), max_size=20),
    idle_s=st.floats(0.0, 2.0),
    free=st.integers(-10, 60_000),
)
def test_prompts_that_pass_are_shorter_and_fit_beside_reserved_memory(left, waiting, idle_s, free):
    found = passed(left, waiting, idle_s=idle_s, free=free)
    assert found == sorted(set(found))
    assert all(2 * waiting[i] <= left for i in found)
    assert sum(waiting[i] + 10 for i in found) <= max(free, 0)
    assert not found or idle_s < CONFIG.max_preempt_s
    assert len(found) < 2 or sum(waiting[i] for i in found) <= 100


@dataclass
class Prompt:
    left: int
    came_s: float
    begun_s: float | None = None
    sliced_s: float = 0.0


@dataclass
class Engine:
    """An engine that only prefills, as bridge/scheduler/slicing.py does by the policy.

    half_sliced_s: when a half-prefilled prompt had its latest slice; it may be complete by then.
    """

    pool: int = 40_000
    now_s: float = 0.0
    half: list[Prompt] = field(default_factory=list)
    queue: list[Prompt] = field(default_factory=list)
    done: list[Prompt] = field(default_factory=list)
    paused: dict[int, int] = field(default_factory=dict)
    half_sliced_s: float = 0.0

    def step(self) -> None:
        most = slice_tokens(RATES, STAGE, CONFIG)
        ran = self._chosen(most)
        for prompt in ran:
            if prompt in self.queue:
                self.queue.remove(prompt)
            n = min(prompt.left, most)
            self.paused[id(prompt)] = self.paused.get(id(prompt), 0) + n
            prompt.left, most = prompt.left - n, max(0, most - n)
            self.now_s += n * RATES.prefill_s_per_token
            self.half = [other for other in self.half if other is not prompt]
            if prompt.left or prompt.begun_s is not None:
                self.half_sliced_s = self.now_s
            if prompt.left:
                prompt.begun_s = self.now_s if prompt.begun_s is None else prompt.begun_s
                prompt.sliced_s = self.now_s
                self.half.append(prompt)
            else:
                self.done.append(prompt)
                del self.paused[id(prompt)]
        if not ran:
            self.now_s += 0.01

    def _chosen(self, most: int) -> list[Prompt]:
        free = self.pool - sum(self.paused.values())
        if not self.half:
            return [prompt for prompt in self.queue[:1] if prompt.left <= free]
        first = min(self.half, key=lambda p: rank_s(p.begun_s, p.left, RATES, CONFIG))
        free -= sum(prompt.left for prompt in self.half)
        found = passing(
            first.left,
            [(prompt.left, prompt.left) for prompt in self.queue],
            idle_s=self.now_s - first.sliced_s,
            free=free,
            most=most,
            config=CONFIG,
        )
        return [self.queue[index] for index in found] or [first]


class ArrivalsAndAborts(RuleBasedStateMachine):
    """Under any arrivals and aborts half-prefilled prompts go on, and the pool suffices."""

    def __init__(self):
        super().__init__()
        self.engine = Engine()

    @rule(tokens=st.one_of(st.integers(1, 300), st.integers(300, 20_000)))
    def arrive(self, tokens):
        self.engine.queue.append(Prompt(tokens, self.engine.now_s))

    @rule(n=st.integers(1, 40))
    def run(self, n):
        for _ in range(n):
            self.engine.step()

    @rule(at=st.integers(0, 30), waits=st.booleans())
    def abort(self, at, waits):
        those = self.engine.queue if waits else self.engine.half
        if those:
            prompt = those.pop(at % len(those))
            self.engine.paused.pop(id(prompt), None)

    @invariant()
    def what_is_begun_can_be_completed(self):
        engine = self.engine
        promised = sum(engine.paused.values()) + sum(prompt.left for prompt in engine.half)
        assert promised <= engine.pool

    @invariant()
    def some_half_prefilled_prompt_had_a_slice_lately(self):
        if self.engine.half:
            # A prompt that passes may itself be long: then its own slices are the latest.
            idle_s = self.engine.now_s - self.engine.half_sliced_s
            assert idle_s <= CONFIG.max_preempt_s + 2 * SLICE_S

    def teardown(self):
        for _ in range(20_000):
            if not self.engine.queue and not self.engine.half:
                return
            self.engine.step()
        raise AssertionError(f"left over: {self.engine.half} {self.engine.queue}")


TestArrivalsAndAborts = ArrivalsAndAborts.TestCase
TestArrivalsAndAborts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("others", [60, 3_000], ids=["short", "middling"])
def test_a_long_prompt_is_completed_under_any_load(others):
    """More of them than the engine can compute arrive until it is complete."""
    engine = Engine(pool=10**9)
    long = Prompt(20_000, 0.0)
    engine.queue.append(long)
    engine.step()
    while long not in engine.done:
        while len(engine.queue) < 3:
            engine.queue.append(Prompt(others, engine.now_s))
        engine.step()
    alone_s = 20_000 * RATES.prefill_s_per_token
    # At its share, behind those only that came before age outweighed their length.
    assert engine.now_s <= 2.1 * alone_s / SHARE


def test_a_prompt_of_half_of_what_is_left_passes_and_a_longer_one_does_not():
    assert passed(10_000, [5_000]) == [0]
    assert passed(10_000, [5_001]) == []


def test_a_prompt_that_fits_exactly_passes_and_the_next_one_has_the_rest():
    assert passed(10_000, [30], free=40) == [0]
    assert passed(10_000, [30], free=39) == []
    assert passed(10_000, [30, 30], free=80) == [0, 1]
    assert passed(10_000, [30, 30], free=79) == [0]
