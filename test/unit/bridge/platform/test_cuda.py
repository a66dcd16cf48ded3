import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang_live.bridge.platform import cuda

SETUP = Path(__file__).parents[4] / "setup.py"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("SGLANG_ENABLE_WAR_BARRIER", "to be restored")
    monkeypatch.delenv("SGLANG_ENABLE_WAR_BARRIER")
    monkeypatch.delenv(cuda.NATIVE_ENV, raising=False)


@pytest.fixture
def sgl_kernel(monkeypatch):
    module = ModuleType("sgl_kernel")
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)


def test_without_a_gpu_there_is_no_such_platform(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(cuda.NATIVE_ENV, "1")
    assert cuda.activate() is None


def test_it_is_chosen_where_sgl_kernel_is_missing(gpu):
    assert cuda.activate() == "sglang_live.bridge.platform.cuda.CudaNativePlatform"


def test_sgl_kernel_is_used_where_it_is_installed(gpu, sgl_kernel, monkeypatch):
    assert cuda.activate() is None
    monkeypatch.setenv(cuda.NATIVE_ENV, "1")
    assert cuda.activate() is not None


def test_the_environment_may_refuse_it(gpu, monkeypatch):
    monkeypatch.setenv(cuda.NATIVE_ENV, "0")
    assert cuda.activate() is None
    monkeypatch.setenv(cuda.NATIVE_ENV, "yes")
    with pytest.raises(ValueError, match="set it to 0 or 1"):
        cuda.activate()


def test_sglangs_modules_import_without_sgl_kernel_and_flashinfer():
    """In a process of its own, that believes to have a GPU until SGLang is imported."""
    # The declared entry point, also where the installed metadata is older.
    assert "sglang_live_cuda = sglang_live.bridge.platform.cuda:activate" in SETUP.read_text()
    program = """
import importlib.metadata as metadata
import torch
group, installed = "sglang.srt.platforms", metadata.entry_points
declared = metadata.EntryPoint("ours", "sglang_live.bridge.platform.cuda:activate", group)
metadata.entry_points = lambda **of: [declared] if of.get("group") == group else installed(**of)
torch.cuda.is_available, torch.version.cuda = (lambda: True), "13.0"
torch.cuda.get_device_capability = lambda device=None: (9, 0)
import sglang.srt.managers.scheduler, sglang.srt.models.qwen3_omni_moe
import sglang.srt.layers.attention.triton_backend, sglang.srt.entrypoints.engine
import sglang.srt.utils as utils
from sglang.srt.platforms import current_platform
from sglang_live.bridge.platform import cuda
cuda.check_hidden()
print(current_platform, utils.is_cuda(), utils.is_cuda_alike())
print(current_platform.get_graph_runner_cls().__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-2:] == [
        "CudaNativePlatform(device=cuda) False True",
        "DecodeCudaGraphRunner",
    ], done.stderr
