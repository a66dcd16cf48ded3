from pathlib import Path

import pytest

from sglang_live.bridge.platform import cpu, cuda
from sglang_live.models.demo.location import TRAINED, default_directory, is_demo
from sglang_live.stages.engine_host import SMALL_POOL_TOKENS, default_engine_args


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(cpu, "is_active", lambda: False)


def test_both_engines_of_a_demo_model_find_room_on_one_gpu(on_cuda):
    args = default_engine_args("cuda:1", demo=True)
    assert args["max_total_tokens"] == SMALL_POOL_TOKENS
    assert 2 * args["mem_fraction_static"] < 1
    assert (args["device"], args["base_gpu_id"]) == ("cuda", 1)


def test_the_pool_of_another_model_is_sglangs_own(on_cuda):
    assert "max_total_tokens" not in default_engine_args("cuda")


@pytest.mark.parametrize("native", [True, False])
def test_without_sgl_kernel_the_tiers_are_copied_directly(on_cuda, monkeypatch, native):
    monkeypatch.setattr(cuda, "is_active", lambda: native)
    found = default_engine_args("cuda").get("hicache_io_backend")
    assert found == ("direct" if native else None)


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        (TRAINED, True),
        (default_directory(cache=Path("/cache")), True),
        (Path("/models/Qwen3-Omni"), False),
        (Path("/models/demo-of-mine"), False),
    ],
)
def test_a_demo_model_is_known_by_its_directory(directory, expected):
    assert is_demo(str(directory)) == expected
