"""The line that explains a failed start, out of what a process printed; and who ended it."""

import signal

import pytest

from sglang_live.stages.endings import (
    EXIT_ENGINE_DIED,
    EXIT_STUCK,
    cause_of,
    telling_line,
    was_work,
)

CARETS = [
    "Traceback (most recent call last):",
    '  File "scheduler.py", line 6071, in run_scheduler_process',
    "    scheduler = Scheduler(server_args, port_args)",
    "                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
]
AFTERWARDS = [
    "",
    "[05:53:48] Received sigquit from a child process. It usually means the child failed.",
    "    ~~~~^^^",
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: leaked semaphores",
    "  warnings.warn('resource_tracker: There appear to be 1 leaked semaphore objects')",
]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["OSError: [Errno 28] No space left on device"], ...),
        (["AssertionError: max_running_request is zero"], ...),
        (
            ["safetensors_rust.SafetensorError: Error while deserializing header"],
            ...,
        ),
        (["ValueError: Not enough host memory available. Requesting 100000.00 GB"], ...),
        (["RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"], ...),
        (
            ["05:53:48 thinker/0 ERROR x: failed: KeyError: 'model_type'"],
            "KeyError: 'model_type'",
        ),
        (["error: OSError: cannot write"], "OSError: cannot write"),
        (["sglang_live refuses to start: seam load_audio did not land"], ...),
        (["MemoryError"], ...),
    ],
)
def test_the_reason_is_found_among_tracebacks_and_shutdown_messages(lines, reason):
    told = telling_line([*CARETS, *lines, *AFTERWARDS])
    assert told == (lines[0] if reason is ... else reason)


def test_a_process_that_printed_nothing_is_explained_by_its_signal():
    assert telling_line([]) == ""
    assert "/dev/shm is full" in cause_of(-signal.SIGBUS, [], False)
    assert "too little memory" in cause_of(-signal.SIGKILL, [], True)
    assert cause_of(-signal.SIGSEGV, [], False) == "Segmentation fault"
    assert cause_of(3, [], False) == ""


@pytest.mark.parametrize(
    ("status", "out_of_memory", "suspicious"),
    [
        (EXIT_ENGINE_DIED, False, True),
        (EXIT_STUCK, False, True),
        (1, False, True),
        (-signal.SIGSEGV, False, True),
        (-signal.SIGABRT, False, True),
        (-signal.SIGKILL, False, False),
        (-signal.SIGKILL, True, True),
        (-signal.SIGTERM, True, False),
        (128 + signal.SIGTERM, False, False),
        (-signal.SIGINT, False, False),
        (0, False, False),
    ],
)
def test_a_process_ended_from_outside_was_not_ended_by_its_work(status, out_of_memory, suspicious):
    assert was_work(status, out_of_memory) is suspicious
