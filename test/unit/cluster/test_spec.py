"""cluster.toml: what it accepts, and where it says that a fault is."""

from types import SimpleNamespace

import msgspec
import pytest

from sglang_live import launch_cluster
from sglang_live.cluster.spec import ClusterSpec, check_model, read_spec
from sglang_live.cluster.state import State
from sglang_live.errors import BadInputError

GOOD = """
model_path = "demo"
zones = ["a", "b"]

[[hosts]]
name = "think"
stages = ["thinker"]

[[hosts]]
name = "voice"
stages = ["talker", "vocoder"]
count = 2
spare = 1
gpus = 2
flags = ["--talker.device", "cuda:0", "--vocoder.device", "cuda:1"]

[gateways]
count = 2
port = 0
"""


def scaling(**values: float) -> str:
    lines = {"sessions": 20, "most": 6} | values
    fields = "\n".join(f"{name} = {value}" for name, value in lines.items())
    return f"\n[hosts.scaling]\n{fields}\n\n[gateways]"


@pytest.fixture
def read(tmp_path):
    def of(text: str) -> ClusterSpec:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return read_spec(path)

    return of


def test_a_file_has_what_it_says(read):
    spec = read(GOOD)
    think, voice = spec.hosts
    assert (think.count, think.spare, voice.count, voice.spare, voice.gpus) == (1, 0, 2, 1, 2)
    assert spec.argv(voice)[:3] == ["--model-path", "demo", "--talker.device"]
    assert spec.argv(spec.gateways) == [
        *("--model-path", "demo"),
        *("--host", "127.0.0.1", "--port", "0"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "count = 2\nspare",
            'count = "two"\nspare',
            "Expected `int`, got `str` - at `$.hosts[1].count`",
        ),
        (
            "count = 2\nspare",
            "count = 0\nspare",
            "0 is too few: remove the group instead - at `$.hosts[1].count`",
        ),
        ("spare = 1", "spare = -1", "-1 is no number - at `$.hosts[1].spare`"),
        ("spare", "spares", "Object contains unknown field `spares` - at `$.hosts[1]`"),
        ('"vocoder"', '"singer"', "no stage is called 'singer' - at `$.hosts[1].stages`"),
        (
            '["thinker"]',
            '["thinker", "thinker"]',
            "a host has some stages, each once - at `$.hosts[0].stages`",
        ),
        ('["thinker"]', "[]", "a host has some stages, each once - at `$.hosts[0].stages`"),
        ('"think"', '"voice"', "'voice' is there twice - at `$.hosts[0].name`"),
        ('"think"', '"gateways"', "'gateways' is no name of hosts - at `$.hosts[0].name`"),
        ('"think"', '"Think 1"', "'Think 1' is no name of hosts - at `$.hosts[0].name`"),
        ('"a", "b"', '"a", "a"', "'a' is empty, or there twice - at `$.zones`"),
        (
            "gpus = 2",
            "gpus = 1",
            "its stages use cuda:0, cuda:1, and the host has 1 GPUs - at `$.hosts[1].flags`",
        ),
        (
            "gpus = 2",
            "gpus = 0",
            "its stages use cuda:0, cuda:1, and the host has 0 GPUs - at `$.hosts[1].flags`",
        ),
        ("gpus = 2", "gpus = 2\ncpus = 0.0", "0.0 is no number of cores - at `$.hosts[1].cpus`"),
        ('"cuda:1"', '"gpu1"', "must be a name such as cuda:0"),
        ('"--talker.device"', '"--talker.connect"', "at `$.hosts[1].flags`"),
        ("port = 0", "port = 70000", "port 70000 is out of range - at `$.gateways.flags`"),
        ("port = 0", 'host = "0.0.0.0"', "without an API key"),
        (
            "port = 0",
            'flags = ["--model-path", "x"]',
            "--model-path is not for flags: the cluster sets it",
        ),
        ("port = 0", 'flags = ["--talker.device", "cpu"]', "at `$.gateways.flags`"),
        ('model_path = "demo"', "", "Object missing required field `model_path`"),
        (
            '"demo"',
            '"demo"\nstage_key_file = "key"',
            "name it from / on, as on every machine - at `$.stage_key_file`",
        ),
        ('"demo"', '"demo"\nstage_key_file = "/none"', "cannot read the stage key"),
        ('"demo"', '"demo"\ndrain_s = -1.0', "-1.0 is no time - at `$.drain_s`"),
        (
            "\n[gateways]",
            scaling(sessions=0),
            "0 is no number of sessions - at `$.hosts[1].scaling.sessions`",
        ),
        (
            "\n[gateways]",
            scaling(most=1),
            "1 is less than their count, 2 - at `$.hosts[1].scaling.most`",
        ),
        (
            "\n[gateways]",
            scaling(cold_start_s=-1.0),
            "-1.0 is no time - at `$.hosts[1].scaling.cold_start_s`",
        ),
        (
            "\n[gateways]",
            scaling(),
            "without --shared-limits nothing tells how many calls there are - at "
            "`$.gateways.flags`",
        ),
        ("[gateways]", "[gateways", "(at line 17, column 10)"),
    ],
)
def test_a_fault_is_told_with_its_place(read, old, new, told):
    assert old in GOOD
    with pytest.raises(BadInputError) as refused:
        read(GOOD.replace(old, new, 1))
    assert told in str(refused.value), str(refused.value)
    assert "cluster.toml: " in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInputError, match=r"none\.toml: .*No such file"):
        read_spec(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (("thinker", "talker", "vocoder"), ""),
        (("thinker", "vocoder"), "this model has no talker"),
    ],
)
def test_every_stage_of_the_model_has_a_host_and_no_other(read, stages, told):
    model = SimpleNamespace(stages=stages)
    spec = read(GOOD)
    if told:
        with pytest.raises(BadInputError, match=told):
            check_model(spec, model)
    else:
        check_model(spec, model)
    alone = msgspec.structs.replace(spec, hosts=spec.hosts[:1])
    with pytest.raises(BadInputError, match="no hosts have the model's"):
        check_model(alone, model)


