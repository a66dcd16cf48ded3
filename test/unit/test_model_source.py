"""`python -m sglang_live.model_source`: what scripts/demo.sh does before it starts the server."""

import pytest

from sglang_live import model_source
from sglang_live.errors import BadInputError, LiveError
from sglang_live.model_source import OFFLINE, main


def test_a_model_that_is_there_is_ready(tmp_path):
    assert main(["--model-path", "demo", "--cache-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [(LiveError("the index cannot be reached"), OFFLINE), (BadInputError("another hash"), 2)],
)
def test_a_failed_download_is_no_refused_one(monkeypatch, tmp_path, capsys, error, status):
    def fail(cache, report):
        raise error

    monkeypatch.setattr(model_source, "demo_weights", fail)
    assert main(["--model-path", "cascade", "--cache-dir", str(tmp_path)]) == status
    assert str(error) in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_written_is_told_before_a_download(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--model-path", "cascade", "--cache-dir", str(tmp_path / "file")]) == 2
    assert "--cache-dir: cannot write" in capsys.readouterr().err
