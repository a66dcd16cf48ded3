"""The hash of the messages changes with what is on the wire, and with nothing else."""

import os
import subprocess
import sys

import msgspec
import pytest

from sglang_live.stages.transport import protocol


def hash_of(monkeypatch, message) -> str:
    monkeypatch.setattr(protocol, "AnyMessage", message)
    return protocol.protocol_hash.__wrapped__()


class Frames(msgspec.Struct, tag=True):
    """What it says."""

    codes: bytes
    n: int = 1


def test_docstrings_do_not_change_it(monkeypatch):
    fields = [("codes", bytes), ("n", int, 1)]
    again = msgspec.defstruct("Frames", fields, tag=True, namespace={"__doc__": "Other words."})
    assert hash_of(monkeypatch, again) == hash_of(monkeypatch, Frames)


@pytest.mark.parametrize(
    "fields",
    [
        [("codes", bytes)],
        [("codes", bytes), ("n", float, 1)],
        [("codes", bytes), ("n", int, 2)],
        [("codes", bytes), ("n", int)],
        [("codes", bytes), ("n_frames", int, 1)],
    ],
)
def test_fields_their_types_and_defaults_do(monkeypatch, fields):
    other = msgspec.defstruct("Frames", fields, tag=True)
    assert hash_of(monkeypatch, other) != hash_of(monkeypatch, Frames)


def test_other_processes_find_the_same_one():
    code = "from sglang_live.stages.transport.protocol import protocol_hash; print(protocol_hash())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == protocol.protocol_hash()
