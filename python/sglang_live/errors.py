"""Errors that reach users. Each knows its protocol code and HTTP status."""


class LiveError(Exception):
    """Base of all errors a user may see.

    Attributes:
        code: short machine-readable name, as in the OpenAI error object.
        http_status: status of the HTTP answer when raised in a request.
        retry_after_s: seconds after which trying again makes sense, or None.
    """

    code = "internal_error"
    http_status = 500

    def __init__(self, message: str, *, retry_after_s: float | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadInputError(LiveError):
    """The request itself is wrong; sending it again cannot help."""

    code = "invalid_value"
    http_status = 400


class ContextLengthError(BadInputError):
    """The input does not fit into the model's context."""

    code = "context_length_exceeded"


class ModelNotFoundError(LiveError):
    code = "model_not_found"
    http_status = 404


class CapacityError(LiveError):
    """Full for now; nothing was changed."""

    code = "server_overloaded"
    http_status = 503


class StageUnavailableError(LiveError):
    """A stage process died or has not come up yet."""

    code = "stage_unavailable"
    http_status = 503


class StageFailedError(LiveError):
    """A stage reported that one job failed. reason: the stage's own code for it."""

    code = "stage_failed"
    http_status = 500

    def __init__(self, message: str, *, reason: str = ""):
        super().__init__(message)
        self.reason = reason
        if reason == ContextLengthError.code:
            self.code, self.http_status = reason, ContextLengthError.http_status


class DeadlineError(LiveError):
    code = "deadline_exceeded"
    http_status = 504


class SeamError(RuntimeError):
    """A hook into SGLang did not land; the process must not serve."""