def test_a_generation_is_of_what_the_processes_are_and_not_of_how_many(read):
    before = read(GOOD)
    more = read(GOOD.replace("count = 2\nspare = 1", "count = 5\nspare = 2"))
    assert all(before.generation(n) == more.generation(n) for n in ("think", "voice", "gateways"))
    other = read(GOOD.replace("spare = 1", 'spare = 1\ncommand = ["numactl"]'))
    assert before.generation("voice") != other.generation("voice")
    assert before.generation("think") == other.generation("think")
    flags = 'flags = ["--max-sessions", "7"]\nzones'
    every = read(GOOD.replace("zones", flags))
    assert all(before.generation(n) != every.generation(n) for n in ("think", "voice", "gateways"))


def test_the_number_of_hosts_follows_the_calls_within_its_bounds(read):
    store = 'flags = ["--shared-limits", "valkey://store"]\nport = 0'
    text = GOOD.replace("\n[gateways]", scaling()).replace("port = 0", store)
    spec, before = read(text), read(GOOD)
    think, voice = spec.hosts
    assert [voice.needed(n) for n in (0, 2, 5, 9)] == [2, 2, 5, 6]
    assert [think.needed(n) for n in (0, 9)] == [1, 1]
    # In each zone a thinker, six voices and the spare one.
    assert spec.size()[0] == 2 * (1 + 7) + 2 and before.size()[0] == 2 * (1 + 3) + 2
    assert spec.generation("voice") == before.generation("voice")
    state = State(spec=spec, sizes={"voice": {"a": 4}})
    wanted = {(one.group, one.zone): (one.needed, one.total) for one in state.wanted()}
    assert wanted[("voice", "a")] == (4, 5) and wanted[("voice", "b")] == (2, 3)
    assert wanted[("think", "b")] == (1, 1) and wanted[("gateways", "")] == (2, 2)
    assert state.needed("gone", "a") == 0


def test_check_tells_what_there_would_be(tmp_path, capsys):
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    assert launch_cluster.main([str(path), "--check"]) == 0
    assert capsys.readouterr().out == f"{path} is right: 10 hosts and gateways\n"
    path.write_text(GOOD.replace('"thinker"', '"vocoder"'))
    assert launch_cluster.main([str(path), "--check"]) == 2
    assert "no hosts have the model's thinker" in capsys.readouterr().err


def test_without_ray_a_cluster_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(launch_cluster.sys.modules, "ray", None)
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    assert launch_cluster.main([str(path)]) == 2
    assert "pip install 'sglang-live[cluster]'" in capsys.readouterr().err
