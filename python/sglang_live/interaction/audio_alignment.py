"""From audio that was heard to tokens that were heard.

In: seconds of a reply's audio. Out: how many of its tokens, from the beginning, they stand for.
Pure. A model that speaks does not say when it says what, so this is an estimate with two hard
bounds: no token is spoken before the talker had it, and all of the audio is all of the text.
"""

from sglang_live.core import FRAME_S

# Before a caller has heard a complete reply: 155 words a minute, an ordinary pace of English
# speech, at 1.3 tokens a word and 12.5 frames a second.
PRIOR_FRAMES_PER_TOKEN = 12.5 / (155 / 60 * 1.3)
# Audio is counted in samples of other rates; a frame must not be lost to rounding.
_EPSILON_FRAMES = 1e-6


def heard_tokens(
    heard_s: float, *, n_tokens: int, n_frames: int, spoken: bool, frames_per_token: float
) -> int:
    """Count the tokens that were heard in full; never falls while heard_s grows.

    Args:
        n_tokens: tokens of the reply, so far as it was generated.
        n_frames: codec frames of its audio; used only if spoken.
        spoken: the audio is complete, so tokens are spread evenly over it.
        frames_per_token: pace of this caller's replies, for audio that is not complete.
    """
    frames = heard_s / FRAME_S + _EPSILON_FRAMES
    if heard_s <= 0 or n_tokens <= 0:
        return 0
    if not spoken or n_frames <= 0:
        return min(int(frames / frames_per_token), _within_reach(frames), n_tokens)
    if frames >= n_frames:
        return n_tokens
    # Something was not heard, so at least one token was not.
    spread = int(frames * n_tokens / n_frames)
    return min(spread, _within_reach(frames), n_tokens - 1)


def _within_reach(frames: float) -> int:
    # The prompt holds the first token, and every step consumes one more.
    return int(frames) + 1
