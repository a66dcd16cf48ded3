"""A disk without room: nothing is half stored, and the store goes on when there is room again.

The kernel refuses to let files of a child process grow, as a full disk does.
"""

import io
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_live.extensions.batches.database import StorageFullError
from sglang_live.extensions.batches.records import COMPLETED, Result
from sglang_live.extensions.batches.store import Store

from .batches import created, opened, result, results_in, uploaded

N_LINES = 400


def in_a_child(work: Callable[[], None]) -> None:
    """Run work in a child process: a limit on the size of files holds for a whole process."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child failed; its traceback is above"


def allow(n_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, most))


def until_full(store: Store, batch_id: str) -> list[int]:
    """The lines whose result was stored."""
    stored = []
    for n in range(1, N_LINES + 1):
        big = Result(n=n, succeeded=True, text=b'{"n": %d, "x": "%s"}\n' % (n, b"y" * 1000))
        try:
            store.batches.record(batch_id, [big])
        except StorageFullError:
            return stored
        stored.append(n)
    raise AssertionError("it never became full")


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where synchronising costs nothing."""
    fast = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=fast) as name:
        yield Path(name)


@pytest.mark.parametrize("extra_bytes", [0, 1, 700, 5000])
def test_results_that_find_no_room_are_stored_later(folder, extra_bytes):
    def work() -> None:
        store = opened(folder)
        batch = created(store, n_lines=N_LINES)
        largest = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        allow(largest + 40_000 + extra_bytes)
        stored = until_full(store, batch.id)
        assert store.batches.get("o", batch.id).n_completed == len(stored)
        allow(1 << 40)
        for n in range(len(stored) + 1, N_LINES + 1):
            store.batches.record(batch.id, [result(n)])
        store.batches.finish(batch.id, COMPLETED)
        assert results_in(store, batch.output_file) == list(range(1, N_LINES + 1))
        store.close()

    in_a_child(work)


def test_an_upload_without_room_leaves_nothing(folder):
    def work() -> None:
        store = opened(folder)
        allow(100_000)
        with pytest.raises(StorageFullError):
            store.files.write(io.BytesIO(b"x" * 200_000))
        assert list((folder / "files").iterdir()) == []
        assert uploaded(store, "o", b"x" * 50_000).n_bytes == 50_000
        store.close()

    in_a_child(work)
