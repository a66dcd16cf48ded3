"""Forks stages from a process that has imported all their modules.

    python -m sglang_live.stages.zygote FD      started by the supervisor

On a machine without a GPU imports are most of a start: eleven seconds of a core for each process of
an engine, and two engines have six of them. With a GPU stages are not forked, because a device that
a process has initialised cannot be used after a fork.

In: over a packet socket, a StartRequest and the file to log to. Out: ProcessState, at the start and
at the end of the process.
"""

import asyncio
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import setproctitle

from sglang_live.aio import background
from sglang_live.telemetry.expected_lines import forgo_expected_lines
from sglang_live.telemetry.log_writing import LogDrops, protect_own_output

# Together they import what every process of an engine needs. The first prepares for the others.
IMPORTS = (
    "sglang_live.stages.runtime",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang_live.stages.thinker.stage",
    "sglang_live.stages.talker.stage",
    "sglang_live.stages.vocoder.stage",
)
# In the environment of a process that was forked, and of those that it starts.
FORKED_ENV = "SGLANG_LIVE_FORKED"
_MAX_PACKET_BYTES = 1 << 20
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128")


def is_useful() -> bool:
    """Whether this machine can fork stages: Linux with pidfd, without an accelerator."""
    can = hasattr(os, "pidfd_open") and sys.platform == "linux"
    return can and not any(Path(device).exists() for device in _ACCELERATORS)


class StartRequest(msgspec.Struct, frozen=True):
    number: int
    environment: dict[str, str]


class ProcessState(msgspec.Struct, frozen=True):
    """
    number: of the StartRequest.
    exit_code: of the process; negative: the signal that ended it. None: it has started.
    error: why there is no such process. "": there is one.
    """

    number: int
    pid: int
    exit_code: int | None = None
    error: str = ""


# --- for the supervisor ---


@dataclass(eq=False)
class Forked:
    """A forked stage process, with the interface of asyncio's Process."""

    pid: int
    _ended: asyncio.Future[int]

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            os.kill(self.pid, signal.SIGKILL)


@dataclass(eq=False)
class Zygote:
    """The process, started when it is first needed and again after it died."""

    _process: asyncio.subprocess.Process | None = None
    _socket: socket.socket | None = None
    _reader: asyncio.Task[None] | None = None
    _begun: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _ended: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _count: int = 0
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def fork(
        self, environment: dict[str, str], out: int, own_out: Callable[[], int] | None = None
    ) -> Forked:
        """A process that becomes the stage whose spec is in the environment.

        Args:
            out: descriptor to which it logs.
            own_out: opens that of the process that forks, when it starts; None: it logs as we do.
        Raises:
            OSError: there is no such process.
        """
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start(own_out)
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        self._count += 1
        number = self._count
        begun = self._begun[number] = loop.create_future()
        ended = self._ended[number] = loop.create_future()
        packet = msgspec.json.encode(StartRequest(number, environment))
        socket.send_fds(self._socket, [packet], [out])
        return Forked(await begun, ended)

    async def close(self) -> None:
        """End it, and with it all that it has forked."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._forget()

    async def _start(self, own_out: Callable[[], int] | None) -> None:
        await self._forget()
        out = own_out() if own_out is not None else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sglang_live.stages.zygote",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()
            if out is not None:
                os.close(out)
        self._socket = ours
        self._reader = background(self._read(ours), "zygote")

    async def _forget(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        self._reader = self._socket = self._process = None

    async def _read(self, packets: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(packets, _MAX_PACKET_BYTES):
                state = msgspec.json.decode(packet, type=ProcessState)
                if state.error:
                    self._ended.pop(state.number)
                    self._begun.pop(state.number).set_exception(OSError(state.error))
                elif state.exit_code is None:
                    self._begun.pop(state.number).set_result(state.pid)
                else:
                    self._ended.pop(state.number).set_result(state.exit_code)
        except ConnectionError:
            pass  # it ended with packets unread
        finally:
            # Its children end with it.
            gone = OSError("the process that forks stages ended")
            for begun in self._begun.values():
                begun.set_exception(gone)
            for ended in self._ended.values():
                ended.set_result(-signal.SIGKILL)
            self._begun = {}
            self._ended = {}


# --- the process itself ---


def main() -> None:
    protect_own_output(LogDrops())
    packets = socket.socket(fileno=int(sys.argv[1]))
    # Also finds the memory of the title, which is not possible once the environment has changed.
    setproctitle.setproctitle("sglang_live::zygote")
    _die_with_parent()
    # A parent that is interrupted at the keyboard ends this process itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forgo_expected_lines()
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # pages that the collector never visits stay shared
    selector = selectors.DefaultSelector()
    selector.register(packets, selectors.EVENT_READ)
    running: dict[int, tuple[int, int]] = {}  # by pidfd: number and pid
    while True:
        for key, _ in selector.select():
            if key.fileobj is packets:
                packet, fds, _, _ = socket.recv_fds(packets, _MAX_PACKET_BYTES, 1)
                if not packet:
                    return  # the server has ended
                request = msgspec.json.decode(packet, type=StartRequest)
                try:
                    pid = os.fork()
                except OSError as error:
                    # Too little memory or too many processes: only this stage fails.
                    packets.send(
                        msgspec.json.encode(ProcessState(request.number, 0, error=f"fork: {error}"))
                    )
                    os.close(fds[0])
                    continue
                if not pid:
                    selector.close()
                    packets.close()
                    _become(request.environment, fds[0])
                os.close(fds[0])
                os.setpgid(pid, pid)  # the child does the same: either may be first
                pidfd = os.pidfd_open(pid)
                running[pidfd] = request.number, pid
                selector.register(pidfd, selectors.EVENT_READ)
                packets.send(msgspec.json.encode(ProcessState(request.number, pid)))
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                number, pid = running.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                packets.send(msgspec.json.encode(ProcessState(number, pid, code)))


def _become(environment: dict[str, str], log_fd: int) -> None:
    """Run a stage in this process. Does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(environment)
        os.environ[FORKED_ENV] = "1"
        from sglang_live.stages import runtime

        runtime.main()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    from sglang_live.stages.endings import die_with_parent

    die_with_parent()


if __name__ == "__main__":
    main()
