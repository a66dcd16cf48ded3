"""Reader of a client's JSON into a form, with errors that name the faulty place.

In: one JSON document. Out: the form, or ClientEventError with code and param.
Forms refuse unknown keys: a client would take an ignored key for a setting that has an effect.
"""

import json
import re
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

from sglang_live.gateway.beta_names import ga_name
from sglang_live.gateway.errors import ClientEventError, cut

Form = TypeVar("Form")

_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
# One escape after the other, so that a pair matches as a whole; group 1 is half of a pair.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_CANDIDATE = re.compile(r"\\u[dD][89a-fA-F]")
# Bytes. In larger documents the place is not searched for, or not even the fault: the search
# would delay all sessions.
_MAX_SEARCHED, _MAX_SCANNED = 1 << 16, 1 << 20


# A setting that changes nothing.
Ignored = Any
# Of OpenAI's API. "flex": the result may take longer.
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of forms. An unknown key is an `unknown_parameter`."""


def read_form(data: str | bytes, decoder: msgspec.json.Decoder[Form]) -> Form:
    """
    Raises:
        ClientEventError: the document is not JSON or not of this form; `param` is the path of
            the fault.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise broken_json(data, error) from None


def read_value(value: Any, form: Any, at: str, *, strict: bool = True) -> Any:
    """As read_form, of a part of a document that was read before.

    Args:
        at: its path; "" for a whole document.
        strict: False: numbers and booleans may be written as text.
    """
    try:
        return msgspec.convert(value, form, strict=strict)
    except msgspec.ValidationError as error:
        raise _explain(str(error), b"null", at) from None


def decoder_of(form: type[Form]) -> msgspec.json.Decoder[Form]:
    key: Any = form  # to mypy, a type of unknown metaclass may not be hashable
    return _decoder_of(key)


@cache
def _decoder_of(form: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form)


def unknown_parameter(path: str) -> ClientEventError:
    """path: a key that the protocol does not have."""
    known = ga_name(path)
    hint = f" The protocol has '{known}'." if known else ""
    return ClientEventError(
        f"Unknown parameter: '{cut(path)}'.{hint}", code="unknown_parameter", param=path
    )


def missing_parameter(path: str) -> ClientEventError:
    return ClientEventError(
        f"Missing required parameter: '{path}'.", code="missing_required_parameter", param=path
    )


def unsupported_parameter(path: str, why: str) -> ClientEventError:
    """path: a setting of the protocol that would have no effect here."""
    return ClientEventError(
        f"Unsupported parameter: '{cut(path)}' {why}", code="unsupported_parameter", param=path
    )


def check_neutral(value: Any, neutral: tuple[Any, ...], path: str) -> None:
    """Raises ClientEventError if a setting without an effect has another value than these or null.

    neutral: values that mean what the server does anyway.
    """
    # True is not 1.
    same = (one for one in neutral if isinstance(value, bool) == isinstance(one, bool))
    if value is None or value in same:
        return
    allowed = ", ".join(map(repr, (None, *neutral)))
    raise unsupported_parameter(path, f"has no effect on this server, only: {allowed}.")


def broken_json(data: str | bytes, error: Exception) -> ClientEventError:
    """The error for a document that a JSON reader refused with `error`.

    JSON can write half of a surrogate pair ("\\ud800"), which is not valid in any text. Readers
    report it as truncated or malformed JSON, so this function searches for it.
    """
    if isinstance(error, RecursionError):
        return ClientEventError("JSON nested too deeply.", code="invalid_json")
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    half = _lone_surrogate(text) if len(text) <= _MAX_SCANNED else None
    if half is None:
        may_be = len(text) > _MAX_SCANNED and _CANDIDATE.search(text)
        hint = " It may hold half of a surrogate pair." if may_be else ""
        return ClientEventError(f"Invalid JSON: {error}.{hint}", code="invalid_json")
    path = _place_of_surrogate(data) if len(data) <= _MAX_SEARCHED else ""
    return ClientEventError(
        f"'{cut(path) or 'The JSON'}' holds {half}, half of a surrogate pair, which is no text.",
        code="invalid_value",
        param=path or None,
    )


def loosely_read(data: str | bytes) -> Any:
    """The document, with half surrogate pairs if it has any; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _lone_surrogate(text: str) -> str | None:
    """The first escape of half of a pair, as it is written."""
    found = ("\\" + match[1] for match in _ESCAPE.finditer(text) if match[1])
    return next(found, None)


def _place_of_surrogate(data: str | bytes) -> str:
    """Path of the first text that holds half of a pair; for a key, the path of its object."""
    pending = [("", loosely_read(data))]
    while pending:
        path, value = pending.pop()
        if isinstance(value, list):
            pending += reversed([(f"{path}[{n}]", part) for n, part in enumerate(value)])
        elif isinstance(value, dict):
            if any(map(_SURROGATE.search, value)):
                return path
            parts = [(f"{path}.{name}".lstrip("."), part) for name, part in value.items()]
            pending += reversed(parts)
        elif isinstance(value, str) and _SURROGATE.search(value):
            return path
    return ""


def _explain(message: str, data: str | bytes, at: str = "") -> ClientEventError:
    """Turn msgspec's "Expected `str`, got `int` - at `$.audio`" into a protocol error.

    at: path of what was read.
    """
    what, found, path = message.rpartition(" - at `$")  # it may quote all of the document
    if not found:
        what, path = message, ""
    path = (at + path.removesuffix("`")).removeprefix(".")
    if unknown := _UNKNOWN.fullmatch(what):
        _check_readable(data)
        return unknown_parameter(f"{path}.{unknown['name']}".lstrip("."))
    if missing := _MISSING.search(what):
        return missing_parameter(f"{path}.{missing['name']}".lstrip("."))
    if not path:
        return ClientEventError(f"Not what is expected here: {what}.", code="invalid_event")
    code = "invalid_type" if ", got `" in what else "invalid_value"
    return ClientEventError(f"{what} at '$.{path}'.", code=code, param=path)


def _check_readable(data: str | bytes) -> None:
    """Raises ClientEventError if the document is not JSON after its first unknown key."""
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise broken_json(data, error) from None
