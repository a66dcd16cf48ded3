"""Devices of replicas and ranks, and those that this machine does not have."""

import pytest

from sglang_live import devices, launch_server
from sglang_live.arguments import parse
from sglang_live.devices import check_devices, devices_of_ranks
from sglang_live.errors import BadInputError


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the number of CUDA devices."""

    def has(n_devices: int) -> None:
        monkeypatch.setattr(devices, "n_cuda_devices", lambda: n_devices)

    return has


def check(*argv: str) -> None:
    check_devices(launch_server._used_devices(parse(["--model-path", "demo", *argv])))


@pytest.mark.parametrize(
    ("device", "args", "used"),
    [
        ("cuda:4", {}, ("cuda:4",)),
        ("cuda:4", {"tp_size": 2}, ("cuda:4", "cuda:5")),
        ("cuda:0", {"tp_size": 2, "pp_size": 2}, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:0", {"tp_size": 2, "gpu_id_step": 2}, ("cuda:0", "cuda:2")),
        ("cuda:0", {"tp_size": 4, "nnodes": 2}, ("cuda:0", "cuda:1")),
        ("cpu", {"tp_size": 2}, ("cpu",)),
    ],
)
def test_ranks_have_consecutive_devices(device, args, used):
    assert devices_of_ranks(device, args) == used


@pytest.mark.parametrize(
    ("n_devices", "argv", "complaint"),
    [
        (6, ["--talker.device", "cuda:6"], "--talker.device: there is no device cuda:6: .* has 6"),
        (6, ["--talker.device", "cuda:4,cuda:6"], "no device cuda:6: .* has 6, cuda:0 to cuda:5"),
        (1, ["--vocoder.device", "cuda:1"], "--vocoder.device: .* this machine has 1, cuda:0$"),
        (2, ["--thinker.device", "cuda:1", "--thinker.tp-size", "2"], "no device cuda:2"),
        (1, ["--thinker.tp-size", "2"], "--thinker.device: there is no device cuda:1"),
        (0, ["--talker.device", "cuda:4"], "no device cuda:4: this machine has no CUDA device"),
        (0, ["--device", "cuda:1"], "--thinker.device: there is no device cuda:1"),
        (0, ["--device", "cuda"], "--thinker.device: there is no device cuda:0: this machine"),
        (0, ["--vocoder.device", "cuda:0"], "--vocoder.device: there is no device cuda:0"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_by_name(machine, n_devices, argv, complaint):
    machine(n_devices)
    with pytest.raises(BadInputError, match=complaint):
        check(*argv)


@pytest.mark.parametrize(
    ("n_devices", "argv"),
    [
        (6, ["--talker.device", "cuda:4,cuda:5"]),
        (6, ["--thinker.tp-size", "4", "--talker.device", "cuda:4", "--vocoder.device", "cuda:5"]),
        (0, ["--talker.device", "cpu", "--vocoder.device", "cpu"]),
        (1, ["--device", "cuda", "--vocoder.device", "cuda:0"]),
        (0, ["--thinker.tp-size", "2"]),
        (1, ["--talker.connect", "tcp://a:1", "--device", "cuda:0", "--allow-keyless-stages"]),
    ],
)
def test_devices_that_exist_and_the_default_without_cuda_are_accepted(machine, n_devices, argv):
    machine(n_devices)
    check(*argv)


def test_the_default_device_costs_no_look_at_the_machine(monkeypatch):
    monkeypatch.setattr(devices, "n_cuda_devices", lambda: pytest.fail("counted"))
    check()


def test_devices_are_counted_without_a_context_by_the_engines_own_pytorch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.n_cuda_devices() == 0
