"""The body of each proxied route: which fields pass, in what form, and how many answers it asks.

In: JSON as it was sent. Out: Asked, whose body is exactly what was checked, or ParameterError.
"""

from collections.abc import Callable
from typing import Any

from sglang_live.gateway.native.chat import chat_fields, check_continued
from sglang_live.gateway.native.checks import (
    Check,
    ParameterError,
    boolean,
    fields,
    integer,
    number,
    text,
)
from sglang_live.gateway.native.generate_form import generate
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.openai_forms import chat, completion
from sglang_live.gateway.native.prompts import NAME, Asked, ids, texts

_SESSION_S = number(1, 86_400)


Form = Callable[[Any], Asked]


def forms(limits: NativeLimits) -> dict[str, Form]:
    return {
        "/generate": lambda body: generate(body, limits),
        "/v1/completions": lambda body: completion(body, limits),
        "/v1/chat/completions": lambda body: chat(body, limits),
        "/v1/tokenize": lambda body: _tokenize(body, limits),
        "/v1/detokenize": lambda body: _plain(body, {"tokens": ids(limits)}, ("tokens",)),
        "/open_session": _open_session,
        "/close_session": lambda body: _only(body, {"session_id": NAME}, ("session_id",)),
        "/abort_request": lambda body: _only(body, {"rid": NAME, "abort_all": _never}, ("rid",)),
    }


def _only(body: Any, table: dict[str, Check], required: tuple[str, ...] = ()) -> Asked:
    return Asked(fields(table, required=required)(body, ""))


def _plain(body: Any, table: dict[str, Check], required: tuple[str, ...] = ()) -> Asked:
    more = {"model": text(512), "skip_special_tokens": boolean}
    return _only(body, table | more, required)


def _never(value: Any, at: str) -> Any:
    if value is not False:
        raise ParameterError(at, "would end the answers of other clients: name a rid.")
    return None


def _open_session(body: Any) -> Asked:
    table: dict[str, Check] = {
        "capacity_of_str_len": integer(1, 2**31 - 1),
        "session_id": NAME,
        "streaming": boolean,
        "timeout": _SESSION_S,
    }
    # `retention` is the gateway's own and was taken out.
    return _only(body, table, ("capacity_of_str_len",))


def _tokenize(body: Any, limits: NativeLimits) -> Asked:
    table = chat_fields(limits) | {
        "prompt": texts(limits),
        "add_special_tokens": boolean,
    }
    kept = fields(table)(body, "")
    if ("prompt" in kept) == ("messages" in kept):
        raise ParameterError("prompt", "give either prompt or messages.")
    check_continued(kept)
    return Asked(kept)
