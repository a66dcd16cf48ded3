"""Audio that waits for a turn: absolute positions and bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.interaction.input_buffer import BufferFullError, EmptyCommitError, InputBuffer


def ramp(start: int, n: int) -> np.ndarray:
    return (np.arange(start, start + n) % 30_000).astype(np.int16)


def test_take_returns_its_range_and_drops_older_audio():
    buffer = InputBuffer(1.0)
    buffer.append(ramp(0, 1000))
    part = buffer.take(200, 500)
    assert np.array_equal(part.pcm, ramp(200, 300))
    assert (buffer.start_sample, buffer.end_sample) == (500, 1000)
    # Positions stay absolute: the next turn begins where the first ended.
    assert np.array_equal(buffer.take(0, 700).pcm, ramp(500, 200))


def test_take_beyond_the_end_returns_the_held_audio():
    buffer = InputBuffer(1.0)
    buffer.append(ramp(0, 100))
    assert len(buffer.take(50, 5000).pcm) == 50
    assert len(buffer.take(5000, 6000).pcm) == 0
    assert buffer.end_sample == 100


def test_a_part_does_not_change_when_more_audio_comes():
    buffer = InputBuffer(1.0)
    buffer.append(ramp(0, 1600))
    part = buffer.take(0, 1600)
    buffer.append(ramp(7, 1600))
    assert np.array_equal(part.pcm, ramp(0, 1600))


def test_less_than_100_ms_cannot_be_committed():
    buffer = InputBuffer(1.0)
    buffer.append(ramp(0, 1599))
    with pytest.raises(EmptyCommitError, match="only has 99"):
        buffer.check_commit()
    buffer.check_commit(pending_samples=1)


def test_the_bound_refuses_before_anything_is_added():
    buffer = InputBuffer(0.1)
    buffer.check_room(1600)
    buffer.append(ramp(0, 1600))
    with pytest.raises(BufferFullError):
        buffer.check_room(1)
    buffer.append(ramp(0, 400))
    buffer.clear()
    assert (buffer.held_samples, buffer.end_sample) == (0, 2000)


@pytest.mark.parametrize(
    ("sample", "latest", "start"),
    [(500, 100, 500), (500, 800, 200), (0, 100, 0), (2000, 0, 1000), (5000, 100, 900)],
)
def test_older_audio_leaves_unless_it_is_needed_or_among_the_latest(sample, latest, start):
    buffer = InputBuffer(0.1)
    buffer.append(ramp(0, 1000))
    assert buffer.keep(sample, latest) == start
    assert (buffer.start_sample, buffer.end_sample) == (start, 1000)


def test_nothing_is_kept_beyond_the_bound():
    buffer = InputBuffer(0.05)
    buffer.append(ramp(0, 1000))
    assert buffer.keep(0, 1000) == 200


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400)), max_size=20))
def test_every_sample_leaves_at_most_once_and_in_order(steps):
    buffer = InputBuffer(100.0)
    n_written, out = 0, []
    for n_in, cut_at in steps:
        buffer.append(ramp(n_written, n_in))
        n_written += n_in
        out.append(buffer.take(buffer.start_sample, buffer.start_sample + cut_at).pcm)
    out.append(buffer.take(buffer.start_sample, buffer.end_sample).pcm)
    assert np.array_equal(np.concatenate(out), ramp(0, n_written))
    assert buffer.end_sample == n_written
