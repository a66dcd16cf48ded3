import asyncio
from types import SimpleNamespace

import pytest

from sglang_live.messages import PrefillStarted
from sglang_live.stages.thinker import prefill_signs

pytestmark = pytest.mark.asyncio


async def signs_of(
    counts: list[tuple[int, int]], monkeypatch, writes_after: int | None = None
) -> int:
    """How many signs are given while the engine's count goes so, one value per look."""
    monkeypatch.setattr(prefill_signs, "SIGN_EVERY_S", 0.001)
    monkeypatch.setattr(prefill_signs, "LONGEST_PREFILL_S", 0.001 * (len(counts) - 1))
    sent, left, looks = [], iter(counts), 0

    def writes() -> bool:
        nonlocal looks
        looks += 1
        return writes_after is not None and looks > writes_after

    job = SimpleNamespace(job_id="job", post=sent.append)
    await asyncio.wait_for(prefill_signs.show_prefill(job, lambda: next(left), writes), 30)
    assert all(message == PrefillStarted("job") for message in sent)
    return len(sent)


async def test_a_prefill_that_advances_gives_signs(monkeypatch):
    assert await signs_of([(0, 192), (64, 128), (128, 64), (192, 0)], monkeypatch) == 3


async def test_an_engine_that_prefills_nothing_gives_none(monkeypatch):
    assert await signs_of([(64, 9), (64, 9), (64, 30), (64, 30)], monkeypatch) == 0


async def test_a_turn_that_writes_gives_none(monkeypatch):
    assert (
        await signs_of([(0, 192), (64, 128), (128, 64), (192, 0)], monkeypatch, writes_after=1) == 1
    )


async def test_batches_that_are_not_counted_give_signs_by_what_is_left(monkeypatch):
    assert await signs_of([(0, 900), (0, 500), (0, 100)], monkeypatch) == 2
