"""The examples in docs/examples/: unmodified third-party clients against the whole server."""

import asyncio
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from test.e2e.conftest import DATA
from test.e2e.relay import certificate
from test.e2e.together import Together

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
# A short response may end before it can be interrupted.
TRIES = 3
SPEECH = DATA / "sp_librivox_0880.flac"
TYPED = ("openai_typed.py", "openai_typed.mjs", "openai_live.mjs")
WITH_SOCKET = ("openai_agents_voice.py", "pipecat_voice.py", "pipecat_voice.py --live")
LIVEKIT = ("livekit_voice.py", "livekit_voice.py --live")


async def run(*command: str | Path, cwd: Path, within_s: float = 120, **environment: str) -> str:
    """The command's output; fails if the command fails or takes longer."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(within_s):
            out, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    text = out.decode()
    assert process.returncode == 0, text
    return text


def example(name: str, url: str, *args: str | Path) -> list[str | Path]:
    assert PYTHON.exists(), "scripts/setup.sh --test makes it"
    return [PYTHON, EXAMPLES / name, "--url", url, *args]


def seconds_of_sound(text: str) -> list[float]:
    return [float(line.split(" s of sound")[0].split()[-1]) for line in text.splitlines()
            if " s of sound" in line]  # fmt: skip


class Ended(NamedTuple):
    """folder: in which the example ran."""

    text: str
    folder: Path


@pytest.fixture(scope="module")
def ended(server, tmp_path_factory) -> Together[str, Ended]:
    """Examples that are given a recording or a text."""

    async def start(name: str) -> Ended:
        folder = tmp_path_factory.mktemp("example")
        if name.endswith(".mjs"):
            return Ended(await javascript(name, server.port, folder), folder)
        script, *more = name.split()
        url = server.http.replace("http", "ws") if name in WITH_SOCKET else server.http
        given = "How are you?" if name in TYPED else SPEECH
        return Ended(await run(*example(script, url, given, *more), cwd=folder), folder)

    return Together((*WITH_SOCKET, *LIVEKIT, "openai_live.py", *TYPED), start)


def test_openais_sdk_blocking(ended):
    text, folder = ended["openai_typed.py"]
    assert "completed" in text
    assert (folder / "answer.wav").stat().st_size > 24_000


async def test_openais_sdk_speaks_transcribes_and_interrupts(server, tmp_path):
    command = example("openai_voice.py", server.http, SPEECH, "--interrupt-after", "0.3")
    for _ in range(TRIES):
        text = await run(*command, cwd=tmp_path)
        assert "you: " in text
        assert seconds_of_sound(text)[0] > 0.3
        # The response may be complete or cancelled. A pause in the question can cancel a response
        # before any of it was heard.
        interrupted = re.search(r"interrupted: \d+ ms of it were heard", text)
        if interrupted:
            break
    assert interrupted


def test_openais_sdk_with_the_live_api(ended):
    text, _ = ended["openai_live.py"]
    assert "answer: " in text
    assert seconds_of_sound(text)[0] > 0.3


@pytest.mark.parametrize("name", WITH_SOCKET)
def test_clients_with_a_socket(ended, name):
    text, _ = ended[name]
    # Of the endless stream only what is no silence counts.
    least_s = 0.05 if "--live" in name else 0.3
    assert all(seconds > least_s for seconds in seconds_of_sound(text)), text
    assert seconds_of_sound(text)


@pytest.mark.parametrize("name", LIVEKIT)
def test_livekit(ended, name):
    assert seconds_of_sound(ended[name].text)[0] > 0.3


@pytest.mark.parametrize("name", ["openai_typed.mjs", "openai_live.mjs"])
def test_openais_sdk_for_javascript(ended, name):
    text, _ = ended[name]
    assert ("completed" if "typed" in name else "close_requested") in text
    assert seconds_of_sound(text)[0] > 0.3


async def javascript(name: str, port: int, folder: Path) -> str:
    """The SDK uses TLS only, so a TLS proxy is in front of the server."""
    cert, key = certificate(folder)
    script = folder / name
    shutil.copy(EXAMPLES / script.name, script)
    (folder / "node_modules").symlink_to(EXAMPLES / "node_modules")
    async with tls_in_front(port, cert, key) as front:
        trust = {"NODE_EXTRA_CA_CERTS": str(cert)}
        command = ("node", script, f"https://127.0.0.1:{front}", "How are you?")
        return await run(*command, cwd=folder, **trust)


@asynccontextmanager
async def tls_in_front(port: int, cert: Path, key: Path) -> AsyncIterator[int]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, to_server[1]), pump(to_server[0], writer))

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with front:
        yield front.sockets[0].getsockname()[1]


def test_the_stages_are_free_afterwards(server):
    server.wait_until_free()
