"""The body of each proxied route: which fields pass, in what form, and how many completions it has.

In: JSON as it was sent. Out: CheckedBody, or ParameterError.
"""

from collections.abc import Callable
from typing import Any

from sglang_live.gateway.chat.answers import SpokenAnswers
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
from sglang_live.gateway.native.prompts import NAME, CheckedBody, ids, texts

_SESSION_S = number(1, 86_400)

Form = Callable[[Any], CheckedBody]


def forms(limits: NativeLimits, answers: SpokenAnswers) -> dict[str, Form]:
    return {
        "/generate": lambda body: generate(body, limits),
        "/v1/completions": lambda body: completion(body, limits),
        "/v1/chat/completions": lambda body: chat(body, limits, answers),
        "/v1/tokenize": lambda body: _tokenize(body, limits, answers),
        "/v1/detokenize": lambda body: _plain(body, {"tokens": ids(limits)}, ("tokens",)),
        "/open_session": _open_session,
        "/close_session": lambda body: _only(body, {"session_id": NAME}, ("session_id",)),
        "/abort_request": lambda body: _only(body, {"rid": NAME, "abort_all": _false}, ("rid",)),
    }


def _only(body: Any, table: dict[str, Check], required: tuple[str, ...] = ()) -> CheckedBody:
    return CheckedBody(fields(table, required=required, nulls=True)(body, ""))


def _plain(body: Any, table: dict[str, Check], required: tuple[str, ...] = ()) -> CheckedBody:
    more = {"model": text(512), "skip_special_tokens": boolean}
    return _only(body, table | more, required)


def _false(value: Any, at: str) -> Any:
    if value is not False:
        raise ParameterError(at, "would end the requests of other clients: name a rid.")
    return None


def _open_session(body: Any) -> CheckedBody:
    table: dict[str, Check] = {
        "capacity_of_str_len": integer(1, 2**31 - 1),
        "session_id": NAME,
        "streaming": boolean,
        "timeout": _SESSION_S,
    }
    # `retention` is the gateway's own field: take_retention has removed it.
    return _only(body, table, ("capacity_of_str_len",))


def _tokenize(body: Any, limits: NativeLimits, answers: SpokenAnswers) -> CheckedBody:
    table = chat_fields(limits, answers) | {
        "prompt": texts(limits),
        "add_special_tokens": boolean,
    }
    kept = fields(table, nulls=True)(body, "")
    if ("prompt" in kept) == ("messages" in kept):
        raise ParameterError("prompt", "give either prompt or messages.")
    check_continued(kept)
    return CheckedBody(kept)
