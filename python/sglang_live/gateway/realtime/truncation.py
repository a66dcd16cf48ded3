"""The `truncation` settings of a session: the part of a long conversation that it keeps.

In: a word or RetentionRatioForm, the server's own retention. Out: Truncation.
"""

from dataclasses import dataclass, replace
from typing import Any

from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.realtime.events import RetentionRatioForm
from sglang_live.kv.retention import RetentionConfig

_PATH = "session.truncation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """
    wire: the client's value, for the echo.
    retention: its meaning here; None: the whole conversation is kept.
    """

    wire: str | dict[str, Any] = "auto"
    retention: RetentionConfig | None = None


def choose_truncation(
    form: str | RetentionRatioForm | None, server: RetentionConfig | None
) -> Truncation:
    """
    Args:
        form: None is "auto".
        server: meaning of "auto"; None: this server keeps whole conversations.
    Raises:
        ClientEventError: an unknown word, or a ratio on a server that keeps whole conversations.
    """
    match form:
        case None | "auto":
            return Truncation(retention=server)
        case "disabled":
            return Truncation(wire="disabled")
        case str():
            raise ClientEventError(
                f"Unknown truncation {form!r}: auto, disabled or a retention_ratio.", param=_PATH
            )
    if server is None:
        raise ClientEventError(
            "This server keeps whole conversations: truncation must be auto or disabled.",
            param=_PATH,
        )
    wire: dict[str, Any] = {"type": "retention_ratio", "retention_ratio": form.retention_ratio}
    limit_tokens = form.token_limits.post_instructions if form.token_limits else None
    kept = RetentionConfig()
    if limit_tokens is None:
        limit_tokens, kept = server.window_tokens + server.slack_tokens, server
    else:
        wire["token_limits"] = {"post_instructions": limit_tokens}
    # Beyond the limit, tokens are dropped until the ratio of it is left: that is the window, and
    # the slack is the rest of the limit.
    window_tokens = max(1, int(form.retention_ratio * limit_tokens))
    slack_tokens = max(1, limit_tokens - window_tokens)
    return Truncation(
        wire=wire,
        retention=replace(
            kept, sink_tokens=None, window_tokens=window_tokens, slack_tokens=slack_tokens
        ),
    )
