"""Files of clients, whose headers may be wrong."""

import io
import struct

import numpy as np
import pytest
import soundfile as sf

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.gateway.audio.files import read_audio


def file_of(samples: np.ndarray, rate_hz: int, container: str = "WAV") -> bytes:
    file = io.BytesIO()
    sf.write(file, samples, rate_hz, format=container, subtype="PCM_16")
    return file.getvalue()


def tone(seconds: float, rate_hz: int, n_channels: int = 1) -> np.ndarray:
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    mono = (8000 * np.sin(2 * np.pi * 440 * t)).astype(np.int16)
    return np.repeat(mono[:, None], n_channels, axis=1)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 44_101, 48_000, 192_000])
@pytest.mark.parametrize("n_channels", [1, 2])
def test_every_usual_rate_keeps_its_pitch(rate_hz, n_channels):
    audio = read_audio(file_of(tone(2.5, rate_hz, n_channels), rate_hz), max_s=10)
    assert audio.duration_s == pytest.approx(2.5, abs=0.002)
    middle = audio.pcm[4000:-4000].astype(float)
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert np.argmax(spectrum) * INPUT_RATE_HZ / len(middle) == pytest.approx(440, abs=1)
    assert np.abs(middle).max() == pytest.approx(8000, rel=0.03)


@pytest.mark.parametrize("rate_hz", [1, 3_999, 384_001, 1_999_999_999])
def test_an_absurd_sample_rate_is_refused_before_the_file_is_read(rate_hz):
    data = bytearray(file_of(tone(0.01, 8_000), 8_000))
    data[24:28] = struct.pack("<I", rate_hz)
    with pytest.raises(BadInputError, match=f"at {rate_hz} Hz"):
        read_audio(bytes(data), max_s=10)


def test_hundreds_of_channels_are_refused():
    with pytest.raises(BadInputError, match="200 channels"):
        read_audio(file_of(np.zeros((100, 200), np.int16), 16_000), max_s=10)


def test_a_file_at_the_limit_is_read_and_a_longer_one_is_refused():
    data = file_of(tone(2.0, 16_000), 16_000, "FLAC")
    assert read_audio(data, max_s=2.0).duration_s == pytest.approx(2.0)
    with pytest.raises(BadInputError, match=r"longer than 1\.9 s"):
        read_audio(data, max_s=1.9)


@pytest.mark.parametrize("data", [b"", b"RIFF", b"no audio at all", b"\0" * 5000])
def test_bytes_that_are_not_audio_are_refused(data):
    with pytest.raises(BadInputError, match=r"no audio file|no .data. chunk"):
        read_audio(data, max_s=10)


def test_a_file_without_samples_is_refused():
    with pytest.raises(BadInputError, match="no samples"):
        read_audio(file_of(np.zeros(0, np.int16), 16_000), max_s=10)
