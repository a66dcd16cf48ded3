"""Random distortions of a recording's spectrum: vocal tracts, speeds, rooms.

Few speakers can be synthesised, and each recording is used hundreds of times. So the features that
distinguish speakers are randomised, on the thinker's inputs, which are Whisper's:
x = (log10 power + 4) / 4 in 128 mel bands, 100 a second, clipped 8 below the clip's maximum before
it is scaled.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional
from transformers import WhisperFeatureExtractor

EXTRACTOR = WhisperFeatureExtractor(feature_size=128)

_MEL_FILTERS = torch.tensor(EXTRACTOR.mel_filters, dtype=torch.float32)  # [201, 128]
# With these weights, the bands sum to the power of the sound.
_WIDTHS = torch.linalg.lstsq(_MEL_FILTERS.double(), torch.ones(201, 1).double(), driver="gelsd")
_WIDTHS = _WIDTHS.solution.float()  # [128, 1]
_DEPTH = 8.0  # of the clipping, in log10 of power
_N_WAVES = 4
_CLEAN_DB = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distortion:
    """Limits of the random distortion of one use of a recording.

    Attributes:
        stretch: maximum change of duration, as a share.
        warp: maximum stretch or compression of the bands, as a share.
        colour: standard deviation of a smooth curve over the bands, in log10 of power.
        snr_db: lowest and highest signal-to-noise ratio. None: no noise is added.
        masks: number of band ranges, and of time ranges, that are blanked out.
        mask_bands, mask_frames: upper limits of their widths, exclusive.
    """

    stretch: float = 0.08
    warp: float = 0.0
    colour: float = 0.0
    snr_db: tuple[float, float] | None = None
    masks: int = 2
    mask_bands: int = 16
    mask_frames: int = 14

    def faded(self, share: float) -> "Distortion":
        """This distortion with its voice and room effects reduced to a share; masks stay."""
        low, high = self.snr_db or (_CLEAN_DB, _CLEAN_DB)
        return replace(
            self,
            stretch=self.stretch * share,
            warp=self.warp * share,
            colour=self.colour * share,
            snr_db=(_CLEAN_DB + (low - _CLEAN_DB) * share, _CLEAN_DB + (high - _CLEAN_DB) * share),
        )

    def apply(self, mel: torch.Tensor, choose: torch.Generator) -> torch.Tensor:
        """A distorted float32 copy of a mel [128, frames]; the frames differ if stretched."""

        def between(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=choose))

        def below(n: int) -> int:
            return int(torch.randint(max(n, 1), (), generator=choose))

        speed = between(1 - self.stretch, 1 + self.stretch)
        mel = functional.interpolate(mel.float()[None], scale_factor=speed, mode="linear")[0]
        if self.warp:
            mel = _warped(mel, between(1 - self.warp, 1 + self.warp))
        if self.colour:
            mel = mel + self.colour / 4 * _curve(mel.shape[0], choose)[:, None]
        if self.snr_db is not None:
            mel = _with_noise(mel, between(*self.snr_db), between(0, 2), choose)
        for _ in range(self.masks):
            at, size = below(mel.shape[0]), below(self.mask_bands)
            mel[at : at + size] = mel.mean()
            at, size = below(mel.shape[1]), below(self.mask_frames)
            mel[:, at : at + size] = mel.mean()
        return mel


# The distortion of training: another vocal tract and room for each use of a recording.
WILD = Distortion(stretch=0.1, warp=0.12, colour=0.3, snr_db=(8, 40), masks=1, mask_frames=8)


def _warped(mel: torch.Tensor, factor: float) -> torch.Tensor:
    """[bands, frames]: band b moves to band b * factor; the last band fills all above it."""
    n = mel.shape[0]
    bands = torch.arange(n) / factor
    below = bands.floor().clamp(max=n - 1).long()
    share = (bands - below).clamp(0, 1)[:, None]
    return mel[below] * (1 - share) + mel[(below + 1).clamp(max=n - 1)] * share


def _curve(n: int, choose: torch.Generator) -> torch.Tensor:
    """[n] random curve of standard deviation 1: a level and the first cosines over the bands."""
    places = (torch.arange(n) + 0.5) / n
    waves = torch.cos(torch.pi * torch.arange(_N_WAVES)[:, None] * places)
    waves[1:] *= 2**0.5
    return torch.randn(_N_WAVES, generator=choose) @ waves / _N_WAVES**0.5


def _with_noise(
    mel: torch.Tensor, snr_db: float, tilt: float, choose: torch.Generator
) -> torch.Tensor:
    """Add noise whose power falls with frequency to the power of `tilt`, 0 white to 2 brown."""
    n_bins, n_frames = _MEL_FILTERS.shape[0], mel.shape[1]
    falling = torch.arange(n_bins).clamp(min=1.0) ** -tilt
    # In each bin the power of Gaussian noise is exponentially distributed.
    drawn = -torch.rand(n_bins, n_frames, generator=choose).clamp(min=1e-9).log()
    noise = _MEL_FILTERS.T @ (falling[:, None] * drawn)
    speech = 10 ** (4 * mel - 4)
    power = (speech * _WIDTHS).sum(0)
    wanted = power[power > power.max() * 1e-3].mean() * 10 ** (-snr_db / 10)
    both = (speech + noise * (wanted * n_frames / (noise * _WIDTHS).sum())).log10()
    return (both.clamp(min=both.max() - _DEPTH) + 4) / 4
