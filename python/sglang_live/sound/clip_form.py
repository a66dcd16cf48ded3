"""The form in which a model was trained to hear recordings; other forms it takes for noise.

In: a clip, as a client sent it. Out: the clip with silence around its sound, without an offset, at
a level that the model knows. Pure.
A checkpoint names its form in its thinker's configuration, `live_clip_form`. One without it hears
clips as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError

CONFIG_KEY = "live_clip_form"
# Of silence, so that bounds of clips and prompts need not know of it: they leave a second.
MAX_ADDED_S = 0.9

Samples = npt.NDArray[np.float32]
Pcm = npt.NDArray[np.int16]

INPUT_RATE_HZ = 16_000
_FRAME_SAMPLES = INPUT_RATE_HZ // 100
# Sound is what is less than 40 dB below the clip's loudest frame, and above its noise; what is less
# than 12 dB below is no noise.
_FLOOR, _MOST_NOISE = 10 ** (-40 / 20), 10 ** (-12 / 20)
_NOISE_QUANTILE, _ABOVE_NOISE = 0.1, 2.0
_NOISE_OF_16_BITS = 2 / 32768
# What is far softer than the least peak is the noise of 16 bits.
_MAX_GAIN = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipForm:
    """
    before_s: silence before the sound of a message. More of it is cut: where the sound lies in
        the encoder's windows changes what the model understands.
    after_s: least silence behind it.
    least_peak: of a clip's samples, of full scale.
    """

    before_s: float
    after_s: float
    least_peak: float

    def __post_init__(self) -> None:
        if not 0 <= self.before_s + self.after_s <= MAX_ADDED_S:
            raise ValueError(f"at most {MAX_ADDED_S} s of silence are added")

    @classmethod
    def of(cls, thinker_config: Mapping[str, Any]) -> Self | None:
        """None: the checkpoint hears clips as they are. Raises BadInputError if it is malformed."""
        given = thinker_config.get(CONFIG_KEY)
        if given is None:
            return None
        try:
            return cls(**{name: float(value) for name, value in given.items()})
        except (TypeError, ValueError, AttributeError) as error:
            raise BadInputError(f"{CONFIG_KEY} is malformed: {error}") from error

    def of_pcm(self, pcm: Pcm, *, begins: bool, ends: bool) -> Pcm:
        """See of_clip. pcm: [n] int16."""
        formed = self.of_clip(
            pcm.astype(np.float32) / np.float32(32768), begins=begins, ends=ends
        ) * np.float32(32768)
        return np.clip(np.round(formed), -32768, 32767).astype(np.int16)

    def of_clip(self, samples: Samples, *, begins: bool = True, ends: bool = True) -> Samples:
        """
        Args:
            samples: [n] in [-1, 1] at INPUT_RATE_HZ.
            begins, ends: whether the message begins and ends with the clip. Pieces of a message
                keep their levels, which must not differ.
        """
        if not len(samples):
            return samples
        samples = samples - samples.mean()
        peak = float(np.abs(samples).max())
        if begins and ends and 0.0 < peak < self.least_peak:
            samples = samples * min(self.least_peak / peak, _MAX_GAIN)
        loud = np.flatnonzero(_is_loud(samples))
        if not len(loud):
            return samples
        before = after = 0  # samples that are lacking
        if begins:
            before = round(self.before_s * INPUT_RATE_HZ) - int(loud[0]) * _FRAME_SAMPLES
        if ends:
            n_quiet = len(samples) - (int(loud[-1]) + 1) * _FRAME_SAMPLES
            after = round(self.after_s * INPUT_RATE_HZ) - n_quiet
        return np.pad(samples[max(0, -before) :], (max(0, before), max(0, after)))


def _is_loud(samples: Samples) -> npt.NDArray[np.bool_]:
    """[n_frames] whether there is sound in a frame; the last one may be shorter."""
    starts = np.arange(0, len(samples), _FRAME_SAMPLES)
    lengths = np.diff(starts, append=len(samples))
    levels = np.sqrt(np.add.reduceat(np.square(samples), starts) / lengths)
    loudest = float(levels.max())
    noise = min(_ABOVE_NOISE * float(np.quantile(levels, _NOISE_QUANTILE)), loudest * _MOST_NOISE)
    loud: npt.NDArray[np.bool_] = levels > max(loudest * _FLOOR, noise, _NOISE_OF_16_BITS)
    return loud
