"""Files that training caches between runs are read without running code in them."""

import pickle
from pathlib import Path

import pytest
import torch

from training.demo.__main__ import Training
from training.demo.convolved import ConvolvedClips
from training.demo.hearing import Heard


class _Program:
    def __reduce__(self):
        return (Path.touch, (Path("touched"),))


@pytest.fixture
def training(tmp_path) -> Training:
    made = object.__new__(Training)
    made.work = tmp_path
    return made


def test_a_cached_result_is_read_back_whole(training):
    rows = torch.arange(6).reshape(2, 3).half()
    convolved = ConvolvedClips(["a"], rows, torch.tensor([2]))
    for _ in range(2):
        cached = training._cached("convolved", lambda: (convolved, [Heard("b", rows)]))
    (clip,) = cached[0]
    assert clip.text == "a" and torch.equal(clip.rows, rows)
    assert cached[1][0].text == "b" and torch.equal(cached[1][0].mel, rows)


def test_a_file_that_is_a_program_is_not_run(training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(_Program(), tmp_path / "heard.pt")
    with pytest.raises(pickle.UnpicklingError):
        training._cached("heard", list)
    assert not (tmp_path / "touched").exists()
