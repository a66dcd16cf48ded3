"""Norms and rotary embeddings without SGLang's kernels, against what SGLang defines."""

import importlib

import pytest
import torch

pytest.importorskip("sglang")
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

from sglang_live.bridge.platform import native_norms

HEAD, N_HEADS, N_KV_HEADS, THETA, MAX_POSITION = 32, 6, 2, 1_000_000, 4096
# One rounding of the sum more than SGLang's definition has, and one of the result.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


@pytest.fixture
def interpreted(monkeypatch):
    """SGLang's Triton kernel, run by Triton's interpreter."""
    pytest.importorskip("triton")
    from sglang.kernels.ops.attention import rotary_triton

    with monkeypatch.context() as changed:
        changed.setenv("TRITON_INTERPRET", "1")
        importlib.reload(rotary_triton)
        yield
    importlib.reload(rotary_triton)


@pytest.fixture
def triton_is_never_called(monkeypatch):
    from sglang.kernels.ops.attention import rotary_triton

    monkeypatch.setattr(rotary_triton, "triton_mrope_fused", None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("n", [0, 1, 17])
def test_a_norm_is_the_one_that_sglang_defines(dtype, with_residual, n):
    norm = RMSNorm(48, eps=1e-6).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(n, 48).to(dtype)
    rest = (torch.randn(n, 48).to(dtype),) if with_residual else ()
    before = [tensor.clone() for tensor in (x, *rest)]
    found = native_norms.rms_norm(norm, x, *rest)
    expected = norm.forward_native(x, *rest)
    for one, other in zip(
        found if with_residual else [found], expected if with_residual else [expected], strict=True
    ):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # The sum, which every later layer reads, has no rounding more.
    if with_residual:
        assert torch.equal(found[1], expected[1])
    assert all(map(torch.equal, (x, *rest), before))


@pytest.mark.parametrize(
    "change",
    [{"var_hidden_size": 16}, {"cast_x_before_out_mul": True}, {"fp32_residual": True}],
    ids=str,
)
def test_a_norm_with_a_rule_of_its_own_is_left_to_sglang(change):
    norm = RMSNorm(48, **change).to(torch.bfloat16)
    x, residual = torch.randn(2, 3, 48).to(torch.bfloat16)
    found, expected = native_norms.rms_norm(norm, x, residual), norm.forward_native(x, residual)
    assert all(map(torch.equal, found, expected))


def test_a_norm_whose_weight_has_another_dtype_is_left_to_sglang():
    norm, x = RMSNorm(48), torch.randn(3, 48).to(torch.bfloat16)
    assert torch.equal(native_norms.rms_norm(norm, x), norm.forward_native(x))


def _ropes(rotary_dim: int, *, neox: bool, dtype: torch.dtype = torch.float32) -> list:
    half = rotary_dim // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    of_all = (HEAD, rotary_dim, MAX_POSITION, THETA, neox, dtype)
    return [
        RotaryEmbedding(*of_all),
        MRotaryEmbedding(*of_all, mrope_section=section, mrope_interleaved=False),
        MRotaryEmbedding(*of_all, mrope_section=section, mrope_interleaved=True),
    ]


def _check(rope, positions: torch.Tensor, dtype: torch.dtype, *, strided: bool = False) -> None:
    n = positions.shape[-1]
    whole = torch.randn(n, (N_HEADS + 2 * N_KV_HEADS) * HEAD).to(dtype)
    sizes = [N_HEADS * HEAD, N_KV_HEADS * HEAD, N_KV_HEADS * HEAD]
    query, key, value = whole.split(sizes, dim=-1)
    expected = rope.forward_native(positions, query.contiguous(), key.contiguous())
    kept = value.clone()
    if not strided:
        query, key = query.contiguous(), key.contiguous()
    found = native_norms.rotate(rope, positions, query, key)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=4e-3 if dtype != torch.float32 else 1e-6
        )
    assert torch.equal(value, kept)


@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("rotary_dim", [HEAD, 16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["plain", "sections", "interleaved"])
def test_keys_and_queries_turn_as_sglang_defines(interpreted, n, rotary_dim, neox, kind):
    rope = _ropes(rotary_dim, neox=neox)[kind]
    _check(rope, torch.randint(MAX_POSITION, (n,)), torch.float32)
    if kind:
        _check(rope, torch.randint(MAX_POSITION, (3, n)), torch.float32)


@pytest.mark.parametrize("kind", [0, 2])
def test_they_turn_inside_one_buffer_with_the_values(interpreted, kind):
    rope = _ropes(HEAD, neox=True)[kind]
    _check(rope, torch.randint(MAX_POSITION, (7,)), torch.float32, strided=True)


def test_half_precision_turns_within_its_rounding(interpreted):
    rope = _ropes(HEAD, neox=True, dtype=torch.float16)[2]
    _check(rope, torch.randint(MAX_POSITION, (3, 9)), torch.float16)


def test_nothing_turns_in_an_empty_batch(triton_is_never_called):
    empty = torch.empty(0, N_HEADS * HEAD)
    found = native_norms.rotate(_ropes(HEAD, neox=True)[0], torch.arange(0), empty, empty)
    assert found[0] is found[1] is empty


def test_what_the_kernel_cannot_do_is_left_to_sglang(triton_is_never_called):
    [rope, *_] = _ropes(HEAD, neox=True)
    positions = torch.arange(3)
    by_head = torch.randn(3, N_HEADS, HEAD)
    found = native_norms.rotate(rope, positions, by_head, by_head)
    expected = rope.forward_native(positions, by_head, by_head)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("interleaved", [True, False])
def test_sglangs_kernel_compiles_for_an_absent_gpu(interleaved, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from sglang.kernels.ops.attention.rotary_triton import _triton_mrope_forward_fused as jit
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {
        **{"n_qh": 32, "n_kh": 4, "hd": 128, "rd": 128, "pad_n_qh": 32, "pad_n_kh": 4},
        **{"pad_hd": 128, "mrope_section_t": 24, "mrope_section_h": 20, "mrope_section_w": 20},
        **{"is_interleaved": interleaved, "is_interleaved_glm": False, "is_neox_style": True},
        "axis_map_ptr": None,
    }
    kinds = ["*bf16", "*bf16", "*bf16", "*i64", "i32", "i32", "i32"] + ["constexpr"] * len(sizes)
    signature = dict(zip(jit.arg_names, kinds, strict=True))
    source = ASTSource(jit, signature, constexprs=sizes)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_they_are_registered_for_the_platform_alone(monkeypatch):
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    native_norms.register("a platform")
    assert BaseFusedOp._oot_forward_registry == {
        "a platform": {
            RMSNorm: native_norms.rms_norm,
            RotaryEmbedding: native_norms.rotate,
            MRotaryEmbedding: native_norms.rotate,
        }
    }
