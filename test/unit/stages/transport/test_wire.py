"""Messages and tensors on their way through ZMQ frames and shared memory."""

import os
import types
import typing
from dataclasses import is_dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sglang_live.messages import AnyMessage, Failed, Ping, TensorRef, UserSegment, WireSegment
from sglang_live.stages.transport import wire

MESSAGES = typing.get_args(AnyMessage)
SMALL = np.arange(3, dtype=np.int16)
LARGE = np.arange(100, dtype=np.float32)


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    """Shared memory of our own, used from 128 bytes on."""
    monkeypatch.setattr(wire, "SHM_DIR", tmp_path)
    monkeypatch.setattr(wire, "SHM_MIN_BYTES", 128)
    return tmp_path


def values(hint) -> st.SearchStrategy:
    """Values of a message field, by its type."""
    if isinstance(hint, types.UnionType):
        return st.one_of([values(kind) for kind in typing.get_args(hint)])
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(values(inner[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    if typing.get_origin(hint) is tuple:
        return st.tuples(*map(values, typing.get_args(hint)))
    if isinstance(hint, type) and (
        is_dataclass(hint) or issubclass(hint, msgspec.Struct) or hasattr(hint, "_fields")
    ):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{name: values(kind) for name, kind in hints.items()})
    return {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
        types.NoneType: st.none(),
    }[hint]


def sent(message, tensors: wire.TensorFrames):
    """What the other side decodes, from bytes as a socket delivers them."""
    return wire.decode([bytes(part) for part in wire.encode(message, tensors)])


def test_no_two_messages_share_a_tag():
    assert len({kind.__struct_config__.tag for kind in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent(kind, data):
    message = data.draw(values(kind))
    arrived, frames = sent(message, None)
    assert (arrived, frames) == (message, [])
    assert type(arrived) is kind


@settings(max_examples=60)
@given(
    array=arrays.arrays(
        st.sampled_from(["<i2", "<f4", "<f8", "<i8", "|u1", "|b1"]),
        arrays.array_shapes(min_side=0, max_side=12),
    ),
    same_host=st.booleans(),
)
def test_a_tensor_arrives_bit_equal_by_either_way(array, same_host):
    tensors = wire.TensorFrames(same_host)
    message, frames = sent(UserSegment("j", WireSegment("key", [1], tensors.put(array))), tensors)
    assert bool(message.segment.states.shm) == (same_host and array.nbytes >= wire.SHM_MIN_BYTES)
    taken = wire.take(message.segment.states, frames)
    assert (taken.dtype, taken.shape) == (array.dtype, array.shape)
    assert taken.tobytes() == array.tobytes()


def test_a_tensor_that_is_not_contiguous_arrives_in_its_own_order():
    tensors = wire.TensorFrames(same_host=False)
    ref = tensors.put(np.arange(6).reshape(2, 3).T)
    assert wire.take(ref, tensors.frames).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_tensors_of_one_message_keep_their_places():
    tensors = wire.TensorFrames(same_host=True)
    refs = [tensors.put(array) for array in (SMALL, LARGE, SMALL[::-1])]
    taken = [wire.take(ref, tensors.frames).tolist() for ref in refs]
    assert taken == [SMALL.tolist(), LARGE.tolist(), SMALL[::-1].tolist()]


def test_a_shared_tensor_can_be_taken_once(shared_memory):
    ref = wire.TensorFrames(same_host=True).put(LARGE)
    assert len(list(shared_memory.iterdir())) == 1
    wire.take(ref, [])
    assert list(shared_memory.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        wire.take(ref, [])


def test_without_shared_memory_every_tensor_is_a_frame(monkeypatch, tmp_path):
    monkeypatch.setattr(wire, "SHM_DIR", tmp_path / "none")
    tensors = wire.TensorFrames(same_host=True)
    assert tensors.put(LARGE).shm == ""
    assert len(tensors.frames) == 1


@pytest.mark.parametrize(
    "name",
    ["/etc/hostname", "../secret", "secret", "sglang_live-1/../secret", "sglang_live-/../secret"],
)
def test_a_name_that_is_not_ours_is_refused_and_its_file_kept(name, tmp_path, monkeypatch):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(wire, "SHM_DIR", shared)
    for secret in (tmp_path / "secret", shared / "secret"):
        secret.write_bytes(b"ab")
    with pytest.raises(ValueError, match="bad shared memory name"):
        wire.take(TensorRef("<i2", [1], shm=name), [])
    with pytest.raises(ValueError, match="bad shared memory name"):
        wire.discard(UserSegment("j", WireSegment("key", [1], TensorRef("<i2", [1], shm=name))))
    assert (tmp_path / "secret").exists() and (shared / "secret").exists()


def test_release_removes_what_was_not_taken_and_nothing_else(shared_memory):
    tensors, others = wire.TensorFrames(same_host=True), wire.TensorFrames(same_host=True)
    taken, _, kept = tensors.put(LARGE), tensors.put(LARGE), others.put(LARGE)
    wire.take(taken, [])
    tensors.release()
    assert [path.name for path in shared_memory.iterdir()] == [kept.shm]


def test_discarding_a_message_frees_its_tensor(shared_memory):
    ref = wire.TensorFrames(same_host=True).put(LARGE)
    for _ in range(2):  # its reader may have removed it
        wire.discard(UserSegment("j", WireSegment("key", [1], ref)))
    assert list(shared_memory.iterdir()) == []
    wire.discard(UserSegment("j", WireSegment("key", [1], TensorRef("<i2", [1], frame=0))))
    wire.discard(Ping("j"))


def test_sweeping_removes_the_files_of_one_process_or_one_run_only(shared_memory):
    names = ("sglang_live-a-12-0", "sglang_live-a-12-7", "sglang_live-a-123-0")
    others = {"sglang_live-ab-12-0", "sglang_live-b-12-0", "other-a-12-0"}
    for name in (*names, *others):
        (shared_memory / name).touch()
    assert wire.sweep_shared_memory("a", 12) == 2
    left = {path.name for path in shared_memory.iterdir()}
    assert left == {"sglang_live-a-123-0", *others}
    assert wire.sweep_shared_memory("a") == 1
    assert {path.name for path in shared_memory.iterdir()} == others


def test_files_carry_the_run_and_the_pid_that_a_sweep_looks_for(shared_memory):
    for _ in range(2):
        wire.TensorFrames(same_host=True, run="a").put(LARGE)
        assert wire.sweep_shared_memory("b", os.getpid()) == wire.sweep_shared_memory("a", 1) == 0
        assert wire.sweep_shared_memory("a", os.getpid()) == 1
    assert list(shared_memory.iterdir()) == []


def test_a_peer_may_not_name_another_servers_shared_memory(shared_memory):
    ref = wire.TensorFrames(same_host=True, run="a").put(LARGE)
    message = wire.encode(UserSegment("j", WireSegment("key", [1], ref)))
    for run in ("b", "a-1", "aa"):
        with pytest.raises(wire.MalformedError, match="another server"):
            wire.decode(message, True, run)
    assert (shared_memory / ref.shm).exists()
    assert wire.decode(message, True, "a")[0].segment.states == ref


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"hello", msgspec.msgpack.encode({"type": "Nothing", "job_id": "j"})],
    ids=["empty", "invalid", "text", "unknown tag"],
)
def test_what_is_no_message_is_malformed(frame):
    with pytest.raises(wire.MalformedError):
        wire.decode([frame])


def test_a_field_of_the_wrong_type_is_refused():
    frame = msgspec.msgpack.encode({"type": "Failed", "job_id": "j", "code": 7, "message": "m"})
    with pytest.raises(wire.MalformedError, match="Expected `str`"):
        wire.decode([frame])
    assert isinstance(wire.decode(wire.encode(Failed("j", "7", "m")))[0], Failed)


def test_what_shared_memory_has_no_room_for_goes_by_socket_and_is_counted(monkeypatch, tmp_path):
    def full(array, path):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    fallbacks = wire.Fallbacks()
    monkeypatch.setattr(wire, "fallbacks", fallbacks)
    monkeypatch.setattr(wire, "_write", full)
    tensors = wire.TensorFrames(same_host=True)
    ref = tensors.put(LARGE)
    assert not ref.shm and fallbacks.n == 1
    assert np.array_equal(wire.take(ref, [bytes(frame) for frame in tensors.frames]), LARGE)
    tensors.release()
    assert not list(tmp_path.iterdir())


def test_a_file_in_shared_memory_is_its_users_alone(shared_memory):
    mask = os.umask(0o022)
    try:
        ref = wire.TensorFrames(same_host=True).put(LARGE)
    finally:
        os.umask(mask)
    assert (shared_memory / ref.shm).stat().st_mode & 0o777 == 0o600


def test_names_in_shared_memory_are_random(shared_memory):
    tensors = wire.TensorFrames(same_host=True)
    names = [tensors.put(LARGE).shm for _ in range(20)]
    assert len({name.rsplit("-", 1)[1] for name in names}) == 20
    assert all(len(name.rsplit("-", 1)[1]) == 32 for name in names)


def test_a_planted_link_is_neither_written_nor_read(shared_memory, tmp_path_factory, monkeypatch):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_bytes(LARGE.tobytes())
    monkeypatch.setattr(wire.secrets, "token_hex", lambda n: "speculated")
    link = shared_memory / f"sglang_live-none-{os.getpid()}-speculated"
    link.symlink_to(secret)
    ref = wire.TensorFrames(same_host=True).put(LARGE + 1)
    assert not ref.shm, "goes by socket"
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        wire.take(TensorRef("<f4", [100], shm=link.name), [])
    assert secret.read_bytes() == LARGE.tobytes()


@pytest.mark.parametrize(
    "ref",
    [
        TensorRef("|O", [1], frame=0),
        TensorRef("<f4", [-1], frame=0),
        TensorRef("<f4", [3], frame=1),
        TensorRef("<f4", [3], frame=-1),
        TensorRef("<f4", [2**40, 2**40], frame=0),
        TensorRef("<f4", [4], frame=0),
        TensorRef("nonsense", [3], frame=0),
    ],
)
def test_a_ref_to_no_tensor_that_came_along_is_malformed(ref):
    with pytest.raises(wire.MalformedError):
        wire.take(ref, [bytes(12)])


def test_a_peer_on_another_host_may_not_name_shared_memory(shared_memory):
    ref = wire.TensorFrames(same_host=True).put(LARGE)
    message = wire.encode(UserSegment("j", WireSegment("key", [1], ref)))
    with pytest.raises(wire.MalformedError, match="another host"):
        wire.decode(message, same_host=False)
    assert (shared_memory / ref.shm).exists()
    assert wire.decode(message, same_host=True)[0].segment.states == ref


@settings(max_examples=300)
@given(st.data())
def test_mutated_messages_decode_or_are_malformed(data):
    kind = data.draw(st.sampled_from(MESSAGES))
    frame = bytearray(wire.encode(data.draw(values(kind)))[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for mutated in (bytes(frame), bytes(frame[:cut]), bytes([0x91]) * 5000 + bytes(frame)):
        try:
            message, _ = wire.decode([mutated], same_host=False)
        except wire.MalformedError:
            continue
        assert type(message) in MESSAGES


def test_a_sweep_goes_on_past_what_it_cannot_remove(shared_memory):
    (shared_memory / "sglang_live-a-77-a").mkdir()
    (shared_memory / "sglang_live-a-77-b").touch()
    assert wire.sweep_shared_memory("a", 77) == 1
    assert [path.name for path in shared_memory.iterdir()] == ["sglang_live-a-77-a"]
