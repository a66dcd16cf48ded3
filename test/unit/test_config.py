"""Settings of the server from argument lists."""

import argparse
import re
from pathlib import Path

import pytest

from sglang_live import launch_stage
from sglang_live.arguments import parse
from sglang_live.config import ServerConfig
from sglang_live.errors import BadInputError
from sglang_live.flags import server_parser
from sglang_live.gateway.http.media_guard import MediaConfig
from sglang_live.kv.retention import RetentionFlags
from sglang_live.model_source import ModelSource
from sglang_live.models.family import ModelFacts
from sglang_live.policy.policies import POLICIES, Policies
from sglang_live.stages.spec import StageConfig

DEMO = ["--model-path", "demo"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("SGLANG_LIVE_API_KEYS", "SGLANG_LIVE_CACHE"):
        monkeypatch.delenv(name, raising=False)


def parsed(*argv: str) -> ServerConfig:
    return parse([*DEMO, *argv])


def test_without_arguments_it_serves_only_this_machine():
    config = parsed()
    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 30000)
    assert (config.keys.api_keys, config.keys.allow_anonymous) == ((), False)
    assert config.media == MediaConfig(allow_local_media=False, allow_private_media_urls=False)
    assert config.policies == Policies.parse(POLICIES)
    assert config.served_model_name == "demo"
    assert config.folders.log_dir is None and config.folders.timeline_dir is None
    assert list(config.stages) == ["thinker", "talker", "vocoder"]
    assert all(stage.replicas == 1 and stage.args == {} for stage in config.stages.values())


@pytest.mark.parametrize(
    ("argv", "thinker", "talker", "vocoder"),
    [
        (["--mem-fraction-static", "0.6"], {"mem_fraction_static": 0.6}, ..., {}),
        (["--mem-fraction-static=0.6"], {"mem_fraction_static": 0.6}, ..., {}),
        (["--thinker.tp-size", "2"], {"tp_size": 2}, {}, {}),
        (["--talker.max-running-requests", "64"], {}, {"max_running_requests": 64}, {}),
        (["--vocoder.chunk-frames", "8"], {}, {}, {"chunk_frames": 8}),
        (["--tp-size", "1", "--talker.tp-size", "2"], {"tp_size": 1}, {"tp_size": 2}, {}),
        (["--talker.tp-size", "2", "--tp-size", "1"], {"tp_size": 1}, {"tp_size": 2}, {}),
        (["--tp-size", "1", "--tp-size", "2"], {"tp_size": 2}, ..., {}),
        (["--tensor-parallel-size", "2"], {"tp_size": 2}, ..., {}),
        (["--skip-server-warmup"], {"skip_server_warmup": True}, ..., {}),
        (
            ["--skip-server-warmup", "--page-size", "7", "--sleep_on_idle"],
            {"skip_server_warmup": True, "page_size": 7, "sleep_on_idle": True},
            ...,
            {},
        ),
        (
            ["--skip-server-warmup", "true", "--sleep-on-idle", "False"],
            {"skip_server_warmup": True, "sleep_on_idle": False},
            ...,
            {},
        ),
        (["--no-sleep-on-idle"], {"sleep_on_idle": False}, ..., {}),
        (["--chunked-prefill-size", "-1"], {"chunked_prefill_size": -1}, ..., {}),
        (["--max-total-tokens", "64Ki"], {"max_total_tokens": 65536}, ..., {}),
        (["--quantization", "fp8"], {"quantization": "fp8"}, ..., {}),
        (["--tokenizer-path", "7"], {"tokenizer_path": "7"}, ..., {}),
        (["--cuda-graph-bs-decode", "1,2"], {"cuda_graph_bs_decode": [1, 2]}, ..., {}),
        (["--mm-process-config", '{"a": 1}'], {"mm_process_config": {"a": 1}}, ..., {}),
        (["--json-model-override-args="], {"json_model_override_args": ""}, ..., {}),
    ],
)
def test_other_arguments_go_to_the_named_stages(argv, thinker, talker, vocoder):
    stages = parsed(*argv).stages
    assert stages["thinker"].args == thinker
    assert stages["talker"].args == (thinker if talker is ... else talker)
    assert stages["vocoder"].args == vocoder


def test_a_flag_of_the_server_cannot_be_abbreviated():
    with pytest.raises(BadInputError, match=r"--max-session: .* did you mean --max-sessions\?"):
        parsed("--max-session", "3")


