"""Code of the laboratory in the product's processes."""

import os

import pytest

from lab.attachment import around, joined
from sglang_live.attachment import ATTACH_ENV, attach

CALLS: list[str] = []


def note(place: str) -> None:
    CALLS.append(place)


class Product:
    def double(self, number: int) -> int:
        return 2 * number


def test_what_the_environment_names_is_called_with_the_place(monkeypatch):
    CALLS.clear()
    monkeypatch.setenv(ATTACH_ENV, f"{__name__}:note,{__name__}:note")
    attach("stage")
    assert CALLS == ["stage", "stage"]
    monkeypatch.setenv(ATTACH_ENV, "")
    attach("sglang")
    assert CALLS == ["stage", "stage"]


def test_what_cannot_be_attached_is_an_error(monkeypatch):
    monkeypatch.setenv(ATTACH_ENV, "no_such_module:attach")
    with pytest.raises(ImportError):
        attach("stage")


def test_environments_are_joined_with_all_their_attachments():
    first, second = {ATTACH_ENV: "a:b", "LAB_X": "1"}, {ATTACH_ENV: "c:d", "OTHER": "2"}
    assert joined(first, {"Z": "3"}, second) == {
        ATTACH_ENV: "a:b,c:d",
        "LAB_X": "1",
        "OTHER": "2",
        "Z": "3",
    }
    assert joined({}, {}) == {}
    assert ATTACH_ENV not in os.environ


def test_a_function_around_another_gets_it_and_may_call_it():
    around(Product, "double", lambda plain, product, number: plain(product, number) + 1)
    assert Product().double(3) == 7


def test_a_name_that_is_gone_is_an_error():
    with pytest.raises(AttributeError, match="defines no treble"):
        around(Product, "treble", lambda plain: plain())
