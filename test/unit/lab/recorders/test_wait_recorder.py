"""Reads of tensors by the project's own code are recorded with their function."""

import pytest
import torch

from lab.recorders.wait_recorder import WaitRecorder
from sglang_live.models.qwen3_omni import code2wav  # any module with a function that reads


@pytest.fixture
def record(tmp_path):
    return tmp_path / "record"


def run_inside(record, source: str) -> list[str]:
    """Lines that `source`, as code of the package, leaves in the record."""
    code = compile(f"def own(x):\n    {source}\n", code2wav.__file__, "exec")
    scope: dict = {"torch": torch}
    exec(code, scope)
    with WaitRecorder(record):
        scope["own"](torch.arange(4))
    return record.read_text().splitlines() if record.exists() else []


@pytest.mark.parametrize(
    ("source", "operator"),
    [
        ("x[0].item()", "_local_scalar_dense"),
        ("int(x.max())", "_local_scalar_dense"),
        ("bool((x > 5).any())", "_local_scalar_dense"),
        ("x.nonzero()", "nonzero"),
        ("x[x > 2]", "index"),
        ("x.masked_select(x > 2)", "masked_select"),
    ],
)
def test_a_read_is_recorded(record, source, operator):
    assert run_inside(record, source) == [f"models/qwen3_omni/code2wav.py own {operator}"]


@pytest.mark.parametrize("source", ["x + 1", "x[torch.tensor([1, 2])]", "x.to(torch.int32)"])
def test_other_operators_are_not(record, source):
    assert run_inside(record, source) == []


def test_a_place_is_recorded_once_and_other_peoples_code_never(record):
    assert len(run_inside(record, "for v in x: int(v)")) == 1
    record.unlink()
    with WaitRecorder(record):
        int(torch.arange(3).max())  # of this file
    assert not record.exists()
