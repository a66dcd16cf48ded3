"""The audio of one response: how much of it the user has heard, and has still to hear.

Owner: one ResponsePlayback per response, kept by the session's monitor. Pure given now_s.
"""

from dataclasses import dataclass

from sglang_live.core import FRAME_S
from sglang_live.interaction.playback import PlaybackClock


@dataclass(eq=False, slots=True, kw_only=True)
class ResponsePlayback:
    """
    generated_s: audio that the stages delivered, sent or not.
    unsent_since_s: when the oldest audio that is not sent was delivered.
    text_tokens: tokens of its text, once that is complete; before, None.
    spoken_s: duration of all its audio, once the talker has ended it; before, None.
    retired: the monitor does not follow it any more.
    was_playing, was_over: state at the last update.
    logged_s: when the timeline last got a `sent` event.
    """

    response_id: str
    clock: PlaybackClock
    generated_s: float = 0.0
    unsent_since_s: float = 0.0
    text_tokens: int | None = None
    spoken_s: float | None = None
    retired: bool = False
    was_playing: bool = False
    was_over: bool = False
    logged_s: float = float("-inf")

    def to_play_s(self, now_s: float, frames_per_token: float) -> float:
        """Seconds of audio that the user has still to hear: LiveServe's T_play.

        The talker is seconds ahead of playback at most, because it is paused beyond that, while
        the text of a minute may be complete. So complete text counts by its expected audio, until
        the audio itself is complete. While there is more text to come, this is a lower bound.

        Args:
            frames_per_token: expected codec frames per token of the text.
        """
        clock = self.clock
        if clock.stopped:
            return 0.0
        whole_s = clock.sent_s
        if clock.finished:
            pass
        elif self.spoken_s is not None:
            whole_s = max(whole_s, self.spoken_s)
        elif self.text_tokens is not None:
            whole_s = max(whole_s, self.text_tokens * frames_per_token * FRAME_S)
        return whole_s - clock.heard_s(now_s)
