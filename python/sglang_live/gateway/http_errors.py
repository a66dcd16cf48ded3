"""A LiveError as the answer to an HTTP request, in OpenAI's form."""

from starlette.responses import JSONResponse

from sglang_live.errors import LiveError
from sglang_live.gateway.event_error import error_body


def error_response(error: LiveError) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse({"error": error_body(error)}, error.http_status, headers)
