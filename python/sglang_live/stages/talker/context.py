"""Which of the user's messages a talker reads, when its context is too short for all."""

# Of a prompt's greatest length an eighth is left, for speech.
_SPEECH_SHARE = 8


def n_left_out(lengths: list[int], prefix_tokens: int, most_tokens: int) -> int:
    """How many messages, from the oldest, are left out of the prompt.

    All are, if the newest is too long. The reply is spoken in any case: what it says is in its own
    text, and the messages give it its tone.

    Args:
        lengths: tokens of each message, the oldest first. prefix_tokens: with which speech begins.
        most_tokens: that a request to the engine may have.
    """
    room = most_tokens - most_tokens // _SPEECH_SHARE - prefix_tokens
    kept = 0
    for length in reversed(lengths):
        room -= length
        if room < 0:
            break
        kept += 1
    return len(lengths) - kept
