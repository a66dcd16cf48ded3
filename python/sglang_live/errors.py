"""Errors that reach clients, each with its protocol code and HTTP status."""

from collections.abc import Mapping
from typing import ClassVar


class LiveError(Exception):
    """Base of all errors that a client may see.

    Attributes:
        code: machine-readable name, as in the OpenAI error object.
        http_status: status of the HTTP response if a request raises the error.
        param: place of the fault in the request; None if there is no such place.
        headers: of the HTTP response.
        retry_after_s: time after which a retry may succeed, in seconds; None if unknown.
    """

    code = "internal_error"
    http_status = 500
    param: str | None = None
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, message: str, *, retry_after_s: float | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadInputError(LiveError):
    """The request is invalid; a retry fails too."""

    code = "invalid_value"
    http_status = 400


class ContextLengthError(BadInputError):
    """The input does not fit into the model's context."""

    code = "context_length_exceeded"


class ModelNotFoundError(LiveError):
    """The request names a model that this server does not serve."""

    code = "model_not_found"
    http_status = 404


class CapacityError(LiveError):
    """A limit of this server is reached; the request changed nothing."""

    code = "server_overloaded"
    http_status = 503


class StageUnavailableError(LiveError):
    """A stage process died or has not started yet."""

    code = "stage_unavailable"
    http_status = 503


class StageFailedError(LiveError):
    """A stage reported that one job failed.

    reason: the stage's code of the failure; "" if it gave none.
    """

    code = "stage_failed"
    http_status = 500

    def __init__(self, message: str, *, reason: str = ""):
        super().__init__(message)
        self.reason = reason
        if reason == ContextLengthError.code:
            self.code = reason
            self.http_status = ContextLengthError.http_status


class DeadlineError(LiveError):
    """The work was not done by its deadline."""

    code = "deadline_exceeded"
    http_status = 504


class SeamError(RuntimeError):
    """A hook into SGLang could not be installed; the process must not serve."""


class OptionsAlikeError(BadInputError):
    """Two options begin with the same token of the model."""

    code = "options_alike"


class ItemsMissingError(BadInputError):
    """The stage lacks items of the history, because it was restarted: send all of them again."""

    code = "items_missing"
