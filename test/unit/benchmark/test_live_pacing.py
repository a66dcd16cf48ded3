"""Claims about the figures of benchmark.live_pacing."""

import numpy as np
import pytest

from benchmark.live_pacing import Cost, Heard, figures, pace

SOUND = np.full(2400, 500, "<i2").tobytes()


def heard(times_s: list[float]) -> Heard:
    session = Heard()
    for at_s in times_s:
        session.take(SOUND, at_s)
    return session


def test_a_steady_stream_has_no_lead_and_no_jitter():
    found = pace([heard([7 + 0.1 * n for n in range(50)])])
    assert (found.n_packets, found.n_zero, found.n_near_zero) == (50, 0, 0)
    assert found.lead_ms == pytest.approx(0, abs=0.1)
    assert found.gap_ms == pytest.approx([100] * 3, abs=0.1)


def test_a_packet_that_comes_early_leads_and_one_that_is_late_does_not():
    early, late = [0.1 * n for n in range(50)], [0.1 * n for n in range(50)]
    early[20] -= 0.07
    late[20] += 0.09
    found = pace([heard(early), heard(late)])
    assert found.lead_ms == pytest.approx(70, abs=0.1)
    assert found.jitter_ms[2] == pytest.approx(90, abs=0.1)
    assert found.gap_ms[2] == pytest.approx(190, abs=0.1)


def test_noise_that_takes_the_place_of_silence_is_told_from_zeros():
    session = heard([])
    for packet in (bytes(4800), np.full(2400, 3, "<i2").tobytes(), SOUND):
        session.take(packet, 0.0)
    assert (session.n_zero, session.n_near_zero) == (1, 1)


def test_costs_are_compared_per_second_of_a_session():
    costs = [Cost(arm, 10, 60.0, ms, [0.0] * 3) for arm, ms in (("live", 6.0), ("realtime", 5.0))]
    assert figures(costs, pace([heard([0.0, 0.1])]))["ratio"] == 1.2
