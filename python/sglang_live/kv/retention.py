"""What a long session keeps: the sink at its start and a window at its end.

In: a session's tokens, pages, audio and images. Out: the tokens to drop between the two.
Source: StreamingLLM, arXiv 2309.17453; whole pages and media are our own conditions. Positions stay
logical, so after a cut a session carries an offset, and what is left needs no new keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]  # half open, in tokens

# Room to keep before the end of the RoPE table: a turn of two minutes is 1500 tokens of audio at
# 12.5 Hz, an answer to it 1024 of text; the rest is for pictures and tool results.
REBASE_RESERVE_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """
    sink_tokens: kept at the start. None: the chat header, which is what all turns build on.
    window_tokens: kept at the end. 2048 tokens are nearly three minutes of audio at 12.5 Hz, or
        some twenty turns.
    slack_tokens: a cut frees at least so many. Each one costs a new page table and moves all that
        refers to positions; an eighth of the window is little to keep for having it every few
        turns only.
    """

    sink_tokens: int | None = None
    window_tokens: int = 2048
    slack_tokens: int = 256

    def __post_init__(self) -> None:
        if self.sink_tokens is not None and self.sink_tokens < 0:
            raise ValueError(f"sink_tokens must not be negative, got {self.sink_tokens}")
        for name in ("window_tokens", "slack_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


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
        n_tokens: resident ones of the session.
        owned_from: what is before it belongs to the radix tree, which is a prefix of the session
            and can only be let go of as a whole up to there, or beyond.
        media: spans of audio or image items, ascending and apart. None of them is ever split: an
            encoder's output means nothing in part.
    Returns:
        None: there is nothing to cut, or not as much as slack_tokens.
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


def media_after(cut: Compaction, media: Sequence[Span]) -> list[Span]:
    """Spans of the media that are left, where they lie after the cut."""
    before = [span for span in media if span[1] <= cut.begin]
    behind = [(a - cut.n_tokens, b - cut.n_tokens) for a, b in media if a >= cut.end]
    return before + behind


def rebase_due(
    offset: int, n_tokens: int, limit: int, reserve_tokens: int = REBASE_RESERVE_TOKENS
) -> bool:
    """Whether keys should be rotated back, so that positions begin at 0 again.

    Args:
        offset: of the logical position of a kept token over its place: all tokens cut so far.
        n_tokens: resident ones. limit: positions there are in the RoPE table.
        reserve_tokens: what the next turn may bring.
    """
    return offset > 0 and offset + n_tokens + reserve_tokens > limit


def _up(n_tokens: int, page_size: int) -> int:
    return -(-n_tokens // page_size) * page_size


def _down(n_tokens: int, page_size: int) -> int:
    return n_tokens // page_size * page_size
