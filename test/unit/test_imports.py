"""Claims about which module may import which."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_live"

# From the bottom up: a room imports from itself and from rooms above it in this list.
ORDER = (
    "clock",
    "errors",
    "settings",
    "environment",
    "devices",
    "addresses",
    "open_files",
    "aio",
    "kernels",
    "sound",
    "speakable",
    "kv",
    "policy",
    "capacity",
    "core",
    "ids",
    "messages",
    "telemetry",
    "journal",
    "webrtc",
    "engine_channel",
    "models",
    "attachment",
    "bridge",
    "stages",
    "orchestrator",
    "interaction",
    "journal",
    "gateway",
    "extension",
    "model_source",
    "config",
    "flags",
    "arguments",
    "preflight",
    "model_flags",
    "shutdown",
    "stage_specs",
    "launch_server",
    "launch_stage",
    "cluster",
    "launch_cluster",
    "client",
    "conformance",
    "lang",
    "extensions",
    "__main__",
)
# The same within bridge/. Files that no line names are facts, which any of them may import.
BRIDGE = (
    "memory",
    "platform",
    "session",
    "tiers",
    "cache",
    "grammars",
    "scheduler",
    "seams",
    "plugin",
)
# Protocols of calls, on a core that knows none of them.
PROTOCOLS = ("gateway.live.", "gateway.realtime.")
# Where SGLang may be imported; everywhere else its types and its import time stay out.
SGLANG = (
    "bridge.",
    "extensions.elastic.engine.",
    "extensions.lending.engine.",
    "models.chatterbox.engine.",
    "models.chatterbox_turbo.engine.",
    "models.cosyvoice.engine.",
    "models.csm.engine.",
    "models.higgs_v2.engine.",
    "models.moshi.engine.",
    "models.moss_tts.engine.",
    "models.qwen3_omni.engine.",
    "models.qwen3_tts.engine.",
    "models.speech_lm.engine.",
    "models.step_audio.engine.",
    "models.zonos.engine.",
    "stages.engine_host",
    "stages.thinker.session",
    "lang",
)
# Lines that each room may have; the files at the top count as one room. A change that needs more
# raises its room's number and says why in the commit.
BUDGETS = {
    "": 4_910,
    "bridge": 9_990,
    "capacity": 940,
    "client": 1_260,
    "cluster": 1_600,
    "conformance": 1_700,
    "engine_channel": 300,
    "extensions/batches": 2_850,
    "extensions/custom_voices": 470,
    "extensions/elastic": 2_250,
    "extensions/lending": 3_420,
    "extensions/planner": 7_040,
    "extensions/traces": 240,
    "gateway": 24_250,
    "interaction": 3_320,
    "journal": 820,
    "kernels": 20,
    "kv": 1_020,
    "models": 21_570,
    "orchestrator": 3_540,
    "policy": 2_020,
    "sound": 1_850,
    "speakable": 2_000,
    "stages": 9_720,
    "telemetry": 760,
    "webrtc": 1_020,
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """Names that a file imports, and whether for types alone."""
    found, tree = [], ast.parse(path.read_text())
    types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            types |= set(ast.walk(node))
        elif isinstance(node, ast.Import):
            found += [(alias.name, node in types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(f"{node.module}.{alias.name}", node in types) for alias in node.names]
    return found


def imported(path: Path, *, for_types: bool = True) -> list[str]:
    """Absolute names of what a file imports, inside functions too.

    for_types: also what it imports for types alone, under TYPE_CHECKING.
    """
    return [name for name, types in _imports(path) if for_types or not types]


def own(name: str) -> str | None:
    """The module of this package that an imported name is in."""
    inside = name.removeprefix("sglang_live.")
    if inside == name:
        return None
    return next((m for m in (inside, inside.rpartition(".")[0]) if m in MODULES and m), None)


GRAPH = {
    module: {target for name in imported(path) if (target := own(name))}
    for module, path in MODULES.items()
}


def test_every_room_has_a_place_in_the_order():
    rooms = {module.partition(".")[0] for module in MODULES if module != "__init__"}
    assert rooms == set(ORDER)


def test_no_import_runs_against_the_order():
    place = {room: at for at, room in enumerate(ORDER)}
    upwards = [
        f"{module} imports {target}"
        for module, targets in GRAPH.items()
        for target in targets
        if module != "__init__"
        and place[target.partition(".")[0]] > place[module.partition(".")[0]]
    ]
    assert upwards == []


def test_the_core_imports_no_extension():
    """It finds them by their folder, with the same names wherever that is."""
    edges = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imported(path)
        if name.startswith("sglang_live.extensions") and not module.startswith("extensions.")
    ]
    assert edges == []


def test_no_extension_imports_another():
    edges = [
        f"{module} imports {target}"
        for module, targets in GRAPH.items()
        for target in targets
        if module.startswith("extensions.")
        and target.startswith("extensions.")
        and module.split(".")[1] != target.split(".")[1]
    ]
    assert edges == []


def test_folders_of_bridge_import_in_one_direction():
    def place(module: str) -> int:
        part = module.split(".")[1]
        return BRIDGE.index(part) if part in BRIDGE else -1

    upwards = [
        f"{module} imports {target}"
        for module, targets in GRAPH.items()
        for target in targets
        if module.startswith("bridge.") and target.startswith("bridge.")
        if place(target) > place(module)
    ]
    assert upwards == []


def test_the_call_core_imports_no_protocol_and_no_protocol_another():
    found = [
        f"{module} imports {target}"
        for module, targets in GRAPH.items()
        for target in targets
        if module.startswith(("gateway.call.", *PROTOCOLS)) and target.startswith(PROTOCOLS)
        if module.split(".")[1] != target.split(".")[1]
    ]
    assert found == []


def test_no_imports_form_a_circle():
    graph = {
        module: {t for name in imported(path, for_types=False) if (t := own(name))}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for target in graph[module]:
            visit(target, (*path, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


def test_sglang_is_imported_only_where_the_engine_is_meant():
    importers = {
        module
        for module, path in MODULES.items()
        for name in imported(path)
        if name.partition(".")[0] == "sglang"
    }
    assert [module for module in sorted(importers) if not module.startswith(SGLANG)] == []


def test_ray_is_imported_only_for_a_cluster():
    importers = {
        module
        for module, path in MODULES.items()
        for name in imported(path)
        if name.partition(".")[0] == "ray"
    }
    assert {module.partition(".")[0] for module in importers} <= {"cluster", "launch_cluster"}


def test_the_product_imports_no_laboratory_and_no_benchmark():
    files = [
        *MODULES.values(),
        *(path for folder in ("sgl_patches", "kernels") for path in (ROOT / folder).rglob("*.py")),
    ]
    importers = {
        (path.relative_to(ROOT), name)
        for path in files
        if path.name != "bench.py"
        for name in imported(path)
        if name.partition(".")[0] in ("lab", "benchmark", "test", "training")
    }
    assert importers == set()


def test_no_module_outside_of_models_imports_a_family():
    families = [
        m.removesuffix("family") for m in MODULES if m.count(".") > 1 and m.endswith(".family")
    ]
    assert families
    importers = {
        (module, target)
        for module, targets in GRAPH.items()
        for target in targets
        for family in families
        if target.startswith(family) and not module.startswith("models.")
    }
    assert importers == set()


def test_no_room_exceeds_its_budget():
    lines = Counter[str]()
    for path in MODULES.values():
        *folders, _ = path.relative_to(PACKAGE).parts
        # Each extension is a room.
        room = "/".join(folders[: 2 if folders[:1] == ["extensions"] else 1])
        lines[room] += path.read_text(encoding="utf-8").count("\n")
    for room, n in sorted(lines.items()):
        print(f"{room or 'top':20}{n:7} of {BUDGETS.get(room, 0)}")
    assert {room: n for room, n in lines.items() if n > BUDGETS.get(room, 0)} == {}
    assert set(BUDGETS) <= set(lines), "a budget of a room that is gone"


def test_a_server_starts_without_what_only_engines_need():
    code = (
        "import sys, sglang_live.launch_server; found = {*sys.modules}; "
        "print({'torch', 'transformers', 'sglang', 'xgrammar', 'benchmark', 'lab', 'av', "
        "'PIL', 'aiortc', 'ray', 'sglang_live.cluster', 'sglang_live.journal', 'valkey', "
        "'cryptography', "
        "'sglang_live.capacity.scaling'} & found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_runs_beside_rays_processes_does_not_import_ray():
    """A process with Ray ends with the cluster's head, and with it its stages and calls."""
    code = "import sys, sglang_live.cluster.hosted; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
