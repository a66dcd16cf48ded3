"""The process that grants a shared device to one stage at a time.

In: wishes of stages and schedulers, on a socket in the run directory. Out: grants, in the order of
policy/arbiter.py. When a connection ends, what it had is free: a process that dies delays no other.
Owner: one DeviceArbiter per set of devices that stages share.
"""

import asyncio
import logging
import socket
import time
from pathlib import Path

from sglang_live.engine_channel.device_turn import ASK, GRANT, LAUNCHED, MESSAGE, RELEASE
from sglang_live.errors import BadInputError
from sglang_live.policy.arbiter import FIRST_LAUNCH_S, Turns, lead_s, next_launch_s
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport.server import ServedJob

log = logging.getLogger(__name__)


class DeviceArbiter:
    """A stage without jobs (stages/runtime.py)."""

    def __init__(self, spec: StageSpec):
        self._path = Path(spec.turns)
        self._turns: Turns[socket.socket] = Turns()
        self._numbers: dict[socket.socket, int] = {}
        self._released_at: asyncio.TimerHandle | None = None  # the holder's turn
        self._granted_s = 0.0
        self._launches_s: dict[socket.socket, float] = {}
        self._n_granted = 0

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        listener.bind(str(self._path))
        listener.listen()
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._on_connect)

    async def run(self, job: ServedJob) -> None:
        raise BadInputError("an arbiter has no jobs")

    async def close_session(self, session_id: str) -> None:
        """It knows none."""

    def load(self) -> dict[str, float]:
        lead_ms = 1000 * lead_s(self._launches_s.values())
        granted = float(self._n_granted)
        return {"connections": float(len(self._numbers)), "granted": granted, "lead_ms": lead_ms}

    def _on_connect(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._numbers[connection] = 0
        asyncio.get_running_loop().add_reader(connection, self._on_message, connection)

    def _on_message(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MESSAGE.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if len(data) != MESSAGE.size:
            self._drop(connection)
        else:
            self._handle(connection, *MESSAGE.unpack(data))
        self._grant()

    def _handle(self, connection: socket.socket, what: bytes, number: int, at_s: float) -> None:
        if what == RELEASE:
            self._leave(connection)
        elif what == LAUNCHED and connection == self._turns.holder:
            now_s = time.monotonic()
            mean_s = self._launches_s.get(connection, FIRST_LAUNCH_S)
            self._launches_s[connection] = next_launch_s(mean_s, now_s - self._granted_s)
            wait_s = at_s - lead_s(self._launches_s.values()) - now_s
            self._end_timer()
            loop = asyncio.get_running_loop()
            self._released_at = loop.call_later(max(0.0, wait_s), self._release_holder)
        elif what == ASK and connection != self._turns.holder:  # or it has crossed the grant
            self._numbers[connection] = number
            self._turns.ask(connection, at_s)

    def _release_holder(self) -> None:
        assert self._turns.holder is not None
        self._leave(self._turns.holder)
        self._grant()

    def _leave(self, connection: socket.socket) -> None:
        if connection == self._turns.holder:
            self._end_timer()
        self._turns.leave(connection)

    def _end_timer(self) -> None:
        if self._released_at is not None:
            self._released_at.cancel()
            self._released_at = None

    def _grant(self) -> None:
        while (holder := self._turns.next()) is not None:
            try:
                holder.send(MESSAGE.pack(GRANT, self._numbers[holder], 0.0))
                self._n_granted += 1
                self._granted_s = time.monotonic()
            except OSError:
                self._drop(holder)

    def _drop(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        self._leave(connection)
        self._numbers.pop(connection, None)
        self._launches_s.pop(connection, None)
        connection.close()
