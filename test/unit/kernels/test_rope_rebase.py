"""Keys moved to earlier positions: exact for any RoPE layout, without other changes."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sglang_live.kernels.rope_rebase import kernel, rebase_keys, reference
from sglang_live.kernels.rope_rebase.grid import GRID, TOLERANCE, Case

N_SLOTS = 64
POISON = 0xFF  # NaN in every dtype
THETA = 1_000_000
# SGLang rounds the angle position * frequency to float32, so its own rotation is off by up to
# half an eps of the largest position, and a difference of two by twice that.
MAX_POSITION = 16_384
ANGLE_ERROR = MAX_POSITION * torch.finfo(torch.float32).eps


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


def inv_freq(rotary_dim: int, device: str = "cpu") -> Tensor:
    return THETA ** -(torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)


def random_keys(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.rand(shape) - 1).to(dtype)


def exact(keys: Tensor, case: Case) -> Tensor:
    """What all these keys should become, in float32."""
    turned, rows = keys.float(), torch.arange(len(keys))
    layout = {"neox": case.neox, "rotary_dim": case.rotary_dim}
    reference.rebase_keys(turned, rows, case.delta, inv_freq(case.rotary_dim), **layout)
    return turned


def bits(keys: Tensor) -> Tensor:
    return keys.view(torch.uint8)


def check(case: Case, device: str, call=rebase_keys) -> None:
    """Turn some rows of one layer of a buffer in which two layers alternate."""
    n_slots = max(N_SLOTS, 2 * case.n_rows)
    shape = n_slots, 2, case.n_heads, case.head_dim
    both = torch.empty(shape, dtype=case.dtype, device=device)
    bits(both).fill_(POISON)
    keys, rows = both[:, 0], torch.randperm(n_slots)[: case.n_rows].to(device)
    chosen = random_keys(case.n_rows, case.n_heads, case.head_dim, dtype=case.dtype)
    bits(keys)[rows] = bits(chosen).to(device)
    layout = {"neox": case.neox, "rotary_dim": case.rotary_dim}
    call(keys, rows, case.delta, inv_freq(case.rotary_dim, device), **layout)
    turned = bits(keys)[rows].view(case.dtype).float().cpu()
    torch.testing.assert_close(turned, exact(chosen, case), rtol=0, atol=TOLERANCE[case.dtype])
    bits(keys)[rows] = POISON
    assert (bits(both) == POISON).all(), "something beside the listed rows changed"


# --- over the grid ---


@pytest.mark.parametrize("case", GRID, ids=str)
def test_listed_rows_are_rotated_and_others_keep_every_bit(case):
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_kernel_equals_the_reference(case):
    check(case, "cuda")


# bf16 and fp8 it cannot do: it truncates the one, and loses carries in the other.
@pytest.mark.parametrize(
    "case",
    [case for case in GRID if case.dtype in (torch.float32, torch.float16) and case.n_rows],
    ids=str,
)
def test_the_interpreted_kernel_equals_the_reference(case, interpreted):
    def launch(keys, rows, delta, freq, *, neox, rotary_dim):
        kernel._launch(keys, rows, *reference.rotation(delta, freq), neox=neox)

    check(case, "cpu", launch)


@pytest.mark.parametrize(
    ("dtype", "neox"),
    [("fp32", True), ("bf16", True), ("bf16", False), ("fp8e4nv", True), ("fp8e5", True)],
)
def test_the_kernel_compiles_for_an_absent_gpu(dtype, neox, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = [f"*{dtype}", "*i64", "*fp32", "*fp32", "i32", "i32", "i32", "fp32"]
    kinds += ["constexpr"] * 4
    jit = kernel._jit()
    signature = dict(zip(jit.arg_names, kinds, strict=True))
    sizes = {"N_PAIRS": 64, "PAIR_BLOCK": 64, "HEAD_BLOCK": 4, "NEOX": neox}
    hopper = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(ASTSource(jit, signature, constexprs=sizes), target=hopper)
    assert compiled.asm["cubin"]


# --- what it means ---


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (96, 24)])
def test_a_rebased_key_is_the_key_of_the_earlier_position(neox, head_dim, rotary_dim):
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    rope = RotaryEmbedding(head_dim, rotary_dim, MAX_POSITION, THETA, neox, torch.float32)
    keys, delta = random_keys(N_SLOTS, 4, head_dim), 8000
    positions = torch.randint(delta, MAX_POSITION, (N_SLOTS,))
    _, now = rope.forward_native(positions, keys.clone(), keys.clone())
    _, earlier = rope.forward_native(positions - delta, keys.clone(), keys.clone())
    freq = rope._compute_inv_freq(rope.base)
    rebase_keys(now, torch.arange(N_SLOTS), delta, freq, neox=neox, rotary_dim=rotary_dim)
    torch.testing.assert_close(now, earlier, rtol=0, atol=2 * ANGLE_ERROR)


@pytest.mark.parametrize("interleaved", [True, False])
def test_under_mrope_all_axes_move_together(interleaved):
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    layout = {"mrope_section": [24, 20, 20], "mrope_interleaved": interleaved}
    rope = MRotaryEmbedding(128, 128, MAX_POSITION, THETA, True, torch.float32, **layout)
    keys, delta = random_keys(N_SLOTS, 4, 128), 8000
    positions = torch.randint(delta, MAX_POSITION, (3, N_SLOTS))  # time, height, width apart
    _, now = rope.forward_native(positions, keys.clone(), keys.clone())
    _, earlier = rope.forward_native(positions - delta, keys.clone(), keys.clone())
    freq = rope._compute_inv_freq(rope.base)
    rebase_keys(now, torch.arange(N_SLOTS), delta, freq, neox=True, rotary_dim=128)
    torch.testing.assert_close(now, earlier, rtol=0, atol=2 * ANGLE_ERROR)


def test_attention_between_rebased_keys_and_queries_is_unchanged():
    case = Case(dtype=torch.float32, delta=12_345)
    keys, queries = random_keys(N_SLOTS, 4, 128), random_keys(N_SLOTS, 4, 128)
    moved_keys, moved_queries = exact(keys, case), exact(queries, case)
    scores = torch.einsum("qhd,khd->hqk", queries, keys)
    moved_scores = torch.einsum("qhd,khd->hqk", moved_queries, moved_keys)
    torch.testing.assert_close(moved_scores, scores, rtol=0, atol=5e-5)


def test_rebasing_back_restores_the_keys():
    keys, rows = random_keys(N_SLOTS, 4, 128), torch.arange(N_SLOTS)
    before = keys.clone()
    for delta in (5000, -5000):
        rebase_keys(keys, rows, delta, inv_freq(128), neox=True, rotary_dim=128)
    torch.testing.assert_close(keys, before, rtol=0, atol=2 * TOLERANCE[torch.float32])


def test_no_distance_changes_no_bit():
    keys = torch.tensor([-0.0, 0.0, torch.inf, torch.nan]).expand(2, 1, 4).clone()
    before = bits(keys).clone()
    rebase_keys(keys, torch.arange(2), 0, inv_freq(4), neox=True, rotary_dim=4)
    assert torch.equal(bits(keys), before)


def test_errors_of_repeated_rebases_grow_slower_than_their_number():
    keys = random_keys(128, 4, 128, dtype=torch.bfloat16)
    truth, rows = keys.float(), torch.arange(128)
    errors = []
    for n_rebases in range(1, 17):
        for held in (keys, truth):
            rebase_keys(held, rows, 3001, inv_freq(128), neox=True, rotary_dim=128)
        if n_rebases in (1, 4, 16):
            errors.append((keys.float() - truth).square().mean().sqrt().item())
    # Four times the roundings: twice the error where they are noise, four times in slow pairs,
    # where a turn of less than half a step is lost each time.
    assert all(2 < more / fewer < 3 for fewer, more in pairwise(errors))
    assert errors[0] < 1e-3


def test_fp8_keys_at_the_end_of_their_range_stay_finite():
    keys = torch.full((1, 1, 2), 448.0).to(torch.float8_e4m3fn)
    eighth_turn = torch.tensor([torch.pi / 4])
    rebase_keys(keys, torch.tensor([0]), 1, eighth_turn, neox=True, rotary_dim=2)
    assert keys.float().flatten().tolist() == [448.0, 0.0]


# --- at the boundary ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": torch.zeros(4, 128)},
        {"keys": torch.zeros(4, 2, 128, dtype=torch.int32)},
        {"keys": torch.zeros(4, 128, 2).transpose(1, 2)},
        {"rows": torch.zeros(1, dtype=torch.int32)},
        {"rows": torch.zeros(1, 1, dtype=torch.int64)},
        {"inv_freq": torch.ones(32)},
        {"inv_freq": torch.ones(64, dtype=torch.float64)},
        {"inv_freq": torch.ones(64, device="meta")},
        {"rotary_dim": 130, "inv_freq": torch.ones(65)},
        {"rotary_dim": 3, "inv_freq": torch.ones(1)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_that_disagree_are_refused(wrong):
    right = {
        "keys": torch.zeros(4, 2, 128),
        "rows": torch.tensor([1]),
        "delta": 1,
        "inv_freq": inv_freq(128),
        "neox": True,
        "rotary_dim": 128,
    }
    rebase_keys(**right)
    with pytest.raises(ValueError):
        rebase_keys(**right | wrong)
