"""Claims about the audio files that clients receive."""

import io
import struct
import wave

import numpy as np
import pytest
import soundfile as sf

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.gateway.audio.files import FORMATS

# By libsndfile.
READABLE = [name for name in FORMATS if name not in ("pcm", "aac")]


def tone(n_samples: int) -> bytes:
    return (8000 * np.sin(np.arange(n_samples) / 20)).astype("<i2").tobytes()


def grown(name: str, pcm: bytes, n_bytes: int = 4800) -> bytes:
    encoder = FORMATS[name].growing()
    pieces = [encoder.push(pcm[at : at + n_bytes]) for at in range(0, len(pcm), n_bytes)]
    return b"".join(pieces) + encoder.finish()


@pytest.mark.parametrize("n_samples", [1, 479, 24_000, 100_003])
@pytest.mark.parametrize("name", READABLE)
def test_a_complete_file_says_how_long_it_is(name, n_samples):
    file = FORMATS[name].file(tone(n_samples))
    assert sf.info(io.BytesIO(file)).frames == n_samples
    samples, rate_hz = sf.read(io.BytesIO(file))
    assert (len(samples), rate_hz) == (n_samples, OUTPUT_RATE_HZ)


def test_a_complete_wav_has_true_sizes_in_both_chunks():
    pcm = tone(12_345)
    file = FORMATS["wav"].file(pcm)
    with wave.open(io.BytesIO(file)) as read:
        assert read.getparams()[:4] == (1, 2, OUTPUT_RATE_HZ, 12_345)
        assert read.readframes(12_345) == pcm
    assert struct.unpack_from("<I", file, 4) == (len(file) - 8,)
    assert struct.unpack_from("<I", file, file.index(b"data") + 4) == (len(pcm),)


def test_flac_has_its_total_and_its_checksum():
    file = FORMATS["flac"].file(tone(5000))
    total = int.from_bytes(file[21:26], "big") & (1 << 36) - 1
    assert file[:4] == b"fLaC" and total == 5000
    assert any(file[26:42])  # MD5 of the samples


@pytest.mark.parametrize("name", READABLE)
def test_a_growing_file_is_read_to_its_end(name):
    samples, _ = sf.read(io.BytesIO(grown(name, tone(50_000))))
    assert 50_000 <= len(samples) < 50_000 + 0.1 * OUTPUT_RATE_HZ


def test_a_growing_wav_begins_at_once_and_leaves_its_length_open():
    pcm = tone(1000)
    file = FORMATS["wav"].growing().push(pcm)
    assert len(file) == 44 + len(pcm)
    assert struct.unpack_from("<I", file, 40) == (0xFFFFFFFF,)


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_file_can_be_made(name):
    assert isinstance(FORMATS[name].file(b""), bytes)