def test_replicas_and_device_are_no_arguments_of_the_engine():
    devices = ["--device", "cuda:1", "--talker.device", "cuda:2"]
    stages = parsed(*devices, "--vocoder.replicas", "3").stages
    devices = [("cuda:1",), ("cuda:2",), ("cuda:0",) * 3]
    assert [stages[name].devices for name in stages] == devices
    assert [stages[name].replicas for name in stages] == [1, 1, 3]
    assert all(stage.args == {} for stage in stages.values())


@pytest.mark.parametrize(
    ("argv", "devices"),
    [
        (["--talker.device", "cuda:4,cuda:5"], ("cuda:4", "cuda:5")),
        (["--talker.device", "cuda:4, cuda:5", "--talker.replicas", "2"], ("cuda:4", "cuda:5")),
        (["--talker.device", "cuda:4", "--talker.replicas", "2"], ("cuda:4", "cuda:4")),
        (["--talker.device", "cuda"], ("cuda:0",)),
        (["--talker.device", "cpu"], ("cpu",)),
        (["--talker.device", "cuda:0,cuda:2", "--talker.tp-size", "2"], ("cuda:0", "cuda:2")),
        (["--talker.device", "cuda:1,cuda:0"], ("cuda:1", "cuda:0")),
    ],
)
def test_a_list_of_devices_gives_each_replica_its_own(argv, devices):
    talker = parsed(*argv).stages["talker"]
    assert (talker.devices, talker.replicas) == (devices, len(devices))


def test_a_stage_on_other_hosts_has_a_replica_per_address():
    stage = parsed("--talker.connect", "tcp://a:1,tcp://b:2", "--allow-keyless-stages").stages[
        "talker"
    ]
    assert (stage.connect, stage.replicas) == (("tcp://a:1", "tcp://b:2"), 2)


@pytest.mark.parametrize(
    "flags",
    [
        ("--talker.replicas", "2"),
        ("--vocoder.device", "cpu"),
        ("--talker.connect", "tcp://127.0.0.1:7101"),
        ("--device", "cpu"),
    ],
)
def test_with_a_table_of_stages_no_flag_says_which_there_are(flags):
    with pytest.raises(BadInputError, match=rf"{flags[0]}: with --directory the stages are those"):
        parsed("--directory", "stages.json", *flags)
    limits = parsed("--directory", "stages.json", "--thinker.context-length", "1000")
    assert limits.stages["thinker"].args == {"context_length": 1000}


@pytest.mark.parametrize(
    ("path", "name"),
    [("/models/Qwen3-Omni", "Qwen3-Omni"), ("/models/Qwen3-Omni/", "Qwen3-Omni"), ("demo", "demo")],
)
def test_a_models_default_name_is_the_last_part_of_its_path(path, name):
    assert parse(["--model-path", path]).served_model_name == name


def test_a_model_in_the_current_directory_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(["--model-path", "."]).served_model_name == tmp_path.name
    assert parse(["--model-path", ".", "--served-model-name", "m"]).served_model_name == "m"


def test_paths_are_read_from_flags_and_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_LIVE_CACHE", "/var/cache/live")
    folders = parsed("--log-dir", "/var/log/live", "--timeline-dir", "/var/timelines").folders
    assert (folders.cache_dir, folders.log_dir) == (Path("/var/cache/live"), Path("/var/log/live"))
    assert folders.timeline_dir == Path("/var/timelines")
    assert parsed("--cache-dir", "/other").folders.cache_dir == Path("/other")


@pytest.mark.parametrize(
    ("flags", "ms"),
    [
        ((), 200),
        (("--speculate-ms", "auto"), 200),
        (("--speculate-ms", "300"), 300),
        (("--speculate-ms", "off"), None),
        (("--live-policies", "urgency"), None),
    ],
)
def test_speculative_turns_are_on_where_they_can_be_truncated(flags, ms):
    scheduling = parsed(*flags).scheduling
    assert scheduling.speculation_ms(recognises=False) == ms
    assert scheduling.speculation_ms(recognises=True) == (80 if ms == 200 else ms)


def test_speculative_turns_that_cannot_be_truncated_are_refused():
    with pytest.raises(BadInputError, match="needs the policy truncate"):
        parsed("--live-policies", "urgency", "--speculate-ms", "200")


@pytest.mark.parametrize("wrong", ["0", "-1", "soon", "1.5"])
def test_other_values_of_speculate_ms_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        parsed("--speculate-ms", wrong)
    assert "positive milliseconds, auto or off" in capsys.readouterr().err


