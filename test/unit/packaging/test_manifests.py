"""deploy/compose.yaml and deploy/kuberay/: valid by pinned schemas, and in agreement.

No engine of containers and no cluster runs them here.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from sglang_live import __main__ as program
from sglang_live import launch_stage
from sglang_live.arguments import parse
from sglang_live.cluster.spec import read_spec

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
KUBERAY = DEPLOY / "kuberay"
HAPROXY = (DEPLOY / "haproxy.cfg").read_text()
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]
KUBERNETES = "1.34"

_TEXT, _INT, _YES_OR_NO = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}


def _object(*required: str, **fields: Any) -> dict:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _choice(*names: str) -> dict:
    return {"enum": list(names)}


# Names, types and choices of KubeRay v1.7.0's RayCluster, as far as they are of use here. A pod is
# one of Kubernetes' own kinds, and is checked as such.
_POD = {"template": {"type": "object"}, "rayStartParams": _TEXTS, "labels": _TEXTS}
_SECRET = _object(value=_TEXT, valueFrom={"type": "object"})
RAY_CLUSTER = _object(
    "headGroupSpec",
    rayVersion=_TEXT,
    enableInTreeAutoscaling=_YES_OR_NO,
    autoscalerOptions=_object(
        version=_choice("v1", "v2"),
        idleTimeoutSeconds=_INT,
        upscalingMode=_choice("Default", "Aggressive", "Conservative"),
    ),
    authOptions=_object(mode=_choice("disabled", "token"), secretName=_TEXT),
    tlsOptions=_object(enabled=_YES_OR_NO),
    gcsFaultToleranceOptions=_object(
        backend=_choice("redis", "rocksdb"),
        redisAddress=_TEXT,
        redisUsername=_SECRET,
        redisPassword=_SECRET,
        externalStorageNamespace=_TEXT,
    ),
    headGroupSpec=_object("template", serviceType=_TEXT, **_POD),
    workerGroupSpecs={
        "type": "array",
        "items": _object(
            *("groupName", "minReplicas", "maxReplicas", "template"),
            groupName=_TEXT,
            replicas=_INT,
            minReplicas=_INT,
            maxReplicas=_INT,
            numOfHosts=_INT,
            idleTimeoutSeconds=_INT,
            **_POD,
        ),
    },
)


def documents() -> list[dict]:
    return [
        one for path in sorted(KUBERAY.glob("*.yaml")) for one in yaml.safe_load_all(path.open())
    ]


def ray_cluster() -> dict:
    [found] = [one for one in documents() if one["kind"] == "RayCluster"]
    return found["spec"]


def groups() -> dict[str, dict]:
    """The groups of pods of the RayCluster by name."""
    spec = ray_cluster()
    return {one["groupName"]: one for one in spec["workerGroupSpecs"]} | {
        "head": spec["headGroupSpec"]
    }


def values(found: Any, key: str) -> Iterator[Any]:
    """All values of a key, at any depth."""
    if isinstance(found, dict):
        yield from ([found[key]] if key in found else [])
    inner = found.values() if isinstance(found, dict) else found if type(found) is list else ()
    for one in inner:
        yield from values(one, key)


# --- deploy/compose.yaml ---


def test_the_compose_file_is_of_the_published_schema():
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, COMPOSE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def arguments(service: str) -> list[str]:
    command = SERVICES[service]["command"]
    assert SERVICES[service]["entrypoint"] == [".venv/bin/sglang-live"]
    assert command[0] in program.COMMANDS
    return command[1:]


@pytest.fixture
def key(tmp_path, monkeypatch) -> str:
    path = tmp_path / "stage.key"
    path.write_text("k" * 32)
    path.chmod(0o600)
    monkeypatch.setenv("SGLANG_LIVE_API_KEYS", "my-key")
    return str(path)


def of_own_key(argv: list[str], key: str) -> list[str]:
    assert "--stage-key-file=/run/secrets/stage-key" in argv
    return [one.replace("/run/secrets/stage-key", key) for one in argv]


def test_gateways_connect_to_the_stages_that_are_there(key):
    gateways = [name for name, one in SERVICES.items() if one.get("command", [""])[0] == "serve"]
    assert len(gateways) == 2
    for gateway in gateways:
        config = parse(of_own_key(arguments(gateway), key))
        for stage, settings in config.stages.items():
            [address] = settings.connect
            host, port = re.fullmatch(r"tcp://(.+):(\d+)", address).groups()
            own, rest = launch_stage._parser().parse_known_args(arguments(host))
            assert (own.stage, own.bind, rest) == (stage, f"tcp://0.0.0.0:{port}", [])
            assert own.model_path == config.model.path


def test_the_gateways_are_the_servers_of_haproxy(key):
    servers = dict(re.findall(r"^ +server (\w+) ([\d.]+):30000$", HAPROXY, re.MULTILINE))
    there = {
        name.removeprefix("gateway-"): one["networks"]["entry"]["ipv4_address"]
        for name, one in SERVICES.items()
        if name.startswith("gateway-")
    }
    assert there == servers
    [agent] = re.findall(r"agent-check agent-port (\d+)", HAPROXY)
    for name in servers:
        config = parse(of_own_key(arguments(f"gateway-{name}"), key))
        assert (config.listen.port, config.listen.agent_port) == (30000, int(agent))
    [bound] = re.findall(r"^ +bind :(\d+)$", HAPROXY, re.MULTILINE)
    assert SERVICES["haproxy"]["ports"] == [f"127.0.0.1:{bound}:{bound}"]


def test_the_image_is_the_one_that_the_first_command_builds():
    [build] = re.findall(r"^#\s+(docker build .*)$", COMPOSE.read_text(), re.MULTILINE)
    words = shlex.split(build)
    own = {one["image"] for one in SERVICES.values() if "entrypoint" in one}
    assert own == {words[words.index("-t") + 1]}
    dockerfile = (DEPLOY.parent / words[words.index("-f") + 1]).read_text()
    assert {f"uid: {uid}" for uid in re.findall(r"--uid (\d+)", dockerfile)} == {"uid: 10001"}
    assert {*values(SERVICES, "uid")} == {"10001"}


# --- deploy/kuberay/ ---


@pytest.mark.parametrize(
    "document",
    [one for one in documents() if one["kind"] != "RayCluster"],
    ids=lambda one: f"{one['kind']}-{one['metadata']['name']}",
)
def test_a_manifest_is_of_kubernetes_schema(document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_cluster_is_of_kuberays_schema():
    assert list(Draft202012Validator(RAY_CLUSTER).iter_errors(ray_cluster())) == []
    misspelt = ray_cluster() | {"authOption": {}}
    assert list(Draft202012Validator(RAY_CLUSTER).iter_errors(misspelt))


@pytest.mark.parametrize("group", groups())
def test_a_pod_of_the_cluster_is_of_kubernetes_schema(group):
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": group}}
    pod["template"] = groups()[group]["template"]
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    pod["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_cluster_has_a_token_tls_and_a_store_that_is_there():
    spec = ray_cluster()
    assert spec["authOptions"] == {"mode": "token"} and spec["tlsOptions"] == {"enabled": True}
    host, port = spec["gcsFaultToleranceOptions"]["redisAddress"].split(":")
    ports = {
        one["metadata"]["name"]: [p["port"] for p in one["spec"]["ports"]]
        for one in documents()
        if one["kind"] == "Service"
    }
    assert int(port) in ports[host]


def test_secrets_and_files_are_those_of_the_commands():
    text = (KUBERAY / "raycluster.yaml").read_text()
    commands = text.split("\napiVersion")[0].replace("\\\n#", "")
    [secret] = re.findall(r"create secret generic (\S+)", commands)
    made = set(re.findall(r"--from-literal=([\w-]+)=", commands))
    used = [*values(documents(), "secretKeyRef")]
    assert {one["name"] for one in used} == {secret}
    items = [item["key"] for one in values(documents(), "secret") for item in one["items"]]
    assert {one["key"] for one in used} | {*items} == made
    [files] = re.findall(r"create configmap sglang-live(.*)$", commands, re.MULTILINE)
    names = {Path(name).name for name in re.findall(r"--from-file=(\S+)", files)}
    assert names == {"cluster.toml", "haproxy.cfg"}
    assert all((DEPLOY.parent / name).exists() for name in re.findall(r"-file=(\S+)", files))


def test_a_node_has_exactly_what_one_host_or_gateway_takes():
    plan = tomllib.loads((KUBERAY / "cluster.toml").read_text())
    [host] = plan["hosts"]
    for group, want in (("pairs", host), ("gateways", plan["gateways"])):
        node = groups()[group]
        assert node["rayStartParams"]["num-cpus"] == str(want["cpus"])
        [container] = node["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert (limits["cpu"], limits.get("nvidia.com/gpu", "0")) == (
            str(want["cpus"]),
            str(want.get("gpus", 0)),
        )
        assert node["minReplicas"] == want["count"] + want["spare"]
    assert groups()["pairs"]["maxReplicas"] == host["scaling"]["most"] + host["spare"]
    assert groups()["head"]["rayStartParams"]["num-cpus"] == "0"


@pytest.fixture
def pod(monkeypatch, tmp_path) -> dict:
    """cluster.toml, in the environment of a pod of gateways."""
    [container] = groups()["gateways"]["template"]["spec"]["containers"]
    for one in container["env"]:
        monkeypatch.setenv(one["name"], one.get("value", "my-key"))
    return tomllib.loads((KUBERAY / "cluster.toml").read_text())


def test_gateways_of_the_cluster_listen_where_haproxy_looks(pod):
    plan = pod
    gateway = plan["gateways"]
    own = ["--model-path", plan["model_path"], "--host", gateway["host"]]
    config = parse([*own, "--port", str(gateway["port"]), *plan["flags"], *gateway["flags"]])
    [agent] = re.findall(r"agent-check agent-port (\d+)", HAPROXY)
    [port] = re.findall(r'"\$\{GATEWAYS\}:(\d+)"', HAPROXY)
    assert (config.listen.agent_port, config.listen.port) == (int(agent), int(port))
    assert config.limits.gateways == gateway["count"] + gateway["spare"]
    assert "@valkey:6379" in config.journal.url and "@valkey:6379" in config.limits.shared_limits
    [entry] = [one for one in documents() if one["metadata"]["name"] == "gateways"]
    assert entry["spec"]["selector"]["ray.io/group"] == "gateways"
    assert next(values(documents(), "image")) and {"name": "GATEWAYS", "value": "gateways"} in [
        one for env in values(documents(), "env") for one in env
    ]


def test_launch_cluster_accepts_the_file(pod, key, tmp_path, monkeypatch):
    # As in the pods (raycluster.yaml).
    monkeypatch.setenv("SGLANG_LIVE_JOURNAL", "valkey://valkey:6379")
    path = tmp_path / "cluster.toml"
    text = (KUBERAY / "cluster.toml").read_text()
    path.write_text(text.replace("/run/sglang_live/stage.key", key))
    spec = read_spec(path)
    assert [group.name for group in spec.hosts] == ["pair"]
    assert spec.stage_key_file == key


def test_the_stages_of_a_host_have_its_gpus(monkeypatch):
    monkeypatch.setenv("SGLANG_LIVE_API_KEYS", "my-key")
    monkeypatch.setenv("SGLANG_LIVE_JOURNAL", "valkey://valkey:6379")
    plan = tomllib.loads((KUBERAY / "cluster.toml").read_text())
    [host] = plan["hosts"]
    config = parse(["--model-path", plan["model_path"], *plan["flags"], *host["flags"]])
    devices = {device for name in host["stages"] for device in config.stages[name].devices}
    assert devices == {f"cuda:{n}" for n in range(host["gpus"])}
