"""Audio files in, 24 kHz PCM16 for the wire out, and the facts about a clip that matter."""

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_live.errors import BadInputError
from sglang_live.sound.decoder import Limits, decode_samples

SAMPLE_RATE_HZ = 24_000
BYTES_PER_SAMPLE = 2
MAX_CLIP_S = 3600.0
FRAME_S = 0.020
FRAME_BYTES = round(SAMPLE_RATE_HZ * FRAME_S) * BYTES_PER_SAMPLE

# Speech fades out; below this much under the loudest frame it is breath and room.
SPEECH_RANGE_DB = 35.0

# Speech begins where it stands out from the room for as long as a phoneme lasts.
ONSET_OVER_ROOM_DB = 10.0
ONSET_FRAMES = 3


@dataclass(frozen=True, slots=True)
class Level:
    """How loud a recording is, in dB of full scale (-inf: digital silence)."""

    duration_s: float
    peak_dbfs: float
    rms_dbfs: float


def load_pcm(path: Path) -> bytes:
    """Read a sound file of any rate as 24 kHz mono PCM16.

    Raises:
        ValueError: if it cannot be read, holds no samples, or lasts more than an hour.
    """
    try:
        mono = decode_samples(
            path.read_bytes(), rate_hz=SAMPLE_RATE_HZ, limits=Limits(max_s=MAX_CLIP_S)
        )
    except (OSError, BadInputError) as error:
        raise ValueError(f"cannot read audio file {path}: {error}") from error
    return (mono * 32767).astype("<i2").tobytes()


def duration_s(pcm: bytes) -> float:
    return len(pcm) / (BYTES_PER_SAMPLE * SAMPLE_RATE_HZ)


def frames(pcm: bytes, per_message: int = 1) -> list[bytes]:
    """Cut into pieces of `per_message` 20 ms frames; the last is filled up with silence."""
    size = FRAME_BYTES * per_message
    cut = [pcm[i : i + size] for i in range(0, len(pcm), size)]
    if cut:
        cut[-1] = cut[-1].ljust(size, b"\0")
    return cut


def speech_frames(pcm: bytes) -> int:
    """Number of frames up to the end of speech, which is where TTFP starts to count.

    The end of speech is the end of the last 20 ms frame whose level (RMS) is within 35 dB
    of the clip's peak level (RMS of its loudest frame). A silent clip ends with its last
    frame.
    """
    levels = _frame_levels(pcm)
    floor = max(levels, default=0.0) * _gain(-SPEECH_RANGE_DB)
    return max((i + 1 for i, level in enumerate(levels) if level >= floor), default=0)


def frames_before_speech(pcm: bytes) -> int:
    """Number of frames before the onset of speech.

    The onset is the first of three frames within 35 dB of the loudest that are also 10 dB
    above the room, which is what the quietest tenth of the frames holds. Where nothing
    stands out by 10 dB, as in a tone, what is within 10 dB of the loudest counts. A clip
    shorter than that begins at once.
    """
    levels = np.array(_frame_levels(pcm))
    if len(levels) < ONSET_FRAMES:
        return 0
    peak, room = levels.max(), np.percentile(levels, 10, method="lower")
    over_room = min(room * _gain(ONSET_OVER_ROOM_DB), peak * _gain(-ONSET_OVER_ROOM_DB))
    speaks = levels >= max(peak * _gain(-SPEECH_RANGE_DB), over_room)
    lasting = np.lib.stride_tricks.sliding_window_view(speaks, ONSET_FRAMES).all(axis=1)
    return int(lasting.argmax())


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


def _frame_levels(pcm: bytes) -> list[float]:
    return [_rms(np.frombuffer(frame, "<i2")) for frame in frames(pcm)]


def _gain(db: float) -> float:
    return 10 ** (db / 20)


def _rms(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) if len(samples) else 0.0


def _dbfs(amplitude: float) -> float:
    return float(20 * np.log10(amplitude / 32768)) if amplitude else float("-inf")
