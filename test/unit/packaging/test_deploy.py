"""Files in deploy/ name only what exists; docs/deploy.md is consistent."""

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sglang_live.arguments import parse
from sglang_live.config import ServerConfig
from sglang_live.devices import devices_of_ranks
from sglang_live.extensions.planner.config import parse_args as parse_plan
from sglang_live.extensions.planner.memory import memory_of
from sglang_live.extensions.planner.simulation.placement import Placement
from sglang_live.telemetry.metrics import GatewayMetrics
from test.unit.commands_in_docs import Command, blocks_of, commands_of

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana.json"
DEPLOYING = (ROOT / "docs" / "deploy.md").read_text()
IMAGES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
_OF_PROMETHEUS = ("_bucket", "_sum", "_count", "_total")
_GIB = 1 << 30
_KV_BYTES = 48 * 4 * 128 * 2 * 2  # layers, heads, channels, keys and values, bf16
_SESSION_TOKENS = 2500


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def in_deploying() -> list[str]:
    """Expressions of alarms and of advice. A bar in a table's cell is escaped by a backslash."""
    text = DEPLOYING + (ROOT / "docs" / "scale.md").read_text()
    return re.findall(r"`([^`\n]*sglang_live_[a-z][^`\n]*)`", text.replace("\\|", "|"))


@pytest.mark.parametrize("expressions", [expressions, in_deploying])
def test_series_in_expressions_exist(expressions):
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    known = {family.name for family in registry.collect()}
    known |= {"sglang_live_stage_up", "sglang_live_stage_load", "sglang_live_stage_starts"}
    known |= {"sglang_live_turn_mark_seconds", "sglang_live_capacity_budget_share"}
    known |= {f"sglang_live_capacity_{name}" for name in ("sessions", "sessions_more")}
    known |= {"sglang_live_capacity_session_limit"}
    known |= {"sglang_live_kv_mover", "sglang_live_lost_jobs"}
    known |= {"sglang_live_journal_dropped", "sglang_live_journal_failures"}
    known |= {"sglang_live_gateway_shared_limits_up"}
    assert expressions()
    for expression in expressions():
        for name in re.findall(r"sglang_live_\w+", expression):
            family = re.sub(rf"({'|'.join(_OF_PROMETHEUS)})$", "", name)
            assert family in known, expression


@pytest.mark.parametrize("expressions", [expressions, in_deploying])
def test_stage_load_fields_in_expressions_are_documented(expressions):
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for expression in expressions():
        for names in re.findall(r'what=~?"([\w|]+)"', expression):
            assert set(names.split("|")) <= documented, expression


def test_every_panel_has_a_description():
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel["description"].endswith(("?", ".")), panel["title"]


def test_images_are_built_by_scripts_setup():
    for path in IMAGES:
        device = path.suffix[1:]
        assert f"scripts/setup.sh --device {device}" in path.read_text()


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_the_run_command_of_an_image_has_shared_memory_host_and_key(path, monkeypatch):
    text = path.read_text()
    header = text.split("\nFROM")[0].replace("\\\n#", "")
    build, run = (
        shlex.split(line) for line in re.findall(r"^#\s+(docker .*)$", header, re.MULTILINE)
    )
    assert "--shm-size=1g" in run
    image = build[build.index("-t") + 1]
    entry, default = (
        json.loads(re.search(rf"^{word} (.*)$", text, re.MULTILINE)[1])
        for word in ("ENTRYPOINT", "CMD")
    )
    key = run[run.index("-e") + 1].removeprefix("SGLANG_LIVE_API_KEYS=")
    monkeypatch.setenv("SGLANG_LIVE_API_KEYS", key)
    arguments = run[run.index(image) + 1 :] or default
    config = parse([*entry[entry.index("sglang_live.launch_server") + 1 :], *arguments])
    assert (config.listen.host, config.keys.api_keys) == ("0.0.0.0", (key,))


# --- docs/deploy.md ---


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## )", DEPLOYING, re.MULTILINE | re.DOTALL)[1]


def rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def number(cell: str) -> float:
    """The number in a cell such as `− 7.1` or `400,000 (37 GiB)`."""
    return float(cell.replace("− ", "-").replace(",", "").split()[0])


def served(command: Command, monkeypatch) -> ServerConfig:
    monkeypatch.setenv("SGLANG_LIVE_API_KEYS", command.api_keys)
    return parse(command.argv)


