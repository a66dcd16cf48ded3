"""Reader of the audio files that clients send.

In: bytes of a file. Out: int16 at INPUT_RATE_HZ, the model's input.
"""

import numpy as np

from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.gateway.audio.resampler import to_int16
from sglang_live.sound.decoder import Limits, decode_samples


def read_audio(data: bytes, *, max_s: float) -> AudioPart:
    """Read a whole file of any usual sample rate and mix its channels.

    Raises:
        BadInputError: see sound.decoder.decode_samples.
    """
    heard = decode_samples(data, rate_hz=INPUT_RATE_HZ, limits=Limits(max_s=max_s))
    return AudioPart(to_int16(heard * np.float32(32768)))
