"""Engines that are connected to the mover of KV memory: one process each."""

import asyncio
import os
import socket
import struct
from dataclasses import dataclass

from sglang_live.extensions.elastic.messages import Hello, Need, Packet
from sglang_live.extensions.elastic.policy import PeakWindow


@dataclass(slots=True, eq=False)
class Engine:
    """
    pidfd: readable when the process has ended: nothing uses its memory any more. -1: it has.
    peak_needed, peak_wished: see PoolView.
    hello: None before its greeting.
    need: None before the first.
    size: granules that it has, as it answered last.
    obtainable: as it was told last.
    answer: to the open order.
    """

    link: socket.socket
    pidfd: int
    peak_needed: PeakWindow
    peak_wished: PeakWindow
    hello: Hello | None = None
    need: Need | None = None
    size: int = 0
    obtainable: int = -1
    answer: "asyncio.Future[Packet] | None" = None

    def close(self) -> None:
        self.link.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def accepted(
    listener: socket.socket, peak_needed: PeakWindow, peak_wished: PeakWindow
) -> Engine | None:
    """The engine that connects. None: it is none of this user's processes, or has gone already."""
    try:
        link, _ = listener.accept()
    except OSError:
        return None
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    # A process of another namespace has no pid here: its end could not be seen.
    if uid != os.getuid() or pid <= 0:
        link.close()
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        link.close()
        return None
    link.setblocking(False)
    return Engine(link, pidfd, peak_needed, peak_wished)