# --- access ---


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_key(host):
    assert parsed("--host", host).listen.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", "", "127.0.0.1 "])
def test_any_other_host_needs_a_key_or_allow_anonymous(host, monkeypatch):
    with pytest.raises(BadInputError, match="without an API key"):
        parsed("--host", host)
    parsed("--host", host, "--api-key", "secret")
    parsed("--host", host, "--allow-anonymous")
    monkeypatch.setenv("SGLANG_LIVE_API_KEYS", "secret")
    parsed("--host", host)


def test_keys_in_arguments_take_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_LIVE_API_KEYS", " one, two,,\n")
    assert parsed().keys.api_keys == ("one", "two")
    assert parsed("--api-key", "a", "--api-key", "b").keys.api_keys == ("a", "b")


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(key, monkeypatch):
    with pytest.raises(BadInputError, match="API key is empty"):
        parsed("--host", "0.0.0.0", "--api-key", key)


@pytest.mark.parametrize("key", [" one", "one ", "one two", "one\ttwo"])
def test_a_key_with_spaces_is_refused_before_anything_starts(key, monkeypatch):
    with pytest.raises(BadInputError, match="spaces") as refused:
        parsed("--api-key", key)
    assert "one" not in str(refused.value).split()
    monkeypatch.setenv("SGLANG_LIVE_API_KEYS", "three,one two")
    with pytest.raises(BadInputError, match="spaces"):
        parsed()


# --- policies ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", ()),
        ("all", POLICIES),
        ("pacing", ("pacing",)),
        ("pacing, urgency,", ("pacing", "urgency")),
        ("deadline,truncate", ("deadline", "truncate")),
        ("fcfs", ("fcfs",)),
    ],
)
def test_policies_are_all_none_or_a_list(text, expected):
    assert parsed("--live-policies", text).policies == Policies.parse(expected)


@pytest.mark.parametrize("text", ["urgent", "urgency,none", "OFF", "", ",", "all,pacing"])
def test_an_unknown_policy_is_refused_with_the_known_ones(text):
    with pytest.raises(BadInputError, match=r"unknown policies .*deadline.*pacing.*urgency"):
        parsed("--live-policies", text)


@pytest.mark.parametrize("text", ["urgency,deadline", "fcfs,pacing,urgency"])
def test_orders_exclude_each_other(text):
    with pytest.raises(BadInputError, match="exclude each other"):
        parsed("--live-policies", text)


# --- retention and storage ---


HOST_TIER = ("--thinker.enable-hierarchical-cache",)


def test_session_storage_has_a_directory_and_a_size(tmp_path):
    assert parsed(*HOST_TIER).session_storage.to_env() == ""
    flags = ["--session-storage", str(tmp_path), "--session-storage-gib", "0.5"]
    storage = parsed(*HOST_TIER, *flags).session_storage
    assert (storage.directory, storage.n_bytes) == (tmp_path, 1 << 29)
    assert storage.to_env() == f"{1 << 29}:{tmp_path}"


def test_by_default_a_session_keeps_its_instructions_and_a_window():
    assert parsed().retention == RetentionFlags()
    flags = ["--retention-window", "4096", "--retention-sink", "100", "--retention-slack", "1"]
    assert parsed(*flags).retention == RetentionFlags(
        sink_tokens=100, window_tokens=4096, slack_tokens=1
    )
    assert parsed("--retention-sink", "1").retention.sink_tokens == 1


@pytest.mark.parametrize(
    ("argv", "context", "good", "window"),
    [
        ([], 65_536, 0, 2048),
        ([], 2048, 0, 1024),
        ([], 32_768, 600, 300),
        (["--context-length", "1000"], 32_768, 0, 500),
        (["--thinker.max-total-tokens", "500"], 32_768, 600, 250),
        (["--retention-window", "2000"], 32_768, 600, 2000),
        ([], 0, 0, 2048),
    ],
)
def test_the_window_is_half_of_what_the_model_is_good_for(argv, context, good, window):
    model = ModelFacts(
        path=Path("m"),
        weights=Path("m"),
        family="f",
        voices=(),
        context_tokens=context,
        good_tokens=good,
    )
    assert parsed(*argv).kept_by(model).window_tokens == window


