"""The server's port before and after it opens."""

import socket

import pytest

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.listen_socket import ListenSocket
from sglang_live.stages.ports import free_port

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def listen_socket(port):
    listen_socket = ListenSocket(HOST, port)
    yield listen_socket
    listen_socket.close()


def test_connections_are_refused_until_the_port_opens(listen_socket, port):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=5)
    listen_socket.open()
    socket.create_connection((HOST, port), timeout=5).close()


def test_an_open_port_cannot_be_bound_again(listen_socket, port):
    listen_socket.open()
    with pytest.raises(LiveError, match=f"cannot listen on {HOST}:{port}: Address already in use"):
        ListenSocket(HOST, port)


def test_the_second_of_two_servers_that_start_at_once_fails(listen_socket, port):
    other = ListenSocket(HOST, port)
    listen_socket.open()
    with pytest.raises(LiveError, match="Address already in use"):
        other.open()
    other.close()


def test_a_location_has_the_port_that_the_system_chose_and_ipv6_in_brackets():
    for host, written in (("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")):
        listen_socket = ListenSocket(host, 0)
        port = listen_socket.socket.getsockname()[1]
        assert port and listen_socket.location == f"{written}:{port}"
        listen_socket.close()


@pytest.mark.parametrize("host", ["nosuch.invalid", "a" * 64])
def test_a_name_without_an_address_is_refused(host):
    with pytest.raises(BadInputError, match=host):
        ListenSocket(host, 0)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(LiveError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        ListenSocket("192.0.2.1", 8000)
