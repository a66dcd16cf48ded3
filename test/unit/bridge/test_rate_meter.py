"""Batches are booked when their results arrive, and their costs are found from them."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from sglang_live.bridge.batch_work import BatchWork, Launch
from sglang_live.bridge.rate_meter import RateMeter
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.sliced_prefill import slice_s, slice_tokens
from sglang_live.policy.view import StageRates

LAUNCH_S = PROCESS_S = 0.0005


@dataclass
class FakeDevice:
    """A device that computes batches one after the other, behind a loop like SGLang's."""

    overlap: bool
    decode_s: float = 0.015
    per_stream_s: float = 0.0
    prefill_s: float = 0.012
    per_token_s: float = 80e-6
    per_audio_s: float = 0.004
    per_pair_s: float = 0.0
    now_s: float = 100.0

    def __post_init__(self):
        self.meter, self.n, self.free_s = RateMeter(), 0, 0.0
        self.in_flight: deque[tuple[Launch, float]] = deque()

    def cost_s(self, work: BatchWork) -> float:
        if work.n_streams:
            return self.decode_s + work.n_streams * self.per_stream_s
        tokens_s = work.n_tokens * self.per_token_s
        attention_s = work.n_pairs * self.per_pair_s
        return self.prefill_s + tokens_s + work.audio_s * self.per_audio_s + attention_s

    def run(self, more_s: float = 0.0, **sizes) -> StageRates:
        """Launch a batch and process the result that the loop processes then.

        more_s: further time of this batch.
        """
        self.n += 1
        work = BatchWork(self.n, **sizes)
        launch = Launch(work, self.now_s)
        self.now_s += LAUNCH_S
        self.free_s = max(launch.at_s, self.free_s) + self.cost_s(work) + more_s
        self.in_flight.append((launch, self.free_s))
        if len(self.in_flight) > self.overlap:
            self.process()
        return self.meter.rates(self.now_s)

    def process(self):
        launch, done_s = self.in_flight.popleft()
        self.now_s = max(self.now_s, done_s)
        self.meter.arrived(launch, self.now_s)
        self.now_s += PROCESS_S


@pytest.fixture(params=[False, True], ids=["no-overlap", "overlap"])
def overlap(request):
    return request.param


def test_a_prefill_among_decodes_is_not_booked_on_the_decode_behind_it(overlap):
    device = FakeDevice(overlap, prefill_s=0.01, per_token_s=0.29 / 2048)
    rounds_s = []
    for n in range(2000):
        rates = device.run(n_tokens=2048) if n % 20 == 19 else device.run(n_streams=4)
        rounds_s.append(rates.round_s)
    assert rates.prefill_s_per_token == pytest.approx(0.29 / 2048, rel=0.05)
    assert rates.round_s == pytest.approx(0.015, rel=0.05)
    assert max(rounds_s[100:]) < 1.1 * 0.015


def test_costs_of_mixed_prefills_are_told_apart(overlap):
    device, rng = FakeDevice(overlap), random.Random(1)
    for _ in range(800):
        if rng.random() < 0.2:
            audio_s = rng.choice((0.0, 0.0, rng.uniform(1, 8)))
            n_tokens = rng.randrange(20, 1500) + round(12.5 * audio_s)
            rates = device.run(n_tokens=n_tokens, audio_s=audio_s)
        else:
            rates = device.run(n_streams=rng.randrange(1, 32))
    assert rates.prefill_s_fixed == pytest.approx(0.012, rel=0.05)
    assert rates.prefill_s_per_token == pytest.approx(80e-6, rel=0.05)
    assert rates.encoder_s_per_audio_s == pytest.approx(0.004, rel=0.05)
    assert rates.round_s == pytest.approx(0.015, rel=0.05)


def test_one_more_stream_lengthens_a_round_by_its_cost(overlap):
    device, rng = FakeDevice(overlap, per_stream_s=1e-4), random.Random(2)
    for _ in range(600):
        rates = device.run(n_streams=rng.randrange(1, 64))
    assert rates.round_s_per_stream == pytest.approx(1e-4, rel=0.05)


def test_prefills_that_waited_for_something_else_do_not_count(overlap):
    device, rng = FakeDevice(overlap), random.Random(3)
    for n in range(120):
        rates = device.run(n_tokens=rng.randrange(100, 2000), more_s=2.0 * (n % 10 == 0))
    assert rates.prefill_s_per_token == pytest.approx(80e-6, rel=0.05)
    assert rates.prefill_s_fixed == pytest.approx(0.012, rel=0.05)


