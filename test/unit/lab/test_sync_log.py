import json
import warnings

import pytest

from lab.sync_log import SYNC_LOG_ENV, SyncLogPart
from sglang_live.engine_channel.inbox import STAGE_ENV


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Begun, on a machine without a GPU."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv(SYNC_LOG_ENV, str(tmp_path))
    monkeypatch.setenv(STAGE_ENV, "thinker")
    with warnings.catch_warnings():
        SyncLogPart(None).start()
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
