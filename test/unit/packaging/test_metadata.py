"""Claims about the metadata in setup.py."""

import ast
import re
import sys
from pathlib import Path

from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python" / "sglang_live"
SETUP = (ROOT / "setup.py").read_text()
# Rooms that run inside SGLang, for SGLang programs, beside a server or behind an extra. stages is
# partly of these.
NOT_THE_SERVER = ("bridge", "conformance", "kernels", "models", "report", "stages", "lang.py")
# From the extras, which also say whether it is built for CUDA. Only stages import its users.
OF_EXTRAS = {"aioice", "aiortc", "av", "cryptography", "ray", "torch", "valkey"}
# Names of distributions that are not those of their modules.
DISTRIBUTIONS = {"PIL": "pillow", "zmq": "pyzmq"}


def required() -> set[str]:
    block = SETUP.split("install_requires=[")[1].split("],")[0]
    return set(re.findall(r'"([a-z0-9-]+)', block))


def imported_by_the_server() -> set[str]:
    """Distributions of third parties that modules of the server import at their top level."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        room, *folders = path.relative_to(PACKAGE).parts
        if room in NOT_THE_SERVER or "engine" in folders:  # of an extension, inside SGLang
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.split(".")[0])
    third_party = names - sys.stdlib_module_names - {"sglang_live"}
    return {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in third_party}


def test_packages_that_the_server_imports_are_required():
    assert imported_by_the_server() - required() - OF_EXTRAS == set()


def test_entry_points_exist():
    for module, name in re.findall(r"= (sglang_live[\w.]*):(\w+)", SETUP):
        path = ROOT / "python" / f"{module.replace('.', '/')}.py"
        defined = [node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")]
        assert name in defined


def test_every_folder_with_python_files_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_data_files_of_the_package_are_installed():
    globs = re.findall(r'"sglang_live": \[([^]]*)\]', SETUP)[0]
    patterns = re.findall(r'"([^"]+)"', globs)
    found = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name[0] != "."
    }
    assert sorted(map(str, data - found)) == []


def test_extensions_are_installed_although_their_folder_is_no_package():
    assert not (PACKAGE / "extensions" / "__init__.py").exists()
    [pattern] = re.findall(r'find_namespace_packages\("python", include=\["([^"]+)"', SETUP)
    folders = {path.parent for path in (PACKAGE / "extensions").rglob("*.py")}
    names = {".".join(path.relative_to(ROOT / "python").parts) for path in folders}
    assert names <= set(find_namespace_packages(str(ROOT / "python"), include=[pattern]))
