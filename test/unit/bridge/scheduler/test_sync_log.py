import json
import warnings

import pytest

from sglang_live.bridge.scheduler.sync_log import SYNC_LOG_ENV, SyncLog


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Begun, on a machine without a GPU."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv(SYNC_LOG_ENV, str(tmp_path))
    with warnings.catch_warnings():
        SyncLog.begin_from_env("thinker")
        yield lambda: json.loads(next(tmp_path.glob("*.json")).read_text())


def wait_as_torch_does() -> None:
    warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", stacklevel=1)


def test_a_place_that_waits_is_recorded_with_its_stack(log):
    wait_as_torch_does()
    document = log()
    (place,) = document["places"]
    assert document["engine"] == "thinker"
    assert (place["n"], place["thread"]) == (1, "MainThread")
    assert any(frame.endswith(" wait_as_torch_does") for frame in place["stack"])


def test_a_place_is_counted_each_time(log):
    for _ in range(64):
        wait_as_torch_does()
    assert [place["n"] for place in log()["places"]] == [64]


def test_other_warnings_are_shown_as_before(log, monkeypatch):
    with pytest.warns(UserWarning, match="another"):
        warnings.warn("another", stacklevel=1)
    assert log()["places"] == []


def test_without_the_variable_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.delenv(SYNC_LOG_ENV, raising=False)
    show = warnings.showwarning
    SyncLog.begin_from_env("talker")
    assert warnings.showwarning is show
