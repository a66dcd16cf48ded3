"""An engine's part in moves of KV memory, in a process of its own, without an engine."""

import multiprocessing as mp
import os
import socket
import time
from multiprocessing.connection import wait
from pathlib import Path

from sglang_live.extensions.elastic.granules import Run, count, split
from sglang_live.extensions.elastic.messages import (
    Give,
    Given,
    Hello,
    Need,
    Obtainable,
    PeerDied,
    Take,
    Taken,
    ToEngine,
    Welcome,
    receive,
    send,
)

UNIT = 8
_FORK = mp.get_context("fork")


class FakeKvEngine:
    """Drives a process that behaves as an engine.

    Args:
        behaviour: "dies_on_give", "dies_on_take", "refuses_give", "cannot_map", or "". Also
            "hangs_on_give", for two seconds; "elsewhere": its memory is on another device;
            "passes_little": half a unit with each message.
    """

    def __init__(self, path: Path, stage: str, start: int, behaviour: str = ""):
        self._commands, theirs = _FORK.Pipe()
        self.process = _FORK.Process(
            target=_run, args=(str(path), stage, start, behaviour, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def ask(self, **need: int) -> dict:
        """Set what the engine needs, if any is given. Returns its state."""
        self._commands.send(need)
        return self._commands.recv()

    def kill(self) -> None:
        """Once or more."""
        if not self._commands.closed:
            self.process.kill()
            self.process.join()
            self.process.close()
            self._commands.close()


def _run(path: str, stage: str, start: int, behaviour: str, commands) -> None:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(path)
    hello = Hello(
        stage=stage,
        unit=UNIT,
        start=start,
        floor=UNIT,
        limit=16 * start,
        place=behaviour if behaviour == "elsewhere" else "cpu",
        most_passed=UNIT // 2 if behaviour == "passes_little" else 1 << 40,
    )
    send(link, hello)
    packet = receive(link, Welcome, wait=True)
    assert packet is not None and isinstance(packet.message, Welcome)
    file = os.memfd_create("fake")
    own = os.fstat(file).st_ino
    os.ftruncate(file, packet.message.granules * 4096)
    os.pwrite(file, b"k" * (packet.message.granules * 4096), 0)
    runs, files = [Run(own, 0, packet.message.granules)], {own: file}
    state = {"obtainable": 0, "peer_died": 0, "dirty": 0, "orders": 0}
    link.setblocking(False)
    while True:
        for ready in wait([link, commands]):
            if ready is commands:
                try:
                    need = commands.recv()
                except EOFError:
                    os._exit(0)
                if need:
                    send(link, Need(**({"size": 0, "reserved": 0, "idle": 0} | need)))
                commands.send(state | {"size": count(runs), "files": len(files)})
                continue
            packet = receive(link, ToEngine)
            if packet is None:
                continue
            new, order = {os.fstat(one).st_ino: one for one in packet.files}, packet.message
            assert len(new) == len(packet.files)
            if isinstance(order, Obtainable):
                state["obtainable"] = order.granules
            elif isinstance(order, PeerDied):
                state["peer_died"] += 1
            elif isinstance(order, Give):
                if behaviour == "dies_on_give":
                    os._exit(1)
                if behaviour == "hangs_on_give":
                    time.sleep(2.0)
                n = 0 if behaviour == "refuses_give" else min(order.granules, count(runs) - UNIT)
                runs, freed = split(runs, count(runs) - n)
                state["orders"] += 1
                for run in freed:  # it is passed on as zeros
                    os.pwrite(files[run.memory], bytes(run.n * 4096), run.first * 4096)
                passed = tuple(files[memory] for memory in {run.memory for run in freed})
                send(link, Given(freed, count(runs)), passed)
            elif isinstance(order, Take):
                if behaviour == "dies_on_take":
                    os._exit(1)
                if behaviour == "cannot_map":
                    for one in new.values():
                        os.close(one)
                    send(link, Taken("no memory", count(runs)))
                    continue
                for memory, one in new.items():
                    if memory in files:
                        os.close(one)
                    else:
                        files[memory] = one
                for run in order.runs:
                    found = os.pread(files[run.memory], run.n * 4096, run.first * 4096)
                    state["dirty"] += any(found)
                runs += order.runs
                send(link, Taken("", count(runs)))
            for memory in files.keys() - {run.memory for run in runs} - {own}:
                os.close(files.pop(memory))
