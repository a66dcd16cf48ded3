"""Windows of the microphone that the agent's own sound explains are not a voice.

In: audio that the network took, scores of the microphone's windows. Out: the scores, 0 for echo.
Owner: one EchoFilter per connection. Only scores of a voice are compared, while a response is
played and shortly after it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from sglang_live.clock import Clock
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.gateway.audio.codec import WireDecoder, WireFormat
from sglang_live.gateway.audio.resampler import StreamResampler
from sglang_live.interaction.echo import MAX_DELAY_S, RATE_HZ, SPAN_S, Floats, halved, unexplained
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.played_audio import PlayedAudio
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.telemetry.metrics import GatewayMetrics

# A window of whose energy less remains is echo. A voice that interrupts remains nearly whole; an
# echo in a room with much reverberation to a tenth, its softest windows to a half.
LEAST_SHARE = 0.5
ECHO_WINDOW = WINDOW_SAMPLES * RATE_HZ // INPUT_RATE_HZ
_SPAN = round(SPAN_S * INPUT_RATE_HZ)
# Right after a turn less than that is there. Silence before it would be taken for a microphone
# that hears no echo.
_LEAST_SPAN = round(0.3 * INPUT_RATE_HZ)
_QUIET_S = 2.0
# Audio that comes by more faster than it was recorded, such as a file that is sent at once, has no
# time at which a microphone heard it.
_MOST_EARLY_S = 0.5


class EchoFilter:
    def __init__(
        self,
        clock: Clock,
        metrics: GatewayMetrics,
        thread: ThreadPoolExecutor,
        on_echo: Callable[[], None],
    ) -> None:
        """
        Args:
            thread: a comparison takes some milliseconds, for which the event loop is not held.
            on_echo: called at the first echo after _QUIET_S without one.
        """
        self._clock, self._metrics, self._thread = clock, metrics, thread
        self._on_echo = on_echo
        self._echo_at_s = float("-inf")
        self._played = PlayedAudio()
        self._decoder: WireDecoder | None = None
        self._halver = StreamResampler(INPUT_RATE_HZ, RATE_HZ)
        self._early_s = 0.0  # how much sooner than in real time this sample came:
        self._newest: tuple[int, float] | None = None

    def audio_sent(self, frame: bytes, form: WireFormat) -> None:
        """The network took this audio of a response."""
        if self._decoder is None or self._decoder.form != form:
            self._decoder = WireDecoder(form)
            self._halver = StreamResampler(INPUT_RATE_HZ, RATE_HZ)
        pcm = self._halver.push(self._decoder.push(frame))
        if not self._played.add((pcm / 32_768).astype(np.float32), self._clock.now_s()):
            self._metrics.echo_unknown_s.inc(len(pcm) / RATE_HZ)

    def playback_stopped(self) -> None:
        self._played.stop(self._clock.now_s())

    async def without_echo(
        self,
        scores: npt.NDArray[np.float32],
        threshold: float,
        buffer: InputBuffer,
        end_sample: int,
    ) -> npt.NDArray[np.float32]:
        """The scores of the windows up to end_sample, 0 where the window is echo.

        Args:
            scores: [n] of the latest windows, 0 to 1.
            threshold: from which a window is a voice.
            buffer: with the microphone's audio.
        """
        if self._too_early(buffer.end_sample) or not (scores >= threshold).any():
            return scores
        # The newest sample came just now.
        end_s = self._clock.now_s() - (buffer.end_sample - end_sample) / INPUT_RATE_HZ
        delay = round(MAX_DELAY_S * RATE_HZ)
        if self._played.until(end_s, len(scores) * ECHO_WINDOW + delay) is None:
            return scores  # nothing that these windows can be an echo of
        heard = buffer.peek(end_sample - _SPAN, end_sample)
        played = self._played.until(end_s, round(len(heard) * RATE_HZ / INPUT_RATE_HZ) + delay)
        if played is None or len(heard) < _LEAST_SPAN:
            return scores
        loop = asyncio.get_running_loop()
        shares = (await loop.run_in_executor(self._thread, _shares, heard, played))[-len(scores) :]
        is_echo = (scores[-len(shares) :] >= threshold) & (shares < LEAST_SHARE)
        if is_echo.any():
            self._echo_is_there(int(is_echo.sum()))
        filtered = scores.copy()
        filtered[-len(shares) :][is_echo] = 0.0
        return filtered

    def _too_early(self, newest_sample: int) -> bool:
        now_s = self._clock.now_s()
        if self._newest is not None:
            sample, at_s = self._newest
            new_s = (newest_sample - sample) / INPUT_RATE_HZ
            self._early_s = max(0.0, self._early_s + new_s - (now_s - at_s))
        self._newest = newest_sample, now_s
        return self._early_s > _MOST_EARLY_S

    def _echo_is_there(self, n_windows: int) -> None:
        self._metrics.echo_windows.inc(n_windows)
        now_s = self._clock.now_s()
        if now_s - self._echo_at_s > _QUIET_S:
            self._metrics.voice_over_response.labels("echo", "played").inc()
            self._on_echo()
        self._echo_at_s = now_s


def _shares(heard: npt.NDArray[np.int16], played: Floats) -> Floats:
    return unexplained(halved(heard), played, ECHO_WINDOW)