@pytest.mark.parametrize(
    "argv",
    [
        ["--retention-window", "0"],
        ["--live-policies", "off"],
        ["--live-policies", "urgency,truncate", "--retention-window", "100"],
    ],
)
def test_without_a_window_or_the_policy_a_session_keeps_everything(argv, tmp_path):
    assert parsed(*argv).kept_by(ModelSource(path="demo").load(tmp_path)) is None


# --- invalid values ---


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--admission-first-audio-ms", "0"], "must be positive"),
        (["--admission-first-audio-ms", "nan"], "must be positive"),
        (["--thinker", "2"], "--thinker: name an argument of that stage, as --thinker.device"),
        (["--speaker.tp-size", "2"], r"no stage is called 'speaker'.*thinker.*talker.*vocoder"),
        (["--Thinker.tp", "2"], "no stage is called 'Thinker'"),
        (["--.tp", "2"], "no stage is called ''"),
        (["--thinker.", "2"], "names no argument"),
        (["--", "2"], "names no argument"),
        (["stray"], "unexpected argument 'stray'"),
        (["--cuda-graph-bs-decode", "1", "2"], "unexpected argument '2'"),
        (["--thinker.port", "1"], "--thinker.port: ports .* are chosen by the server"),
        (["--talker.model-path", "m"], "--talker.model-path: all stages load one checkpoint"),
        (["--enable-dp-attention"], "live streams need SGLang without DP attention"),
        (["--speculative-algorithm", "EAGLE"], "without speculation"),
        (["--talker.dp-size", "2"], "--talker.dp-size: replicas"),
        (["--thinker.data-parallel-size", "2"], "--thinker.data-parallel-size: replicas"),
        (["--talker.scheduler-recv-interval", "2"], "interruptions are received in every round"),
        (["--thinker.kv-cache-dtype", "nvfp4"], "KV in nvfp4 does not allow: --thinker.kv-cache"),
        (["--kv-cache-dtype", "fp4_mx_block16"], "KV in fp4_mx_block16 does not allow"),
        (["--kv-cache-dtype", "mxfp8"], "KV in mxfp8 does not allow"),
        (
            ["--vocoder.precision", "bf16"],
            "takes float32 or tf32 or bfloat16 or float16, got 'bf16'",
        ),
        (["--vocoder.max-buffered-frames", "1"], "max_buffered_frames=1 cannot hold one chunk"),
        (["--port", "65536"], "port 65536 is out of range"),
        (["--port", "-1"], "port -1 is out of range"),
        (["--max-sessions", "0"], "max-sessions must be at least 1"),
        (["--retention-window", "-1"], "retention-window must be at least 0, got -1"),
        (["--retention-sink", "0"], "retention-sink must be at least 1, got 0"),
        (["--retention-slack", "0"], "retention-slack must be at least 1, got 0"),
        (["--session-storage", "."], "needs the policy next-use and --thinker.enable-hierarchical"),
        (
            [*HOST_TIER, "--live-policies", "urgency", "--session-storage", "."],
            "needs the policy next-use",
        ),
        ([*HOST_TIER, "--session-storage", "./absent"], "there is no directory absent"),
        (
            [*HOST_TIER, "--session-storage", ".", "--session-storage-gib", "0"],
            "session-storage-gib must be positive",
        ),
        (
            [*HOST_TIER, "--session-storage", ".", "--session-storage-gib", "nan"],
            "session-storage-gib must be a number",
        ),
        (
            ["--live-policies", "off", "--retention-slack", "0", "--retention-window", "0"],
            "retention-slack must be at least 1, got 0",
        ),
        (["--talker.replicas", "0"], "replicas must be a number from 1, got '0'"),
        (["--talker.replicas", "two"], "replicas must be .* got 'two'"),
        (["--talker.replicas", "1.5"], "replicas must be .* got '1.5'"),
        (["--talker.replicas"], "replicas must be .* got None"),
        (["--talker.device", "0"], "device must be a name"),
        (["--talker.device", "gpu:0"], "--talker.device: device must be a name"),
        (["--talker.device", "cuda:4,"], "device must be a name .* got 'cuda:4,'"),
        (["--talker.device"], "device must be a name"),
        (
            ["--talker.device", "cuda:4,cuda:5", "--talker.replicas", "3"],
            "--talker.device names 2 devices for 3 replicas",
        ),
        (
            ["--talker.device", "cuda:4,cuda:5", "--talker.replicas", "1"],
            "--talker.device names 2 devices for 1 replicas",
        ),
        (
            ["--thinker.device", "cuda:0,cuda:1", "--thinker.tp-size", "2"],
            "--thinker.device: replica 0 has cuda:0 to cuda:1 and replica 1 has cuda:1 to cuda:2",
        ),
        (["--vocoder.device", "cuda:3,cuda:3"], "--vocoder.device: .* both would use cuda:3"),
        (
            [
                "--talker.connect",
                "tcp://a:1",
                "--talker.device",
                "cuda:1",
                "--allow-keyless-stages",
            ],
            "--talker.device: the stages of --talker.connect run on the devices",
        ),
        (["--thinker.base-gpu-id", "4"], "--thinker.base-gpu-id: devices are named with"),
        (["--talker.connect", "a:1"], "--talker.connect takes tcp://HOST:PORT, .* got 'a:1'"),
        (["--talker.connect", "tcp://a"], "--talker.connect takes tcp://HOST:PORT"),
        (["--talker.connect", "tcp://a:1,tcp://::1:2"], "in brackets, got 'tcp://::1:2'"),
        (["--talker.connect", "tcp://a:65536"], "--talker.connect takes tcp://HOST:PORT"),
    ],
)
def test_an_invalid_value_is_refused_with_the_reason(argv, complaint):
    with pytest.raises(BadInputError, match=complaint):
        parsed(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--talker.kv-cache-dtype", "nvfp4"],
        ["--kv-cache-dtype", "nvfp4", "--live-policies", "urgency"],
        ["--kv-cache-dtype", "fp8_e4m3"],
    ],
)
def test_kv_in_fp4_is_refused_only_where_keys_are_rotated(argv):
    assert parsed(*argv).stages["talker"].args["kv_cache_dtype"] == argv[1]


