"""Audio files that clients send, as the model hears them.

In: bytes of wav, flac, mp3 or ogg. Out: int16 at INPUT_RATE_HZ.
"""

import io

import numpy as np
import soundfile as sf

from sglang_live.errors import BadInputError
from sglang_live.gateway.resampler import resample
from sglang_live.orchestrator.history import INPUT_RATE_HZ, AudioPart


def read_audio(data: bytes, *, max_s: float) -> AudioPart:
    """A whole file of any rate, its channels mixed.

    Raises:
        BadInputError: no audio, a format that libsndfile does not know, or more than max_s.
    """
    try:
        with sf.SoundFile(io.BytesIO(data)) as file:
            rate_hz = file.samplerate
            # One second more than allowed tells too long from just long enough. Not file.frames:
            # the header of a stream promises what it likes.
            samples = file.read(round((max_s + 1) * rate_hz), dtype="int16", always_2d=True)
    except sf.LibsndfileError:
        raise BadInputError(
            "This is no audio file that can be read: wav, flac, mp3 and ogg can."
        ) from None
    if not len(samples):
        raise BadInputError("The audio file holds no samples.")
    if len(samples) > max_s * rate_hz:
        raise BadInputError(f"The audio is longer than {max_s:g} s.")
    mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1).astype(np.int16)
    return AudioPart(resample(np.ascontiguousarray(mono), rate_hz, INPUT_RATE_HZ))
