"""Ports for processes that will listen some seconds from now."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_LOWEST = 20_000
# Linux takes the ports of outgoing connections from here on unless it was told otherwise.
_EPHEMERAL_FROM = 32_768
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of the loopback where nobody listens, and that the system gives to nobody else.

    A port that the system chose would be free as well, but also for the next connection that is
    opened before its process has come to listen: an engine takes ten seconds for that.

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
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_FROM