def test_results_that_are_noticed_late_do_not_shift_the_costs(overlap):
    device, rng = FakeDevice(overlap), random.Random(4)
    for n in range(200):
        rates = device.run(n_tokens=rng.randrange(300, 2000))
        device.now_s += 0.05 * (n % 12 == 0)
    assert rates.prefill_s_per_token == pytest.approx(80e-6, rel=0.05)


def test_prefills_of_one_size_give_their_whole_time(overlap):
    device = FakeDevice(overlap)
    for _ in range(50):
        rates = device.run(n_tokens=500)
    found_s = rates.prefill_s_fixed + 500 * rates.prefill_s_per_token
    assert found_s == pytest.approx(0.052, rel=0.02)


def test_a_new_speed_is_found_within_the_prefills_that_are_kept(overlap):
    device, rng = FakeDevice(overlap), random.Random(5)
    for _ in range(100):
        device.run(n_tokens=rng.randrange(100, 2000))
    device.per_token_s = 1e-3
    for _ in range(70):
        rates = device.run(n_tokens=rng.randrange(100, 2000))
    assert rates.prefill_s_per_token == pytest.approx(1e-3, rel=0.05)


def test_slices_of_a_long_prompt_keep_their_duration_as_its_context_grows(overlap):
    device, rng = FakeDevice(overlap, prefill_s=0.002, per_pair_s=2e-8), random.Random(9)
    for _ in range(20):
        rates = device.run(n_tokens=rng.randrange(20, 200))
    config = PolicyConfig()
    context, excess = 0, []
    while context < 27_000:
        n = min(512, slice_tokens(rates, config.stage, config.slicing))
        work = BatchWork(0, n_tokens=n, n_pairs=n * (context + n // 2))
        least = config.stage.min_chunk_tokens
        shortest = BatchWork(0, n_tokens=least, n_pairs=least * (context + least // 2))
        aim_s = max(slice_s(rates, config.slicing), device.cost_s(shortest))
        excess.append(device.cost_s(work) / aim_s)
        rates = device.run(n_tokens=n, n_pairs=work.n_pairs)
        context += n
        device.run(n_streams=1)
    assert max(excess) < 1.75  # until the cost of the context is found
    assert max(excess[10:]) < 1.25


def test_a_cost_that_was_zero_is_found_again():
    device, rng = FakeDevice(overlap=False, prefill_s=0.05, per_token_s=0.0), random.Random(8)
    for _ in range(100):
        rates = device.run(n_tokens=rng.randrange(100, 2000))
    assert rates.prefill_s_per_token == pytest.approx(0.0, abs=5e-6)
    device.per_token_s = 1e-4
    for _ in range(100):
        rates = device.run(n_tokens=rng.randrange(100, 2000))
    assert rates.prefill_s_per_token == pytest.approx(1e-4, rel=0.05)


def test_no_cost_is_negative():
    device, rng = FakeDevice(overlap=False, prefill_s=0.0, per_audio_s=0.0), random.Random(6)
    for _ in range(100):
        rates = device.run(
            n_tokens=rng.randrange(1, 50), audio_s=rng.choice((0.0, 1.0)), more_s=rng.random() / 1e3
        )
        costs = rates.prefill_s_fixed, rates.prefill_s_per_token, rates.encoder_s_per_audio_s
        assert min(costs) >= 0.0
        assert rates.prefill_s_per_token > 0.0


def test_busy_is_the_share_of_time_in_which_batches_are_computed(overlap):
    device = FakeDevice(overlap, decode_s=0.02)
    for _ in range(500):
        device.run(n_streams=1)
        rates = device.meter.rates(device.now_s)
    assert rates.busy > 0.9
    for _ in range(500):
        device.run(n_streams=1)
        while device.in_flight:
            device.process()
        device.now_s += 0.06
        rates = device.meter.rates(device.now_s)
    assert rates.busy == pytest.approx(0.25, abs=0.03)


def test_the_latest_result_is_known_by_its_number():
    device = FakeDevice(overlap=True)
    device.run(n_tokens=100)
    assert (device.meter.n_done, device.meter.prefill_done_s) == (0, 0.0)
    device.run(n_streams=1)
    assert device.meter.n_done == 1
    assert device.meter.prefill_done_s == pytest.approx(100.02, abs=0.001)
    device.run(n_streams=1)
    assert device.meter.n_done == 2
    assert device.meter.prefill_done_s == pytest.approx(100.02, abs=0.001)
