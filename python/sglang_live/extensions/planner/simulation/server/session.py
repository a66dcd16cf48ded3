"""One session of a simulated server."""

from dataclasses import dataclass, field

from sglang_live.interaction.user_stats import UserStats


@dataclass(frozen=True, slots=True)
class History:
    """What a session holds of a conversation.

    n_user: tokens of the user's messages. has_kv: otherwise its first turn computes it all.
    """

    n_tokens: int
    n_user: int
    has_kv: bool = True


NEW = History(0, 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request appends to the thinker's session: a message, audio_s of it a clip."""

    n_tokens: int
    audio_s: float = 0.0

    def part(self, n_tokens: int) -> "Piece":
        """n_tokens of it."""
        return Piece(n_tokens, self.audio_s * n_tokens / self.n_tokens)


def without_first(pieces: list[Piece], n_tokens: int) -> list[Piece]:
    left = list(pieces)
    while left and n_tokens >= left[0].n_tokens:
        n_tokens -= left.pop(0).n_tokens
    if left and n_tokens:
        left[0] = left[0].part(left[0].n_tokens - n_tokens)
    return left


def without_last(pieces: list[Piece], n_tokens: int) -> list[Piece]:
    return without_first(pieces[::-1], n_tokens)[::-1]


@dataclass(eq=False, slots=True)
class Session:
    """
    Attributes:
        n_tokens: the engine session behind the instructions; 0 after it was lost.
        n_device, n_host: how many of them, from the begin on, have KV there.
        pieces: the conversation as the gateway has it, without instructions.
        is_cut: the engine still holds what was truncated; its next turn says so.
        media: spans of audio in the session's KV.
        talker_prompt: user messages in the talker's prompt, in tokens.
    """

    session_id: str
    stats: UserStats
    n_tokens: int = 0
    n_device: int = 0
    n_host: int = 0
    pieces: list[Piece] = field(default_factory=list)
    is_cut: bool = False
    talker_prompt: int = 0
    is_closed: bool = False
    media: list[tuple[int, int]] = field(default_factory=list)

    @property
    def history(self) -> int:
        """Tokens of the conversation."""
        return sum(piece.n_tokens for piece in self.pieces)
