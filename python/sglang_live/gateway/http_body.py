"""Request bodies of bounded size."""

from starlette.requests import Request

from sglang_live.errors import BadInputError


class BodyTooLargeError(BadInputError):
    code = "request_too_large"
    http_status = 413


async def read_body(request: Request, max_bytes: int) -> bytes:
    """
    Raises:
        BodyTooLargeError: as soon as it is, before the rest has come.
        ClientDisconnect: the client left.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise BodyTooLargeError(f"The body may have at most {max_bytes} bytes.")
    return bytes(raw)
