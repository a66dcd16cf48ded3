"""The server's port before and after it opens."""

import socket

import pytest

from sglang_live.errors import LiveError
from sglang_live.gateway.listen_socket import Door
from sglang_live.stages.ports import free_port

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def door(port):
    door = Door(HOST, port)
    yield door
    door.close()


def test_nobody_is_let_in_before_it_opens(door, port):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=5)
    door.open()
    socket.create_connection((HOST, port), timeout=5).close()


def test_an_open_door_is_nobody_elses(door, port):
    door.open()
    with pytest.raises(LiveError, match=f"cannot listen on {HOST}:{port}: Address already in use"):
        Door(HOST, port)


def test_of_two_that_start_at_once_the_second_is_told(door, port):
    other = Door(HOST, port)
    door.open()
    with pytest.raises(LiveError, match="Address already in use"):
        other.open()
    other.close()


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(LiveError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        Door("192.0.2.1", 8000)
