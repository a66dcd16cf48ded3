"""Connections without a request and too many connections, on real sockets of the loopback."""

import asyncio
import json
import logging
import resource
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import connect

from sglang_live import open_files
from sglang_live.gateway.connection_guard import ConnectionGuard, ConnectionLimits, _network
from sglang_live.gateway.http import body as http_body
from sglang_live.open_files import raise_open_files
from sglang_live.telemetry.metrics import GatewayMetrics

from .fakes import FakeOrchestrator, app_of
from .live_server import listening

PATIENCE_S = 10.0


@asynccontextmanager
async def guarded(**limits):
    """Yields host, port and the metrics of a server with these limits."""
    metrics = GatewayMetrics(CollectorRegistry())
    guard = ConnectionGuard(ConnectionLimits(**limits), metrics.clients_dropped)
    async with listening(app_of(FakeOrchestrator()), guard.protect) as address:
        host, port = address.split(":")
        yield host, int(port), metrics


def closed(metrics: GatewayMetrics, reason: str) -> float:
    name = "sglang_live_gateway_clients_dropped_total"
    return metrics.registry.get_sample_value(name, {"reason": reason}) or 0


async def health(host: str, port: int, **options) -> int:
    async with httpx.AsyncClient(timeout=PATIENCE_S, **options) as http:
        return (await http.get(f"http://{host}:{port}/health")).status_code


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: "])
async def test_a_connection_without_a_complete_request_is_closed(sent):
    async with guarded(first_request_s=0.2) as (host, port, metrics):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(sent)
        assert await until_closed(reader) == b""
        writer.close()
        assert closed(metrics, "silent") == 1


async def test_a_second_request_has_the_same_deadline():
    async with guarded(first_request_s=0.3) as (host, port, metrics):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}}")
        writer.write(b"GET /health HT")
        await until_closed(reader)
        writer.close()
        assert closed(metrics, "silent") == 1


async def test_an_open_session_is_not_a_silent_connection():
    async with (
        guarded(first_request_s=0.2) as (host, port, metrics),
        connect(f"ws://{host}:{port}/v1/realtime") as socket,
    ):
        assert json.loads(await socket.recv())["type"] == "session.created"
        await asyncio.sleep(0.5)
        await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert json.loads(await socket.recv())["type"] == "input_audio_buffer.cleared"
        assert closed(metrics, "silent") == 0


async def test_a_thousand_silent_connections_do_not_block_others_of_their_address():
    async with guarded(first_request_s=60.0) as (host, port, metrics):
        silent = []
        for _ in range(20):
            opened = (asyncio.open_connection(host, port) for _ in range(50))
            silent += await asyncio.gather(*opened)
        assert await health(host, port) == 200
        async with connect(f"ws://{host}:{port}/v1/realtime") as socket:
            assert json.loads(await socket.recv())["type"] == "session.created"
        assert closed(metrics, "crowded_out") >= 1000 - ConnectionLimits().silent_per_address
        for _, writer in silent:
            writer.transport.abort()


async def test_an_address_with_too_many_connections_gets_an_error_and_others_are_served():
    async with guarded(max_connections_per_address=2) as (host, port, metrics):
        url = f"ws://{host}:{port}/v1/realtime"
        async with connect(url), connect(url):
            reader, writer = await asyncio.open_connection(host, port)
            response = await until_closed(reader)
            writer.close()
            head, _, body = response.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert closed(metrics, "too_many") == 1
            elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
            assert await health(host, port, transport=elsewhere) == 200
        for _ in range(100):  # the server sees the closed sockets a little later
            if await health(host, port) == 200:
                break
        else:
            raise AssertionError("closed connections still count")


async def test_bytes_that_are_not_http_get_an_error_in_the_protocols_form():
    async with guarded() as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        head, _, body = (await until_closed(reader)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_body_that_does_not_arrive_is_an_error(monkeypatch):
    monkeypatch.setattr(http_body, "BODY_PAUSE_S", 0.2)
    async with guarded() as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        path = b"POST /v1/audio/speech HTTP/1.1\r\n"
        writer.write(path + b'Host: localhost\r\nContent-Length: 100\r\n\r\n{"input"')
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"}}")
        writer.close()
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "request_timeout"


class _Peer:
    def __init__(self, address: str):
        self._address = address

    def get_extra_info(self, name: str):
        return (self._address, 1, 0, 0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(one, other, same):
    assert (_network(_Peer(one)) == _network(_Peer(other))) is same


@pytest.mark.parametrize(
    ("now", "hard", "after", "short"),
    [
        (1024, 1 << 20, 65_536, False),
        (1024, 4096, 4096, True),
        (1 << 20, 1 << 20, 1 << 20, False),
        (1024, resource.RLIM_INFINITY, 65_536, False),
    ],
)
def test_the_limit_on_open_files_is_raised_or_logged(monkeypatch, caplog, now, hard, after, short):
    limits = [(now, hard)]
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda _, pair: limits.append(pair))
    caplog.set_level(logging.WARNING)
    assert raise_open_files(64, 3072 + 1024) == after
    assert limits[-1] == (after, hard)
    assert ("open_files_short" in caplog.text) is short
    if short:
        assert "ulimit -n" in caplog.text


def test_a_limit_that_cannot_be_raised_does_not_stop_the_server(monkeypatch, caplog):
    def refuse(_, pair):
        raise PermissionError("no")

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (256, 65_536))
    monkeypatch.setattr(open_files.resource, "setrlimit", refuse)
    assert raise_open_files(64, 1024) == 256
    assert "open_files_not_raised" in caplog.text


def test_the_protocol_classes_extend_those_of_uvicorn():
    config = uvicorn.Config(app_of(FakeOrchestrator()))
    config.load()
    before = config.http_protocol_class, config.ws_protocol_class
    metrics = GatewayMetrics(CollectorRegistry())
    ConnectionGuard(ConnectionLimits(), metrics.clients_dropped).protect(config)
    now = config.http_protocol_class, config.ws_protocol_class
    assert all(issubclass(new, old) for new, old in zip(now, before, strict=True))
