"""The name of an engine's load file shows its stage."""

from sglang_live.bridge.platform.load_file import SHM_NAMES_ENV, path_for
from sglang_live.stages.transport.wire import SHM_PREFIX


def test_the_file_has_the_stages_prefix_and_a_name_per_engine(monkeypatch):
    monkeypatch.setenv(SHM_NAMES_ENV, f"{SHM_PREFIX}123-")
    assert path_for("a").startswith(f"/dev/shm/{SHM_PREFIX}123-loads-")
    assert path_for("a") == path_for("a") != path_for("b")


def test_an_engine_outside_a_stage_has_a_name_too(monkeypatch):
    monkeypatch.delenv(SHM_NAMES_ENV, raising=False)
    assert path_for("a").startswith("/dev/shm/sglang_loads-")
