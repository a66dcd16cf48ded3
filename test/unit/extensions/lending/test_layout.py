"""Claims about where a borrower's tokens are in a lender's pages."""

import itertools

import numpy as np
import pytest

from sglang_live.extensions.lending.layout import (
    UNIT_BYTES,
    Geometry,
    Memory,
    n_rows,
    refusal,
    slots_in,
    units_of,
)

MODELS = {
    "thinker": Geometry(
        dtype="bfloat16", layout="nhd", n_layers=48, n_heads=4, k_dim=128, v_dim=128, page_size=1
    ),
    "talker": Geometry(
        dtype="bfloat16", layout="nhd", n_layers=20, n_heads=2, k_dim=128, v_dim=128, page_size=1
    ),
    "demo thinker": Geometry(
        dtype="float32", layout="nhd", n_layers=4, n_heads=2, k_dim=16, v_dim=16, page_size=1
    ),
    "demo talker": Geometry(
        dtype="float32", layout="nhd", n_layers=2, n_heads=2, k_dim=16, v_dim=16, page_size=16
    ),
    "odd": Geometry(
        dtype="float16", layout="nhd", n_layers=3, n_heads=1, k_dim=24, v_dim=40, page_size=4
    ),
}
RUNS = ((1, 64), (16, 512), (37, 1000), (5, 4096))


def memory_of(lender: Geometry, n_slots: int) -> Memory:
    offsets, at = [], 0
    for row in lender.row_bytes:
        offsets.append(at)
        at += -(-n_slots * row // 4096) * 4096
    return Memory(offsets=tuple(offsets), row_bytes=lender.row_bytes, n_bytes=at)


PAIRS = [
    pytest.param(lender, borrower, run, id=f"{a}-{b}-{run[0]}+{run[1]}")
    for (a, lender), (b, borrower), run in itertools.product(MODELS.items(), MODELS.items(), RUNS)
]


@pytest.mark.parametrize(("lender", "borrower", "run"), PAIRS)
def test_envelopes_are_disjoint_and_inside_the_lease(lender, borrower, run):
    first, n = run
    memory, size = memory_of(lender, first + n), borrower.envelope_bytes
    ranges = memory.ranges(first, n)
    slots = slots_in(ranges, size)
    begins = np.sort(slots) * UNIT_BYTES
    assert (np.diff(begins) >= size).all()
    inside = [(low <= begins) & (begins + size <= high) for low, high in ranges]
    assert np.any(inside, axis=0).all()
    assert (slots < n_rows(memory.n_bytes, size)).all()


@pytest.mark.parametrize(("lender", "borrower", "run"), PAIRS)
def test_waste_is_below_one_envelope_and_a_unit_per_range(lender, borrower, run):
    ranges = memory_of(lender, sum(run)).ranges(*run)
    step = units_of(borrower.envelope_bytes) * UNIT_BYTES
    used = len(slots_in(ranges, borrower.envelope_bytes)) * step
    whole = sum(high - low for low, high in ranges)
    assert whole - used < len(ranges) * (step + UNIT_BYTES)


def test_a_session_of_the_demo_fits_without_waste():
    # 4 buffers of 128-byte rows hold 1024-byte envelopes: two lent slots per token.
    ranges = memory_of(MODELS["demo talker"], 20_001).ranges(1, 20_000)
    assert len(slots_in(ranges, MODELS["demo thinker"].envelope_bytes)) == 10_000


def test_a_run_that_is_shorter_than_an_envelope_holds_none():
    ranges = memory_of(MODELS["demo talker"], 8).ranges(0, 7)
    assert len(slots_in(ranges, MODELS["demo thinker"].envelope_bytes)) == 0


def test_bytes_written_through_slots_come_back_and_touch_nothing_else():
    lender, borrower = MODELS["odd"], MODELS["demo talker"]
    memory, size = memory_of(lender, 300), borrower.envelope_bytes
    ranges = memory.ranges(40, 200)
    data = np.full(memory.n_bytes, 7, np.uint8)
    slots = slots_in(ranges, size)
    for n, slot in enumerate(slots):
        data[slot * UNIT_BYTES :][:size] = n % 251
    for n, slot in enumerate(slots):
        assert (data[slot * UNIT_BYTES :][:size] == n % 251).all()
    outside = np.ones(memory.n_bytes, bool)
    for low, high in ranges:
        outside[low:high] = False
    assert (data[outside] == 7).all()


@pytest.mark.parametrize("run", [(-1, 4), (0, 0), (200, 2000)])
def test_a_run_outside_of_the_mapping_is_refused(run):
    with pytest.raises(ValueError, match="not in the mapping"):
        memory_of(MODELS["odd"], 300).ranges(*run)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("dtype", "uint8", "dtype"), ("layout", "hnd", "layout")],
)
def test_a_pool_that_cannot_be_shared_has_a_reason(field, value, reason):
    fields = {name: getattr(MODELS["talker"], name) for name in Geometry.__slots__}
    assert refusal(MODELS["talker"]) is None
    assert str(refusal(Geometry(**fields | {field: value}))).startswith(f"{reason}:")
