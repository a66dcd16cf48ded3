"""Audio files as 24 kHz PCM16, and measurements of a clip: level, onset and end of speech."""

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError
from sglang_live.sound.decoder import Limits, decode_samples

BUNDLED_CLIP = Path(__file__).parent.parent / "assets" / "question.flac"
SAMPLE_RATE_HZ = 24_000
BYTES_PER_SAMPLE = 2
MAX_CLIP_S = 3600.0
FRAME_S = 0.020
FRAME_BYTES = round(SAMPLE_RATE_HZ * FRAME_S) * BYTES_PER_SAMPLE

# Speech fades out; frames this far below the loudest one are breath and room noise.
SPEECH_RANGE_DB = 35.0


@dataclass(frozen=True, slots=True)
class Level:
    """Duration of a recording, and its levels in dB of full scale (-inf: digital silence)."""

    duration_s: float
    peak_dbfs: float
    rms_dbfs: float


def load_pcm(path: Path) -> bytes:
    """Read a sound file of any rate as 24 kHz mono PCM16.

    Raises:
        ValueError: the file cannot be read, has no samples, or lasts more than an hour.
    """
    try:
        mono = decode_samples(
            path.read_bytes(), rate_hz=SAMPLE_RATE_HZ, limits=Limits(max_s=MAX_CLIP_S)
        )
    except (OSError, BadInputError) as error:
        raise ValueError(f"cannot read audio file {path}: {error}") from error
    return (mono * 32767).astype("<i2").tobytes()


def duration_s(pcm: bytes | bytearray) -> float:
    return len(pcm) / (BYTES_PER_SAMPLE * SAMPLE_RATE_HZ)


def frames(pcm: bytes, per_message: int = 1) -> list[bytes]:
    """Split into parts of `per_message` 20 ms frames; the last is padded with silence."""
    size = FRAME_BYTES * per_message
    parts = [pcm[i : i + size] for i in range(0, len(pcm), size)]
    if parts:
        parts[-1] = parts[-1].ljust(size, b"\0")
    return parts


def speech_frames(pcm: bytes) -> int:
    """Number of frames up to the end of speech, from which TTFP counts.

    The end of speech is the end of the last 20 ms frame whose level (RMS) is within 35 dB
    of the clip's peak level (RMS of its loudest frame). A silent clip ends with its last
    frame.
    """
    levels = frame_levels(pcm)
    floor = max(levels, default=0.0) * gain(-SPEECH_RANGE_DB)
    return max((i + 1 for i, level in enumerate(levels) if level >= floor), default=0)


def measure_level(pcm: bytes) -> Level:
    samples = np.frombuffer(pcm, "<i2")
    peak = float(np.abs(samples.astype(np.int32)).max()) if len(samples) else 0.0
    return Level(duration_s(pcm), _dbfs(peak), _dbfs(_rms(samples)))


def write_wav(path: Path, pcm: bytes) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(BYTES_PER_SAMPLE)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(pcm)


def frame_levels(pcm: bytes) -> list[float]:
    return [_rms(np.frombuffer(frame, "<i2")) for frame in frames(pcm)]


def gain(db: float) -> float:
    return float(10 ** (db / 20))


def _rms(samples: npt.NDArray[np.int16]) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) if len(samples) else 0.0


def _dbfs(amplitude: float) -> float:
    return float(20 * np.log10(amplitude / 32768)) if amplitude else float("-inf")
