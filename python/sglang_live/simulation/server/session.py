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


@dataclass(eq=False, slots=True)
class Session:
    """
    Attributes:
        n_tokens: the engine session behind the instructions; 0 after it was lost.
        n_device, n_host: how many of them, from the begin on, have KV there.
        history: tokens of the conversation as the gateway has it, without instructions.
        media: spans of audio in the session's KV.
        talker_prompt: user messages in the talker's prompt, in tokens.
    """

    session_id: str
    stats: UserStats
    n_tokens: int = 0
    n_device: int = 0
    n_host: int = 0
    history: int = 0
    talker_prompt: int = 0
    is_closed: bool = False
    media: list[tuple[int, int]] = field(default_factory=list)
