"""A store whose process is killed at any line of its code goes on where it was.

A kill before a line of the store's modules leaves what the kernel has by then: a copy of its folder
has it too. Where kills follow one another, the store runs in a child process that ends by SIGKILL.
What it had reported as done by then must be there afterwards, once.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.extensions.batches.records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ENDED,
    FINALIZING,
    VALIDATING,
    Batch,
    Line,
)
from sglang_live.extensions.batches.store import Store

from .batches import URL, FakeTime, input_of, opened, result, results_in, uploaded

TRACED = ("batch_store.py", "file_store.py", "database.py")
# The kernel keeps what a killed process wrote, on any file system; memory spares the syncs.
FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None
N_LINES = 5
# What a script may do; numbers are of lines.
BEGINNING = (("upload", 0), ("create", 0), ("begin", 0), ("claim", 3), ("record", 2), ("claim", 2))
COMPLETES = (("record", 3), ("finish", 0))
CANCELS = (("cancel", 0), ("record", 3), ("finish", 0))


class Play:
    """Does what a script says with one store. tell: called with what was done."""

    def __init__(self, store: Store, tell: Callable[..., None]):
        self.store, self.tell = store, tell
        self.file, self.batch, self.after, self.claimed = "", "", 0, []

    def run(self, script) -> None:
        for name, n in script:
            getattr(self, name)(n)

    def upload(self, _n: int) -> None:
        ids = (str(n) for n in range(1, N_LINES + 1))
        self.file = uploaded(self.store, "o", input_of(ids)).id
        self.tell("file", self.file)

    def create(self, _n: int) -> None:
        self.batch = self.store.batches.create(
            owner="o", endpoint=URL, input_file=self.file, metadata=None, results_kept_s=None
        ).id
        self.tell("batch", self.batch)

    def begin(self, _n: int) -> None:
        begin(self.store, self.batch)

    def claim(self, n: int) -> None:
        lines = self.store.batches.claim(self.batch, self.after, n)
        self.after = max([self.after, *(line.n for line in lines)])
        self.claimed += [line.n for line in lines]

    def record(self, n: int) -> None:
        # Every third line fails.
        lines, self.claimed = self.claimed[:n], self.claimed[n:]
        self.store.batches.record(self.batch, [result(x, bool(x % 3)) for x in lines])
        self.tell("recorded", lines)

    def cancel(self, _n: int) -> None:
        self.store.batches.cancel("o", self.batch)
        self.tell("cancelled", True)

    def finish(self, _n: int) -> None:
        batch = self.store.batches.get("o", self.batch)
        if batch.status == CANCELLING or not batch.n_left:
            end(self.store, batch)
            self.tell("ended", self.store.batches.get("o", self.batch).status)


def begin(store: Store, batch_id: str) -> None:
    lines = [Line(n=n, custom_id=str(n), at=0, n_bytes=1) for n in range(1, N_LINES + 1)]
    store.batches.begin(batch_id, lines)


def end(store: Store, batch: Batch) -> None:
    """As the runner ends a batch whose lines have a result or are not to run."""
    if batch.status == CANCELLING:
        if lines := store.batches.claim(batch.id, 0, 100):
            store.batches.record(batch.id, [result(line.n, False) for line in lines])
        store.batches.finish(batch.id, CANCELLED)
    else:
        store.batches.finish(batch.id, COMPLETED)


def killed_at(step: int, folder: Path, script) -> tuple[bool, dict]:
    """Play a script in a child that is killed before line `step`.

    Returns:
        Whether it came to its end instead, and what it told.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        steps = count(1)

        def trace(frame, event, _arg):
            if not frame.f_code.co_filename.endswith(TRACED):
                return None
            if event == "line" and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        def tell(what: str, value) -> None:
            os.write(writes, json.dumps([what, value]).encode() + b"\n")

        sys.settrace(trace)
        try:
            Play(opened(folder), tell).run(script)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        told = [json.loads(line) for line in pipe.read().splitlines()]
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the child failed by itself"
    found = dict(told)
    found["recorded"] = [n for what, value in told if what == "recorded" for n in value]
    return status == 0, found


def check_and_go_on(folder: Path, told: dict) -> None:
    store = opened(folder, FakeTime())
    try:
        if "file" in told:
            assert store.files.get("o", told["file"])
        known = [batch.id for batch in store.batches.unfinished()]
        if "batch" in told and "ended" not in told:
            assert told["batch"] in known or store.batches.get("o", told["batch"]).status in ENDED
        for batch_id in known:
            check_batch(store, batch_id, told)
        if "ended" in told:
            assert store.batches.get("o", told["batch"]).status == told["ended"]
            assert set(told["recorded"]) <= set(results_of(store, told["batch"]))
        for path in store.files.path("file-" + "0" * 26).parent.iterdir():
            assert store.files.get("o", path.name).n_bytes == path.stat().st_size
    finally:
        store.close()


