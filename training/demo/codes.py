"""Codec codes of sound: the vocoder is trained to decode them, the talker to predict them.

A frame of 80 ms is described by two things, each quantised step by step (residual vector
quantisation, one codebook of 256 per step):

- its spectrum: eight log-mel vectors, as principal components;
- the phase of its pitch: the waveform below 150 Hz, at 32 samples per frame. A spectrum alone
  leaves open where a period begins, and a decoder without it averages over all positions.

The sum of a frame's centroids approximates the frame, so they are the vocoder's code embedding,
which needs no training.
"""

from dataclasses import dataclass

import numpy as np
import torch

from training.demo.sizes import FRAME_SAMPLES, SIZE
from training.demo.voices import ANSWER_RATE_HZ

N_SPECTRUM, N_PHASE = 11, 5  # codebooks
N_COMPONENTS = 96
LOW_SAMPLES = 32  # per frame, of the waveform below LOW_HZ
LOW_HZ = 150.0

_FFT, _WINDOW, _HOP = 1024, 640, 240
_N_MELS, _LOWEST_HZ, _HIGHEST_HZ = 64, 40.0, 11_500.0
_MEL_FLOOR = 1e-3
_KMEANS_ROUNDS = 20
_KMEANS_SAMPLE = 60_000


@dataclass(frozen=True, slots=True, eq=False)
class Codebooks:
    """Codebooks fitted to recordings.

    mean: [512], mean of the log-mel frames.
    components: [512, 96], their principal axes.
    spectrum, phase: [256, n] per step, n the dimension of the quantised vector.
    """

    mean: torch.Tensor
    components: torch.Tensor
    spectrum: tuple[torch.Tensor, ...]
    phase: tuple[torch.Tensor, ...]

    @classmethod
    def fit(cls, recordings: list[np.ndarray], seed: int) -> "Codebooks":
        """Fit to recordings, float32 at 24 kHz, of whole frames each."""
        noise = torch.Generator().manual_seed(seed)
        spectra = torch.cat([mel_frames(r) for r in recordings])
        phases = torch.cat([low_frames(r) for r in recordings])
        mean = spectra.mean(0)
        centred = spectra - mean
        _, axes = torch.linalg.eigh(centred.T @ centred)
        components = axes[:, -N_COMPONENTS:].flip(1).contiguous()
        return cls(
            mean,
            components,
            _fit_steps(centred @ components, N_SPECTRUM, noise),
            _fit_steps(phases, N_PHASE, noise),
        )

    def encode(self, recording: np.ndarray) -> torch.Tensor:
        """[16, frames] codes of a recording of whole frames."""
        spectrum = (mel_frames(recording) - self.mean) @ self.components
        phase = low_frames(recording)
        return torch.stack([*_encode(spectrum, self.spectrum), *_encode(phase, self.phase)])

    def embedding(self) -> torch.Tensor:
        """[16 * 256, 128] for the vocoder, which averages over the codebooks.

        Later components have less variance and are scaled up; the decoder would ignore them.
        """
        books = len(self.spectrum) + len(self.phase)
        rows = torch.zeros(books, SIZE.codebook_size, SIZE.codec_hidden)
        raised = torch.linspace(0, 1.2, N_COMPONENTS).exp()
        for i, book in enumerate(self.spectrum):
            rows[i, :, :N_COMPONENTS] = book / self.spectrum[0].std() * raised
        for i, book in enumerate(self.phase, start=len(self.spectrum)):
            rows[i, :, N_COMPONENTS:] = book / self.phase[0].std()
        return (rows * books).flatten(0, 1)


def whole_frames(sound: np.ndarray, lead_frames: int, tail_frames: int) -> np.ndarray:
    """Pad a recording with silence around it, and its end to a whole frame."""
    fill = -len(sound) % FRAME_SAMPLES
    return np.pad(sound, (lead_frames * FRAME_SAMPLES, fill + tail_frames * FRAME_SAMPLES))


