"""What was played until a moment, of audio that is sent faster than it plays."""

import numpy as np
import pytest

from sglang_live.interaction.filters.echo import (
    KEPT_S,
    MAX_DELAY_S,
    MOST_BUFFERED_S,
    RATE_HZ,
    SPAN_S,
    PlayedAudio,
)


def ones(seconds: float, value: float = 1.0) -> np.ndarray:
    return np.full(round(seconds * RATE_HZ), value, np.float32)


def test_audio_plays_when_it_comes_or_after_what_came_before():
    played = PlayedAudio()
    played.add(ones(1.0, 1.0), 10.0)
    played.add(ones(1.0, 2.0), 10.2)
    heard = played.until(12.0, 2 * RATE_HZ)
    assert (heard[:RATE_HZ] == 1.0).all() and (heard[RATE_HZ:] == 2.0).all()
    played.add(ones(1.0, 3.0), 15.0)
    heard = played.until(16.0, 2 * RATE_HZ)
    assert (heard[:RATE_HZ] == 0.0).all() and (heard[RATE_HZ:] == 3.0).all()


def test_where_nothing_was_played_there_is_nothing():
    played = PlayedAudio()
    assert played.until(5.0, RATE_HZ) is None
    played.add(ones(1.0), 10.0)
    assert played.until(10.0, RATE_HZ) is None
    assert played.until(10.5, RATE_HZ)[: RATE_HZ // 2].sum() == 0.0
    assert played.until(12.0, RATE_HZ) is None


def test_what_is_discarded_is_not_played():
    played = PlayedAudio()
    played.add(ones(1.0), 10.0)
    played.add(ones(5.0), 10.0)
    played.stop(11.5)
    assert played.until(13.0, 3 * RATE_HZ).sum() == pytest.approx(1.5 * RATE_HZ, abs=1)
    played.add(ones(1.0, 2.0), 12.0)
    assert played.until(12.5, RATE_HZ // 2).max() == 2.0
    played.stop(12.0)
    assert played.until(13.0, RATE_HZ) is None


def test_all_is_kept_that_a_comparison_reads():
    played = PlayedAudio()
    for n in range(100):
        played.add(ones(0.1), n / 10)
    n_read = round((SPAN_S + MAX_DELAY_S) * RATE_HZ)
    assert (played.until(10.0, n_read) == 1.0).all()


def test_it_is_bounded_in_both_directions():
    played = PlayedAudio()
    kept = [played.add(ones(1.0), 10.0) for _ in range(100)]
    assert sum(kept) == pytest.approx(MOST_BUFFERED_S + 1, abs=1)
    played.add(ones(1.0), 200.0)
    assert played.until(200.0 - KEPT_S, RATE_HZ) is None
    assert len(played._parts) == 1
