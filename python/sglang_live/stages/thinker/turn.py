"""A turn in a thinker's session: what it reports, and what is known of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_live.core import HistoryItem
from sglang_live.engine_channel.messages import TEXT_PREFIX, THINK_PREFIX, TURN_PREFILL_PREFIX
from sglang_live.models.qwen3_omni.prompt import Append


@dataclass(frozen=True, slots=True)
class Started:
    """The turn begins; `items` are those the session lacked and now takes in."""

    items: list[HistoryItem]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One request of a turn was prefilled.

    n_new: tokens it added to the session. begin: behind how many that the engine holds.
    """

    rid: str
    append: Append
    n_new: int
    begin: int


@dataclass(frozen=True, slots=True)
class Generated:
    """Reply so far, cumulative. finish: None while it goes on."""

    ids: list[int]
    text: str
    finish: str | None


@dataclass(slots=True)
class TurnState:
    """One turn in the session, which fills it in; only the stage sets `ending`.

    job_id: names its requests.
    generating: the request that writes the reply, while it does. rid: the same, also afterwards.
    on_generating: told that request before it is sent.
    ending: nobody wants more of the reply.
    ahead: what is said is taken in while the caller still speaks; nobody waits for it.
    timely: somebody hears every delay.
    prefilling: the request that is taken in, while it is.
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
    prefilling: str | None = None
    dropped: list[str] = field(default_factory=list)

    @property
    def rid_prefix(self) -> str:
        """Begins the ids of the turn's requests: tells the engine what waits for them."""
        if self.prefill_only:
            return TURN_PREFILL_PREFIX
        return THINK_PREFIX if self.timely else TEXT_PREFIX
