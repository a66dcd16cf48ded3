"""The user messages that a talker's prompt contains, when it cannot or need not contain all."""

from collections.abc import Sequence

# An eighth of the context is for speech.
_SPEECH_SHARE = 8


def n_left_out(lengths: list[int], prefix_tokens: int, most_tokens: int) -> int:
    """Number of oldest messages that the prompt leaves out.

    All of them, if the newest does not fit. The response is spoken in any case: its words come from
    its own text, and the messages only influence its tone.

    Args:
        lengths: tokens of each message, the oldest first.
        prefix_tokens: of the markup behind the messages, with which speech begins.
        most_tokens: limit of a request to the engine.
    """
    room = most_tokens - most_tokens // _SPEECH_SHARE - prefix_tokens
    kept = 0
    for length in reversed(lengths):
        room -= length
        if room < 0:
            break
        kept += 1
    return len(lengths) - kept


def first_kept(keys: Sequence[str], lengths: Sequence[int], began_with: str | None) -> int:
    """Index of the message with which the prompt of a session with a window begins.

    A prompt that begins with the same message as the one before continues it: only its end is
    computed. When the window has dropped that message, nothing of the KV fits, because every later
    position counts on it. So the prompt then leaves out half of what is left, too, and the next
    ones need not begin anew until the window has come that far. The messages only influence the
    tone.

    Args:
        lengths: tokens of each message, the oldest first.
        began_with: key of the previous prompt's first message. None: there was none.
    """
    if began_with is None or not keys:
        return 0
    if began_with in keys:
        return keys.index(began_with)
    half, kept, first = sum(lengths) / 2, 0, len(keys)
    while first and (first == len(keys) or kept + lengths[first - 1] <= half):
        first -= 1
        kept += lengths[first]
    return first