@pytest.mark.parametrize("column", [1, 2])
def test_memory_of_one_gpu_adds_up(column):
    table = {row[0]: row[column] for row in rows(section("Memory")) if len(row) == 3}
    names = list(table)
    left = names.index("left for KV of the thinker")
    parts = [number(table[name]) for name in names[names.index("free at first") : left]]
    assert sum(parts) == pytest.approx(number(table[names[left]]), abs=0.5)
    n_tokens = number(table["`--thinker.max-total-tokens`"])
    gib = n_tokens * _KV_BYTES / _GIB
    assert f"({gib:.0f} GiB)" in table["`--thinker.max-total-tokens`"]
    assert gib < number(table[names[left]])
    sessions = number(table["sessions with all their KV on the GPU: tokens / 2,500"])
    assert sessions == n_tokens / _SESSION_TOKENS


@pytest.mark.parametrize(("column", "gpu"), [(1, "h200"), (2, "h100")])
def test_memory_of_one_gpu_is_what_the_plan_says(column, gpu):
    table = {row[0]: row[column] for row in rows(section("Memory")) if len(row) == 3}
    config = parse_plan(["--gpu", gpu])
    memory = memory_of(Placement(), config.gpu.free_gib, config.sizes, config.model)
    assert number(table["free at first"]) == config.gpu.free_gib
    assert number(table["`--thinker.max-total-tokens`"]) == memory.thinker_tokens
    assert memory.talker_tokens == 100_000
    left = number(table["left for KV of the thinker"])
    thinker = memory.gpus[0].parts[-1].gib
    assert left == pytest.approx(thinker + memory.gpus[0].spare_gib, abs=0.6)


def test_commands_for_one_gpu_have_the_sizes_of_the_table(tmp_path, monkeypatch):
    table = {row[0]: row[1:] for row in rows(section("Memory")) if len(row) == 3}
    n_tokens = [number(cell) for cell in table["`--thinker.max-total-tokens`"]]
    sessions = [
        number(cell) for cell in table["sessions with all their KV on the GPU: tokens / 2,500"]
    ]
    commands = [c for block in blocks_of(section("One GPU")) for c in commands_of(block, tmp_path)]
    configs = [served(c, monkeypatch) for c in commands if c.module == "sglang_live.launch_server"]
    assert [c.stages["thinker"].args["max_total_tokens"] for c in configs] == n_tokens
    assert [c.capacity.max_sessions for c in configs] == sessions
    assert all(c.stages["talker"].args["max_total_tokens"] == 100_000 for c in configs)


def test_stages_on_eight_gpus_have_the_devices_of_the_table(tmp_path, monkeypatch):
    text = section("Eight GPUs")
    said = {}
    for gpus, stage, *_ in (row for row in rows(text) if row[0][0].isdigit()):
        first, _, last = gpus.partition(" to ")
        said |= dict.fromkeys(range(int(first), int(last or first) + 1), stage.split("/")[0])
    commands = [c for block in blocks_of(text) for c in commands_of(block, tmp_path)]
    [config] = (served(command, monkeypatch) for command in commands)
    placed: dict[int, str] = {}
    for name, stage in config.stages.items():
        for device in stage.devices:
            ranks = {int(d.removeprefix("cuda:")) for d in devices_of_ranks(device, stage.args)}
            assert not placed.keys() & ranks
            placed |= dict.fromkeys(ranks, name)
    assert placed == said and set(placed) == set(range(8))


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_an_image_runs_without_roots_rights_on_a_base_that_can_be_pinned(name):
    lines = (ROOT / "deploy" / name).read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1] not in ("root", "0")
    last_user = max(i for i, line in enumerate(lines) if line.startswith("USER "))
    assert last_user < next(i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT"))
    [base] = [line for line in lines if line.startswith("FROM ")]
    assert base == "FROM ${BASE}"


@pytest.mark.parametrize("secret", ["key.pem", "deploy/tls/server.key", ".env", "x/.env.prod"])
def test_secrets_beside_the_sources_stay_out_of_images(secret):
    rules = (ROOT / ".dockerignore").read_text().split()
    name = secret.rsplit("/", 1)[-1]
    assert any(fnmatch.fnmatch(name, rule.removeprefix("**/")) for rule in rules)


def test_every_javascript_package_of_the_examples_is_locked_by_its_hash():
    lock = json.loads((ROOT / "docs/examples/package-lock.json").read_text())
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages and all(entry["integrity"] for entry in packages.values())
    assert not any("resolved" in entry for entry in packages.values()), "names a registry"
