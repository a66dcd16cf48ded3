"""The examples in docs/examples/: unmodified third-party clients against the whole server."""

import asyncio
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from test.e2e.conftest import DATA
from test.e2e.relay import certificate

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
# A short response may end before it can be interrupted.
TRIES = 3
SPEECH = DATA / "sp_librivox_0880.flac"


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


async def test_openais_sdk_blocking(server, tmp_path):
    text = await run(*example("openai_typed.py", server.http, "How are you?"), cwd=tmp_path)
    assert "completed" in text
    assert (tmp_path / "answer.wav").stat().st_size > 24_000


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


async def test_openais_sdk_with_the_live_api(server, tmp_path):
    text = await run(*example("openai_live.py", server.http, SPEECH), cwd=tmp_path)
    assert "answer: " in text
    assert seconds_of_sound(text)[0] > 0.3


@pytest.mark.parametrize(
    "name", ["openai_agents_voice.py", "pipecat_voice.py", "pipecat_voice.py --live"]
)
async def test_clients_with_a_socket(server, tmp_path, name):
    url = server.http.replace("http", "ws")
    name, *more = name.split()
    text = await run(*example(name, url, SPEECH, *more), cwd=tmp_path)
    least_s = 0.05 if more else 0.3  # of the endless stream only what is no silence counts
    assert all(seconds > least_s for seconds in seconds_of_sound(text)), text
    assert seconds_of_sound(text)


@pytest.mark.parametrize("more", [(), ("--live",)], ids=["realtime", "live"])
async def test_livekit(server, tmp_path, more):
    text = await run(*example("livekit_voice.py", server.http, SPEECH, *more), cwd=tmp_path)
    assert seconds_of_sound(text)[0] > 0.3


@pytest.mark.parametrize("name", ["openai_typed.mjs", "openai_live.mjs"])
async def test_openais_sdk_for_javascript(server, tmp_path, name):
    """The SDK uses TLS only, so a TLS proxy is in front of the server."""
    cert, key = certificate(tmp_path)
    script = tmp_path / name
    shutil.copy(EXAMPLES / script.name, script)
    (tmp_path / "node_modules").symlink_to(EXAMPLES / "node_modules")
    async with tls_in_front(server.port, cert, key) as port:
        trust = {"NODE_EXTRA_CA_CERTS": str(cert)}
        command = ("node", script, f"https://127.0.0.1:{port}", "How are you?")
        text = await run(*command, cwd=tmp_path, **trust)
    assert ("completed" if "typed" in name else "close_requested") in text
    assert seconds_of_sound(text)[0] > 0.3


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
