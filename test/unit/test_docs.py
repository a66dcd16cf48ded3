"""README.md, CONTRIBUTING.md and docs/ name only what exists and explain all settings.

Their commands have valid arguments. Links of benchmark/notes/ have targets.
"""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from sglang_live import arguments, launch_stage
from sglang_live.client.__main__ import parse_args as parse_client
from sglang_live.extensions.batches.client import parse_args as parse_batch
from sglang_live.extensions.batches.metrics import BatchMetrics
from sglang_live.flags import server_parser
from sglang_live.model_source import ModelSource
from sglang_live.policy.policies import NAMES
from sglang_live.settings import flags_of
from sglang_live.stages.spec import SPEC_ENV, StageSpec
from sglang_live.stages.vocoder.config import VocoderConfig
from sglang_live.telemetry.metrics import GatewayMetrics
from test.unit.commands_in_docs import blocks_of, commands_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_live"
EXAMPLES = ROOT / "docs" / "examples" / "README.md"
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "lab" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    EXAMPLES,
]
# Notes of the laboratory may name files, flags and settings of their time.
NOTES = [*sorted((ROOT / "benchmark" / "notes").glob("*.md")), ROOT / "benchmark/results/README.md"]
LINKED = [*DOCS, *NOTES, ROOT / "CHANGELOG.md", ROOT / "sgl_patches" / "README.md"]
SOURCES = [
    path
    for folder in ("python", "benchmark", "lab", "training", "scripts", "docs/examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh") and "node_modules" not in path.parts
]
_FILE = re.compile(r"(?<![\w./$~{-])[\w][\w./-]*\.(?:py|sh|md|svg|txt|html|flac)\b")
_FOLDER = re.compile(r"`([\w.][\w./-]*/)`")
_MODULE = re.compile(r"python -m ((?:sglang_live|benchmark|lab|training)[\w.]*)")
_FLAG = re.compile(r"(?<![\w-])--(?:(?:thinker|talker|vocoder|STAGE)\.)?([a-z][a-z0-9-]+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
# Flags of other programs.
_FOREIGN_FLAGS = {"shm-size", "local-dir", "prefix", "no-package-lock", "backend", "worker-urls"}


HANDBOOK = [path for path in DOCS if path != EXAMPLES]
MAX_WORDS = 35_000
MAX_WORDS_OF_README = 1_500
MAX_LINE = 900


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def words(pattern: re.Pattern, path: Path) -> list[str]:
    return sorted(set(pattern.findall(path.read_text())))


def own_flags() -> set[str]:
    """Flags of the server, in the sources, and fields of dataclasses that flags are made of."""
    text = "\n".join(path.read_text() for path in SOURCES)
    names = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    typed = {*re.findall(r"--([a-z][a-z0-9-]+)", text), *(n.replace("_", "-") for n in names)}
    return typed | {flag.removeprefix("--") for flag in server_flags()}


def server_flags() -> set[str]:
    return {flag for action in server_parser()._actions for flag in action.option_strings}


def sglang_flags() -> set[str]:
    """SGLang's flags, read from its source: an import takes seconds."""
    spec = importlib.util.find_spec("sglang")
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups" / "fields"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    return {name.replace("_", "-") for name in re.findall(r"^    (\w+): A\[", text, re.MULTILINE)}


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_every_file_and_folder_exists(path):
    named = [*words(_FILE, path), *words(_FOLDER, path)]
    places = (ROOT, PACKAGE, ROOT / "docs", ROOT / "benchmark" / "notes", path.parent)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_every_link_has_a_target(path):
    assert [link for link in words(_LINK, path) if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", [*DOCS, *NOTES], ids=name_of)
def test_every_named_result_is_kept(path):
    """Names may have `*`, and one `{a,b}` for several."""
    named = set(re.findall(r"benchmark/results/[\w*.{},/-]*\.(?:json|toml)", path.read_text()))
    missing = []
    for name in named:
        before, brace, after = re.fullmatch(r"([^{]*)(?:\{([^}]*)\})?(.*)", name).groups()
        names = [f"{before}{choice}{after}" for choice in (brace or "").split(",")]
        missing += [one for one in names if not list(ROOT.glob(one))]
    assert missing == []


@pytest.mark.parametrize("path", [*DOCS, *NOTES], ids=name_of)
def test_every_module_can_be_run(path):
    def is_there(name: str) -> bool:
        place = name.replace(".", "/")
        roots = (ROOT, ROOT / "python")
        return any(
            (r / f"{place}{end}").is_file() for r in roots for end in (".py", "/__main__.py")
        )

    assert [name for name in words(_MODULE, path) if not is_there(name)] == []


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_every_flag_exists(path):
    known = own_flags() | sglang_flags() | _FOREIGN_FLAGS
    assert [flag for flag in words(_FLAG, path) if flag not in known] == []


def test_the_handbook_has_at_most_its_words():
    n_words = {name_of(path): len(path.read_text().split()) for path in HANDBOOK}
    assert n_words["README.md"] <= MAX_WORDS_OF_README
    assert sum(n_words.values()) <= MAX_WORDS, n_words


@pytest.mark.parametrize("path", HANDBOOK, ids=name_of)
def test_no_line_of_the_handbook_is_too_long(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [(number, len(line)) for number, line in lines if len(line) > MAX_LINE] == []


def test_the_map_names_every_room():
    def rooms(folder: Path) -> list[str]:
        inside = (path for path in sorted(folder.iterdir()) if path.is_dir())
        return [name_of(path) for path in inside if path.name[0] not in "._"]

    # Build output is no room; sglang_live.kernels is installed from kernels/.
    none = ("build", "dist", "python/sglang_live/kernels")
    chart = (ROOT / "README.md").read_text().split("## Map")[1]
    there = [room for room in rooms(ROOT) + rooms(PACKAGE) if room not in none]
    assert [room for room in there if f"`{room}/" not in chart] == []


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_every_anchor_is_a_heading(path):
    def anchors(file: Path) -> set[str]:
        # GitHub's anchors: lower case, no punctuation, hyphens for spaces.
        plain = (
            re.sub(r"[^\w\- ]", "", title.lower()) for title in _HEADING.findall(file.read_text())
        )
        named = re.findall(r'<a id="([^"]+)">', file.read_text())
        return {*named, *(title.replace(" ", "-") for title in plain)}

    links = _ANCHOR.findall(path.read_text())
    assert [
        (file, anchor)
        for file, anchor in links
        if anchor not in anchors(path.parent / file if file else path)
    ] == []


@pytest.mark.parametrize("path", [*DOCS, *NOTES], ids=name_of)
def test_every_document_begins_with_its_purpose(path):
    title, first = path.read_text().split("\n\n")[:2]
    assert title.startswith("# ")
    assert first[0].isalnum() or first[0] == "`", first
    assert first.rstrip().endswith((".", ":")), first


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_every_command_has_valid_arguments(path, tmp_path, monkeypatch):
    """The program's own parser accepts them; nothing is started."""
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    key = tmp_path / "stage.key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    (tmp_path / "lines.jsonl").write_text('{"url": "/v1/audio/speech"}')
    monkeypatch.chdir(tmp_path)
    check = {
        "sglang_live.launch_server": accept_server,
        "sglang_live.launch_stage": accept_stage,
        "sglang_live.client": lambda argv, _: parse_client(argv),
        "sglang_live.extensions.batches": lambda argv, _: parse_batch(argv),
    }
    for block in blocks_of(path.read_text()):
        commands = commands_of(block, tmp_path) if "python -m" in block else []
        assert len(commands) >= block.count("python -m"), block
        for command in commands:
            monkeypatch.setenv("SGLANG_LIVE_API_KEYS", command.api_keys)
            if command.module in check:
                check[command.module](command.argv, monkeypatch)


def accept_server(argv: list[str], _monkeypatch) -> None:
    for stage, settings in arguments.parse(argv).stages.items():
        assert unknown_to(stage, settings.args) == set(), argv


def accept_stage(argv: list[str], monkeypatch) -> None:
    taken_over = []
    model = SimpleNamespace(
        path="/models/m",
        cpu_weights="",
        family="sglang_live.models.qwen3_omni.family",
        stages=("thinker", "talker", "vocoder"),
        recordings=None,
    )
    monkeypatch.setattr(ModelSource, "load", lambda _source, _cache: model)
    monkeypatch.setattr(launch_stage.RunDir, "make", lambda **_: model)
    monkeypatch.setattr(launch_stage.os, "execve", lambda *args: taken_over.append(args[-1]))
    assert launch_stage.main(argv) is None, argv
    monkeypatch.setenv(SPEC_ENV, taken_over[0][SPEC_ENV])
    spec = StageSpec.from_env()
    assert unknown_to(spec.stage, spec.engine_args) == set(), argv


def unknown_to(stage: str, args: dict) -> set[str]:
    known = {f.name for f in fields(VocoderConfig)} if stage == "vocoder" else sglang_flags()
    return {name for name in args if name not in known and name.replace("_", "-") not in known}


def test_every_flag_and_setting_is_explained():
    explained = (ROOT / "docs" / "configuration.md").read_text()
    of_stage = {flag for one in launch_stage._parser()._actions for flag in one.option_strings}
    flags = (server_flags() | of_stage) - {"-h", "--help"}
    assert [flag for flag in flags if f"`{flag}" not in explained] == []
    vocoder = {f"--vocoder.{flag.name}" for flag in flags_of(VocoderConfig)}
    assert [flag for flag in vocoder if f"`{flag}" not in explained] == []
    policies = (ROOT / "docs" / "scheduling.md").read_text().split("\n## ")[0]
    assert [name for name in NAMES if f"`{name}`" not in policies] == []


def test_every_variable_of_the_environment_is_explained():
    explained = (ROOT / "docs" / "configuration.md").read_text()
    sources = [*SOURCES, *(ROOT / "sgl_patches").glob("*.py")]
    read = {
        name for path in sources for name in re.findall(r"SGLANG_LIVE_[A-Z_]+", path.read_text())
    }
    assert {name for name in read if f"`{name}`" not in explained} == set()


@pytest.mark.parametrize("metrics", [GatewayMetrics, BatchMetrics])
def test_every_series_has_a_help_text(metrics):
    registry = CollectorRegistry()
    metrics(registry)
    families = list(registry.collect())
    assert families
    assert [f.name for f in families if not re.fullmatch(r"\w.*\.", f.documentation)] == []


def test_every_series_of_the_gateway_that_docs_name_exists():
    text = (ROOT / "docs" / "metrics.md").read_text().split("## Gateway")[1].split("\n## ")[0]
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    there = {family.name.removeprefix("sglang_live_gateway_") for family in registry.collect()}
    named = re.findall(r"`(?!sglang_live)(\w+(?:_total|_seconds))(?:\{[\w,]+\})?`", text)
    assert len(named) > 30
    assert [name for name in named if name.removesuffix("_total") not in there] == []
