"""The agent's own sound in the user's microphone: how much of the microphone it explains.

A client without echo cancellation sends back what its loudspeaker plays, later, softer and with
the room's reverberation. What the server has sent is known, so the echo can be predicted: the
delay from the cross-correlation, then per frequency a filter over a few frames by least squares.
Where the prediction leaves little of the microphone's energy, what it hears is the agent.

In: audio that the network took, the microphone's latest audio. Out: for each window the share of
its energy that the echo does not explain, and with that the scores, 0 for echo.
Owner: one EchoFilter per connection; all else is pure. Only scores of a voice are compared, while a
response is played and shortly after it. Both signals are compared below 4 kHz, where speech has its
energy.
"""

import asyncio
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soxr

from sglang_live.clock import Clock
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.filters.voice_filter import Found, Frame, Scores, VoiceFilter
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.vad import TurnDetection
from sglang_live.telemetry.metrics import GatewayMetrics

RATE_HZ = INPUT_RATE_HZ // 2
# The microphone may be this far behind the time at which audio is played by the server's clock:
# the network, the client's buffer, the room, and the way back.
MAX_DELAY_S = 0.6
# Long enough that the microphone was mostly quiet if the user has just begun to speak.
SPAN_S = 2.0
# Frames of 32 ms, four of which overlap. Eight of them cover the reverberation of 88 ms.
_FRAME, _HOP, _TAPS = 256, 64, 8
_WINDOW = np.hanning(_FRAME + 1)[:-1].astype(np.float32)
# Of the mean energy per tap: fits noise less.
_REGULARISATION = 1e-2
# Exponent of the cross-spectrum's magnitude that is removed: 1 would weigh noise as speech.
_WHITENING = 0.7
# Of the loudest frame's energy: softer frames weigh no more than this.
_FLOOR = 1e-3
# A speech model scores the noise after a loud sound as voice, too: for this many windows what is
# left of a window counts against a share of the loudest echo.
_LASTING, _LASTING_SHARE = 8, 0.1
_TINY = 1e-9
# Played audio is forgotten when no comparison reads it any more, not even one that is late.
KEPT_S = SPAN_S + MAX_DELAY_S + 0.5
# A response may be sent much faster than it is played.
MOST_BUFFERED_S = 30.0
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

Floats = npt.NDArray[np.float32]
Spectrum = npt.NDArray[np.complex64]


class EchoFilter(VoiceFilter):
    def __init__(
        self,
        clock: Clock,
        metrics: GatewayMetrics,
        thread: Executor,
        early_s: float | None = None,
    ) -> None:
        """
        Args:
            thread: a comparison takes some milliseconds, for which the event loop is not held.
            early_s: as of a PlaybackClock.
        """
        self._clock = clock
        self._metrics = metrics
        self._thread = thread
        self._played = PlayedAudio(early_s)
        self._echo_at_s = float("-inf")
        self._early_s = 0.0  # how much sooner than in real time this sample came:
        self._newest: tuple[int, float] | None = None

    def configure(self, detection: TurnDetection) -> bool:
        return detection.ignore_echo

    def playback_began(self, sound: Floats) -> None:
        """The network took this audio of a response: [n] at RATE_HZ."""
        if not self._played.add(sound, self._clock.now_s()):
            self._metrics.echo_unknown_s.inc(len(sound) / RATE_HZ)

    def playback_stopped(self) -> None:
        self._played.stop(self._clock.now_s())

    async def filtered(self, frame: Frame, scores: Scores) -> Scores:
        buffer = frame.buffer
        if self._too_early(buffer.end_sample) or not (scores >= frame.threshold).any():
            return scores
        # The newest sample came just now.
        end_s = self._clock.now_s() - (buffer.end_sample - frame.end) / INPUT_RATE_HZ
        delay = round(MAX_DELAY_S * RATE_HZ)
        if self._played.until(end_s, len(scores) * ECHO_WINDOW + delay) is None:
            return scores  # nothing that these windows can be an echo of
        microphone = buffer.peek(frame.end - _SPAN, frame.end)
        played = self._played.until(end_s, round(len(microphone) * RATE_HZ / INPUT_RATE_HZ) + delay)
        if played is None or len(microphone) < _LEAST_SPAN:
            return scores
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, _unexplained, microphone, played)
        shares = found[-len(scores) :]
        is_echo = (scores[-len(shares) :] >= frame.threshold) & (shares < LEAST_SHARE)
        if is_echo.any():
            self._echo_is_there(int(is_echo.sum()), frame)
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

    def _echo_is_there(self, n_windows: int, frame: Frame) -> None:
        self._metrics.echo_windows.inc(n_windows)
        now_s = self._clock.now_s()
        if now_s - self._echo_at_s > _QUIET_S:
            frame.found.append(Found("echo", "played"))
        self._echo_at_s = now_s


