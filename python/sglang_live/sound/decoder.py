"""Decoder of untrusted sound files: uploads, chats, SGLang's own API, the client's recordings.

In: bytes of wav, aiff, au, caf, w64, flac, mp3, ogg. Out: samples at the requested rate.
Files are decoded block by block: lengths in headers are not trusted, memory holds the result and
one block, and decoding stops at the first block beyond the limits. wav.py reads wav files,
libsndfile the others.
"""

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soundfile as sf
import soxr

from sglang_live.errors import BadInputError
from sglang_live.sound.lengths import with_true_length
from sglang_live.sound.mpeg import begin_of
from sglang_live.sound.ogg import links
from sglang_live.sound.wav import read_wav

Samples = npt.NDArray[np.float32]

# Default limit of one file: 38 MB as float32 at 16 kHz.
MAX_CLIP_S = 600.0
# Frames of one block: 2 MiB with 8 channels.
_BLOCK_FRAMES = 1 << 16
_UNREADABLE = (
    "This is no audio file that can be read: wav, aiff, au, caf, w64, flac, mp3 and ogg can, and "
    "in uploads what holds AAC, AMR or WMA."
)
# Containers whose readers are in wide use. libsndfile reads more, which no client sends and in
# whose readers memory errors are reported every few years.
_CONTAINERS = frozenset(("WAV", "WAVEX", "AIFF", "AU", "CAF", "W64", "FLAC", "MP3", "OGG"))
# Codings whose decoded samples were compared with those of another decoder.
_PLAIN = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_CODED = ("IMA_ADPCM", "MS_ADPCM", "GSM610", "VORBIS", "OPUS")
_LAYERS = ("MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III")
_SUBTYPES = frozenset((*_PLAIN, *_CODED, *_LAYERS))
# libsndfile's other readers never run.
_SIGNATURES = (b".snd", b"dns.", b"caff", b"riff\x2e\x91", b"fLaC", b"OggS", b"ID3")
# Floats exceed full scale a little; above this they are integers that were never scaled.
_MAX_OVERSHOOT = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one file. A header may claim billions of samples a second, or a thousand channels.

    max_s: duration in seconds.
    """

    max_s: float
    min_rate_hz: int = 4_000
    max_rate_hz: int = 384_000
    max_channels: int = 8

    def check(self, n_channels: int, rate_hz: int) -> None:
        """Raises BadInputError if a file with this header is beyond the limits."""
        if n_channels > self.max_channels or not self.min_rate_hz <= rate_hz <= self.max_rate_hz:
            raise BadInputError(
                f"{n_channels} channels at {rate_hz} Hz: at most {self.max_channels}, and from "
                f"{self.min_rate_hz} to {self.max_rate_hz} Hz."
            )


@dataclass(frozen=True, slots=True)
class Sound:
    """A file that is being decoded.

    blocks: [n, n_channels] float32 each; can be iterated once.
    """

    rate_hz: int
    n_channels: int
    blocks: Iterator[Samples]


def decode_samples(data: bytes, *, rate_hz: int, limits: Limits, mono: bool = True) -> Samples:
    """Decode a whole file.

    Returns:
        [n] float32 in [-1, 1], its channels averaged; [n, n_channels] when not mono.
    Raises:
        BadInputError: the file is not readable, has no samples, is beyond the limits, or has
            samples that are infinite, not numbers, or far beyond full scale.
    """
    sound = decode(data, limits)
    n_channels = 1 if mono else sound.n_channels
    stream = None
    if sound.rate_hz != rate_hz:
        stream = soxr.ResampleStream(sound.rate_hz, rate_hz, n_channels, dtype="float32")
    blocks = [_resampled(block, n_channels, stream) for block in sound.blocks]
    if stream is not None:
        rest = np.zeros((0, n_channels), np.float32)
        blocks.append(stream.resample_chunk(rest, last=True).reshape(-1, n_channels))
    samples = np.concatenate(blocks)
    if not len(samples):
        raise BadInputError(f"The audio file holds no samples at {rate_hz} Hz.")
    np.clip(samples, -1.0, 1.0, out=samples)  # codecs and resampling overshoot
    return samples[:, 0] if mono else samples


def duration_s(data: bytes, limits: Limits) -> float:
    """Duration of a whole file, decoded block by block. Raises what `decode_samples` raises."""
    sound = decode(data, limits)
    return sum(len(block) for block in sound.blocks) / sound.rate_hz


def decode(data: bytes, limits: Limits) -> Sound:
    """Start to decode. Raises what `decode_samples` raises, also while the blocks are iterated.

    Samples beyond full scale are clipped, as in other decoders.
    """
    wav = read_wav(data)
    if wav is not None:
        limits.check(wav.n_channels, wav.rate_hz)
    if wav is not None and wav.is_plain:
        blocks = wav.blocks(_BLOCK_FRAMES)
        return Sound(wav.rate_hz, wav.n_channels, _bounded(blocks, wav.rate_hz, limits))
    if wav is None and not data.startswith(_SIGNATURES) and not _is_aiff(data):
        begin = begin_of(data)
        if begin is None and not _is_mpeg(data):
            raise BadInputError(_UNREADABLE)
        data = data[begin or 0 :]
    first, *others = links(data) if data.startswith(b"OggS") else [data]
    sound = _open(wav.repaired() if wav else with_true_length(first), limits)
    blocks = itertools.chain(sound.blocks, _read_links(others, sound, limits))
    return Sound(sound.rate_hz, sound.n_channels, _bounded(blocks, sound.rate_hz, limits))


def _open(data: bytes, limits: Limits) -> Sound:
    source = io.BytesIO(data)
    try:
        file = _Sequential(source)
    except (sf.LibsndfileError, ValueError):
        raise BadInputError(_UNREADABLE) from None
    if file.format not in _CONTAINERS or file.subtype not in _SUBTYPES:
        file.close()
        raise BadInputError(f"{_UNREADABLE} Not {file.subtype} in {file.format}.")
    limits.check(file.channels, file.samplerate)
    return Sound(file.samplerate, file.channels, _read(file, source))


def _read_links(others: list[bytes], first: Sound, limits: Limits) -> Iterator[Samples]:
    """The blocks of a chained file behind its first link."""
    for link in others:
        sound = _open(link, limits)
        form = sound.rate_hz, sound.n_channels
        if form != (first.rate_hz, first.n_channels):
            raise BadInputError(
                f"A chained ogg file changes from {first.n_channels} channels at {first.rate_hz} "
                f"Hz to {form[1]} channels at {form[0]} Hz: its parts must be alike."
            )
        yield from sound.blocks


def _is_mpeg(data: bytes) -> bool:
    return data[:1] == b"\xff" and len(data) > 1 and data[1] & 0xE0 == 0xE0


def _is_aiff(data: bytes) -> bool:
    return data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC")


class _Sequential(sf.SoundFile):  # type: ignore[misc] # soundfile has no types
    """A file that is read from beginning to end.

    After each read, a seekable SoundFile seeks to its own position. That fails at the end of a FLAC
    stream without a length.
    """

    def seekable(self) -> bool:
        return False


def _read(file: sf.SoundFile, source: io.BytesIO) -> Iterator[Samples]:
    """Iterate over the blocks of a file. source: the bytes behind it."""
    with file:
        n_read = _BLOCK_FRAMES
        while n_read == _BLOCK_FRAMES:
            # Read as float, because libsndfile does not scale floats that are read as integers.
            block = np.full((_BLOCK_FRAMES, file.channels), np.nan, np.float32)
            try:
                n_read = len(file.read(out=block))
            except sf.LibsndfileError:
                # The file breaks off within a block of its codec: the samples before it count.
                n_read = int(np.isfinite(block[:, 0]).argmin())
                if not n_read or source.tell() < len(source.getbuffer()):
                    raise BadInputError(f"{_UNREADABLE} It is damaged.") from None
                yield block[:n_read]
                return
            yield block[:n_read]


def _bounded(blocks: Iterator[Samples], rate_hz: int, limits: Limits) -> Iterator[Samples]:
    n_frames = 0
    for block in blocks:
        n_frames += len(block)
        if n_frames > limits.max_s * rate_hz:
            raise BadInputError(f"The audio is longer than {limits.max_s:g} s.")
        peak = np.abs(block).max(initial=0.0)
        if not np.isfinite(peak):
            raise BadInputError("The audio holds samples that are infinite or not numbers.")
        if peak > _MAX_OVERSHOOT:
            raise BadInputError(f"The audio holds samples of {peak:g}: floats go from -1 to 1.")
        yield np.clip(block, -1.0, 1.0)
    if not n_frames:
        raise BadInputError("The audio file holds no samples.")


def _resampled(block: Samples, n_channels: int, stream: soxr.ResampleStream | None) -> Samples:
    """Convert channels and rate.

    Args:
        block: [n, channels of the file].
        stream: None: the rate stays.
    Returns:
        [m, n_channels].
    """
    if n_channels < block.shape[1]:
        block = block.mean(axis=1, keepdims=True, dtype=np.float32)
    if stream is None:
        return block
    resampled: Samples = stream.resample_chunk(np.ascontiguousarray(block))
    return resampled.reshape(-1, n_channels)
