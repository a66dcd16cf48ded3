"""How much of its conversation a session of SGLang's own API keeps: `retention` of /open_session.

In: the body of a request, the server's own bounds. Out: RetentionConfig, and the body without it.
"""

from typing import Annotated

import msgspec

from sglang_live.errors import BadInputError
from sglang_live.kv.retention import RetentionConfig

# Attention sinks of StreamingLLM, arXiv 2309.17453; the engine rounds them up to a page. Where the
# instructions of such a session end, only its client knows.
SINK_TOKENS = 4

_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class _RetentionForm(msgspec.Struct, forbid_unknown_fields=True):
    window: _Tokens
    sink: _Tokens | None = None
    slack: _Tokens | None = None


def take_retention(body: object, server: RetentionConfig | None) -> RetentionConfig | None:
    """Take `retention` out of the body, which SGLang would not understand.

    Args:
        server: gives what the client left out; None: this server keeps whole conversations.
    Returns:
        With a number of sink tokens. None: the body asks for nothing.
    Raises:
        BadInputError: bounds that make no sense, or that would not be kept.
    """
    if not isinstance(body, dict) or "retention" not in body:
        return None
    try:
        form = msgspec.convert(body.pop("retention"), _RetentionForm)
    except msgspec.ValidationError as error:
        raise BadInputError(f"retention: {error}") from None
    if server is None:
        raise BadInputError("retention: this server keeps whole conversations.")
    if body.get("streaming") is not True:
        raise BadInputError('retention: only sessions with "streaming": true can be bounded.')
    return RetentionConfig(
        sink_tokens=form.sink or server.sink_tokens or SINK_TOKENS,
        window_tokens=form.window,
        slack_tokens=form.slack or server.slack_tokens,
    )
