"""Claims about extensions: what one may add, and that a server without any is complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_live import extension

PACKAGE = Path(extension.__file__).parent
# Of one extension, which adds what there is to add.
EXTENSION = """
from dataclasses import dataclass

from sglang_live.errors import BadInputError
from sglang_live.extension import Extension
from sglang_live.settings import Settings, flag

@dataclass(frozen=True, slots=True, kw_only=True)
class EchoFlags(Settings):
    echo: str | None = flag(None, "answer with it", value="WORD")

class Echo(Extension):
    title = "echoes"
    flags = EchoFlags

    def addition(self, own, policies, stages):
        if own.echo is None:
            return None
        if own.echo == "pacing" and not policies.pacing:
            raise BadInputError("--echo pacing: there is none")
        from sglang_live.extensions.echo.served import Echoes
        return Echoes(own.echo)

EXTENSION = Echo()
"""
SERVED = """
from msgspec.structs import replace
from starlette.responses import PlainTextResponse

from sglang_live.errors import BadInputError
from sglang_live.extension import Addition
from sglang_live.gateway.parts import GatewayAddition

class Echoes(Addition):
    requests_at_once = 7

    def __init__(self, word):
        self.word = word

    def check(self, model):
        if not model.has_thinker:
            raise BadInputError("--echo: nothing to answer with")

    def stages(self, specs):
        lender = replace(specs[0], stage="echo", factory="echo.served:EchoStage")
        parts = [replace(one, parts=("echo.served:part",)) for one in specs]
        return [*parts, lender]

    def gateway(self, parts):
        return EchoRoutes(self.word, parts.orchestrator.model_name)

class EchoRoutes(GatewayAddition):
    paths = {"/echo": {"get": {"summary": "Echoes."}}}
    log = []

    def __init__(self, word, name):
        async def echo(_request):
            return PlainTextResponse(f"{word} of {name}")

        self.routes = {("/echo", "GET"): echo}

    def start(self):
        self.log.append("start")

    async def close(self):
        self.log.append("close")
"""
# Run in a process of its own, since modules are imported once.
WITH_ECHO = """
import sys
from dataclasses import replace
from pathlib import Path
import pytest
from starlette.testclient import TestClient
from sglang_live.arguments import parse
from sglang_live.errors import BadInputError
from sglang_live.flags import server_parser
from sglang_live.model_flags import check_flags
from sglang_live.models.family import ModelFacts
from sglang_live.stage_specs import stage_specs
from test.unit.gateway.fakes import FakeOrchestrator, app_of

assert "echoes:" in server_parser().format_help()
argv = ["--model-path", "demo"]
assert parse(argv).additions == () and "sglang_live.extensions.echo.served" not in sys.modules
with pytest.raises(BadInputError, match="there is none"):
    parse([*argv, "--live-policies", "off", "--echo", "pacing"])
config = parse([*argv, "--echo", "hi", "--max-sessions", "3", "--flex-at-once", "1"])

path = Path("/models/m")
model = ModelFacts(path=path, weights=path, family="sglang_live.models.qwen3_omni.family",
                   voices=("a",), vocab_size=100, context_tokens=1000)
check_flags(config, model)
with pytest.raises(BadInputError, match="nothing to answer with"):
    check_flags(config, replace(model, stages=("talker", "vocoder")))
specs = stage_specs(config, model, Path("/tmp/run"), "key")
assert [one.name for one in specs] == ["thinker/0", "talker/0", "vocoder/0", "echo/0"]
assert specs[0].parts == ("echo.served:part",) and specs[3].factory == "echo.served:EchoStage"
assert specs[2].engine_args["max_streams"] == 3 + 1 + 7 + 32

[addition] = config.additions
app = app_of(FakeOrchestrator(), additions=[addition.gateway], api_keys=("k",))
key = {"Authorization": "Bearer k"}
with TestClient(app, base_url="http://127.0.0.1") as client:
    assert client.get("/echo").status_code == 401
    assert client.get("/echo", headers=key).text == f"hi of {FakeOrchestrator.model_name}"
    assert "/echo" in client.get("/openapi.json", headers=key).json()["paths"]
from sglang_live.extensions.echo.served import EchoRoutes
assert EchoRoutes.log == ["start", "close"]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Folder of the package without its extensions, made of links."""
    package = tmp_path / "sglang_live"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in ("extensions", "__pycache__"):
            (package / path.name).symlink_to(path)
    return package


def run(package: Path, program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(package.parent), str(Path(__file__).parents[2])))
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_extension_adds_flags_stages_and_routes(package):
    folder = package / "extensions" / "echo"
    folder.mkdir(parents=True)
    (folder / "extension.py").write_text(EXTENSION)
    (folder / "served.py").write_text(SERVED)
    done = run(package, WITH_ECHO)
    assert done.returncode == 0, done.stderr


def test_an_extension_may_have_no_flags(package):
    folder = package / "extensions" / "quiet"
    folder.mkdir(parents=True)
    (folder / "extension.py").write_text(
        "from sglang_live.extension import Extension\nEXTENSION = Extension()"
    )
    program = """
from sglang_live.arguments import parse
print(parse(["--model-path", "demo"]).additions)
"""
    assert run(package, program).stdout == "()\n"


def test_extensions_come_in_the_order_of_their_names(package):
    for name in ("b", "a", "c"):
        folder = package / "extensions" / name
        folder.mkdir(parents=True)
        (folder / "extension.py").write_text(f"EXTENSION = {name!r}")
    (package / "extensions" / "c" / "extension.py").unlink()
    program = "from sglang_live.extension import extensions; print(*extensions())"
    assert run(package, program).stdout == "a b\n"


def test_without_their_folder_there_are_none(package):
    program = "from sglang_live.extension import extensions; print(extensions())"
    assert run(package, program).stdout == "()\n"


def test_flags_of_an_extension_need_few_imports():
    program = """
import sys
from sglang_live.extension import extensions
extensions()
print(sorted({"numpy", "sglang", "sqlite3", "torch"} & set(sys.modules)))
"""
    assert run(PACKAGE, program).stdout == "[]\n"
