"""One line of a batch, from its text to its result: tries, pauses between them, and the deadline.

In: the text of a line. Out: the text of its result. A refusal for lack of room or of a stage is no
result: the line waits.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.in_process import Outcome
from sglang_live.extensions.batches.input_lines import body_of
from sglang_live.extensions.batches.records import NO_TOKENS, Batch, Line, Result, Tokens, tokens_of
from sglang_live.gateway.errors import error_body, internal_error
from sglang_live.ids import new_id
from sglang_live.orchestrator.suspects import SuspectError

log = logging.getLogger(__name__)

# Statuses with which the server refuses what it could serve at another time.
_REFUSALS = (429, 503)
_FIRST_PAUSE_S = 1.0
_MOST_DEATHS = 2


class Execute(Protocol):
    def __call__(self, key: str, path: str, body: bytes, until_s: int) -> Awaitable[Outcome]: ...


@dataclass(eq=False)
class LineRuns:
    """
    retried: called with the code of the error for which a line is tried again.
    """

    execute: Execute
    config: BatchConfig
    retried: Callable[[str], None]
    # A line that an engine was processing when it died may have ended it. Such lines run again one
    # at a time, so that the others are not suspected a second time.
    _suspects: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, key: str, batch: Batch, line: Line, text: bytes) -> Result:
        if line.attempts > self.config.max_attempts:
            return failure(
                line,
                "server_error",
                f"The server ended {self.config.max_attempts} times while it ran this request.",
            )
        try:
            async with asyncio.timeout(self.config.line_s):
                outcome = await self._tried(key, batch, body_of(text))
        except TimeoutError:
            message = f"The request was not done within {self.config.line_s:g} s."
            return failure(line, "request_timeout", message)
        response = {
            "status_code": outcome.status,
            "request_id": new_id("req"),
            "body": outcome.body,
        }
        return _result(line, outcome.succeeded, response, None, tokens_of(outcome.body))

    async def _tried(self, key: str, batch: Batch, body: bytes) -> Outcome:
        n_failed, n_deaths, pause_s, was_suspect = 0, 0, _FIRST_PAUSE_S, False
        while True:
            if was_suspect:
                async with self._suspects:
                    outcome = await self._once(key, batch, body)
            else:
                outcome = await self._once(key, batch, body)
            is_suspect = outcome.code == SuspectError.code
            n_deaths += is_suspect and not was_suspect
            if is_suspect:
                if n_deaths == _MOST_DEATHS:
                    return outcome
                wait_s = self.config.suspect_s
            elif outcome.status in _REFUSALS:
                wait_s = max(pause_s, outcome.retry_after_s or 0.0)
            elif outcome.status >= 500:
                n_failed += 1
                if n_failed == self.config.max_tries:
                    return outcome
                wait_s = pause_s
            else:
                return outcome
            self.retried(outcome.code or str(outcome.status))
            await asyncio.sleep(min(wait_s, max(self.config.retry_s, self.config.suspect_s)))
            pause_s = min(2 * pause_s, self.config.retry_s)
            was_suspect = is_suspect

    async def _once(self, key: str, batch: Batch, body: bytes) -> Outcome:
        try:
            return await self.execute(key, batch.endpoint, body, batch.expires_s)
        except Exception:  # a bug, which must not end the runner of all batches
            log.exception("batch_line_crashed path=%s", batch.endpoint)
            error = internal_error()
            return Outcome(error.http_status, {"error": error_body(error)}, error.code)


def failure(line: Line, code: str, message: str) -> Result:
    """The result of a line without a response."""
    return _result(line, False, None, {"code": code, "message": message})


def _result(
    line: Line,
    succeeded: bool,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
    tokens: Tokens = NO_TOKENS,
) -> Result:
    text = orjson.dumps(
        {
            "id": new_id("batch_req"),
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )
    return Result(n=line.n, succeeded=succeeded, text=text, tokens=tokens)
