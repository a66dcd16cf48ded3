"""Feed messages to a scheduler and reports from it, over real sockets."""

import numpy as np
import pytest
import torch
import zmq
from msgspec import msgpack

from sglang_live.bridge.scheduler.talker_input import PromptStates
from sglang_live.engine_channel import inbox as inbox_module
from sglang_live.engine_channel.inbox import (
    INBOX_ENV,
    STEPS_ENV,
    Inbox,
    Outbox,
    RowsOutbox,
    address_from_env,
    policy_config_from_env,
    steps_text,
)
from sglang_live.engine_channel.states import to_array, to_tensor
from sglang_live.messages import (
    ForgetStates,
    Frames,
    HiddenRows,
    Report,
    TalkerForget,
    TalkerPrompt,
    TalkerStates,
    TalkerText,
)
from sglang_live.policy.config import TALKER
from sglang_live.stages import engine_link
from sglang_live.stages.endings import EXIT_STUCK


def test_a_models_steps_reach_its_scheduler(monkeypatch):
    monkeypatch.delenv(STEPS_ENV, raising=False)
    assert policy_config_from_env(TALKER) == TALKER
    monkeypatch.setenv(STEPS_ENV, steps_text(0.0122, 28))
    assert policy_config_from_env(TALKER) == TALKER.changed(
        {"stage.step_s": 0.0122, "stage.chunk_steps": 28}
    )
    monkeypatch.setenv(STEPS_ENV, steps_text(0.04, 103, 0.5))
    stage = policy_config_from_env(TALKER).stage
    assert stage.pipeline_s == TALKER.stage.pipeline_s + 0.5 and stage.chunk_steps == 103


@pytest.fixture
def address(run_dir) -> str:
    return f"ipc://{run_dir}/box"


@pytest.fixture
def peer(address):
    """The stage's end: `peer(zmq.PULL)` binds, `peer(zmq.PUSH)` connects."""
    sockets = []

    def make(kind: int) -> zmq.Socket:
        socket = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, 5_000)
        sockets.append(socket)
        socket.bind(address) if kind == zmq.PULL else socket.connect(address)
        return socket

    yield make
    for socket in sockets:
        socket.close(linger=0)


def received(socket: zmq.Socket) -> Report:
    return msgpack.decode(socket.recv(), type=Report)


def test_an_inbox_returns_all_messages_in_order_and_never_blocks(address, peer):
    inbox, stage = Inbox(address), peer(zmq.PUSH)
    assert inbox.drain() == []
    feeds = [
        TalkerStates(7, "<f4", 1, b"abcd"),
        TalkerPrompt("r", prompt_len=9, seed=-(2**60), greedy=True, audio_at=[1], states=[7]),
        ForgetStates([7]),
        *(TalkerText("r", [n]) for n in range(20)),
        TalkerText("r", [], done=True),
        TalkerForget("r"),
    ]
    for feed in feeds:
        stage.send(msgpack.encode(feed))
    drained = []
    while len(drained) < len(feeds):
        assert inbox.socket.poll(5_000)
        drained += inbox.drain()
    assert drained == feeds
    inbox.socket.close(linger=0)


def test_an_outbox_delivers_frames(address, peer):
    stage, frames = peer(zmq.PULL), Frames(["r", "q"], [3, 0], [[1, 2], [3, 4]])
    outbox = Outbox(address)
    outbox.send(frames)
    assert received(stage) == frames
    outbox._socket.close(linger=0)


def test_a_scheduler_that_reads_nothing_ends_its_stage(address, monkeypatch, caplog):
    def leave(status: int):
        raise SystemExit(status)

    monkeypatch.setattr(engine_link, "QUEUE_MESSAGES", 5)
    monkeypatch.setattr(engine_link.os, "_exit", leave)
    feed = engine_link.FeedSocket(address)
    for _ in range(5):
        feed.send(TalkerForget("r"))
    with pytest.raises(SystemExit, match=str(EXIT_STUCK)):
        feed.send(TalkerForget("r"))
    assert "scheduler_does_not_read" in caplog.text
    feed._socket.close(linger=0)


def test_a_stage_that_reads_nothing_blocks_its_scheduler(address, monkeypatch):
    monkeypatch.setattr(inbox_module, "QUEUE_MESSAGES", 5)
    outbox, frames = Outbox(address), Frames(["r"], [3], [[1, 2]])
    outbox._socket.setsockopt(zmq.SNDTIMEO, 50)  # a test cannot wait forever
    for _ in range(5):
        outbox.send(frames)
    with pytest.raises(zmq.Again):
        outbox.send(frames)
    outbox._socket.close(linger=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_rows_arrive_in_the_models_dtype(address, peer, dtype):
    stage = peer(zmq.PULL)
    outbox = RowsOutbox(address)
    rows = torch.tensor([[0.5, -2.0], [1.5, 3.0]], dtype=dtype)
    outbox.send("r", [4, 7], rows)
    report = received(stage)
    assert isinstance(report, HiddenRows)
    assert (report.rid, report.at) == ("r", [4, 7])
    assert len(report.rows) == 4 * dtype.itemsize
    came = to_tensor(np.frombuffer(report.rows, report.dtype).reshape(2, 2))
    assert came.dtype == dtype and torch.equal(came, rows)


def test_an_engine_outside_a_stage_is_an_error_with_the_variables_name(monkeypatch):
    monkeypatch.delenv(INBOX_ENV, raising=False)
    with pytest.raises(RuntimeError, match=f"{INBOX_ENV} is not set"):
        address_from_env(INBOX_ENV)


def states_message(states_id: int, rows: torch.Tensor) -> TalkerStates:
    array = to_array(rows)
    return TalkerStates(states_id, array.dtype.str, len(array), array.tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_announced_prompt_becomes_a_record_with_the_states_it_refers_to(dtype):
    rows = torch.arange(15, dtype=dtype).reshape(5, 3)
    states = PromptStates()
    states.take(states_message(1, rows[:2]))
    states.take(states_message(2, rows[2:]))
    stream = states.stream_of(
        TalkerPrompt(
            "r", prompt_len=20, seed=5, greedy=False, audio_at=[4, 5, 9, 10, 11], states=[1, 2]
        )
    )
    states.forget(ForgetStates([1, 2]))
    assert (stream.rid, stream.prompt_len, stream.seed, stream.greedy) == ("r", 20, 5, False)
    assert stream.audio_at.tolist() == [4, 5, 9, 10, 11]
    for begin in range(5):
        for end in range(begin + 1, 6):
            part = stream.audio.between(begin, end)
            assert part.dtype == dtype and torch.equal(part, rows[begin:end])
    assert not stream.has_text_for(0)


def test_a_prompt_without_audio_has_no_states():
    prompt = TalkerPrompt("r", prompt_len=20, seed=5, greedy=True)
    stream = PromptStates().stream_of(prompt)
    assert stream.audio is None and len(stream.audio_at) == 0
