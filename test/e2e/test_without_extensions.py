"""The core alone is a whole server: without extensions/, and with no laboratory to import."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from test.e2e.conftest import running_server

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def core(tmp_path) -> Path:
    """A folder with the package as a wheel has it, but without extensions."""
    package = tmp_path / "sglang_live"
    left_out = shutil.ignore_patterns("extensions", "__pycache__")
    shutil.copytree(ROOT / "python" / "sglang_live", package, ignore=left_out)
    shutil.copytree(ROOT / "sgl_patches", package / "sgl_patches", ignore=left_out)
    shutil.copytree(ROOT / "kernels", package / "kernels", ignore=left_out, dirs_exist_ok=True)
    return tmp_path


def python(core: Path, *argv: str) -> str:
    """What a program with this package alone prints."""
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=core,
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_without_extensions_and_laboratory_speaks_and_ends(core, tmp_path_factory):
    found = "import sglang_live.extension as e, importlib.util as u; "
    found += "print(e.__file__, e.extensions(), u.find_spec('lab'))"
    assert python(core, "-c", found).split(maxsplit=1) == [
        str(core / "sglang_live" / "extension.py"),
        "() None\n",
    ]
    logs = tmp_path_factory.mktemp("core")
    with running_server("demo", logs, environment={"PYTHONPATH": str(core)}, folder=core) as server:
        spoken = python(core, "-m", "sglang_live.client", "--url", server.ws, "--json")
        turn = json.loads(spoken.splitlines()[-1])
        assert turn["status"] == "completed" and turn["transcript"] and turn["audio_s"] > 0.5
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi."}]}
        answer = httpx.post(f"{server.http}/v1/chat/completions", json=chat, timeout=60).json()
        assert answer["choices"][0]["message"]["content"]
        assert httpx.get(f"{server.http}/v1/batches", timeout=5).status_code == 404
        server.process.terminate()
        assert server.process.wait(30) == 0
