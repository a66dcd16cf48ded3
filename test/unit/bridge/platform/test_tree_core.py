import os

import pytest
import torch

from sglang_live.bridge.platform import tree_core
from sglang_live.bridge.platform.tree_core import BACKEND_ENV, use_matching_tree_core


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setenv(BACKEND_ENV, "to be restored")
    monkeypatch.delenv(BACKEND_ENV)


def test_the_installed_sglang_says_which_pytorch_it_is_built_for():
    assert tree_core.torch_of_sglang() == "2.14.1"


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ("2.13.0+cpu", None),
        ("2.14.1+cu130", None),
        ("2.11.0+cu130", "python"),
        ("2.15.0", "python"),
    ],
)
def test_the_tree_in_rust_needs_a_pytorch_that_it_works_with(monkeypatch, installed, chosen):
    monkeypatch.setattr(torch, "__version__", installed)
    use_matching_tree_core()
    assert os.environ.get(BACKEND_ENV) == chosen


def test_a_tree_that_the_operator_chose_is_kept(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setenv(BACKEND_ENV, "rust")
    use_matching_tree_core()
    assert os.environ[BACKEND_ENV] == "rust"
