"""StageHost, an actor that has the stages of one host in a child process, and starts that again."""

import os
import threading
import uuid

import msgspec
import ray

from sglang_live.cluster.child import MARK, Child, environment_of
from sglang_live.cluster.hosted import HostNews, StagesOrder

# Each call of facts() returns at least this often.
_LONG_POLL_S = 5.0
_RESTART_S = 1.0


class ProcessHost:
    """An actor with threads, and one child process. What is common to hosts and gateways."""

    _program = ""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._news = HostNews()
        self._version = 0
        # The next life of this actor counts from 0 as well.
        self._life = uuid.uuid4().hex
        self._child: Child | None = None
        self._is_ending = threading.Event()
        self._last_line = ""
        self._gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        threading.Thread(target=self._keep, daemon=True).start()

    def facts(self, known: str) -> tuple[str, bytes]:
        """The version of this host's news, and the news: soon, once it is another than the known
        one, or after a few seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._name() != known, _LONG_POLL_S)
            return self._name(), msgspec.json.encode(self._news)

    def drain(self) -> None:
        """End the child, which may take its time, and start it no more."""
        self._is_ending.set()
        if self._child is not None:
            self._child.end()

    def _order(self) -> msgspec.Struct:
        """Of the next child."""
        raise NotImplementedError

    def _read(self, line: str) -> HostNews | None:
        """News in what the child prints; None: there are none."""
        raise NotImplementedError

    def _keep(self) -> None:
        while not self._is_ending.is_set():
            environment = environment_of(self._gpus, os.environ)
            try:
                self._child = Child(self._program, self._order(), environment)
                end = f"exit {self._child.run(self._note)}: {self._last_line}"
            except OSError as error:  # it was not started, or ended before it read its order
                end = str(error)
            if not self._is_ending.is_set():
                self._tell(HostNews(error=end))
                self._is_ending.wait(_RESTART_S)
        self._tell(HostNews(ended=True))

    def _note(self, line: str) -> None:
        if (news := self._read(line)) is not None:
            self._tell(news)
        else:
            print(line, end="", flush=True)
            self._last_line = line.strip() or self._last_line

    def _tell(self, news: HostNews) -> None:
        with self._changed:
            self._news, self._version = news, self._version + 1
            self._changed.notify_all()

    def _name(self) -> str:
        return f"{self._life}-{self._version}"


class StageHost(ProcessHost):
    """Stages that share devices.

    Args:
        order: a StagesOrder as JSON, whose address is this machine's if it is empty.
    """

    _program = "stages"

    def __init__(self, order: bytes):
        self._given = msgspec.json.decode(order, type=StagesOrder)
        super().__init__()

    def _order(self) -> msgspec.Struct:
        address = self._given.address or ray.util.get_node_ip_address()
        return msgspec.structs.replace(self._given, address=address)

    def _read(self, line: str) -> HostNews | None:
        if not line.startswith(MARK):
            return None
        try:
            return msgspec.json.decode(line.removeprefix(MARK), type=HostNews)
        except msgspec.DecodeError:
            return None  # with a line of a stage in it: more news follow
