"""Sockets between a stage process and its SGLang scheduler: feed messages and reports."""

import os
import queue
import threading
from collections.abc import Sequence

import msgspec
import torch
import zmq

from sglang_live.engine_channel.states import to_array
from sglang_live.messages import Feed, HiddenRows, Picture, Report
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.policies import Policies

INBOX_ENV = "SGLANG_LIVE_INBOX"
OUTBOX_ENV = "SGLANG_LIVE_OUTBOX"
STAGE_ENV = "SGLANG_LIVE_STAGE"
# Comma-separated names of the policies that are on; empty or absent: SGLang's own scheduling.
POLICIES_ENV = "SGLANG_LIVE_POLICIES"
# "<seconds of speech of a decode step>:<steps of which the next stage makes one chunk of audio>".
STEPS_ENV = "SGLANG_LIVE_STEPS"
# "<bytes>:<directory>"; empty or absent: session KV has no storage tier.
STORAGE_ENV = "SGLANG_LIVE_SESSION_STORAGE"
# "module:factory" of further parts of the scheduler, separated by commas.
PARTS_ENV = "SGLANG_LIVE_PARTS"
# High-water mark of each end, a bound of memory: a stage or engine that falls behind so far has
# been ended by supervision before.
QUEUE_MESSAGES = 65_536
# Bound of the queued forward passes with thinker states, which may take megabytes each.
_PENDING_ROWS = 1_024
# Of SGLang's custom_params: how many tokens at the prompt's end are the response's beginning.
CONTINUED = "sglang_live_continued"
# Name of our radix cache in SGLang's registry.
RADIX_BACKEND = "sglang_live"


class Inbox:
    """PULL end inside the scheduler. Drained once a round, never blocks."""

    def __init__(self, address: str):
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self.socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(Feed)

    def drain(self) -> list[Feed]:
        feeds = []
        # Poll first: an exception in every round would cost more than most rounds' messages.
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            feeds.append(self._decoder.decode(self.socket.recv(zmq.NOBLOCK)))
        return feeds


class Outbox:
    """PUSH end inside the scheduler's process, for one thread. Blocks while the queue is full."""

    def __init__(self, address: str):
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, report: Report) -> None:
        self._socket.send(self._encoder.encode(report))


# Request id, positions, their states on the host, event of the copy (None on a CPU).
_Pending = tuple[str, list[int], torch.Tensor, list[Picture], torch.cuda.Event | None]


class RowsOutbox:
    """Sends thinker states without making the forward pass wait for the device.

    A thread waits for the copy to the host and owns the socket.
    """

    def __init__(self, address: str):
        self._pending: queue.Queue[_Pending] = queue.Queue(_PENDING_ROWS)
        self._address = address
        threading.Thread(target=self._run, name="hidden-rows", daemon=True).start()

    def send(
        self, rid: str, at: list[int], rows: torch.Tensor, pictures: Sequence[Picture] = ()
    ) -> None:
        """Queue the states of one request.

        Args:
            at, pictures: see HiddenRows.
            rows: [len(at), hidden] on the model's device.
        """
        event = None
        host = rows.to("cpu", non_blocking=True)
        if rows.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._pending.put((rid, at, host, list(pictures), event))

    def _run(self) -> None:
        outbox = Outbox(self._address)
        while True:
            rid, at, host, pictures, event = self._pending.get()
            if event is not None:
                event.synchronize()
            states = to_array(host)
            outbox.send(HiddenRows(rid, at, states.dtype.str, states.tobytes(), pictures))


def address_from_env(name: str) -> str:
    address = os.environ.get(name)
    if not address:
        raise RuntimeError(f"{name} is not set: this engine was not started by a stage")
    return address


def steps_text(step_s: float, chunk_steps: int, decode_s: float = 0.0) -> str:
    """For STEPS_ENV. Other steps than the stage's own are those of a model with another codec.

    decode_s: see PieceTalker.
    """
    return f"{step_s!r}:{chunk_steps}:{decode_s!r}"


def policy_config_from_env(config: PolicyConfig) -> PolicyConfig:
    """The constants of this stage, with the steps of its model."""
    if text := os.environ.get(STEPS_ENV, ""):
        step_s, chunk_steps, decode_s = text.split(":")
        steps = {
            "stage.step_s": float(step_s),
            "stage.chunk_steps": int(chunk_steps),
            "stage.pipeline_s": config.stage.pipeline_s + float(decode_s),
        }
        config = config.changed(steps)
    return config


def policies_from_env() -> Policies:
    return Policies.parse(name for name in os.environ.get(POLICIES_ENV, "").split(",") if name)
