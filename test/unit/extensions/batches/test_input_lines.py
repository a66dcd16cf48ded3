"""Input files: where their lines are, and what is wrong with them."""

import json

import pytest

from sglang_live.errors import ModelNotFoundError
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.input_lines import CheckedInput, body_of, check_input

URL = "/v1/chat/completions"


def only_m(name: str | None) -> None:
    if name not in (None, "m"):
        raise ModelNotFoundError(f"The model '{name}' does not exist.")


def line(custom_id: str = "a", **fields) -> str:
    body = {"model": "m", "messages": []}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body} | fields)


def checked(tmp_path, *lines: str | bytes, **config) -> CheckedInput:
    path = tmp_path / "input"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return check_input(path, URL, only_m, BatchConfig(**config))


def faults(result: CheckedInput) -> list[tuple[int | None, str, str | None]]:
    return [(fault.n_line, fault.code, fault.param) for fault in result.faults]


def test_lines_are_found_at_their_places(tmp_path):
    result = checked(tmp_path, line("a"), "", "  ", line("ü", body={"x": "ü"}), line("c"), "")
    assert not result.faults
    assert [(x.n, x.custom_id) for x in result.lines] == [(1, "a"), (4, "ü"), (5, "c")]
    text = (tmp_path / "input").read_bytes()
    bodies = [body_of(text[x.at : x.at + x.n_bytes]) for x in result.lines]
    assert json.loads(bodies[1]) == {"x": "ü"}


def test_a_byte_order_mark_and_carriage_returns_are_no_fault(tmp_path):
    result = checked(tmp_path, b"\xef\xbb\xbf" + line("a").encode() + b"\r", line("b"))
    assert [x.custom_id for x in result.lines] == ["a", "b"]
    assert result.lines[0].at == 3


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[]", "invalid_event", None),
        (b"\xff\xfe", "invalid_json_line", None),
        ('{"custom_id": "a"}', "missing_required_parameter", "method"),
        (line(more=1), "unknown_parameter", "more"),
        (line(custom_id=5), "invalid_type", "custom_id"),
        (line(""), "invalid_value", "custom_id"),
        (line("a" * 513), "invalid_value", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/completions"), "invalid_url", "url"),
        (line(body=[]), "invalid_type", "body"),
        (line(body={"model": 3}), "invalid_type", "body.model"),
        (line(body={"model": "gpt"}), "model_not_found", "body.model"),
    ],
)
def test_a_faulty_line_is_named(tmp_path, text, code, param):
    result = checked(tmp_path, line("first"), text, line("last"))
    assert faults(result) == [(2, code, param)]
    assert len(result.lines) == 2, "the others are checked, too"


def test_a_custom_id_occurs_once(tmp_path):
    result = checked(tmp_path, line("a"), line("b"), line("a"))
    assert faults(result) == [(3, "duplicate_custom_id", "custom_id")]
    assert "line 1" in result.faults[0].message


def test_a_long_line_is_a_fault_and_the_next_line_is_not(tmp_path):
    long = line("a", body={"x": "y" * 5000})
    result = checked(tmp_path, long, line("b"), max_line_bytes=1000)
    assert faults(result) == [(1, "line_too_large", None)]
    assert [(x.n, x.custom_id, x.at) for x in result.lines] == [(2, "b", len(long) + 1)]


def test_the_number_of_lines_and_of_faults_is_bounded(tmp_path):
    assert faults(checked(tmp_path, *(line(str(n)) for n in range(5)), max_lines=4)) == [
        (5, "too_many_requests", None)
    ]
    assert len(checked(tmp_path, *("{" for _ in range(50)), max_faults=7).faults) == 7


@pytest.mark.parametrize("text", ["", "\n\n", "\r\n"])
def test_an_empty_file_is_a_fault(tmp_path, text):
    assert faults(checked(tmp_path, text)) == [(None, "empty_file", None)]
