"""The modelled device of a server, from its flags."""

import pytest

from lab import launch_server
from sglang_live import launch_server as product
from sglang_live.attachment import ATTACH_ENV
from sglang_live.extensions.planner.device_model.model import H100

DEVICE = str(H100)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What the launcher changes in its process."""
    for name in ("parse", "check_devices", "check_flags"):
        monkeypatch.setattr(product, name, getattr(product, name))
    for name in (ATTACH_ENV, "LAB_DEVICE_MODEL", "PYTHONPATH"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--device-model", "/none.toml"], "device model /none.toml: No such file"),
        (["--device-model", DEVICE, "--talker.device", "cuda:8"], "there is no device 'cuda:8'"),
        (["--device-model", DEVICE, "--vocoder.device", "cpu"], "there is no device 'cpu'"),
        (
            ["--device-model", DEVICE, "--thinker.tp-size", "2"],
            "those of one device, not of --thi",
        ),
        (
            [
                "--device-model",
                DEVICE,
                "--talker.connect",
                "tcp://a:1",
                "--allow-keyless-stages",
            ],
            "--talker.connect uses a device of another",
        ),
    ],
)
def test_a_server_that_the_modelled_device_cannot_carry_is_refused(argv, complaint, capfd):
    assert launch_server.main(["--model-path", "demo", *argv]) == 2
    assert complaint in capfd.readouterr().err


def test_without_a_modelled_device_nothing_is_attached(monkeypatch):
    started = []
    monkeypatch.setattr(product, "main", lambda argv: started.append(argv) or 0)
    parse = product.parse
    assert launch_server.main(["--model-path", "demo", "--port", "1"]) == 0
    assert started == [["--model-path", "demo", "--port", "1"]]
    assert product.parse is parse
