"""The thinker's states at audio positions, as they come from its scheduler."""

import numpy as np
import pytest

from sglang_live.messages import HiddenRows, Picture
from sglang_live.stages.thinker import audio_states
from sglang_live.stages.thinker.audio_states import AudioStates


def report(rid: str, *at: int) -> HiddenRows:
    """Each row holds its position."""
    rows = np.array([[position, position] for position in at], np.float32)
    return HiddenRows(rid, list(at), "<f4", rows.tobytes())


@pytest.fixture
def states():
    return AudioStates()


async def test_states_come_in_prompt_order_without_what_was_computed_again(states):
    await states.add(report("r", 7, 8))
    await states.add(report("r", 3, 5, 7))
    rows, _ = await states.of("r", 3, begin=5)
    assert rows[:, 0].tolist() == [5, 7, 8]
    assert rows.dtype == np.float32


async def test_states_stay_in_the_engines_dtype(states):
    bits = np.array([[1, 2], [3, 4]], "<u2")  # of bfloat16
    await states.add(HiddenRows("r", [0, 1], "<u2", bits.tobytes()))
    rows, _ = await states.of("r", 2, begin=0)
    assert rows.dtype == np.dtype("<u2") and rows.tolist() == bits.tolist()


async def test_late_duplicates_leave_nothing_behind(states):
    await states.add(report("r", 0, 1))
    await states.of("r", 2, begin=0)
    await states.add(report("r", 0, 1))  # of a retraction
    assert not states._chunks


async def test_what_is_kept_has_an_end(states, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(audio_states.time, "monotonic", lambda: now_s)
    await states.add(report("taken", 0))
    await states.of("taken", 1, begin=0)
    await states.add(report("aborted", 0))
    now_s += audio_states.KEEP_S + 1
    await states.add(report("next", 0))
    assert list(states._chunks) == ["next"] and not states._taken


async def test_a_picture_that_came_in_two_pieces_is_one(states):
    rows = np.zeros((2, 2), np.float32).tobytes()
    await states.add(HiddenRows("r", [5, 6], "<f4", rows, [Picture(5, 2, 2)]))
    await states.add(HiddenRows("r", [7, 8], "<f4", rows, [Picture(5, 2, 2)]))
    found, pictures = await states.of("r", 4, begin=3)
    assert (len(found), pictures) == (4, [Picture(5, 2, 2)])
