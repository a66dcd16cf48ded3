"""A turn in a thinker's session: its events and its state."""

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_live.core import HistoryItem
from sglang_live.engine_channel.messages import (
    FLEX_PREFIX,
    TEXT_PREFIX,
    THINK_PREFIX,
    TURN_PREFILL_PREFIX,
)
from sglang_live.models.prompt import Append


@dataclass(frozen=True, slots=True)
class Started:
    """The turn begins. items: those that the engine session lacks, and now prefills."""

    items: list[HistoryItem]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One request of the turn was prefilled.

    n_new: tokens that it added to the engine session.
    begin: position of the first of them, in what the engine holds now.
    """

    rid: str
    append: Append
    n_new: int
    begin: int


@dataclass(frozen=True, slots=True)
class Generated:
    """The response so far. finish: why it ended. None: it goes on."""

    ids: list[int]
    text: str
    finish: str | None


@dataclass(slots=True)
class TurnState:
    """State of one turn. The session writes it; the stage writes `ending` only.

    job_id: of the turn's job.
    n_prompt: tokens of the prompt.
    n_cached: those of them whose KV was not computed anew.
    rebuilt: whether the engine session was built anew.
    truncated: whether the engine session was truncated.
    refused: whether the engine refused to truncate it.
    generating: id of the request that generates the response. None: there is none now.
    rid: the same, kept after the request. "": there was none yet.
    on_generating: called with that id before the request is sent.
    ending: whether the response is to end where it is.
    prefill_only: whether the user still speaks, so that nothing waits for the turn.
    timely: whether the response is heard, so that every delay counts.
    flex: whether it is best-effort work.
    prefilling: id of the request that prefills, in a turn prefill. None: there is none now.
    dropped: keys of the oldest items, which did not fit.
    """

    job_id: str = "warm-up"
    n_prompt: int = 0
    n_cached: int = 0
    rebuilt: bool = False
    truncated: bool = False
    refused: bool = False
    generating: str | None = None
    rid: str = ""
    on_generating: Callable[[str], None] = lambda rid: None
    ending: bool = False
    prefill_only: bool = False
    timely: bool = True
    flex: bool = False
    prefilling: str | None = None
    dropped: list[str] = field(default_factory=list)

    @property
    def rid_prefix(self) -> str:
        """Prefix of the turn's request ids, from which the engine derives their urgency."""
        if self.prefill_only:
            return TURN_PREFILL_PREFIX
        if self.flex:
            return FLEX_PREFIX
        return THINK_PREFIX if self.timely else TEXT_PREFIX
