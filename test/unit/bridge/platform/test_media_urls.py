"""Media downloads of the engine: every hop is checked."""

import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import requests
import soundfile as sf
from sglang.srt.utils import common

from sglang_live.addresses import is_public
from sglang_live.bridge.platform.audio_input import load_audio
from sglang_live.bridge.platform.media_urls import (
    PRIVATE_MEDIA_ENV,
    check_public,
    with_public_connections,
)

ADDRESSES = {"media.example": ["93.184.216.34"], "half.example": ["93.184.216.34", "10.0.0.7"]}


class Answer:
    def __init__(self, url: str, location: str | None = None, body: bytes = b""):
        self.url, self.body = url, body
        self.status_code = 302 if location else 200
        self.headers = {"Location": location} if location else {}

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def raise_for_status(self):
        pass

    def iter_content(self, chunk_size: int):
        yield self.body


class Web:
    """Responses by URL, and the requested URLs."""

    def __init__(self):
        self.asked: list[str] = []
        self.pages: dict[str, Answer] = {}

    def redirect(self, url: str, location: str) -> None:
        self.pages[url] = Answer(url, location)

    def get(self, url: str, **_how) -> Answer:
        self.asked.append(url)
        return self.pages[url]


@pytest.fixture
def web(monkeypatch) -> Web:
    """SGLang's own download, with the seam in place, in a web of our own."""
    web, upstream = Web(), common._assert_media_url_allowed

    def resolve(host, *_args, **_how):
        if host not in ADDRESSES and not host[0].isdigit():
            raise socket.gaierror("no such host")
        return [(0, 0, 0, "", (address, 0)) for address in ADDRESSES.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(common, "get_mm_http_session", lambda: web)
    monkeypatch.setattr(
        common, "_assert_media_url_allowed", lambda url: check_public(upstream(url), url)
    )
    monkeypatch.delenv(PRIVATE_MEDIA_ENV, raising=False)
    return web


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1/admin", "http://169.254.169.254/x", "http://half.example/x"]
)
def test_a_public_host_cannot_redirect_the_engine_to_a_private_one(web, target):
    first = "http://media.example/a.wav"
    web.redirect(first, target)
    with pytest.raises(ValueError, match="not a public address"):
        load_audio(first)
    assert web.asked == [first]


@pytest.mark.parametrize("url", ["http://10.0.0.7/a.wav", "http://unknown.example/a.wav"])
def test_a_requests_own_url_is_checked_too(web, url):
    with pytest.raises(ValueError, match="media host"):
        common.download_remote_media(url, timeout=5)
    assert web.asked == []


def test_public_hosts_may_redirect_to_public_ones(web):
    out = io.BytesIO()
    sf.write(out, np.zeros(1600), 16_000, format="WAV")
    web.redirect("http://media.example/a.wav", "/b.wav")
    there = "http://media.example/b.wav"
    web.pages[there] = Answer(there, body=out.getvalue())
    assert len(load_audio("http://media.example/a.wav")) == 1600


def test_the_operator_can_allow_hosts_of_the_private_network(web, monkeypatch):
    monkeypatch.setenv(PRIVATE_MEDIA_ENV, "1")
    url = "http://10.0.0.7/a.wav"
    web.pages[url] = Answer(url, body=b"sound")
    assert common.download_remote_media(url, timeout=5) == b"sound"


@pytest.mark.parametrize(
    "address",
    ["::1", "fe80::1%eth0", "::ffff:10.0.0.1", "2002:a00:1::", "64:ff9b::a00:1", "::10.0.0.1",
     "::ffff:0:10.0.0.1", "100.64.0.1", "224.0.0.1", "0.0.0.0"],
)  # fmt: skip
def test_a_private_address_in_any_notation_is_private(address):
    assert not is_public(address)
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")
    assert is_public("64:ff9b::5db8:d822")


@pytest.fixture
def admin():
    """A server of this machine that no download may reach; its port, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(f"{self.headers['Host']}{self.path}")
            self.send_response(200)
            self.send_header("content-length", "6")
            self.end_headers()
            self.wfile.write(b"secret")

        def log_message(self, *_args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, asked
    server.shutdown()
    thread.join()
    server.server_close()


def resolving_to(monkeypatch, *answers: str) -> None:
    """A name server that returns the next address each time, and the last one from then on."""
    left, real = list(answers), socket.getaddrinfo

    def resolve(host, port, *args, **how):
        if host != "rebinding.example":
            return real(host, port, *args, **how)
        return real(left.pop(0) if len(left) > 1 else left[0], port, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_a_name_that_moves_to_a_private_address_is_not_followed(admin, monkeypatch):
    port, asked = admin
    monkeypatch.delenv(PRIVATE_MEDIA_ENV, raising=False)
    session, url = requests.Session(), f"http://rebinding.example:{port}/admin"
    session.trust_env = False
    resolving_to(monkeypatch, "93.184.216.34", "127.0.0.1")
    check_public(None, url)
    assert session.get(url, timeout=5).content == b"secret", "requests alone follows it"
    asked.clear()
    resolving_to(monkeypatch, "93.184.216.34", "127.0.0.1")
    check_public(None, url)
    guarded = with_public_connections(requests.Session())
    guarded.trust_env = False
    with pytest.raises(ValueError, match="not a public address"):
        guarded.get(url, timeout=5)
    assert asked == []


def test_a_connection_uses_the_checked_address_and_the_requested_name(admin, monkeypatch):
    port, asked = admin
    monkeypatch.delenv(PRIVATE_MEDIA_ENV, raising=False)
    monkeypatch.setattr("sglang_live.bridge.platform.media_urls.is_public", lambda address: True)
    resolving_to(monkeypatch, "127.0.0.1", "203.0.113.1")
    session = with_public_connections(with_public_connections(requests.Session()))
    session.trust_env = False
    assert session.get(f"http://rebinding.example:{port}/a", timeout=5).content == b"secret"
    assert asked == [f"rebinding.example:{port}/a"]


def test_an_allowed_private_host_is_reached_through_a_public_session(admin, monkeypatch):
    port, asked = admin
    monkeypatch.setenv(PRIVATE_MEDIA_ENV, "1")
    session = with_public_connections(requests.Session())
    session.trust_env = False
    assert session.get(f"http://127.0.0.1:{port}/a", timeout=5).content == b"secret"
    assert len(asked) == 1
