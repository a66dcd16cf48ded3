"""Talker and client of one session, as far as the gateway's monitor sees them.

In: the text of a response as it comes. Out: what the session's SessionMonitor reports to the
stages, from the same code as in the server. There is no sound: audio is a number of seconds.
"""

import asyncio

from sglang_live.clock import Clock
from sglang_live.core import FRAME_S
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.playback import ResponsePlayback

# The talker is paused when it is this far ahead of its listener, about its high mark with rounds
# of 15 ms.
BUFFERED_S = 2.0
# Audio goes out in packets, and a talker makes this many seconds of it in a second.
_PACKET_S = 0.2
_TALKER_SPEED = 5.0


class Listener:
    """Hears one response after another."""

    def __init__(self, monitor: SessionMonitor, clock: Clock):
        self._monitor, self._clock = monitor, clock
        self._n_tokens, self._is_complete = 0, False
        self._changed = asyncio.Event()

    def begin(self, response_id: str) -> ResponsePlayback:
        self._n_tokens, self._is_complete = 0, False
        playback = self._monitor.response_created(response_id)
        self._monitor.turn_started(playback)
        return playback

    def text(self, n_tokens: int) -> None:
        """The response has n_tokens so far."""
        self._n_tokens = n_tokens
        self._changed.set()

    def text_completed(self, playback: ResponsePlayback) -> None:
        self._monitor.text_completed(playback, self._n_tokens)
        self._is_complete = True
        self._changed.set()

    async def hear(self, playback: ResponsePlayback, whole_s: float) -> None:
        """Send the response's audio as the talker makes it; return when all of it was heard.

        Args:
            whole_s: duration of the whole response, which the monitor is not told.
        """
        clock, monitor = playback.clock, self._monitor
        while clock.sent_s < whole_s:
            if not self._has_text_beyond(clock.sent_s, whole_s):
                self._changed.clear()
                await self._changed.wait()
                continue
            buffered_s = clock.sent_s - clock.heard_s(self._clock.now_s())
            if buffered_s + _PACKET_S > BUFFERED_S:
                await self._clock.sleep(_PACKET_S)
                continue
            packet_s = min(_PACKET_S, whole_s - clock.sent_s)
            monitor.audio_generated(playback, packet_s)
            monitor.audio_sent(playback, packet_s)
            await self._clock.sleep(packet_s / _TALKER_SPEED)
        n_frames = round(whole_s / FRAME_S)
        monitor.turn_result(playback, n_tokens=self._n_tokens, n_frames=n_frames, spoken=True)
        monitor.turn_ended(playback)
        monitor.response_done(playback, "completed")
        monitor.all_audio_sent(playback)
        await self._clock.sleep(max(0.0, clock.dry_at_s - self._clock.now_s()))

    def _has_text_beyond(self, sent_s: float, whole_s: float) -> bool:
        # A frame needs one more token than the frame before it; the text is usually far ahead.
        return self._is_complete or self._n_tokens > sent_s / FRAME_S
