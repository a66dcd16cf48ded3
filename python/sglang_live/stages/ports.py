"""Ports for processes that will listen some seconds from now."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_LOWEST = 20_000
# Linux's default for the first port of outgoing connections.
_EPHEMERAL_FROM = 32_768
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A free port of the loopback that the system assigns to no other process.

    A port that the system chooses could be assigned to a connection before its process listens,
    which an engine does after ten seconds.

    Raises:
        OSError: there is none.
    """
    behind = _first_ephemeral()
    candidates = range(_LOWEST, behind) if behind > _LOWEST else range(1024, behind)
    for port in random.sample(candidates, min(200, len(candidates))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text("utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_FROM
