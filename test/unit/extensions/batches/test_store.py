"""Files, batches and results in the store."""

import io
import os
import sqlite3

import pytest

from sglang_live.errors import BadInputError, LiveError
from sglang_live.extensions.batches.batch_store import (
    BatchEndedError,
    NoSuchBatchError,
    TooManyBatchesError,
)
from sglang_live.extensions.batches.database import StorageFullError, storage_errors
from sglang_live.extensions.batches.file_store import (
    FileInUseError,
    KeyStorageFullError,
    NoSuchFileError,
)
from sglang_live.extensions.batches.pages import Page
from sglang_live.extensions.batches.records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    Fault,
)

from .batches import FakeTime, created, input_of, opened, result, results_in, uploaded

ALL = Page(None, 100, "asc")


@pytest.fixture
def store(tmp_path):
    made = opened(tmp_path / "batches")
    yield made
    made.close()


def test_a_file_is_found_by_its_owner_alone(store):
    file = uploaded(store, "a", b"text")
    assert store.files.get("a", file.id) == file
    assert store.files.path(file.id).read_bytes() == b"text"
    for owner, file_id in (("b", file.id), ("a", "file-" + "0" * 26), ("a", "../lock")):
        with pytest.raises(NoSuchFileError):
            store.files.get(owner, file_id)
        with pytest.raises(NoSuchFileError):
            store.files.delete(owner, file_id)
    assert store.files.page("b", ALL, None) == ([], False)


def test_pages_follow_each_other_in_both_orders(store):
    ids = [uploaded(store, "a", b"x").id for _ in range(5)]
    assert ids == sorted(ids)
    first, more = store.files.page("a", Page(None, 2, "desc"), None)
    assert ([file.id for file in first], more) == (ids[:2:-1], True)
    store.files.delete("a", first[-1].id)  # a cursor need not exist
    rest, more = store.files.page("a", Page(first[-1].id, 9, "desc"), None)
    assert ([file.id for file in rest], more) == (ids[2::-1], False)
    assert store.files.page("a", ALL, "batch_output") == ([], False)


def test_a_file_is_not_deleted_while_a_batch_needs_it(store):
    batch = created(store)
    with pytest.raises(FileInUseError):
        store.files.delete("o", batch.input_file)
    store.batches.cancel("o", batch.id)
    with pytest.raises(FileInUseError):
        store.files.delete("o", batch.input_file)
    store.batches.finish(batch.id, CANCELLED)
    store.files.delete("o", batch.input_file)
    assert not store.files.path(batch.input_file).exists()


def test_files_are_deleted_after_their_lifetime_but_not_under_a_batch(tmp_path):
    time = FakeTime()
    store = opened(tmp_path, time)
    idle = uploaded(store, "o", b"x", kept_s=3600)
    batch = created(store)
    time.now += 3600
    with pytest.raises(NoSuchFileError):
        store.files.get("o", idle.id)
    time.now += 10_000_000
    store.files.delete_old()
    assert not store.files.path(idle.id).exists()
    assert store.files.path(batch.input_file).exists()
    store.batches.finish(batch.id, EXPIRED)
    store.files.delete_old()
    assert not store.files.path(batch.input_file).exists()
    time.now += 10_000_000
    store.batches.delete_old()
    with pytest.raises(NoSuchBatchError):
        store.batches.get("o", batch.id)
    store.close()


def test_the_files_of_a_key_are_bounded_in_number_and_size(tmp_path):
    store = opened(tmp_path, max_key_files=2, max_key_bytes=10)
    uploaded(store, "a", b"12345")
    with pytest.raises(KeyStorageFullError):
        uploaded(store, "a", b"123456")
    uploaded(store, "a", b"12345")
    with pytest.raises(KeyStorageFullError):
        uploaded(store, "a", b"")
    uploaded(store, "b", b"12345")
    assert len(list((tmp_path / "files").iterdir())) == 3, "nothing is left of refused files"
    store.close()


def test_results_of_running_batches_count_for_their_key(store):
    batch = created(store)
    before = store.files.used_bytes("o")
    store.batches.record(batch.id, [result(1), result(2, succeeded=False)])
    n_bytes = 2 * len(result(1).text)
    assert store.files.used_bytes("o") == before + n_bytes
    for n in (3, 4):
        store.batches.record(batch.id, [result(n)])
    store.batches.finish(batch.id, COMPLETED)
    assert store.files.used_bytes("o") == before + 2 * n_bytes


def test_a_batch_that_completes_has_the_results_of_all_lines(store):
    batch = created(store)
    assert [line.n for line in store.batches.claim(batch.id, 0, 3)] == [1, 2, 3]
    store.batches.record(batch.id, [result(2), result(1, succeeded=False)])
    store.batches.record(batch.id, [result(4), result(3)])
    store.batches.finish(batch.id, COMPLETED)
    ended = store.batches.get("o", batch.id)
    assert (ended.status, ended.n_completed, ended.n_failed, ended.n_left) == (COMPLETED, 3, 1, 0)
    assert results_in(store, ended.output_file) == [2, 4, 3]
    assert results_in(store, ended.error_file) == [1]
    shown = ended.to_json("m", None)
    assert shown["output_file_id"] == ended.output_file and shown["completed_at"]
    assert store.files.get("o", ended.output_file).purpose == "batch_output"
    assert store.batches.unfinished() == []


