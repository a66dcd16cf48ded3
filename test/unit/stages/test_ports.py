"""A port that is free stays free until its process has come to listen."""

import socket

import pytest

from sglang_live.stages import ports


def test_a_port_can_be_listened_on():
    port = ports.free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_it_is_none_that_the_system_gives_to_connections():
    assert ports.free_port() < ports._first_ephemeral()


@pytest.mark.parametrize("text", ["", "nonsense", None])
def test_an_unknown_ephemeral_range_is_linuxs_default(tmp_path, monkeypatch, text):
    told = tmp_path / "range"
    if text is not None:
        told.write_text(text)
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", told)
    assert ports._first_ephemeral() == 32_768


def test_a_large_ephemeral_range_leaves_some_ports(tmp_path, monkeypatch):
    told = tmp_path / "range"
    told.write_text("1100 65535")
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", told)
    assert 1024 <= ports.free_port() < 1100


def test_a_port_that_is_taken_is_not_given(tmp_path, monkeypatch):
    told = tmp_path / "range"
    told.write_text("1026 65535")
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", told)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 1024))
        assert ports.free_port() == 1025
