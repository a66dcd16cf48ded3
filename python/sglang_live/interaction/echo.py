"""The agent's own sound in the user's microphone: how much of the microphone it explains.

A client without echo cancellation sends back what its loudspeaker plays, later, softer and with
the room's reverberation. What the server has sent is known, so the echo can be predicted: the
delay from the cross-correlation, then per frequency a filter over a few frames by least squares.
Where the prediction leaves little of the microphone's energy, what it hears is the agent.

In: the microphone's latest audio, and what was played until then. Out: for each window, the share
of its energy that the echo does not explain.
Pure. Both signals are compared below 4 kHz, where speech has its energy.
"""

import numpy as np
import numpy.typing as npt
import soxr

from sglang_live.core import INPUT_RATE_HZ

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

Floats = npt.NDArray[np.float32]
Spectrum = npt.NDArray[np.complex64]


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