def test_a_file_of_results_without_results_does_not_exist(store):
    batch = created(store, n_lines=1)
    store.batches.record(batch.id, [result(1)])
    store.batches.finish(batch.id, COMPLETED)
    shown = store.batches.get("o", batch.id).to_json("m", None)
    assert shown["output_file_id"] and shown["error_file_id"] is None


def test_a_line_has_one_result(store):
    batch = created(store)
    store.batches.record(batch.id, [result(1)])
    with pytest.raises(AssertionError, match="line 1"):
        store.batches.record(batch.id, [result(2), result(1)])
    assert store.batches.get("o", batch.id).n_completed == 1
    store.batches.record(batch.id, [result(2)])
    assert results_in(store, batch.output_file) == [1, 2], "the refused results are overwritten"


def test_an_invalid_batch_lists_its_faults(store):
    batch = store.batches.create(
        owner="o",
        endpoint="/v1/x",
        input_file=uploaded(store, "o", b"x").id,
        metadata={"a": "b"},
        results_kept_s=None,
    )
    store.batches.fail(batch.id, [Fault(code="c", message="m", n_line=3)])
    failed = store.batches.get("o", batch.id).to_json("m", None)
    assert failed["status"] == FAILED and failed["failed_at"] and failed["metadata"] == {"a": "b"}
    assert failed["errors"] == {
        "object": "list",
        "data": [{"code": "c", "line": 3, "message": "m", "param": None}],
    }
    store.batches.begin(batch.id, [])
    assert store.batches.get("o", batch.id).status == FAILED


def test_a_batch_is_cancelled_once_and_not_after_its_end(store):
    batch = created(store)
    assert store.batches.cancel("o", batch.id).status == CANCELLING
    assert store.batches.cancel("o", batch.id).status == CANCELLING
    store.batches.finish(batch.id, CANCELLED)
    with pytest.raises(BatchEndedError):
        store.batches.cancel("o", batch.id)
    for owner, batch_id in (("p", batch.id), ("o", "batch_x")):
        with pytest.raises(NoSuchBatchError):
            store.batches.cancel(owner, batch_id)


def test_a_cancelled_batch_is_not_begun_by_its_validation(store):
    file = uploaded(store, "o", input_of(["a"]))
    new = {"endpoint": "/v1/x", "metadata": None, "results_kept_s": None}
    batch = store.batches.create(owner="o", input_file=file.id, **new)
    store.batches.cancel("o", batch.id)
    store.batches.begin(batch.id, [])
    store.batches.fail(batch.id, [])
    assert store.batches.get("o", batch.id).status == CANCELLING
    with pytest.raises(NoSuchFileError) as refused:
        store.batches.create(owner="p", input_file=file.id, **new)
    assert refused.value.param == "input_file_id"


def test_the_batches_of_a_key_are_bounded(tmp_path):
    store = opened(tmp_path, max_key_batches=2)
    batches = [created(store) for _ in range(2)]
    created(store, owner="p")
    with pytest.raises(TooManyBatchesError):
        created(store)
    store.batches.finish(batches[0].id, CANCELLED)
    created(store)
    store.close()


def test_attempts_count_the_servers_that_ended_by_themselves(tmp_path):
    store, id = opened(tmp_path), ""
    for attempt in (1, 2):
        id = id or created(store).id
        assert [x.attempts for x in store.batches.claim(id, 0, 2)] == [attempt, attempt]
        store.close()
        store = opened(tmp_path)
    store.batches.claim(id, 0, 2)
    store.batches.release(id, [1])
    assert [x.attempts for x in store.batches.claim(id, 0, 9)] == [3, 4, 1, 1]
    store.close()


def test_a_folder_has_one_server(tmp_path):
    store = opened(tmp_path)
    with pytest.raises(BadInputError, match="another server"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="--batch-dir"):
        opened(tmp_path / "file" / "batches")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "batches.sqlite").write_text("no database " * 100)
    with pytest.raises(BadInputError, match="--batch-dir"):
        opened(tmp_path / "broken")
    opened(tmp_path / "other").close()
    other = sqlite3.connect(tmp_path / "other" / "batches.sqlite")
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(BadInputError, match="version"):
        opened(tmp_path / "other")


def test_what_is_stored_is_for_the_account_of_the_server_and_has_no_key(tmp_path):
    before = os.umask(0o077)
    try:
        store = opened(tmp_path / "batches")
        uploaded(store, store.owner_of("secret-key"), b"x")
        store.close()
    finally:
        os.umask(before)
    for path in (tmp_path / "batches").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        if path.is_file():
            assert b"secret-key" not in path.read_bytes()


def test_contents_without_a_row_are_deleted_at_the_next_start(tmp_path):
    store = opened(tmp_path)
    kept, batch = uploaded(store, "o", b"x"), created(store)
    store.batches.record(batch.id, [result(1)])
    orphan, _ = store.files.write(io.BytesIO(b"never added"))
    store.close()
    store = opened(tmp_path)
    assert not store.files.path(orphan).exists()
    assert store.files.path(kept.id).exists() and results_in(store, batch.output_file) == [1]
    store.close()


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (OSError(28, "No space left on device"), StorageFullError),
        (OSError(27, "File too large"), StorageFullError),
        (FileNotFoundError(2, "No such file"), FileNotFoundError),
    ],
)
def test_a_full_disk_is_an_error_for_clients(error, becomes):
    with pytest.raises(becomes), storage_errors():
        raise error
    assert issubclass(StorageFullError, LiveError) and StorageFullError().http_status == 503
