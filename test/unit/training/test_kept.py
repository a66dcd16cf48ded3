"""What training keeps between runs is read back without running what a file says."""

import pickle
from pathlib import Path

import pytest
import torch

from training.demo.__main__ import Training
from training.demo.fronts import Fronts
from training.demo.hearing import Heard


class _Program:
    def __reduce__(self):
        return (Path.touch, (Path("touched"),))


@pytest.fixture
def training(tmp_path) -> Training:
    made = object.__new__(Training)
    made.work = tmp_path
    return made


def test_what_was_made_is_read_back_whole(training):
    rows = torch.arange(6).reshape(2, 3).half()
    fronts = Fronts(["a"], rows, torch.tensor([2]))
    for _ in range(2):
        kept = training._kept("fronts", lambda: (fronts, [Heard("b", rows)]))
    (front,) = kept[0]
    assert front.text == "a" and torch.equal(front.rows, rows)
    assert kept[1][0].text == "b" and torch.equal(kept[1][0].mel, rows)


def test_a_file_that_is_a_program_is_not_run(training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(_Program(), tmp_path / "heard.pt")
    with pytest.raises(pickle.UnpicklingError):
        training._kept("heard", list)
    assert not (tmp_path / "touched").exists()
