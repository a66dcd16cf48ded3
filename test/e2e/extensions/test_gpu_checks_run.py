"""The GPU checks that start engines run to their end on a CPU, at tiny sizes."""

import json

import pytest

from benchmark.gpu import __main__ as command
from sglang_live.extensions.planner.device_model.model import load_device_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.mark.parametrize(
    "check",
    [
        "server",
        "talker",
        "thinker",
        "syncs",
        "voice_load",
        "speech",
        "constants",
        "lending",
        "full_constants",
        "full_load",
        "full_policies",
    ],
)
def test_a_check_passes_on_the_cpu(check, tmp_path):
    words = [check, "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    status = command.main(words)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert (status, document["problems"]) == (command.PASSED, [])
    assert document["figures"]
    for model in tmp_path.glob("*.toml"):
        assert load_device_model(model).n_devices == 1