@pytest.mark.parametrize(
    "argv", [["--port", "many", *DEMO], ["--host"], []], ids=["no number", "no value", "no model"]
)
def test_unknown_syntax_ends_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as exited:
        parse(argv)
    assert exited.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_has_flags_by_subject():
    text = server_parser().format_help()
    for group in ("what to serve", "network and keys", "limits", "policies", "stages"):
        assert f"\n{group}:\n" in text


@pytest.mark.parametrize("parser", [server_parser(), launch_stage._parser()])
def test_help_fits_80_columns_and_tells_defaults(monkeypatch, parser):
    monkeypatch.setenv("COLUMNS", "80")
    text = parser.format_help()
    assert max(map(len, text.splitlines())) < 80
    for action in parser._actions:
        flag = action.option_strings[-1]
        assert action.help, flag
        assert flag in re.split(r"[\s,]", text), f"{flag} is broken across lines"
        if action.default not in (None, False, [], "", argparse.SUPPRESS):
            assert "default" in action.help, flag


@pytest.mark.parametrize("typed", ["::1", "[::1]"])
def test_a_host_may_have_the_brackets_of_a_url(typed):
    assert parse(["--model-path", "demo", "--host", typed]).listen.host == "::1"


def test_configurations_cannot_change():
    config = parsed()
    with pytest.raises(AttributeError):
        config.listen.port = 1
    with pytest.raises(AttributeError):
        config.drain_s = 1.0
    with pytest.raises(AttributeError):
        StageConfig().replicas = 2


@pytest.mark.parametrize(
    ("arguments", "sessions", "responses"),
    [
        ([], None, None),
        (["--api-key", "a"], None, 30 * 64),
        (["--api-key", "a", "--api-key", "b"], 48, 30 * 48),
        (["--api-key", "a", "--api-key", "b", "--max-sessions", "1"], 1, 30),
        (["--api-key", "a", "--max-sessions-per-key", "7"], 7, 30 * 7),
        (["--api-key", "a", "--max-responses-per-minute", "5"], None, 5),
    ],
)
def test_limits_of_a_key_follow_from_the_number_of_keys(arguments, sessions, responses):
    config = parse(["--model-path", "demo", *arguments])
    limits = config.limits.of_server(config.capacity.max_sessions, len(config.keys.api_keys))
    assert limits.max_sessions_per_key == sessions
    assert limits.max_responses_per_minute == responses


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-sessions-per-secret", "0"],
        ["--idle-session-s", "-1"],
        ["--idle-session-s", "inf"],
        ["--first-request-s", "0"],
        ["--max-connections-per-address", "0"],
    ],
)
def test_invalid_limits_are_refused(arguments):
    with pytest.raises(BadInputError):
        parse(["--model-path", "demo", *arguments])
