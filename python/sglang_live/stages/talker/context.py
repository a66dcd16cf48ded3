"""The user messages that a talker's prompt contains, when its context is too short for all."""

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
