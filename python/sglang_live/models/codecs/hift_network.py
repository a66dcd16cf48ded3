"""The network of HiFT: mel to pitch, pitch to a source of harmonics, both to sound.

Source: FunAudioLLM/CosyVoice (hifigan/generator.py, hifigan/f0_predictor.py), arXiv:2309.09493.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.flow.layers import Linear
from sglang_live.models.codecs.snac import NOISE_SIZE, Snake, Weights
from sglang_live.models.host_copy import copy_to

SAMPLE_RATE_HZ = 24_000
N_FFT, HOP = 16, 4
_DILATIONS = (1, 3, 5)
_SLOPE = 0.1
_LIMIT = 0.99
# Of the source: amplitudes of a harmonic and of noise beside it, and the pitch of what has a voice.
_SINE, _BREATH, _VOICED_HZ = 0.1, 0.003, 10.0


class Pads(Enum):
    """The sides at which a convolution sees zeros."""

    BOTH, LEFT, RIGHT = range(3)


class Conv:
    """A convolution of stride 1 that keeps the number of columns."""

    def __init__(self, weights: Weights, name: str, pads: Pads, dilation: int = 1):
        self.weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        self._dilation = dilation
        n = (self.weight.shape[2] - 1) * dilation
        self.n_padded = {Pads.BOTH: (n // 2, n // 2), Pads.LEFT: (n, 0), Pads.RIGHT: (0, n)}[pads]

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x, self.n_padded)
        return F.conv1d(padded, self.weight, self._bias, dilation=self._dilation)


class Pitch:
    """
    Attributes:
        n_ahead: columns behind a column that its pitch needs, if the first convolution looks ahead.
    """

    def __init__(self, weights: Weights, first: Pads, others: Pads):
        name = "f0_predictor.condnet"
        self._convs = [
            Conv(weights, f"{name}.{i}", others if i else first) for i in range(0, 10, 2)
        ]
        self._out = Linear(weights, "f0_predictor.classifier")
        self.n_ahead = self._convs[0].n_padded[1]

    def __call__(self, mel: Tensor) -> Tensor:
        """[n_streams, n_columns, 1] Hz."""
        for conv in self._convs:
            mel = F.elu(conv(mel))
        return self._out(mel.transpose(1, 2)).abs_()


class Source:
    """What vocal cords make: harmonics of a pitch, or noise.

    The reference draws the noise anew for each call, or for each model. Here it is a function of
    the place in the stream, so that a stream sounds alike in any company.
    """

    def __init__(
        self,
        weights: Weights,
        noise: Tensor,
        angles: Callable[[Tensor, int], Tensor],
        n: int,
        rate_hz: int = SAMPLE_RATE_HZ,
    ):
        """
        Args:
            noise: [NOISE_SIZE].
            angles: [n_streams, n_harmonics, n_samples] of the turns in a sample of each column,
                [n_streams, n_harmonics, n_columns], and its samples.
            n: samples of a column.
            rate_hz: samples of a second.
        """
        self._merge = Linear(weights, "m_source.l_linear")
        self._noise, self._angles, self._n, self._rate_hz = noise, angles, n, rate_hz

    def __call__(self, pitch: Tensor, begins: Sequence[int]) -> Tensor:
        """[n_streams, n_samples].

        Args:
            pitch: [n_streams, n_columns, 1] Hz.
            begins: columns of each stream before these.
        """
        n_harmonics = self._merge.weight.shape[1]
        harmonics = torch.arange(1, n_harmonics + 1, device=pitch.device)
        turns = (pitch * harmonics / self._rate_hz).transpose(1, 2)
        waves = self._angles(turns, self._n).transpose(1, 2).sin() * _SINE
        voiced = (pitch > _VOICED_HZ).to(pitch.dtype).repeat_interleave(self._n, 1)
        loud = voiced * _BREATH + (1 - voiced) * (_SINE / 3)
        first = self._n * copy_to(torch.tensor(begins), pitch.device)[:, None]
        places = first + torch.arange(waves.shape[1], device=pitch.device)
        shifts = (harmonics - 1) * (NOISE_SIZE // n_harmonics)
        noise = self._noise[(places[..., None] + shifts) & (NOISE_SIZE - 1)]
        return self._merge(waves * voiced + loud * noise).tanh()[..., 0]


class Network:
    """
    Attributes:
        n_ahead: columns behind a column that its sound needs, if the first convolution looks ahead.
        samples_per_column: of mel.
    """

    def __init__(self, weights: Weights, first: Pads, others: Pads):
        self._first = Conv(weights, "conv_pre", first)
        self._last = Conv(weights, "conv_post", others)
        n_ups = weights.count("ups")
        is_causal = others is Pads.LEFT
        self._ups = [_Up(weights, f"ups.{i}", is_causal) for i in range(n_ups)]
        self._downs = [_Down(weights, f"source_downs.{i}", is_causal) for i in range(n_ups)]
        self._source_units = [_Unit(weights, f"source_resblocks.{i}", others) for i in range(n_ups)]
        units = [
            _Unit(weights, f"resblocks.{i}", others) for i in range(weights.count("resblocks"))
        ]
        n = len(units) // n_ups
        self._units = [units[i : i + n] for i in range(0, len(units), n)]
        self.n_ahead = self._first.n_padded[1]
        self.samples_per_column = HOP * math.prod(up.stride for up in self._ups)
        weight = self._last.weight
        self._window = torch.hann_window(N_FFT, device=weight.device, dtype=weight.dtype)

    def __call__(self, mel: Tensor, sources: Tensor, n_cut: int = 0) -> Tensor:
        """[n_streams, n_samples] of [n_streams, n_mels, n_columns], without the last n_cut columns.

        sources: [n_streams, n_samples], of all of them.
        """
        n_columns = mel.shape[2] - n_cut
        spectrum = torch.stft(sources, N_FFT, HOP, window=self._window, return_complex=True)
        parts = torch.cat((spectrum.real, spectrum.imag), 1)
        parts = parts[..., : n_columns * self.samples_per_column // HOP + 1]
        x = self._first(mel)[..., :n_columns]
        for i, up in enumerate(self._ups):
            x = up(F.leaky_relu(x, _SLOPE))
            if i == len(self._ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + self._source_units[i](self._downs[i](parts))
            x = torch.stack([unit(x) for unit in self._units[i]]).mean(0)
        loud, angles = self._last(F.leaky_relu(x)).split(N_FFT // 2 + 1, 1)
        spectrum = torch.polar(loud.exp().clamp_(max=1e2), angles.sin())
        return self._sound_of(spectrum).clamp_(-_LIMIT, _LIMIT)

    def _sound_of(self, spectrum: Tensor) -> Tensor:
        """[n_streams, HOP * (n_frames - 1)], the inverse of torch.stft. That of torch waits for the
        device, to see that the windows leave no gap."""
        n_frames = spectrum.shape[2]
        frames = torch.fft.irfft(spectrum, N_FFT, dim=1) * self._window[:, None]
        squares = self._window.square()[None, :, None].expand(1, -1, n_frames)
        size = (1, N_FFT + HOP * (n_frames - 1)), (1, N_FFT)
        sound = F.fold(frames, *size, stride=(1, HOP)) / F.fold(squares, *size, stride=(1, HOP))
        return sound[:, 0, 0, N_FFT // 2 : -N_FFT // 2]


class _Up:
    """Centred: a transposed convolution, whose kernel is twice the stride, and one more if that is
    odd. Causal: columns are repeated before a convolution with such a kernel."""

    def __init__(self, weights: Weights, name: str, is_causal: bool):
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        self._is_causal = is_causal
        self._kernel = self._weight.shape[2]
        self.stride = self._kernel // 2

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_causal:
            repeated = F.pad(x.repeat_interleave(self.stride, 2), (self._kernel - 1, 0))
            return F.conv1d(repeated, self._weight, self._bias)
        padding = (self._kernel - self.stride) // 2
        return F.conv_transpose1d(x, self._weight, self._bias, stride=self.stride, padding=padding)


class _Down:
    """Brings the source to the rate of a layer; the kernel is twice the stride, or 1."""

    def __init__(self, weights: Weights, name: str, is_causal: bool):
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        self._stride = stride = max(1, self._weight.shape[2] // 2)
        self._pads = (stride - 1, 0) if is_causal else (stride // 2, stride // 2)

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x, self._pads), self._weight, self._bias, stride=self._stride)


class _Unit:
    """Residual pairs of convolutions, the first of each dilated."""

    def __init__(self, weights: Weights, name: str, pads: Pads):
        self._pairs = [
            (
                Snake(weights, f"{name}.activations1.{i}"),
                Conv(weights, f"{name}.convs1.{i}", pads, dilation),
                Snake(weights, f"{name}.activations2.{i}"),
                Conv(weights, f"{name}.convs2.{i}", pads),
            )
            for i, dilation in enumerate(_DILATIONS)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        for act, dilated, act_between, conv in self._pairs:
            x = x + conv(act_between(dilated(act(x))))
        return x
