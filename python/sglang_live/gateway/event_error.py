"""A refused client event, and the `error` object that tells the client why."""

from typing import Any

from sglang_live.errors import BadInputError, LiveError

# Errors quote what was wrong, which may be all of a frame.
_MAX_MESSAGE, _MAX_PARAM = 1000, 256


class ClientEventError(BadInputError):
    """One client event is wrong; nothing was changed.

    Attributes:
        code: protocol error code; some clients act on it.
        param: path of the offending field, such as "session.audio.output.voice", or None.
    """

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param


def cut(text: str, n_characters: int = 80) -> str:
    return text if len(text) <= n_characters else text[:n_characters] + "…"


def error_body(error: LiveError) -> dict[str, Any]:
    """The part of an error object that all its uses share: type, code, message, param."""
    param = getattr(error, "param", None)
    return {
        "type": "server_error" if error.http_status >= 500 else "invalid_request_error",
        "code": error.code,
        "message": cut(str(error), _MAX_MESSAGE),
        "param": param and cut(param, _MAX_PARAM),
    }


def internal_error() -> LiveError:
    """What a client is told about a bug of ours; the log has the traceback."""
    return LiveError("The server had an error while processing this event.")
