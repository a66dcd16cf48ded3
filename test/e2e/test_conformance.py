"""The conformance suite against the demo, as a program of its own."""

import asyncio
import sys
from xml.etree import ElementTree

import pytest

from test.e2e.conftest import Server, running_server
from test.e2e.test_examples import PYTHON, ROOT

pytestmark = pytest.mark.e2e

KEY = "k"


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Server:
    folder = tmp_path_factory.mktemp("conformance")
    with running_server("demo", folder, "--api-key", KEY) as running:
        yield running


# The types of the Live API are in the clients' environment, aiortc is in this one.
@pytest.mark.parametrize(
    ("python", "profiles"),
    [
        (sys.executable, ("core", "audio", "tools", "transcription", "webrtc")),
        (PYTHON, ("core", "live")),
    ],
    ids=["realtime", "live"],
)
async def test_the_demo_conforms(demo, tmp_path, python, profiles):
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    report = tmp_path / "junit.xml"
    process = await asyncio.create_subprocess_exec(
        str(python), "-m", "sglang_live.conformance", "--url", demo.http, "--key", KEY,
        "--junit", str(report), *flags,
        env={"PYTHONPATH": str(ROOT / "python"), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(900):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, out.decode()
    suites = ElementTree.parse(report).getroot()
    assert [suite.attrib["name"] for suite in suites] == list(profiles)
    skipped = {suite.attrib["name"]: int(suite.attrib["skipped"]) for suite in suites}
    assert not any(skipped.values()), out.decode()