def log_mel(sound: torch.Tensor) -> torch.Tensor:
    """[64, n / 240] natural logarithms of mel magnitudes of [n] samples."""
    edge = (_FFT - _HOP) // 2
    padded = torch.nn.functional.pad(sound, (edge, edge))
    window = torch.hann_window(_WINDOW)
    spectrum = torch.stft(
        padded, _FFT, _HOP, win_length=_WINDOW, window=window, center=False, return_complex=True
    )
    return torch.log(_mel_filters() @ spectrum.abs() + _MEL_FLOOR)


def mel_frames(sound: np.ndarray) -> torch.Tensor:
    """[frames, 8 * 64]."""
    mel = log_mel(torch.from_numpy(sound))
    return mel.T.reshape(len(sound) // FRAME_SAMPLES, -1)


def low_frames(sound: np.ndarray) -> torch.Tensor:
    """[frames, 32]: the waveform below LOW_HZ, its level evened out."""
    spectrum = np.fft.rfft(np.pad(sound, FRAME_SAMPLES).astype(np.float64))
    hz = np.arange(len(spectrum)) * ANSWER_RATE_HZ / (len(sound) + 2 * FRAME_SAMPLES)
    # A soft edge: a sharp one rings.
    low = spectrum * np.clip((LOW_HZ + 20 - hz) / 40, 0, 1)
    wave = np.fft.irfft(low)
    turned = np.fft.irfft(-1j * low)
    level = np.hypot(wave, turned)
    wave = wave / (np.sqrt(level) + 0.03)
    kept = wave[FRAME_SAMPLES:-FRAME_SAMPLES][:: FRAME_SAMPLES // LOW_SAMPLES]
    return torch.from_numpy(kept.astype(np.float32)).reshape(-1, LOW_SAMPLES)


def _mel_filters() -> torch.Tensor:
    """[64, 513] triangles of area one, evenly spaced in mel."""
    lowest, highest = (2595 * np.log10(1 + hz / 700) for hz in (_LOWEST_HZ, _HIGHEST_HZ))
    mels = np.linspace(lowest, highest, _N_MELS + 2)
    edges = 700 * (10 ** (mels / 2595) - 1) * _FFT / ANSWER_RATE_HZ
    bins = np.arange(_FFT // 2 + 1)[None]
    below, centre, above = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    slopes = np.minimum((bins - below) / (centre - below), (above - bins) / (above - centre))
    filters = np.maximum(slopes, 0)
    filters /= np.maximum(filters.sum(1, keepdims=True), 1e-9)
    return torch.from_numpy(filters.astype(np.float32))


def _fit_steps(rows: torch.Tensor, steps: int, noise: torch.Generator) -> tuple[torch.Tensor, ...]:
    books = []
    for _ in range(steps):
        book = _kmeans(rows, noise)
        books.append(book)
        rows = rows - book[_nearest(rows, book)]
    return tuple(books)


def _encode(rows: torch.Tensor, books: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    codes = []
    for book in books:
        code = _nearest(rows, book)
        codes.append(code)
        rows = rows - book[code]
    return codes


def _nearest(rows: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    return (book.square().sum(1) - 2 * rows @ book.T).argmin(1)


def _kmeans(rows: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """[256, n] centroids; one without rows restarts at a random row."""
    n = SIZE.codebook_size
    if len(rows) > _KMEANS_SAMPLE:
        rows = rows[torch.randperm(len(rows), generator=noise)[:_KMEANS_SAMPLE]]
    centroids = rows[torch.randint(len(rows), (n,), generator=noise)].clone()
    for _ in range(_KMEANS_ROUNDS):
        nearest = _nearest(rows, centroids)
        counts = torch.bincount(nearest, minlength=n)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, rows)
        anew = rows[torch.randint(len(rows), (n,), generator=noise)]
        mean = sums / counts.clamp(min=1)[:, None]
        centroids = torch.where(counts[:, None] > 0, mean, anew)
    return centroids