def _unexplained(microphone: npt.NDArray[np.int16], played: Floats) -> Floats:
    return unexplained(halved(microphone), played, ECHO_WINDOW)


@dataclass(frozen=True, slots=True)
class _Part:
    start_s: float
    sound: Floats

    @property
    def end_s(self) -> float:
        return self.start_s + len(self.sound) / RATE_HZ


class PlayedAudio:
    """What the user's loudspeaker has played, by the server's clock. now_s never decreases.

    As the playback clock without acks does, this assumes that audio plays when it comes, or when
    what came before has been played. Where the client is later, the echo's delay is larger by that.
    """

    def __init__(self, early_s: float | None = None) -> None:
        """early_s: as of a PlaybackClock. A packet that is less late leaves no gap."""
        self._early_s = early_s
        self._parts: deque[_Part] = deque()
        self._end_s = float("-inf")  # of all that came, kept or not

    def add(self, sound: Floats, now_s: float) -> bool:
        """The network took this audio, [n] at RATE_HZ. Returns whether it is kept: not if it plays
        more than MOST_BUFFERED_S from now."""
        follows = now_s < self._end_s + (self._early_s or 0.0)
        part = _Part(self._end_s if follows else now_s, sound)
        self._end_s = part.end_s
        is_kept = part.start_s - now_s <= MOST_BUFFERED_S
        if is_kept:
            self._parts.append(part)
        self._forget(now_s)
        return is_kept

    def stop(self, now_s: float) -> None:
        """The client discards what it has not played, unless that comes too late."""
        if self._early_s is not None:
            return
        while self._parts and self._parts[-1].end_s > now_s:
            part = self._parts.pop()
            n_played = round((now_s - part.start_s) * RATE_HZ)
            if n_played > 0:
                self._parts.append(_Part(part.start_s, part.sound[:n_played]))
                break
        self._end_s = min(self._end_s, now_s)

    def until(self, end_s: float, n: int) -> Floats | None:
        """The n samples that were played until end_s, with zeros where nothing played.

        None: nothing was played in that time.
        """
        begin_s = end_s - n / RATE_HZ
        if self._end_s <= begin_s:
            return None
        found = np.zeros(n, np.float32)
        is_empty = True
        for part in self._parts:
            at = round((part.start_s - begin_s) * RATE_HZ)
            first, last = max(at, 0), min(at + len(part.sound), n)
            if first < last:
                found[first:last] = part.sound[first - at : last - at]
                is_empty = False
        return None if is_empty else found

    def _forget(self, now_s: float) -> None:
        while self._parts and self._parts[0].end_s < now_s - KEPT_S:
            self._parts.popleft()


def halved(pcm: npt.NDArray[np.int16]) -> Floats:
    """16 kHz int16 as RATE_HZ float32 in [-1, 1]."""
    halved: Floats = soxr.resample(pcm.astype(np.float32) / 32768, INPUT_RATE_HZ, RATE_HZ, "MQ")
    return halved


