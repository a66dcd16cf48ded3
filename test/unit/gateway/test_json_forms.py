"""Errors for documents that are not JSON and for half surrogate pairs, at bounded cost."""

import json

import pytest

from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.json_forms import Strict, decoder_of, read_form


class Form(Strict):
    text: str = ""
    parts: tuple[dict[str, str], ...] = ()


def error_of(document: str | bytes) -> ClientEventError:
    with pytest.raises(ClientEventError) as refused:
        read_form(document, decoder_of(Form))
    return refused.value


@pytest.mark.parametrize("half", [r"\ud800", r"\uDBFF", r"\udc00", r"\udfff", r"\ud83d\u0041"])
@pytest.mark.parametrize(
    ("document", "path"),
    [
        ('{"text": "HALF"}', "text"),
        ('{"text": "a HALF b"}', "text"),
        ('{"parts": [{}, {"x": "HALF"}]}', "parts[1].x"),
        ('{"parts": [{"HALF": "x"}]}', "parts[0]"),
        (r'{"text": "\\HALF"}', "text"),  # an escaped backslash before it
    ],
)
def test_the_error_for_half_of_a_surrogate_pair_names_its_place(document, path, half):
    for form in (str, str.encode):
        error = error_of(form(document.replace("HALF", half)))
        assert (error.code, error.param) == ("invalid_value", path)
        assert half[:6] in str(error)


@pytest.mark.parametrize(
    "text", [r"\ud83d\ude00", r"\\ud800", r"\uD83D\uDE00 \u00e9", "\U0001f600"]
)
def test_whole_pairs_are_text(text):
    document = f'{{"text": "{text}"}}'
    assert read_form(document, decoder_of(Form)).text == json.loads(document)["text"]


@pytest.mark.parametrize("document", ["", "{", '{"text": "x', r'{"text": "\ud83d\ude00"', b"\xff"])
def test_a_document_that_is_not_json_is_invalid_json(document):
    assert error_of(document).code == "invalid_json"


def test_a_large_document_is_not_searched_but_the_error_names_a_possible_surrogate():
    """Reading 24 MiB escape by escape would delay all sessions by seconds."""
    for piece, may_be in (("\\\\", False), (r"\ud83d\ude00", True)):
        error = error_of('{"text": "' + piece * (1 << 20))
        assert (error.code, error.param) == ("invalid_json", None)
        assert ("surrogate" in str(error)) is may_be
