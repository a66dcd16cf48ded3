"""The page and all it needs come from the server itself."""

import re
from pathlib import Path

import pytest

import sglang_live

from .test_http import client

WEB = Path(sglang_live.__file__).parent / "gateway" / "web"
FILES = sorted(path.name for path in WEB.iterdir())


@pytest.fixture
def http():
    return client()


async def test_the_page_may_use_the_microphone_and_nothing_from_elsewhere(http):
    page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "microphone=(self)" in page.headers["permissions-policy"]
    for address in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert address.startswith(("/", "data:,")), address
        if address.startswith("/page/"):
            assert (await http.get(address)).status_code == 200, address


@pytest.mark.parametrize("name", FILES)
async def test_every_file_of_it_is_served(http, name):
    answer = await http.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.content == (WEB / name).read_bytes()


async def test_the_recorded_question_is_served(http):
    clip = await http.get("/page/question.flac")
    assert clip.headers["content-type"] == "audio/flac"
    assert clip.content[:4] == b"fLaC"


@pytest.mark.parametrize("path", ["/", "/page/index.html", "/page/app.js"])
async def test_nobody_frames_it_by_whatever_name(http, path):
    headers = (await http.get(path)).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "microphone=(self)" in headers["permissions-policy"]


async def test_nothing_beside_it_is_served(http):
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/absent.js"):
        assert (await http.get(path)).status_code == 404


def test_its_parts_fit_together():
    """Whatever the scripts look for is in the page, and what they import is there."""
    html = (WEB / "index.html").read_text()
    scripts = {path.name: path.read_text() for path in WEB.glob("*.js")}
    ids = set(re.findall(r'id="([^"]+)"', html))
    wanted = {name for text in scripts.values() for name in re.findall(r'\$\("([^"]+)"\)', text)}
    wanted |= {name for text in scripts.values() for name in re.findall(r'show\("([^"]+)"', text)}
    assert wanted <= ids
    for text in scripts.values():
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert name in scripts
    assert not any("https://" in text or "http://" in text for text in scripts.values())
    labels = set(re.findall(r'<label for="([^"]+)"', html))
    assert set(re.findall(r'<input id="([^"]+)"', html)) == labels, "every field has a label"


async def test_a_missing_slash_redirects_to_no_host_that_a_request_names(http):
    answer = await http.get("/page", headers={"Host": "evil.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers


async def test_the_page_connects_to_its_own_server_alone(http):
    policy = (await http.get("/")).headers["content-security-policy"]
    assert re.search(r"connect-src ([^;]+);", policy)[1] == "'self'"
