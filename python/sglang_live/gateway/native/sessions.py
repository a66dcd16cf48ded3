"""Sessions of SGLang's own API: how many are open by owner, and how much each of them keeps.

In: names of sessions opened, used and closed; bodies of /open_session. Out: room and bounds, or an
error. Owner: one NativeSessions per process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from sglang_live.errors import BadInputError, CapacityError
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.kv.retention import RetentionConfig

IDLE_S = 3_600.0
# Attention sinks of StreamingLLM, arXiv 2309.17453; the engine rounds them up to a page. Only the
# client can tell where the instructions of such a session end.
_SINK_TOKENS = 4

_Tokens = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(slots=True)
class NativeSessions:
    """The open sessions: each holds a request row and KV in the engine until it ends.

    _open: (owner, name) -> (idle limit, time at which that limit is reached).
    """

    per_owner: int
    of_all: int
    now_s: Callable[[], float]
    _open: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def open(self, owner: str, name: str, idle_s: float) -> None:
        """Raises RateLimitError or CapacityError when there is no room for another session."""
        now_s = self.now_s()
        self._open = {key: entry for key, entry in self._open.items() if entry[1] > now_s}
        n_own = sum(held == owner for held, _ in self._open)
        if (owner, name) not in self._open:
            if n_own >= self.per_owner:
                raise RateLimitError(f"This key has {n_own} sessions open, its limit: close one.")
            if len(self._open) >= self.of_all:
                raise CapacityError(f"full: {self.of_all} native sessions", retry_after_s=10)
        self._open[owner, name] = idle_s, now_s + idle_s

    def used(self, owner: str, name: str) -> None:
        if entry := self._open.get((owner, name)):
            self._open[owner, name] = entry[0], self.now_s() + entry[0]

    def close(self, owner: str, name: str) -> None:
        self._open.pop((owner, name), None)


class _RetentionForm(msgspec.Struct, forbid_unknown_fields=True):
    window: _Tokens
    sink: _Tokens | None = None
    slack: _Tokens | None = None


def take_retention(body: object, server: RetentionConfig | None) -> RetentionConfig | None:
    """Remove `retention` from the body of /open_session; SGLang has no such field.

    Args:
        server: values for fields that the client left out; None: this server keeps whole
            conversations.
    Returns:
        Bounds with a number of sink tokens; None if the body has no `retention`.
    Raises:
        BadInputError: the bounds are not valid, or the session would not be bounded by them.
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
        sink_tokens=form.sink or server.sink_tokens or _SINK_TOKENS,
        window_tokens=form.window,
        slack_tokens=form.slack or server.slack_tokens,
    )