def unexplained(microphone: Floats, played: Floats, window: int) -> Floats:
    """Share of the energy of each window that is not echo, 0 to about 1.

    Args:
        microphone: [n], at most SPAN_S: a longer span costs more and determines no better filter.
        played: [n + MAX_DELAY_S * RATE_HZ]; its last sample is played when the microphone's last
            one is recorded, by the server's clock.
        window: samples of a window; the windows end with the microphone's last sample.
    Returns:
        [n // window], oldest first. Of a window without sound 1.
    """
    delay = delay_of(microphone, played)
    # One hop ahead of the delay, because the filter's taps only look back.
    start = len(played) - len(microphone) - delay + _HOP
    reference = np.zeros_like(microphone)
    part = played[start : start + len(microphone)]
    reference[: len(part)] = part
    heard = _spectra(microphone)
    residual = heard - _predicted(heard, _spectra(reference))
    return _shares(heard, residual, len(microphone), window)


def delay_of(microphone: Floats, played: Floats) -> int:
    """Samples by which the microphone is behind what is played, 0 to MAX_DELAY_S."""
    n = 1 << (len(played) + len(microphone) - 1).bit_length()
    cross = np.fft.rfft(microphone, n) * np.conj(np.fft.rfft(played, n))
    size = np.abs(cross)
    cross /= (size + 1e-3 * size.mean() + _TINY) ** _WHITENING
    correlation = np.abs(np.fft.irfft(cross, n))
    most = len(played) - len(microphone)
    # played[most - delay + t] is heard as microphone[t].
    by_delay = np.concatenate((correlation[n - most :], correlation[:1]))
    return int(by_delay.argmax())


def _spectra(signal: Floats) -> Spectrum:
    """[frames, bins]."""
    n = (len(signal) - _FRAME) // _HOP + 1
    frames = np.lib.stride_tricks.sliding_window_view(signal, _FRAME)[::_HOP][:n]
    spectra: Spectrum = np.fft.rfft(frames * _WINDOW, axis=1).astype(np.complex64)
    return spectra


def _predicted(heard: Spectrum, played: Spectrum) -> Spectrum:
    """The echo, by the filter over _TAPS frames of each bin with the least relative error."""
    n, bins = heard.shape
    past = np.zeros((bins, n, _TAPS), np.complex64)
    for tap in range(_TAPS):
        past[:, tap:, tap] = played[: n - tap].T
    adjoint = past.conj().transpose(0, 2, 1) * _weights(heard)
    normal = adjoint @ past
    energy = np.trace(normal, axis1=1, axis2=2).real / _TAPS
    normal += (_REGULARISATION * energy + _TINY)[:, None, None] * np.eye(_TAPS, dtype=np.complex64)
    filters = np.linalg.solve(normal, adjoint @ heard.T[:, :, None])
    predicted: Spectrum = (past @ filters)[:, :, 0].T
    return predicted


def _weights(heard: Spectrum) -> Floats:
    """[frames]. A frame counts by how much of it is explained, however loud it is: a loud voice
    that is not echo does not bend the filter, and a quiet microphone while the agent speaks is
    evidence against any echo."""
    energy = (np.abs(heard) ** 2).sum(1)
    weights: Floats = 1 / (energy + _FLOOR * energy.max() + _TINY)
    weights /= weights.max()
    return weights


def _shares(heard: Spectrum, residual: Spectrum, n: int, window: int) -> Floats:
    """Energies of the frames whose centres are in each window."""
    centres = np.arange(len(heard)) * _HOP + _FRAME // 2
    n_windows = n // window
    index = np.clip((centres - (n - n_windows * window)) // window, 0, n_windows - 1)
    before = np.bincount(index, (np.abs(heard) ** 2).sum(1), n_windows)
    after = np.bincount(index, (np.abs(residual) ** 2).sum(1), n_windows)
    echo = np.concatenate((np.zeros(_LASTING - 1), np.maximum(before - after, 0)))
    lasting = np.lib.stride_tricks.sliding_window_view(echo, _LASTING).max(1)
    whole = np.maximum(before, _LASTING_SHARE * lasting)
    shares: Floats = np.where(before > _TINY, after / np.maximum(whole, _TINY), 1.0)
    return shares.astype(np.float32)
