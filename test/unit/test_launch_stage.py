"""launch_stage: the spec of its process, and refused arguments."""

import json
import socket
from types import SimpleNamespace

import msgspec
import pytest

from sglang_live import devices, launch_stage
from sglang_live.model_source import ModelSource
from sglang_live.models.family import CPU_WEIGHTS_ENV, INT8
from sglang_live.policy.policies import POLICIES, Policies
from sglang_live.stages.spec import SPEC_ENV

TALKER = ["--stage", "talker", "--model-path", "/models/m", "--bind", "tcp://127.0.0.1:7101"]


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """A function that runs the command: its exit status, or the spec of the new process."""

    class Executed(BaseException):
        pass

    def execve(path, command, environment):
        spec = json.loads(environment[SPEC_ENV])
        assert spec.get("environment", {}).items() <= environment.items()
        raise Executed(command, spec)

    monkeypatch.setattr(launch_stage.os, "execve", execve)
    monkeypatch.setattr(launch_stage.RunDir, "make", lambda **_: SimpleNamespace(path=tmp_path))
    family = "sglang_live.models.qwen3_omni.family"
    checkpoint = SimpleNamespace(
        path="/models/m",
        family=family,
        cpu_weights="",
        stages=("thinker", "talker", "vocoder"),
        recordings=None,
    )
    monkeypatch.setattr(ModelSource, "load", lambda _source, _cache: checkpoint)

    def launch(*argv: str) -> dict | int:
        try:
            return launch_stage.main(list(argv))
        except Executed as executed:
            command, spec = executed.args
            assert command[1:] == ["-m", "sglang_live.stages.runtime"]
            return spec

    return launch


def test_the_stage_binds_the_address_and_shares_no_memory(launched, monkeypatch):
    monkeypatch.setattr(devices, "n_cuda_devices", lambda: 2)
    spec = launched(*TALKER, "--device", "cuda:1")
    assert (spec["stage"], spec["address"]) == ("talker", "tcp://127.0.0.1:7101")
    assert spec["same_host"] is False
    assert (spec["device"], spec["served_name"]) == ("cuda:1", "m")


def test_further_arguments_go_to_its_engine(launched):
    spec = launched(*TALKER, "--max-running-requests", "8")
    assert spec["engine_args"]["max_running_requests"] == 8
    spec = launched("--stage", "vocoder", *TALKER[2:], "--chunk-frames", "8")
    assert spec["engine_args"] == {"chunk_frames": 8}


def test_a_thinkers_weights_are_those_of_its_arguments(launched):
    thinker = ("--stage", "thinker", *TALKER[2:], "--cpu-weights", "int8")
    assert launched(*thinker)["environment"] == {CPU_WEIGHTS_ENV: INT8}
    assert launched(*thinker[:-1], "own").get("environment", {}) == {}


def test_a_stage_that_the_model_lacks_is_refused(launched, monkeypatch, capsys):
    speaks = SimpleNamespace(path="/models/m", stages=("talker", "vocoder"))
    monkeypatch.setattr(ModelSource, "load", lambda _source, _cache: speaks)
    assert launched("--stage", "thinker", *TALKER[2:]) == 2
    assert "--stage thinker: this model has no thinker" in capsys.readouterr().err


def test_its_policies_are_those_of_its_arguments(launched):
    assert launched(*TALKER)["policies"] == msgspec.to_builtins(Policies.parse(POLICIES))
    assert launched(*TALKER, "--live-policies", "off")["policies"] == msgspec.to_builtins(
        Policies()
    )


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--live-policies", "x"], "unknown policies"),
        (["--talker.tp-size", "2"], "one stage needs no prefix"),
        (["--tp-sise", "2"], "--tp-sise: SGLang has no such argument; did you mean --tp-size?"),
        (["--replicas", "2"], "--replicas is the server's"),
        (["--dp-size", "2"], "--dp-size: replicas of a stage are started with --STAGE.replicas"),
        (["--device", "gpu"], "--device: device must be a name"),
        (["--device", "cuda:1,cuda:2"], "--device takes one device"),
        (["--device", "cuda"], "--device: there is no device cuda:0: this machine has no CUDA"),
        (["--device", "cuda:1"], "--device: there is no device cuda:1: this machine has no CUDA"),
        (["--chunk-frames", "8"], "--chunk-frames: SGLang has no such argument"),
        (["--speaker.tp", "2"], "no stage is called 'speaker'"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(launched, argv, complaint, capsys, monkeypatch):
    monkeypatch.setattr(devices, "n_cuda_devices", lambda: 0)
    assert launched(*TALKER, *argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and complaint in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "*"])
def test_an_address_that_is_taken_is_refused_before_the_stage_starts(launched, host, capsys):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]*"), 0), family=family) as taken:
        bind = f"tcp://{host}:{taken.getsockname()[1]}"
        assert launched(*TALKER[:-1], bind, "--allow-keyless-stages") == 2
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1", "tcp://::1:7101", "127.0.0.1:7101"])
def test_an_address_of_another_form_is_refused(launched, bind, capsys):
    assert launched(*TALKER[:-1], bind) == 2
    assert "error: --bind takes tcp://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--stage", "speaker", *TALKER[2:]], TALKER[:4]])
def test_an_unknown_stage_or_no_address_ends_with_usage(launched, argv, capsys):
    with pytest.raises(SystemExit):
        launched(*argv)
    assert "usage:" in capsys.readouterr().err


def test_a_missing_checkpoint_is_refused_before_the_stage_starts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launch_stage.os, "execve", lambda *_: pytest.fail("the stage was started"))
    argv = ["--stage", "talker", "--model-path", str(tmp_path), "--bind", "tcp://127.0.0.1:7101"]
    assert launch_stage.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path} is no checkpoint: it is empty; ")
    assert len(err.splitlines()) == 1
