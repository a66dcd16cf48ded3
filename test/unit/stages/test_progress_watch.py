"""A scheduler with work and without a completed round is stuck; any other is left alone."""

import pytest

from sglang_live.bridge.scheduler.watch import ProgressCell
from sglang_live.stages.progress_watch import ROUND_TOKENS, ProgressWatch


@pytest.fixture
def watch():
    return ProgressWatch(limit_s=10)


def test_one_that_is_idle_is_never_stuck(watch):
    assert not any(watch.look(now_s, has_work=False, n_steps=5) for now_s in range(0, 1000, 7))


def test_one_that_completes_rounds_is_never_stuck(watch):
    assert not any(watch.look(9.0 * n, has_work=True, n_steps=n) for n in range(100))


def test_one_with_work_that_completes_none_is_stuck_after_the_limit(watch):
    assert not watch.look(0, has_work=True, n_steps=5)
    assert not watch.look(10, has_work=True, n_steps=5)
    assert watch.look(10.1, has_work=True, n_steps=5)


def test_time_without_work_does_not_count(watch):
    watch.look(0, has_work=True, n_steps=5)
    watch.look(8, has_work=False, n_steps=5)
    assert not watch.look(17, has_work=True, n_steps=5)
    assert watch.look(19, has_work=True, n_steps=5)


def test_a_round_of_long_prompts_gets_as_much_longer(watch):
    n_tokens = 3 * ROUND_TOKENS
    watch.look(0, has_work=True, n_steps=5, round_tokens=n_tokens)
    assert not watch.look(30, has_work=True, n_steps=5, round_tokens=n_tokens)
    assert watch.look(30.1, has_work=True, n_steps=5, round_tokens=n_tokens)


def test_one_that_has_a_reason_begins_anew(watch):
    watch.look(0, has_work=True, n_steps=5)
    assert watch.look(11, has_work=True, n_steps=5)
    watch.forgive(11)
    assert not watch.look(20, has_work=True, n_steps=5)
    assert watch.look(22, has_work=True, n_steps=5)


def test_what_a_scheduler_counts_is_read_through_another_opening_of_the_file(tmp_path):
    writer, reader = (ProgressCell(tmp_path / "progress") for _ in range(2))
    assert reader.read() == (0, 0)
    writer.launch(512)
    writer.step()
    writer.step()
    assert reader.read() == (2, 512)
    assert (tmp_path / "progress").stat().st_mode & 0o777 == 0o600
