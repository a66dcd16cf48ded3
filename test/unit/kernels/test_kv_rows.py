"""Rows of many layers copied to other rows: exact, and nothing else changes."""

import mmap
import re

import pytest
import torch
from torch import Tensor

from sglang_live.kernels.kv_rows import copy_rows, kernel
from sglang_live.kernels.kv_rows.grid import GRID, Case


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel itself, run by Triton's interpreter instead of a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel._jit.cache_clear()
    yield
    kernel._jit.cache_clear()


def n_slots_of(case: Case) -> int:
    return case.page * (2 * -(-case.n_rows // case.page) + 1)


def slots_of(case: Case) -> Tensor:
    """[n_rows] int64: random pages, and the last not whole."""
    pages = torch.randperm(n_slots_of(case) // case.page)
    return (pages[:, None] * case.page + torch.arange(case.page)).flatten()[: case.n_rows]


class Side:
    """Keys of all layers, then values, with random bytes."""

    def __init__(self, case: Case, gap: int = 0, device: str = "cpu", *, pin: bool = False):
        size = case.dtype.itemsize
        self.row_bytes, self.raw, self.layers = [], [], []
        for head_dim in (case.head_dim, case.v_head_dim):
            width = case.n_heads * head_dim
            for _ in range(case.n_layers):
                raw = torch.randint(256, (n_slots_of(case), (width + gap) * size)).byte()
                raw = raw.pin_memory() if pin else raw.to(device)
                rows = raw.view(case.dtype)[:, :width]
                self.raw.append(raw)
                self.layers.append(rows.unflatten(1, (case.n_heads, head_dim)))
                self.row_bytes.append(width * size)


def check(src: Side, dst: Side, rows: Tensor, call) -> None:
    from_, to = rows.cpu()
    expected = [raw.cpu().clone() for raw in dst.raw]
    for new, raw, n in zip(expected, src.raw, src.row_bytes, strict=True):
        new[to, :n] = raw.cpu()[from_, :n]
    call(src.layers, dst.layers, rows)
    if rows.is_cuda:
        torch.cuda.synchronize()
    for new, raw in zip(expected, dst.raw, strict=True):
        assert torch.equal(raw.cpu(), new)


def launch(src: list[Tensor], dst: list[Tensor], rows: Tensor) -> None:
    """What copy_rows does with rows on a GPU."""
    if rows.shape[1]:
        places = [tuple(map(kernel._place, layers)) for layers in (src, dst)]
        kernel._launch(kernel._layout(*places), rows, stream=0, n_programs=5)


def both_ways(host: Side, device: Side, direction: str) -> tuple[Side, Side]:
    return (device, host) if direction == "to_host" else (host, device)


def random_rows(case: Case) -> Tensor:
    return torch.stack((slots_of(case), slots_of(case)))


# --- over the grid ---

directions = pytest.mark.parametrize("direction", ["to_host", "to_device"])
cases = pytest.mark.parametrize("case", GRID, ids=str)


@cases
def test_the_reference_copies_the_listed_rows_and_no_other_byte(case):
    check(Side(case, case.gap), Side(case), random_rows(case), copy_rows)


@directions
@cases
def test_the_interpreted_kernel_does_the_same(case, direction, interpreted):
    sides = both_ways(Side(case), Side(case, case.gap), direction)
    check(*sides, random_rows(case), launch)


@pytest.mark.gpu
@directions
@cases
def test_the_kernel_does_the_same_over_the_link(case, direction):
    sides = both_ways(Side(case, pin=True), Side(case, case.gap, "cuda"), direction)
    check(*sides, random_rows(case).cuda(), copy_rows)


@pytest.mark.gpu
def test_memory_that_cuda_has_registered_is_copied_and_pageable_memory_is_refused():
    n_layers, n_slots, row_bytes = 3, 97, 1024
    pages = mmap.mmap(-1, n_layers * n_slots * row_bytes)  # pages that nothing else has registered
    host = torch.frombuffer(pages, dtype=torch.uint8).view(n_layers, n_slots, row_bytes)
    device = torch.randint(256, host.shape, device="cuda").byte()
    rows = torch.stack([torch.randperm(n_slots) for _ in range(2)])
    with pytest.raises(ValueError, match="pageable"):
        copy_rows(list(device), list(host), rows.cuda())
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0
    try:
        copy_rows(list(device), list(host), rows.cuda())
        torch.cuda.synchronize()
    finally:
        cudart.cudaHostUnregister(host.data_ptr())
    assert torch.equal(host[:, rows[1]], device.cpu()[:, rows[0]])


# Rows of 1 KB in accesses of 16 bytes; of 8 and of 1 where a side is not aligned.
@pytest.mark.parametrize(("alignment", "access"), [(16, "v2.b64"), (8, "b64"), (1, "b8")])
def test_the_kernel_compiles_for_an_absent_gpu(alignment, access, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    jit, words = kernel._jit()
    kinds = ["*i64", "*i64", "i32", "i32"] + ["constexpr"] * 4
    signature = dict(zip(jit.arg_names, kinds, strict=True))
    word = words[min(8, alignment)]
    sizes = {"WORD": word, "ALIGNMENT": alignment, "COLUMNS": 128, "ROWS": 16}
    hopper = GPUTarget("cuda", 90, 32)
    source = ASTSource(jit, signature, constexprs=sizes)
    compiled = triton.compile(source, target=hopper, options={"num_warps": kernel.N_WARPS})
    assert compiled.asm["cubin"]
    stores = set(re.findall(r"st\.global\.([a-z0-9.]+)", compiled.asm["ptx"]))
    assert stores == {access}


# --- what it reads of the layers ---


def places(*layers: Tensor) -> tuple[kernel.Place, ...]:
    return tuple(map(kernel._place, layers))


def test_all_rows_of_a_launch_have_the_alignment_of_the_least_aligned():
    memory = torch.zeros(64, 32, dtype=torch.uint8)  # 64-byte aligned, as all of torch's
    whole, half, odd = memory[:, :16], memory[:, 8:24], memory[:, 1:17]
    found = [kernel._layout(places(whole, x), places(whole, x)) for x in (whole, half, odd)]
    assert [x.alignment_bytes for x in found] == [16, 8, 1]
    assert [x.word_bytes for x in found] == [8, 8, 1]
    assert found[0].entries[1] == (memory.data_ptr(), memory.data_ptr(), 32, 32, 2)


def test_the_table_of_a_layout_is_made_once_per_stream():
    layer = torch.zeros(4, 16)
    layout = kernel._layout(places(layer), places(layer))
    assert kernel._layout(places(layer), places(layer)) is layout
    tables = [kernel._table(layout, layer.device, stream) for stream in (1, 1, 2)]
    assert tables[0] is tables[1]
    assert tables[0] is not tables[2]
    assert tables[2].tolist() == [list(layout.entries[0])]


# --- at the boundary ---


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rows": torch.zeros(2, 3, dtype=torch.int32)}, "int64"),
        ({"rows": torch.zeros(3, dtype=torch.int64)}, "n_rows"),
        ({"rows": torch.zeros(3, 2, dtype=torch.int64).T}, "contiguous"),
        ({"src_layers": [torch.zeros(4, 2, 3)]}, "1 layers cannot be copied to 2"),
        ({"src_layers": [torch.zeros(4, 2, 3), torch.zeros(4, 3, 2)]}, "rows differ"),
        ({"src_layers": [torch.zeros(4, 2, 3).half()] * 2}, "rows differ"),
        ({"src_layers": [torch.zeros(4, 3, 2).transpose(1, 2)] * 2}, "contiguous"),
        ({"src_layers": [torch.zeros(4, 2, 3, device="meta")] * 2}, "on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_disagree_are_refused(wrong, words):
    right = {
        "src_layers": [torch.zeros(4, 2, 3) for _ in range(2)],
        "dst_layers": [torch.zeros(4, 2, 3) for _ in range(2)],
        "rows": torch.zeros(2, 1, dtype=torch.int64),
    }
    copy_rows(**right)
    with pytest.raises(ValueError, match=words):
        copy_rows(**right | wrong)
