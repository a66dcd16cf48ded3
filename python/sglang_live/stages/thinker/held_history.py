"""What a thinker's session remembers of its last messages, to be able to take them back."""

from dataclasses import dataclass

from sglang_live.core import HistoryItem
from sglang_live.models.qwen3_omni.prompt import Piece


@dataclass(frozen=True, slots=True)
class LastReply:
    """The reply at the end of a session. It holds ask_at tokens before the markup that asks for
    it, and begin tokens before its first one. ids: without the end-of-turn token.
    """

    ids: tuple[int, ...]
    ask_at: int
    begin: int


@dataclass(frozen=True, slots=True)
class BeforeUtterance:
    """The session as it was before it took in what may still be being said.

    key: of the first piece of that. last: of the last, if the caller may have been done with it.
    in_pieces: it was taken in with more than one turn.
    """

    key: str
    n_tokens: int
    last_reply: LastReply | None
    tail: list[Piece]
    last: str | None = None
    in_pieces: bool = False


def begins_with(history: list[HistoryItem], keys: list[str]) -> bool:
    return [item.key for item in history[: len(keys)]] == keys


def first_tokens_of(reply: LastReply, items: list[HistoryItem]) -> HistoryItem | None:
    """The item in the reply's place, if it holds the reply's first tokens, one at least."""
    for item in items:
        ids = item.token_ids
        if item.role == "assistant" and ids and reply.ids[: len(ids)] == ids:
            return item
    return None
