"""Compaction: which tokens a long session drops between its sink and its window.

In: a session's tokens, pages, audio and images. Out: the tokens to drop.
Source: StreamingLLM, arXiv 2309.17453; whole pages and media are our own conditions. Positions stay
logical, so a compacted session has an offset, and the remaining tokens need no new keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sglang_live.settings import Count, Settings, Whole, flag

Span = tuple[int, int]  # half open, in tokens

# Positions in reserve before the end of the RoPE table: a turn of two minutes is 1500 tokens of
# audio at 12.5 Hz, its response 1024 of text; the rest is for images and tool results.
REBASE_RESERVE_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """
    sink_tokens: tokens kept at the start; None: the chat header, on which all turns build.
    window_tokens: tokens kept at the end. 2048 tokens are nearly three minutes of audio at
        12.5 Hz, or some twenty turns.
    slack_tokens: least number of tokens that a compaction drops. Each compaction costs a new page
        table and moves all references to positions; an eighth of the window more is a small price
        for one compaction in several turns.
    within_tokens: of sink, window and slack together: a longer sink leaves less to the window,
        at least a quarter of it. None: any number.
    window_frames: of a talker's response; None: window_tokens, because both come at 12.5 per
        second.
    """

    sink_tokens: int | None = None
    window_tokens: int = 2048
    slack_tokens: int = 256
    within_tokens: int | None = None
    window_frames: int | None = None

    def __post_init__(self) -> None:
        if self.sink_tokens is not None and self.sink_tokens < 0:
            raise ValueError(f"sink_tokens must not be negative, got {self.sink_tokens}")
        for name in ("window_tokens", "slack_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def behind(self, header_tokens: int) -> "RetentionConfig":
        """With the sink and the window of a session with a header of this length."""
        sink = header_tokens if self.sink_tokens is None else self.sink_tokens
        window = self.window_tokens
        if self.within_tokens is not None:
            left = self.within_tokens - sink - self.slack_tokens
            window = min(window, max(left, window // 4, 1))
        return replace(self, sink_tokens=sink, window_tokens=window)

    def most_frames(self, page_size: int) -> int:
        """Of a talker's response in KV, with margin: compaction comes before, in whole pages."""
        return self.window_tokens + self.slack_tokens + 3 * page_size + 8


_USUAL = RetentionConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFlags(Settings):
    """Bounds as an operator gave them; None: those that suit the model."""

    window_tokens: Whole | None = flag(
        None,
        "latest part of a conversation that a session keeps; 0: everything",
        name="retention-window",
        value="TOKENS",
        unset=f"{_USUAL.window_tokens}, at most half of what the model is good for",
    )
    sink_tokens: Count | None = flag(
        None,
        "first part of it that a session keeps",
        name="retention-sink",
        value="TOKENS",
        unset="the instructions",
    )
    slack_tokens: Count | None = flag(
        None,
        "growth beyond both before the session is compacted",
        name="retention-slack",
        value="TOKENS",
        unset=f"{_USUAL.slack_tokens}, at most a sixteenth of what the model is good for",
    )

    def suited_to(self, good_tokens: int | None) -> RetentionConfig:
        """
        Args:
            good_tokens: length of a conversation that the model is good for. Half of it is the
                window, and less where long instructions would leave less than a quarter of it to
                the turn and its response. None: not known.
        """
        if good_tokens is None:
            good_tokens = 2 * _USUAL.window_tokens
        slack = max(1, min(_USUAL.slack_tokens, good_tokens // 16))
        given = self.window_tokens
        return RetentionConfig(
            sink_tokens=self.sink_tokens,
            window_tokens=given or max(1, min(_USUAL.window_tokens, good_tokens // 2)),
            slack_tokens=self.slack_tokens or slack,
            within_tokens=None if given else max(1, good_tokens * 3 // 4),
            window_frames=None if given else _USUAL.window_tokens,
        )


@dataclass(frozen=True, slots=True)
class Compaction:
    """Tokens [begin, end) are dropped; both are the start of a page."""

    begin: int
    end: int

    @property
    def n_tokens(self) -> int:
        return self.end - self.begin


def compaction_of(
    *,
    n_tokens: int,
    sink_tokens: int,
    window_tokens: int,
    page_size: int,
    owned_from: int,
    media: Sequence[Span],
    slack_tokens: int = 1,
) -> Compaction | None:
    """
    Args:
        n_tokens: resident tokens of the session.
        owned_from: tokens before it belong to the radix tree. They are a prefix of the session,
            which releases them only as a whole.
        media: spans of audio or image items, ascending and disjoint. They are never split: part
            of an encoder's output has no meaning.
    Returns:
        The tokens to drop; None: fewer than slack_tokens can be dropped.
    """
    assert all(a[1] <= b[0] for a, b in pairwise(media)), media
    begin = _up(sink_tokens, page_size)
    for first, behind in media:
        if first < begin < behind:
            begin = _up(behind, page_size)
    end = _down(max(n_tokens - window_tokens, 0), page_size)
    for first, behind in reversed(media):
        if first < end < behind:
            end = _down(first, page_size)
    if end < owned_from or end - begin < max(slack_tokens, 1):
        return None
    return Compaction(begin, end)


def media_after(dropped: Compaction, media: Sequence[Span]) -> list[Span]:
    """Returns the spans of the remaining media after the compaction."""
    before = [span for span in media if span[1] <= dropped.begin]
    behind = [(a - dropped.n_tokens, b - dropped.n_tokens) for a, b in media if a >= dropped.end]
    return before + behind


def rebase_due(
    offset: int, n_tokens: int, limit: int, reserve_tokens: int = REBASE_RESERVE_TOKENS
) -> bool:
    """Returns True if keys must be rotated back, so that positions begin at 0 again.

    Args:
        offset: logical position of a kept token minus its index: all tokens dropped so far.
        n_tokens: resident tokens.
        limit: number of positions in the RoPE table.
        reserve_tokens: most tokens that the next turn may add.
    """
    return offset > 0 and offset + n_tokens + reserve_tokens > limit


def _up(n_tokens: int, page_size: int) -> int:
    return -(-n_tokens // page_size) * page_size


def _down(n_tokens: int, page_size: int) -> int:
    return n_tokens // page_size * page_size
