"""The demo checkpoint, built once."""

from pathlib import Path

import pytest

from sglang_live.models.qwen3_omni.family import Qwen3OmniSpec


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory) -> Path:
    from sglang_live.models.demo.build import build
    from sglang_live.models.demo.location import DemoSize

    path = tmp_path_factory.mktemp("demo")
    build(path, DemoSize())
    return path


@pytest.fixture(scope="session")
def demo_spec(demo_checkpoint) -> Qwen3OmniSpec:
    return Qwen3OmniSpec.load(demo_checkpoint)
