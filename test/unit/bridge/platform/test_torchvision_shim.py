"""The shim acts on a whole process, so each test starts its own."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

IMPORT_SHIM = "import sys; from sglang_live.bridge.platform import torchvision_shim as shim; "


def run(code: str) -> str:
    command = [sys.executable, "-c", IMPORT_SHIM + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_installing_imports_neither_torch_nor_torchvision():
    # It happens in every Python process of the environment, pip included.
    assert run("shim.install(); print('torch' in sys.modules)") == "False"


def test_installing_twice_adds_one_finder():
    count = "print(sum(isinstance(f, shim.TorchvisionFinder) for f in sys.meta_path))"
    assert run(f"shim.install(); shim.install(); {count}") == "1"


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_imports_with_this_pytorch_whatever_it_was_built_for():
    code = "shim.install(); import torchvision, torch; print(torch.ops.torchvision.nms)"
    assert run(code) == "torchvision.nms"
