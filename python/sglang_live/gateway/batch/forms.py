"""Forms of requests to /v1/batches, and the lifetime of files that a client names."""

from typing import Annotated

from msgspec import Meta

from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.json_forms import Strict

# OpenAI's bounds.
LEAST_S, MOST_S = 3600, 2_592_000
_MAX_PAIRS = 16
WINDOW = "24h"

Value = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(max_length=64)]


class ExpiresAfter(Strict):
    anchor: str
    seconds: int


class BatchForm(Strict):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Name, Value], Meta(max_length=_MAX_PAIRS)] | None = None
    output_expires_after: ExpiresAfter | None = None

    def results_kept_s(self) -> int | None:
        """Lifetime of the files of results; None: the client leaves it to the server."""
        after = self.output_expires_after
        if after is None:
            return None
        return kept_s(after.anchor, str(after.seconds), "output_expires_after")


def kept_s(anchor: object, seconds: object, param: str) -> int | None:
    """The lifetime of a file in seconds; None if the client names none.

    Raises:
        ClientEventError: with `param`.
    """
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ClientEventError("anchor must be 'created_at'.", param=f"{param}.anchor")
    is_number = isinstance(seconds, str) and seconds.isascii() and seconds.isdigit()
    if not is_number or not LEAST_S <= int(str(seconds)[:9]) <= MOST_S:
        raise ClientEventError(f"seconds must be {LEAST_S} to {MOST_S}.", param=f"{param}.seconds")
    return int(str(seconds))