def check_batch(store: Store, batch_id: str, told: dict) -> None:
    batch = store.batches.get("o", batch_id)
    if told.get("cancelled"):
        assert batch.status == CANCELLING
    if batch.status == VALIDATING:
        begin(store, batch_id)
    lines = store.batches.claim(batch_id, 0, 100)
    assert set(told["recorded"]).isdisjoint(line.n for line in lines), "a finished line is lost"
    if batch.status not in (CANCELLING, FINALIZING):
        for line in lines:
            store.batches.record(batch_id, [result(line.n, bool(line.n % 3))])
    end(store, store.batches.get("o", batch_id))
    if batch.n_lines or batch.status == VALIDATING:
        assert sorted(results_of(store, batch_id)) == list(range(1, N_LINES + 1)), "once each"


def results_of(store: Store, batch_id: str) -> list[int]:
    shown = store.batches.get("o", batch_id).to_json("m", None)
    ids = [shown["output_file_id"], shown["error_file_id"]]
    return [n for file_id in ids if file_id for n in results_in(store, file_id)]


def copied_before_lines(script, folder: Path, copies: Path, known: int) -> list[tuple[Path, dict]]:
    """Play a script, and copy its folder before each line of the store: what a kill there leaves.

    Args:
        known: leading entries of the script whose lines are passed over.
    Returns:
        What had been told by then, with each copy, and at last the folder itself.
    """
    found: list[tuple[Path, dict]] = []
    told: dict = {"recorded": []}
    begun = 0

    def trace(frame, event, _arg):
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line" and begun > known:
            copy = copies / str(len(found))
            shutil.copytree(folder, copy)
            found.append((copy, {**told, "recorded": [*told["recorded"]]}))
        return trace

    def tell(what: str, value) -> None:
        if what == "recorded":
            told["recorded"] += value
        else:
            told[what] = value

    play, before = Play(opened(folder), tell), sys.gettrace()
    sys.settrace(trace)
    try:
        for action in script:
            begun += 1
            play.run([action])
    finally:
        sys.settrace(before)
        play.store.close()
    return [*found, (folder, told)]


@pytest.mark.parametrize("ending", [COMPLETES, CANCELS], ids=["completes", "cancelled"])
def test_a_kill_at_any_line_loses_no_result(ending):
    # The beginning, which both endings have, is tested with one of them.
    known = 0 if ending is COMPLETES else len(BEGINNING)
    with tempfile.TemporaryDirectory(dir=FAST) as name:
        folder, copies = Path(name) / "played", Path(name) / "copies"
        found = copied_before_lines((*BEGINNING, *ending), folder, copies, known)
        for copy, told in found:
            check_and_go_on(copy, told)
    assert told["ended"] == (COMPLETED if ending is COMPLETES else CANCELLED)
    assert len(found) > 200


def test_a_result_file_that_a_kill_left_without_a_result_is_deleted_with_its_batch(tmp_path):
    store = opened(tmp_path)
    Play(store, lambda what, value: None).run([*BEGINNING[:3], ("cancel", 0)])
    [batch] = store.batches.unfinished()
    for file_id in (batch.output_file, batch.error_file):
        store.files.path(file_id).write_bytes(b'{"custom_id": "1"')
    end(store, batch)
    shown = store.batches.get("o", batch.id).to_json("m", None)
    kept = {path.name for path in store.files.path(batch.output_file).parent.iterdir()}
    assert kept == {batch.input_file, shown["error_file_id"]}
    assert len(results_of(store, batch.id)) == N_LINES
    store.close()


ACTION = st.tuples(st.sampled_from(["claim", "record", "finish", "cancel"]), st.integers(1, 3))


@settings(max_examples=40)
@given(st.lists(ACTION, max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=3))
def test_several_kills_in_any_sequence_lose_no_result(actions, steps):
    script = [("upload", 0), ("create", 0), ("begin", 0), *without_work_after_an_end(actions)]
    with tempfile.TemporaryDirectory(dir=FAST) as name:
        for step in steps:
            _, told = killed_at(step, Path(name), script)
            check_and_go_on(Path(name), told)


def without_work_after_an_end(actions) -> list[tuple[str, int]]:
    kept = []
    for name, n in actions:
        if name == "cancel" and ("cancel", 0) in kept:
            continue
        kept.append((name, 0 if name in ("cancel", "finish") else n))
        if name == "finish" and ("cancel", 0) in kept:
            break
    return kept
