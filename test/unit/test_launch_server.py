"""The start of the server: refusals before any process starts, and the specs of stages."""

import json
import logging
import socket
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from sglang_live import devices, launch_server, model_flags, model_source
from sglang_live.arguments import parse
from sglang_live.capacity.control import CapacityControl
from sglang_live.clock import SimClock
from sglang_live.errors import StageUnavailableError
from sglang_live.gateway.draining import Drain
from sglang_live.gateway.http.body import MAX_FRAME_BYTES
from sglang_live.model_source import ModelSource
from sglang_live.models.demo.location import TRAINED
from sglang_live.models.family import CPU_WEIGHTS_ENV, INT8, ModelFacts
from sglang_live.orchestrator.directory import FollowedStages, StaticDirectory
from sglang_live.orchestrator.sessions import Orchestrator
from sglang_live.policy.policies import Policies
from sglang_live.stage_specs import stage_specs
from sglang_live.stages.ports import free_port
from sglang_live.stages.spec import SPEC_ENV, STAGES, StageSpec
from sglang_live.stages.supervisor import Supervisor
from sglang_live.telemetry.log_writing import LogDrops


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    """A server that starts a process fails the test."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch_server, "Supervisor", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.fixture(autouse=True)
def log_handlers():
    """main() sets up the root logger; later tests get the former handlers back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model-path", "/no/such/model"], "error: there is no directory /no/such/model: "),
        (
            ["--model-path", "demo", "--host", "0.0.0.0"],
            "error: serving 0.0.0.0 without an API key",
        ),
        (["--model-path", "demo", "--speaker.tp", "2"], "error: --speaker.tp: no stage is called"),
        (["--model-path", "demo", "--live-policies", "x"], "error: unknown policies"),
        (
            ["--model-path", "demo", "--thinker.mem-fracton-static", "0.6"],
            "error: --thinker.mem-fracton-static: SGLang has no such argument; "
            "did you mean --thinker.mem-fraction-static?",
        ),
        (
            ["--model-path", "demo", "--timeline-dir", "/dev/null/x"],
            "error: --timeline-dir: cannot write /dev",
        ),
    ],
    ids=[
        "no model",
        "open to all",
        "no such stage",
        "no such policy",
        "misspelt",
        "no such directory",
    ],
)
def test_it_refuses_in_one_line_and_with_status_2(argv, message, capsys):
    assert launch_server.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_refused_before_anything_starts(monkeypatch, model, capsys):
    monkeypatch.setattr(ModelSource, "load", lambda _source, _cache: model)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert launch_server.main(["--model-path", "demo", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "another --port may be free\n"
    )


def test_another_model_is_refused_by_its_architecture(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert launch_server.main(["--model-path", str(tmp_path)]) == 2
    assert "no model family claims its architecture (LlamaForCausalLM)" in capsys.readouterr().err


@pytest.fixture
def model() -> ModelFacts:
    return ModelFacts(
        path=Path("/models/m"),
        weights=Path("/models/m"),
        family="sglang_live.models.qwen3_omni.family",
        voices=("a",),
        vocab_size=100,
        context_tokens=1000,
    )


def test_a_stage_that_does_not_start_is_reported_and_removed(tmp_path, monkeypatch, model, capsys):
    stopped = []

    class FailingSupervisor:
        replicas = ()

        def __init__(self, specs, **_options):
            self.specs = specs

        async def start(self):
            raise StageUnavailableError("talker/0 did not start (exit 3)")

        async def stop(self):
            stopped.append(True)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch_server, "Supervisor", FailingSupervisor)
    monkeypatch.setattr(ModelSource, "load", lambda _source, _cache: model)
    assert launch_server.main(["--model-path", "/models/m", "--port", str(free_port())]) == 1
    assert "error: talker/0 did not start (exit 3)" in capsys.readouterr().err
    assert stopped and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lacks", "argv", "message"),
    [
        ("thinker", ["--thinker.mem-fraction-static", "0.5"], "--thinker.mem-fraction-static: "),
        ("thinker", ["--thinker.device", "cpu"], "--thinker.device: this model has no thinker"),
        ("thinker", ["--cpu-weights", "int8"], "--cpu-weights: this model only speaks"),
        ("thinker", ["--speculate-ms", "200"], "--speculate-ms: this model only speaks"),
        (
            "thinker",
            ["--speaker-model", "resemblyzer"],
            "--speaker-model: this model only speaks",
        ),
        (
            "talker",
            ["--talker.connect", "tcp://h:1", "--allow-keyless-stages"],
            "--talker.connect: this model has no talker",
        ),
    ],
)
def test_flags_of_a_stage_that_the_model_lacks_are_refused_by_name(
    model, monkeypatch, capsys, lacks, argv, message
):
    others = replace(model, stages=tuple(stage for stage in STAGES if stage != lacks))
    monkeypatch.setattr(ModelSource, "load", lambda _source, _cache: others)
    assert launch_server.main(["--model-path", "/models/m", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context-length", "-1"], "thinker: --context-length must be positive, got -1"),
        (["--max-total-tokens", "999999999999"], "--thinker.max-total-tokens 999999999999: it"),
        (["--thinker.max-total-tokens", "500"], "--thinker.max-total-tokens 500: it takes 2 GiB"),
        (
            ["--thinker.enable-hierarchical-cache", "--thinker.hicache-size", "3"],
            "--thinker.hicache-size 3: it takes 3 GiB, and this machine has 1 GiB of memory",
        ),
        (["--thinker.max-total-tokens", "0"], "thinker: --max-total-tokens must be positive"),
        (["--thinker.mem-fraction-static", "7"], "thinker: --mem-fraction-static is a share"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(model, monkeypatch, capsys, argv, message):
    large = replace(model, path=TRAINED, kv_values=1 << 20)
    monkeypatch.setattr(ModelSource, "load", lambda _source, _cache: large)
    monkeypatch.setattr(model_flags, "n_cuda_devices", lambda: 0)
    monkeypatch.setattr(model_flags, "memory_bytes", lambda: 1 << 30)
    assert launch_server.main(["--model-path", "/models/m", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_sizes_of_a_gpu_are_left_to_its_engine(model, monkeypatch):
    monkeypatch.setattr(model_flags, "n_cuda_devices", lambda: 1)
    monkeypatch.setattr(model_flags, "memory_bytes", lambda: 1 << 30)
    config = parse(["--model-path", "/models/m", "--max-total-tokens", "10000"])
    model_flags.check_sizes(config, replace(model, path=TRAINED, kv_values=1 << 20))


def test_a_part_of_a_cascade_is_looked_for_before_a_download(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(model_source, "_demo_llm", lambda _cache: pytest.fail("downloaded"))
    argv = ["--model-path", "cascade", "--recogniser", "nosuch", "--voice-model", "hibari"]
    assert launch_server.main([*argv, "--cache-dir", str(tmp_path)]) == 2
    assert "there is no recogniser 'nosuch'" in capsys.readouterr().err


def specs(model, *argv: str) -> dict:
    config = parse(["--model-path", "/models/m", *argv])
    listed = stage_specs(config, model, Path("/tmp/run"), native_key="key")
    return {spec.name: spec for spec in listed}


def test_every_replica_gets_a_spec_and_an_address_of_its_own(model):
    by_name = specs(model, "--talker.replicas", "2", "--thinker.replicas", "2")
    assert list(by_name) == ["thinker/0", "thinker/1", "talker/0", "talker/1", "vocoder/0"]
    assert len({spec.address for spec in by_name.values()}) == 5
    assert all(spec.same_host and len(spec.address) < 100 for spec in by_name.values())
    native = {name: spec.native_key for name, spec in by_name.items() if spec.native_key}
    assert native == {"thinker/0": "key"}, "SGLang's own API is that of the first thinker"


@pytest.mark.parametrize(
    ("prefers", "flag", "has"),
    [("", (), False), ("int8", (), True), ("", ("int8",), True), ("int8", ("own",), False)],
)
def test_a_thinker_alone_has_weights_in_8_bits(model, prefers, flag, has):
    argv = ("--cpu-weights", *flag) if flag else ()
    by_name = specs(replace(model, cpu_weights=prefers), *argv)
    found = {name: spec.environment for name, spec in by_name.items() if spec.environment}
    assert found == ({"thinker/0": {CPU_WEIGHTS_ENV: INT8}} if has else {})


GPU = ("--thinker.device", "cuda:0", "--talker.device", "cuda:0", "--vocoder.device", "cuda:0")


@pytest.mark.parametrize(
    ("has_gpu", "argv", "turns"),
    [
        (True, GPU, True),
        (False, GPU, False),
        (True, ("--talker.device", "cuda:1", "--vocoder.device", "cuda:2"), False),
        (True, ("--thinker.tp-size", "2", "--talker.device", "cuda:1"), False),
        (False, (*GPU, "--live-policies", "pacing,arbiter"), True),
        (True, (*GPU, "--live-policies", "urgency,pacing"), False),
    ],
)
def test_stages_that_share_a_gpu_have_it_by_turns(monkeypatch, model, has_gpu, argv, turns):
    monkeypatch.setattr("sglang_live.stage_specs.may_have_gpu", lambda: has_gpu)
    by_name = specs(model, *argv)
    assert ("arbiter/0" in by_name) == turns
    taking = {name for name, spec in by_name.items() if spec.turns and name != "arbiter/0"}
    assert taking == ({"thinker/0", "talker/0", "vocoder/0"} if turns else set())


@pytest.mark.parametrize(
    ("gib", "argv", "size_gb"),
    [
        (128, (), 60),
        (512, (), 64),
        (128, ("--thinker.replicas", "2"), 30),
        (128, ("--thinker.tp-size", "2"), 30),
        (22, (), None),  # it would be 3 GB
        (128, ("--thinker.max-total-tokens", "450000", "--max-sessions", "180"), None),
        (128, ("--thinker.max-total-tokens", "40000", "--max-sessions", "180"), 60),
        (
            128,
            ("--thinker.max-total-tokens", "450000", "--retention-window", "0"),
            60,
        ),
        (128, ("--thinker.hicache-size", "2"), 2),
        (128, ("--thinker.enable-hierarchical-cache=false",), None),
        (128, ("--live-policies", "urgency,pacing"), None),
        (128, ("--thinker.device", "cpu"), None),
    ],
)
def test_idle_sessions_of_a_gpu_have_a_copy_on_the_host(monkeypatch, model, gib, argv, size_gb):
    monkeypatch.setattr("sglang_live.stage_specs.may_have_gpu", lambda: True)
    monkeypatch.setattr("sglang_live.stage_specs.available_bytes", lambda: gib << 30)
    by_name = specs(model, *argv)
    for name, spec in by_name.items():
        args = spec.engine_args
        if name.startswith("thinker") and size_gb is not None:
            assert args["enable_hierarchical_cache"] and args["hicache_size"] == size_gb
        else:
            assert not args.get("enable_hierarchical_cache")


def test_an_engine_on_the_cpu_keeps_no_copy_of_its_memory_in_its_memory(monkeypatch, model):
    monkeypatch.setattr("sglang_live.stage_specs.available_bytes", lambda: 128 << 30)
    assert not any("hicache_size" in spec.engine_args for spec in specs(model).values())


@pytest.mark.parametrize(
    ("text", "policies"),
    [("off", ()), ("pacing,truncate", ("pacing", "truncate"))],
)
def test_every_spec_has_the_policies(model, text, policies):
    by_name = specs(model, "--live-policies", text)
    assert {spec.policies for spec in by_name.values()} == {Policies.parse(policies)}


def test_a_spec_reaches_its_process_unchanged(model, monkeypatch):
    for spec in specs(model, "--tp-size", "2", "--vocoder.chunk-frames", "8").values():
        monkeypatch.setenv(SPEC_ENV, spec.to_env())
        assert StageSpec.from_env() == spec
        assert spec.stage in STAGES


@pytest.mark.parametrize(
    ("argv", "shared"),
    [
        ([], ["thinker/0", "talker/0", "vocoder/0"]),
        (["--talker.device", "cuda:1"], ["thinker/0", "vocoder/0"]),
        (["--talker.device", "cuda:1", "--vocoder.device", "cuda:1"], ["talker/0", "vocoder/0"]),
        (["--thinker.device", "cuda:1", "--thinker.tp-size", "2"], ["talker/0", "vocoder/0"]),
        (
            ["--thinker.device", "cuda:1", "--thinker.tp-size", "2", "--talker.device", "cuda:2"],
            ["thinker/0", "talker/0"],
        ),
        (["--talker.device", "cuda:0,cuda:1"], ["thinker/0", "talker/0", "vocoder/0"]),
        (
            [
                "--allow-keyless-stages",
                *("--thinker.connect", "tcp://far:1", "--vocoder.device", "cuda:3"),
            ],
            [],
        ),
    ],
)
def test_a_replica_knows_whether_another_stage_uses_its_device(model, monkeypatch, argv, shared):
    monkeypatch.setattr(devices, "n_cuda_devices", lambda: 8)
    found = specs(model, *argv)
    assert [name for name, spec in found.items() if spec.shares_device] == shared


def test_stages_on_other_hosts_are_reached_by_tcp_without_shared_memory(model):
    by_name = specs(model, "--talker.connect", "tcp://far:1", "--allow-keyless-stages")
    assert by_name["talker/0"].address == "tcp://far:1"
    assert not by_name["talker/0"].same_host and by_name["thinker/0"].same_host


async def test_the_application_has_the_settings_of_the_server(model):
    config = parse(["--model-path", "/models/m", "--api-key", "k", "--turn-prefill-s", "4"])
    clock, drops = SimClock(), LogDrops()
    directory = StaticDirectory(stage_specs(config, model, Path("/tmp/run"), native_key="key"))
    supervisor = Supervisor(directory.specs)
    followed = FollowedStages(directory, supervisor, model.stages, clock)
    orchestrator = Orchestrator(
        supervisor,
        model_name=config.served_model_name,
        voices=model.voices,
        capacity=CapacityControl(config.capacity, clock, dict),
        policies=config.policies,
        clock=clock,
    )
    metrics = launch_server._metrics(supervisor, orchestrator, drops)
    app = launch_server._application(
        config, model, followed, orchestrator, metrics, Drain(), None, None
    )
    http = launch_server._http(config, app, metrics)
    assert http.ws_max_size == MAX_FRAME_BYTES
    thinker = supervisor.replicas[0].spec
    gateway = launch_server._gateway_config(config, model, thinker)
    assert (gateway.keys.accepted, gateway.turns.turn_prefill_s) == (("k",), 4.0)
    cascade = replace(model, family="sglang_live.models.cascade.family")
    assert launch_server._gateway_config(config, cascade, thinker).turns.turn_prefill_s is None
    native = gateway.native
    assert (native.native_api_key, native.native_socket) == ("key", thinker.native_socket)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/health")).status_code == 503, "no stage is up"
        assert (await client.get("/v1/models")).status_code == 401
        series = await client.get("/metrics", headers={"Authorization": "Bearer k"})
    assert "\nsglang_live_capacity_session_limit " in series.text


def test_a_gateway_whose_table_lacks_a_stage_is_not_healthy(model, tmp_path):
    config = parse(["--model-path", "/models/m", "--directory", str(tmp_path / "stages.json")])
    directory = launch_server._directory(config, model, tmp_path, "key", SimClock())
    followed = FollowedStages(directory, Supervisor(directory.specs), model.stages, SimClock())
    now = launch_server._health(followed)
    assert dict(now.replicas) == dict.fromkeys(model.stages, "absent") and not now.serving


def test_flex_requests_have_streams_beside_those_of_sessions(model):
    by_name = specs(model, "--max-sessions", "3", "--flex-at-once", "1")
    assert by_name["vocoder/0"].engine_args["max_streams"] == 36


@pytest.mark.parametrize(
    ("args", "takes"),
    [
        ({}, True),
        ({"enable_priority_scheduling": True}, False),
        ({"abort_on_priority_when_disabled": True}, False),
    ],
)
def test_sglang_gets_a_priority_only_where_it_has_no_other_meaning(args, takes):
    assert launch_server._takes_priority(args) is takes
