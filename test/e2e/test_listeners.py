"""Sockets and files of the server's processes, and access to them."""

import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_live.stages.run_dir import run_of
from sglang_live.stages.transport.wire import SHM_DIR, shm_names
from test.e2e.conftest import SENTENCES, Server

pytestmark = pytest.mark.e2e


def processes(server: Server) -> list[psutil.Process]:
    first = psutil.Process(server.process.pid)
    return [first, *first.children(recursive=True)]


def test_only_the_gateways_tcp_port_speaks_http(server):
    ports = {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes(server)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", server.port) in ports
    assert {ip for ip, _ in ports} <= {"127.0.0.1", "::1"}, "a stage listens to other machines"
    with ThreadPoolExecutor(32) as pool:
        others = ports - {("127.0.0.1", server.port)}
        for address, answer in zip(others, pool.map(first_answer, others), strict=True):
            assert not answer.startswith(b"HTTP/"), f"{address} answers HTTP"


def first_answer(address: tuple[str, int]) -> bytes:
    """The first bytes of the reply to a request of SGLang's own API; empty if none."""
    with socket.create_connection(address, timeout=2) as stream:
        stream.settimeout(2)
        stream.sendall(b"GET /model_info HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            return stream.recv(64)
        except (TimeoutError, ConnectionError):
            return b""


def test_the_socket_of_sglangs_api_requires_the_key_and_is_private(server):
    paths = {
        Path(connection.laddr)
        for process in processes(server)
        for connection in process.net_connections("unix")
        if connection.laddr and connection.laddr.endswith("thinker-0-native")
    }
    [path] = paths
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
        assert http.get("http://native/model_info").status_code == 401
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
        assert http.post("http://native/generate", json=body).status_code == 401


def test_files_and_sockets_are_private_to_their_owner(server):
    """Files in the server's folder, its logs, and its open files in shared memory."""
    said = {"model": "demo", "input": SENTENCES, "voice": "alloy"}
    # A stage has a log when it has written a line.
    httpx.post(f"{server.http}/v1/audio/speech", json=said, timeout=60).raise_for_status()
    bound = [c.laddr for p in processes(server) for c in p.net_connections("unix") if c.laddr]
    folder = next(Path(path).parent for path in bound if path.endswith("thinker-0-native"))
    logs = [path for path in server.log_dir.iterdir() if path.name != "server.log"]
    shared = {
        Path(mapped.path)
        for process in processes(server)
        for mapped in process.memory_maps()
        if mapped.path.startswith("/dev/shm/") and Path(mapped.path).exists()
    }
    sockets = [path for path in map(Path, bound) if path.is_socket()]
    assert logs and shared and len(sockets) > 3
    for path in (folder, *folder.rglob("*"), *logs, *shared, *sockets):
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path


def test_files_in_shared_memory_have_the_name_of_the_run(server):
    """With the name, the next start can remove files of a killed server."""
    bound = [c.laddr for p in processes(server) for c in p.net_connections("unix") if c.laddr]
    folder = next(Path(path).parent for path in bound if path.endswith("thinker-0-native"))
    maps = [f"/proc/{process.pid}/maps" for process in processes(server)]
    lines = [line.split() for path in maps for line in Path(path).read_text().splitlines()]
    # By inode: a semaphore is mapped under another name than the one that it leaves.
    mapped = {int(line[4]) for line in lines if len(line) > 5 and line[5].startswith("/dev/shm/")}
    names = [path for path in SHM_DIR.iterdir() if path.lstat().st_ino in mapped]
    assert names
    for name in names:
        assert name.name.startswith(shm_names(run_of(folder))), name


@pytest.mark.parametrize("path", ["/generate", "/model_info", "/v1/models", "/health"])
def test_no_website_is_allowed_by_cors(server, path):
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for answer in (
        httpx.options(f"{server.http}{path}", headers=origin),
        httpx.get(f"{server.http}{path}", headers=origin),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
