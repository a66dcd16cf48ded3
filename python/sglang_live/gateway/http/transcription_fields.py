"""Fields of a transcription's form.

In: a multipart form. Out: texts, flags and numbers, or ClientEventError with the field's name.
"""

import re

from starlette.datastructures import FormData

from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.flex.tier import TIERS
from sglang_live.gateway.realtime.events import MAX_HINT, MAX_NAME

HONOURED = (
    *("file", "model", "language", "prompt", "response_format", "service_tier", "stream"),
    "temperature",
)
# OpenAI's parameters for other models: this one cannot produce their output or use their input.
UNSUPPORTED = (
    "include",
    "keywords",
    "known_speaker_names",
    "known_speaker_references",
    "languages",
    "timestamp_granularities",
)
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
# Lists and objects are written as `name[]` and `name[key]`.
_INNER = re.compile(r"\[.*", re.DOTALL)


def check_fields(form: FormData) -> None:
    """Raises ClientEventError if a field is unknown, unsupported, or occurs twice."""
    seen: set[str] = set()
    for written, value in form.multi_items():
        name = _INNER.sub("", written)
        # "auto" lets the server choose; this one does not divide files.
        if name == "chunking_strategy" and value == "auto":
            continue
        if name in (*UNSUPPORTED, "chunking_strategy"):
            raise ClientEventError(
                f"Unsupported parameter: '{name}' has no meaning for this model.",
                code="unsupported_parameter",
                param=name,
            )
        if written not in HONOURED:
            raise ClientEventError(
                f"Unknown parameter: {cut(written)!r}.", code="unknown_parameter", param=written
            )
        if name in seen:
            raise ClientEventError(f"'{name}' occurs twice.", param=name)
        seen.add(name)


def text_of(form: FormData, name: str) -> str | None:
    """Returns None if the field is absent.

    Raises:
        ClientEventError: the field is a file or too long.
    """
    value = form.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ClientEventError(f"'{name}' must be text.", param=name)
    most = MAX_HINT if name == "prompt" else MAX_NAME
    if len(value) > most:
        raise ClientEventError(f"'{name}' may have at most {most} characters.", param=name)
    return value


def flag(form: FormData, name: str) -> bool:
    text = text_of(form, name)
    if text is None:
        return False
    if text.lower() not in _FLAGS:
        raise ClientEventError(f"{name} must be true or false, got {cut(text)!r}.", param=name)
    return _FLAGS[text.lower()]


def service_tier(form: FormData) -> str | None:
    name = text_of(form, "service_tier")
    if name is not None and name not in TIERS:
        raise ClientEventError(
            f"Unknown service_tier {cut(name)!r}: {', '.join(TIERS)}.", param="service_tier"
        )
    return name


def temperature(form: FormData) -> float:
    text = text_of(form, "temperature")
    try:
        value = 0.0 if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise ClientEventError(
            f"temperature must be 0 to 2, got {cut(str(text))!r}.", param="temperature"
        )
    return value
