"""Audio files that clients send, as the model hears them.

In: bytes of wav, flac, mp3 or ogg. Out: int16 at INPUT_RATE_HZ.
"""

import io
from collections.abc import Iterator

import numpy as np
import soundfile as sf
import soxr

from sglang_live.errors import BadInputError
from sglang_live.orchestrator.history import INPUT_RATE_HZ, AudioPart

# A header may promise anything: billions of samples a second, hundreds of channels.
_RATES_HZ = range(8_000, 192_001)
_MAX_CHANNELS = 8


def read_audio(data: bytes, *, max_s: float) -> AudioPart:
    """A whole file of any usual rate, its channels mixed. Holds no more than the result, and a
    second.

    Raises:
        BadInputError: no audio, a format that libsndfile does not know, or more than max_s.
    """
    try:
        with sf.SoundFile(io.BytesIO(data)) as file:
            return AudioPart(np.concatenate([*_heard(file, max_s)]))
    except sf.LibsndfileError:
        raise BadInputError(
            "This is no audio file that can be read: wav, flac, mp3 and ogg can."
        ) from None


def _heard(file: sf.SoundFile, max_s: float) -> Iterator[np.ndarray]:
    rate_hz, n_samples = file.samplerate, 0
    if rate_hz not in _RATES_HZ or file.channels > _MAX_CHANNELS:
        raise BadInputError(
            f"{file.channels} channels at {rate_hz} Hz: at most {_MAX_CHANNELS}, and from "
            f"{_RATES_HZ[0]} to {_RATES_HZ[-1]} Hz."
        )
    stream = soxr.ResampleStream(rate_hz, INPUT_RATE_HZ, 1, dtype="int16")
    # Second by second, whatever the header says of the length.
    while len(piece := file.read(rate_hz, dtype="int16", always_2d=True)):
        n_samples += len(piece)
        if n_samples > max_s * rate_hz:
            raise BadInputError(f"The audio is longer than {max_s:g} s.")
        mono = piece[:, 0] if file.channels == 1 else piece.mean(axis=1).astype(np.int16)
        yield stream.resample_chunk(np.ascontiguousarray(mono))
    if not n_samples:
        raise BadInputError("The audio file holds no samples.")
    yield stream.resample_chunk(np.zeros(0, np.int16), last=True)
