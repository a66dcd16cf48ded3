"""Storms beside simulated users."""

import pytest

from benchmark.simulate.config import SimulateConfig
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.run import Simulated, World, point_of

STORM = StormSpec(16, 6.0, 30.0)


@pytest.fixture(scope="module")
def simulated():
    """All runs of users beside the storm: by arm, or without it."""
    config = SimulateConfig(turns=4, barge_in=(0.5,), vocoder_batch=16)
    known: dict[tuple[str, bool], Simulated] = {}

    def run(arm: str, storm: StormSpec | None = STORM) -> Simulated:
        key = arm, storm is not None
        if key not in known:
            world = World(config.workload(0.5), config.server, config.users, storm)
            known[key] = world.simulate(arm, 24)
        return known[key]

    return run


def test_waves_come_until_the_users_have_left(simulated):
    found = simulated("off")
    waves = sorted({row.wave for row in found.storm_rows})
    assert waves == list(range(1, len(waves) + 1))
    assert len(found.storm_rows) == STORM.sessions * len(waves)
    assert len(waves) == pytest.approx(found.end_s / STORM.period_s, abs=1)
    assert all(row.start_s == pytest.approx(row.wave * STORM.period_s) for row in found.storm_rows)
    assert all(row.ok and row.record.ttft_ms > 0 for row in found.storm_rows)
    assert found.sessions_left == 0


def test_a_clip_is_encoded_before_its_answer(simulated):
    """Half a minute takes 45 ms of the encoder, and 9 ms of the prefill."""
    first_ms = min(row.record.ttft_ms for row in simulated("off").storm_rows)
    assert first_ms > 54


def test_without_a_storm_there_are_no_messages(simulated):
    found = simulated("off", None)
    assert found.storm_rows == () and point_of("off", 24, [found]).storm is None
    assert point_of("off", 24, [simulated("off")]).storm.sent == len(simulated("off").storm_rows)


def test_listeners_hear_no_gaps_where_messages_wait_for_them(simulated):
    off, protected = (point_of(arm, 24, [simulated(arm)]) for arm in ("off", "all"))
    assert off.continuity < 0.95
    assert protected.continuity > 0.98
    assert protected.storm.ttft_ms.p90 > off.storm.ttft_ms.p90
