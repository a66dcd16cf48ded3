"""A tape has the semantics of a captured CUDA graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from lab.cpu_graphs.tape import CaptureError, Tape, as_one_call


def test_a_replay_reads_the_inputs_and_writes_into_the_recorded_outputs():
    x = torch.tensor([1.0, 2.0])
    tape = Tape()
    with tape.recording():
        y = (x * 3 + 1).reshape(2, 1).cumsum(0)
    address = y.data_ptr()
    x.copy_(torch.tensor([5.0, 7.0]))
    assert y.flatten().tolist() == [4.0, 11.0]  # until the replay
    tape.replay()
    assert y.flatten().tolist() == [16.0, 38.0]
    assert y.data_ptr() == address


def test_a_replay_runs_no_python_of_the_recorded_function():
    runs: list[int] = []
    kept: list[torch.Tensor] = []
    x, tape = torch.zeros(2), Tape()

    def step() -> torch.Tensor:
        runs.append(1)
        out = x + len(runs)
        kept.append(out.clone())
        return out

    with tape.recording():
        out = step()
    x.fill_(10)
    tape.replay()
    tape.replay()
    assert len(runs) == len(kept) == 1
    assert out.tolist() == [11.0, 11.0]  # the number of runs is that of the recording


def test_what_python_has_computed_is_frozen():
    x, scale, tape = torch.ones(2), {"by": 2.0}, Tape()
    with tape.recording():
        table = torch.tensor([scale["by"], scale["by"]])
        out = x * table
    scale["by"] = 5.0
    tape.replay()
    assert out.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("place", [torch.tensor([2, 0]), [2, 0], 1], ids=["tensor", "list", "one"])
def test_a_number_assigned_to_single_places_is_refused(place):
    seen = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(CaptureError, match="pageable"), Tape().recording():
        seen[place] = True


def test_numbers_in_slices_and_tensors_in_indexed_places_are_recorded():
    rows, state, tape = torch.tensor([2, 0]), torch.zeros(3), Tape()
    with tape.recording():
        state[:2] = 5
        state[rows] = torch.ones_like(rows, dtype=torch.float32)
    state.zero_()
    tape.replay()
    assert state.tolist() == [1.0, 5.0, 1.0]


def test_writes_in_place_happen_again_and_in_order():
    rows, state, tape = torch.tensor([2, 0]), torch.zeros(3), Tape()
    with tape.recording():
        seen = state.clone()
        state[rows] += 1
        state[1:2].copy_(state[:1] * 10)
    assert state.tolist() == [1.0, 10.0, 1.0]
    rows.copy_(torch.tensor([0, 1]))
    tape.replay()
    assert seen.tolist() == [1.0, 10.0, 1.0]
    assert state.tolist() == [2.0, 20.0, 1.0]


@pytest.mark.parametrize(
    "reads",
    [
        pytest.param(lambda x: bool((x > 0).all()), id="branch"),
        pytest.param(lambda x: x[0].item(), id="item"),
        pytest.param(lambda x: int(x[0]), id="int"),
        pytest.param(lambda x: [1, 2, 3][x.long()[0].clamp(0, 2)], id="index of a list"),
        pytest.param(lambda x: x[: x.long()[1]], id="slice"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.numpy(), id="numpy"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: torch.where(x > 0), id="where"),
        pytest.param(lambda x: x[x > 0], id="mask"),
        pytest.param(lambda x: x.__setitem__(x > 0, 1.0), id="assign by mask"),
        pytest.param(lambda x: x.masked_select(x > 0), id="masked_select"),
        pytest.param(lambda x: torch.equal(x, x), id="equal"),
        pytest.param(lambda x: torch.unique(x), id="unique"),
        pytest.param(lambda x: x.repeat_interleave(torch.tensor([1, 2])), id="repeat"),
        pytest.param(lambda x: torch.tensor([1.0], device=x.device), id="copy from the host"),
    ],
)
def test_reading_on_the_host_is_refused(reads):
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(CaptureError, match="host"), Tape().recording():
        reads(x)
    reads(x)  # outside a recording it is no error


def test_a_call_that_is_one_entry_reads_the_buffers_at_each_replay():
    lengths, values, tape = torch.tensor([2, 1]), torch.arange(6.0).view(2, 3), Tape()

    def attend(out: torch.Tensor) -> torch.Tensor:
        for i, n in enumerate(lengths.tolist()):
            out[i] = values[i, :n].sum()
        return out

    with tape.recording():
        total = as_one_call(attend, torch.empty(2)) * 2
    assert total.tolist() == [2.0, 6.0]
    lengths.copy_(torch.tensor([3, 2]))
    tape.replay()
    assert total.tolist() == [6.0, 14.0]
    assert as_one_call(attend, torch.empty(2)).tolist() == [3.0, 7.0]


def test_a_call_that_is_one_entry_writes_into_its_recorded_result():
    x, tape = torch.ones(3), Tape()
    with tape.recording():
        out = as_one_call(lambda t: torch.tensor(t.tolist()) + 1, x)
    address = out.data_ptr()
    x.fill_(4)
    tape.replay()
    assert out.tolist() == [5.0] * 3 and out.data_ptr() == address


def test_collectives_are_refused():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(2)
        with pytest.raises(CaptureError, match="one rank"), Tape().recording():
            distributed.all_reduce(x)
    finally:
        distributed.destroy_process_group()


def test_an_error_ends_the_recording():
    with pytest.raises(ZeroDivisionError), Tape().recording():
        1 / 0  # noqa: B018
    assert torch.ones(1).tolist() == [1.0]
    assert as_one_call(lambda: torch.ones(2).tolist()) == [1.0, 1.0]


def _block(x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, cache: torch.Tensor):
    """The kinds of operators of a decode step."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    low, high = torch.nn.functional.linear(normed, weight).chunk(2, dim=-1)
    cache[rows] = torch.nn.functional.silu(low) * high
    heads = cache[rows].view(len(rows), 1, 2, -1).transpose(1, 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    top, ids = mixed.flatten(1).topk(3, dim=-1)
    pick = top.softmax(-1).cumsum(-1).masked_fill(top > 0.5, -1.0).argmax(-1, keepdim=True)
    return ids.gather(1, pick), torch.full_like(top, -1.0).scatter_(1, pick, 0.0)


@settings(max_examples=20)
@given(n=st.integers(1, 5), seed=st.integers(0, 1000))
def test_replays_equal_eager_runs_bit_by_bit(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.zeros(n, 8), torch.randn(16, 8, generator=generator)
    rows, cache = torch.zeros(n, dtype=torch.int64), torch.zeros(8, 8)
    tape = Tape()
    with tape.recording():
        out = _block(x, weight, rows, cache)
    for _ in range(3):
        x.normal_(generator=generator)
        rows.copy_(torch.randperm(8, generator=generator)[:n])
        alone = cache.clone()
        expected = _block(x, weight, rows, alone)
        tape.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert torch.equal(cache, alone)
