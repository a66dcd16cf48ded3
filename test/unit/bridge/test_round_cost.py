"""Claims about the fit of what rounds take."""

import math
import random

import pytest

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.bridge.round_cost import RoundCostMeter
from sglang_live.policy.round_cost import RoundCost

TRUE = RoundCost(decode=(4e-3, 3e-4, 2e-7), prefill=(6e-3, 5e-5, 2e-8, 1e-8, 3e-3, 1e-6))


class Engine:
    """Batches of random sizes, which take what TRUE says, times a noise."""

    def __init__(self, seed: int, noise: float = 0.0):
        self.meter, self._random, self._noise = RoundCostMeter(), random.Random(seed), noise

    def decodes(self, n_rounds: int, factor: float = 1.0) -> None:
        for _ in range(n_rounds):
            n = self._random.randrange(1, 64)
            context = n * self._random.randrange(50, 4000)
            spent_s = float(TRUE.decode_s(n, context)) * self._with_noise(factor)
            self.meter.take(BatchWork(1, n_streams=n, n_context=context), spent_s)

    def prefills(self, n_rounds: int) -> None:
        for _ in range(n_rounds):
            n, context = self._random.randrange(16, 2048), self._random.randrange(0, 8000)
            audio_s = self._random.choice((0.0, self._random.uniform(0.0, 20.0)))
            loaded = self._random.choice((0, self._random.randrange(0, 4000)))
            work = BatchWork(
                1,
                n_tokens=n,
                n_context=n * context,
                n_squared=n * n,
                audio_s=audio_s,
                n_loaded=loaded,
            )
            spent_s = TRUE.prefill_s(n, context, audio_s, loaded) * self._with_noise(1.0)
            self.meter.take(work, spent_s)

    def _with_noise(self, factor: float) -> float:
        return factor * (1.0 + self._random.uniform(-self._noise, self._noise))


def test_decode_rounds_are_predicted():
    engine = Engine(1)
    engine.decodes(300)
    cost = engine.meter.cost
    for n, context in ((1, 100), (32, 64_000), (200, 400_000)):
        assert float(cost.decode_s(n, context)) == pytest.approx(
            float(TRUE.decode_s(n, context)), rel=0.05
        )
    assert cost.decode_error < 0.05


def test_prefills_are_predicted():
    engine = Engine(2)
    engine.prefills(400)
    cost = engine.meter.cost
    for sizes in ((64, 0, 0.0, 0), (1000, 6000, 0.0, 0), (200, 100, 15.0, 0), (64, 0, 0.0, 4000)):
        assert cost.prefill_s(*sizes) == pytest.approx(TRUE.prefill_s(*sizes), rel=0.1)
    assert cost.prefill_error < 0.1


def test_the_error_is_that_of_nine_in_ten_predictions():
    engine = Engine(3, noise=0.3)
    engine.decodes(600)
    assert 0.2 < engine.meter.cost.decode_error < 0.36


def test_it_is_unknown_before_some_batches_were_measured():
    engine = Engine(4)
    engine.decodes(15)
    assert math.isinf(engine.meter.cost.decode_error)
    assert math.isinf(engine.meter.cost.prefill_error)
    engine.decodes(1)
    assert math.isfinite(engine.meter.cost.decode_error)


def test_a_fault_of_the_machine_is_left_out_and_a_slower_engine_is_not():
    engine = Engine(5)
    engine.decodes(300)
    before = float(engine.meter.cost.decode_s(32, 64_000))
    engine.decodes(2, factor=30.0)
    engine.decodes(6)
    assert float(engine.meter.cost.decode_s(32, 64_000)) == pytest.approx(before, rel=0.02)
    engine.decodes(300, factor=5.0)
    assert float(engine.meter.cost.decode_s(32, 64_000)) == pytest.approx(5 * before, rel=0.1)


def test_costs_are_never_negative():
    meter = RoundCostMeter()
    for n in range(1, 200):  # the larger, the shorter
        meter.take(BatchWork(1, n_streams=n, n_context=10 * n), 1.0 / n)
    assert min(meter.cost.decode) >= 0.0
