"""HTTP as proxies, old clients and attackers write it, on a real socket."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from sglang_live.gateway.connection_guard import ConnectionGuard, ConnectionLimits
from test.unit.gateway.fakes import FakeOrchestrator, app_of
from test.unit.gateway.http.test_transcription import file_of, writes
from test.unit.gateway.live_server import listening
from test.unit.gateway.native.test_proxy import FakeSglang

OWN = (
    *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/chat/completions"),
    "/v1/realtime/client_secrets",
)
NATIVE = ("/generate", "/v1/completions", "/v1/tokenize", "/open_session", "/abort_request")
READ = ("/health", "/v1/models", "/v1/audio/voices", "/model_info", "/server_info")
BODY = b'{"input": "Hi."}'
HOST = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
NEXT = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def served(orchestrator: FakeOrchestrator | None = None):
    def protect(config) -> None:
        closed = Counter("closed", "x", ["reason"], registry=CollectorRegistry())
        ConnectionGuard(ConnectionLimits(), closed).protect(config)

    async with listening(FakeSglang().app) as upstream:
        app = app_of(orchestrator or FakeOrchestrator(), native_url=f"http://{upstream}/")
        async with listening(app, protect) as address:
            yield address


async def exchanged(address: str, sent: bytes) -> bytes:
    """All that the server sends before it closes the connection."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"Transfer-Encoding: chunked\r\ncontent-length: 4\r\n\r\n",
        b"Content-Length: 4\r\nTransfer-Encoding: identity\r\n\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n",
    ],
)
async def test_a_request_with_two_lengths_hides_no_other_one(lengths):
    async with served() as address:
        for path in (*OWN, *NATIVE, *READ, "/v1/no/such/path"):
            request = b"POST " + path.encode() + b" HTTP/1.1\r\n" + HOST + lengths + CHUNKS
            received = await exchanged(address, request + NEXT)
            assert statuses(received) == [400], path
            assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == (
                "invalid_http_request"
            )


async def test_a_compressed_body_is_refused_and_the_error_names_what_is_not():
    async with served() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path in (*OWN, *NATIVE):
            for encoding in ("gzip", "BR", "identity, deflate"):
                headers = {"content-encoding": encoding}
                response = await http.post(path, content=BODY, headers=headers)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (415, "Content-Encoding"), path
                assert response.headers["accept-encoding"] == "identity"
                assert "identity" in error["message"]
        headers = {"content-encoding": "identity"}
        response = await http.post("/v1/audio/speech", content=BODY, headers=headers)
        assert response.status_code == 200


async def test_a_mark_of_utf8_before_json_is_no_part_of_it():
    bodies = {
        "/v1/audio/speech": {"input": "Hi."},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "Hi."}],
            "modalities": ["text", "audio"],
        },
        "/v1/realtime/client_secrets": {},
        "/v1/tokenize": {"prompt": "Hi."},
    }
    async with served() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path, body in bodies.items():
            content = b"\xef\xbb\xbf" + json.dumps(body).encode()
            assert (await http.post(path, content=content)).status_code in (200, 207), path


async def test_head_is_answered_like_get_without_a_body():
    async with served() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path in (*READ, "/", "/health_generate"):
            got, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path


async def test_headers_have_a_limit():
    async with served() as address:
        for more in (b"X: " + b"a" * 100_000 + b"\r\n", b"X: abcdefgh\r\n" * 9000):
            received = await exchanged(address, b"GET /health HTTP/1.1\r\n" + HOST + more + b"\r\n")
            assert statuses(received)[0] in (400, 431)


async def test_what_no_client_should_send_is_served_or_refused():
    """Requests with drawn faults: no crash, and every refusal has the form of all errors."""
    rng = random.Random(7)
    pieces = (b"\r\n", b"\n", b"\0", b" ", b":", b",", b"\xff", b"Content-Length: 3\r\n")
    async with served() as address:
        for n in range(150):
            path = rng.choice((*OWN, *NATIVE, *READ)).encode()
            length = rng.choice((b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked"))
            body = CHUNKS if b"chunked" in length else BODY
            request = bytearray(b"POST " + path + b" HTTP/1.1\r\n" + HOST + length + b"\r\n\r\n")
            request += body
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(request))
                request[at : at + rng.randint(0, 1)] = rng.choice(pieces)
            received = await exchanged(address, bytes(request) + b"\r\n\r\n" + NEXT)
            for status in statuses(received):
                assert status < 500, (n, bytes(request))
            first = received.partition(b"HTTP/1.1 ")[2]
            if first[:1] == b"4":
                assert b'{"error":' in received, (n, bytes(request), received)


# --- multipart ---

NAMES = [
    (b"filename*=UTF-8''%C3%A9.wav", "é.wav"),
    (b"filename*=utf-8'de'%e6%9d%b1%20a.wav", "東 a.wav"),
    (b"filename*=ISO-8859-1'en'%e9.wav", "é.wav"),
    (b"filename=plain.wav; FILENAME*=UTF-8''extended.wav", "extended.wav"),
    (b"filename*=UTF-8''..%2F%22%0d%0aX.wav", "../___X.wav"),
    (b"filename*=no-such-charset''a%ff.wav", "a\ufffd.wav"),
    ('filename="東.wav"'.encode(), "東.wav"),
]


def form_of(disposition: bytes, data: bytes, fields: dict[str, str]) -> dict:
    parts = [(b'form-data; name="' + k.encode() + b'"', v.encode()) for k, v in fields.items()]
    parts.append((b'form-data; name="file"; ' + disposition, data))
    content = b"".join(
        b"--XX\r\nContent-Disposition: " + head + b"\r\n\r\n" + value + b"\r\n"
        for head, value in parts
    )
    headers = {"content-type": "multipart/form-data; boundary=XX"}
    return {"content": content + b"--XX--\r\n", "headers": headers}


@pytest.mark.parametrize(("disposition", "name"), NAMES)
async def test_a_file_may_have_an_extended_name(disposition, name):
    app = app_of(writes("Rain."))
    async with (
        listening(app) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as http,
    ):
        form = form_of(disposition, file_of(), {})
        response = await http.post("/v1/audio/transcriptions", **form)
        assert response.status_code == 200, response.text
