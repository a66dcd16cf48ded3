"""Checks of the machine and of the checkpoint before anything is loaded."""

import errno
import json
import os

import pytest

from sglang_live import launch_server, preflight
from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.checkpoint_files import check_checkpoint, find_checkpoint
from sglang_live.models.demo.location import TRAINED


@pytest.fixture
def full(monkeypatch):
    """A disk that has no room."""

    def no_space(folder, n_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preflight, "probe", no_space)


def test_an_absent_log_folder_is_made(tmp_path):
    preflight.check_log_folder("--log-dir", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())


def test_a_log_folder_that_is_no_folder_is_refused_by_its_flag(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInputError, match=f"--log-dir: cannot write {folder}: "):
            preflight.check_log_folder("--log-dir", folder)


def test_a_server_starts_with_a_full_log_disk(tmp_path, full, caplog):
    preflight.check_log_folder("--log-dir", tmp_path)
    assert "log_folder_full flag=--log-dir" in caplog.text


def test_a_full_disk_that_a_server_needs_is_named(tmp_path, full, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(LiveError, match=f"TMPDIR: cannot write {tmp_path}: No space left"):
        preflight.check_temporary_folder()
    with pytest.raises(LiveError, match=r"cannot write /dev/shm: No space left.*--shm-size"):
        preflight.check_shared_memory()
    with pytest.raises(LiveError, match=f"--session-storage: cannot write {tmp_path}: No space"):
        preflight.check_storage(tmp_path, 1)


def test_an_absent_folder_for_temporary_files_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    with pytest.raises(LiveError, match=r"TMPDIR: cannot write .*absent: No such file"):
        preflight.check_temporary_folder()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            "Qwen/Qwen3-Omni-30B-A3B-Instruct",
            "downloads no checkpoints: .* `hf download Qwen/",
        ),
        ("", "--model-path is empty: --model-path is the directory of a checkpoint"),
        (".", r"is no checkpoint: it has no config.json, but a\.txt, adapters, .* and 3 more; "),
        ("a.txt", "a.txt is a file: --model-path is the directory"),
        ("empty", "/empty is no checkpoint: it is empty; .* or demo, cascade"),
        ("hub", "it has no config.json, but hub/snapshots/b95 has one"),
        ("gguf", "m.gguf is GGUF, which is not served"),
        ("adapters", r"it is an adapter \(LoRA\)"),
        ("/absent/model", "there is no directory /absent/model: "),
        ("Demo", "there is no model Demo; did you mean demo?"),
        ("cascad", "did you mean cascade?"),
    ],
)
def test_a_path_without_a_checkpoint_is_told_what_is_there(tmp_path, monkeypatch, given, complaint):
    for name in ("empty", "hub/snapshots/b95", "gguf", "adapters", "z"):
        (tmp_path / name).mkdir(parents=True)
    for name in (
        "a.txt",
        "b.txt",
        "c.txt",
        "hub/snapshots/b95/config.json",
        "gguf/m.gguf",
        "adapters/adapter_config.json",
    ):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=complaint):
        find_checkpoint(given, ("demo", "cascade"))


def test_files_that_tls_cannot_use_are_refused_by_name(tmp_path):
    (tmp_path / "cert.pem").write_text("no certificate")
    for key in (None, tmp_path / "absent.pem"):
        with pytest.raises(BadInputError, match=r"--ssl-certfile: .*cert\.pem, with the key in "):
            preflight.check_certificate(tmp_path / "cert.pem", key)


def test_this_machine_passes_all_checks(tmp_path):
    preflight.check_temporary_folder()
    preflight.check_shared_memory()
    preflight.check_storage(tmp_path, 1)
    check_checkpoint(TRAINED)


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("a\n  ^^^^")])
def test_the_last_line_is_the_reason_of_any_fault(fault, capsys):
    def fail() -> int:
        raise fault

    assert launch_server.end_in_one_line(fail) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: {type(fault).__name__}: {' '.join(str(fault).split())}"


# --- files of a checkpoint ---


def weights(n_bytes: int, header: object = None) -> bytes:
    tensor = {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}
    text = json.dumps({"a": tensor} if header is None else header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(n_bytes)


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights(100))
    check_checkpoint(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("model.safetensors", weights(100)[:-1], "has .* bytes, its header says"),
        ("model.safetensors", weights(100) + b"x", "has .* bytes, its header says"),
        ("model.safetensors", weights(100)[:20], "is no safetensors file, or cut short"),
        ("model.safetensors", b"", "is no safetensors file, or cut short"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n" * 3, "is no safe"),
        ("model.safetensors", weights(4, {"a": {}}), "broken header"),
        ("model.safetensors", weights(4, [1]), "broken header"),
        ("tokenizer.json", b"{", "is no JSON"),
        ("tokenizer.json", b"\xff\xfe", "is no JSON"),
        ("x.safetensors.index.json", b'{"weight_map": {"a": "far.safetensors"}}', "is missing"),
        ("x.safetensors.index.json", b"[]", "has no weight_map"),
    ],
)
def test_a_broken_file_is_named(checkpoint, name, content, complaint):
    (checkpoint / name).write_bytes(content)
    with pytest.raises(BadInputError, match=complaint) as refused:
        check_checkpoint(checkpoint)
    assert str(checkpoint) in str(refused.value)


def test_a_checkpoint_without_weights_is_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match="has no weights"):
        check_checkpoint(checkpoint)
    with pytest.raises(BadInputError, match="there is no directory"):
        check_checkpoint(checkpoint / "absent")
