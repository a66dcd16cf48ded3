"""The page and all its files come from the server itself."""

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


async def test_the_page_may_use_the_microphone_and_load_nothing_from_other_hosts(http):
    page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "microphone=(self)" in page.headers["permissions-policy"]
    for address in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert address.startswith(("/", "data:,")), address
        if address.startswith("/page/"):
            assert (await http.get(address)).status_code == 200, address


@pytest.mark.parametrize("name", FILES)
async def test_every_file_of_the_page_is_served(http, name):
    response = await http.get(f"/page/{name}")
    assert response.status_code == 200
    assert response.content == (WEB / name).read_bytes()


async def test_the_recorded_question_is_served(http):
    clip = await http.get("/page/question.flac")
    assert clip.headers["content-type"] == "audio/flac"
    assert clip.content[:4] == b"fLaC"


@pytest.mark.parametrize("path", ["/", "/page/index.html", "/page/app.js"])
async def test_no_url_of_the_page_can_be_framed(http, path):
    headers = (await http.get(path)).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "microphone=(self)" in headers["permissions-policy"]


async def test_files_outside_the_pages_folder_are_not_served(http):
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/absent.js"):
        assert (await http.get(path)).status_code == 404


def test_scripts_find_their_elements_and_imports():
    """Elements that the scripts look up are in the page, and modules that they import exist."""
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


async def test_a_missing_slash_does_not_redirect_to_the_requests_host(http):
    response = await http.get("/page", headers={"Host": "evil.example"})
    assert response.status_code == 404
    assert "location" not in response.headers


async def test_the_page_connects_only_to_its_own_server(http):
    policy = (await http.get("/")).headers["content-security-policy"]
    assert re.search(r"connect-src ([^;]+);", policy)[1] == "'self'"
