"""From audio that was heard to tokens that were heard.

In: seconds of a response's audio. Out: the number of its first tokens that they contain.
Pure. The models give no alignment of text and audio, so this is an estimate with two exact bounds:
no token is spoken before the talker has it, and all of the audio contains all of the text.
"""

from sglang_live.core import FRAME_S

# Until a session has a complete response: 155 words a minute, an ordinary pace of English speech,
# at 1.3 tokens a word and 12.5 frames a second.
PRIOR_FRAMES_PER_TOKEN = 12.5 / (155 / 60 * 1.3)
# Durations come from samples at other rates; rounding must not lose a frame.
_EPSILON_FRAMES = 1e-6


def heard_tokens(
    heard_s: float, *, n_tokens: int, n_frames: int, spoken: bool, frames_per_token: float
) -> int:
    """Count the tokens that were heard in full; never falls while heard_s grows.

    Args:
        n_tokens: tokens of the response that were generated so far.
        n_frames: codec frames of its audio; used only if spoken.
        spoken: the audio is complete, so tokens are spread evenly over it.
        frames_per_token: average of this user's session; used for audio that is not complete.
    """
    frames = heard_s / FRAME_S + _EPSILON_FRAMES
    if heard_s <= 0 or n_tokens <= 0:
        return 0
    if not spoken or n_frames <= 0:
        return min(int(frames / frames_per_token), _consumed(frames), n_tokens)
    if frames >= n_frames:
        return n_tokens
    # The last frame was not heard, so neither was the last token.
    spread = int(frames * n_tokens / n_frames)
    return min(spread, _consumed(frames), n_tokens - 1)


def _consumed(frames: float) -> int:
    # The talker's prompt holds the first token, and every step consumes one more.
    return int(frames) + 1
