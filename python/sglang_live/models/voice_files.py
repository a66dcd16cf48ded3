"""Recordings of speakers whose voices a talker takes on: a directory with one file for each.

In: the directory of --voices. Out: files by the names of their voices, and samples. Without torch:
the server reads them before it starts a stage. A file NAME.txt beside a recording has its words,
for a talker that needs them.
"""

from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.sound.decoder import Limits, Samples, decode_samples

# Shorter ones tell little of a voice. Longer ones tell no more: they are averaged over time.
MIN_S, MAX_S = 1.0, 60.0
# A voice from a telephone would speak as through one.
MIN_RATE_HZ = 16_000
# Each takes a decoding at every start, and a row of the talker's memory.
MAX_VOICES = 256
# A minute of 384 kHz in two channels of floats.
_MAX_BYTES = 192 << 20
_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg")
_WORDS = ".txt"


def voice_files(directory: Path) -> dict[str, Path]:
    """The files by name of voice, which is the file's stem, in alphabetical order.

    Raises:
        BadInputError: there is no such directory, it has no recordings, too many, something else,
            or two of one name.
    """
    if not directory.is_dir():
        raise BadInputError(f"--voices: there is no directory {directory}")
    found: dict[str, Path] = {}
    files = [file for file in sorted(directory.iterdir()) if not file.name.startswith(".")]
    stems = {file.stem for file in files if file.suffix.lower() in _SUFFIXES}
    for file in files:
        if file.suffix == _WORDS and file.stem in stems:
            continue
        if file.suffix.lower() not in _SUFFIXES or not file.is_file():
            kinds = ", ".join(_SUFFIXES)
            raise BadInputError(f"--voices: {file} is no recording: it has none of {kinds}")
        same = [other for name, other in found.items() if name.lower() == file.stem.lower()]
        if same:
            raise BadInputError(f"--voices: {same[0]} and {file} are one name of two voices")
        found[file.stem] = file
    if not 0 < len(found) <= MAX_VOICES:
        raise BadInputError(
            f"--voices: {directory} has {len(found)} recordings, 1 to {MAX_VOICES} are possible"
        )
    return found


def read_recording(file: Path, rate_hz: int) -> Samples:
    """[n] float32 in [-1, 1], at rate_hz.

    Raises:
        BadInputError: the file is unreadable, shorter than MIN_S, longer than MAX_S, or has fewer
            than MIN_RATE_HZ samples a second.
    """
    try:
        n_bytes = file.stat().st_size
        if n_bytes > _MAX_BYTES:
            raise BadInputError(f"It has {n_bytes} bytes, the limit is {_MAX_BYTES}.")
        samples = decode_recording(file.read_bytes(), rate_hz)
    except OSError as error:
        raise BadInputError(f"--voices: cannot read {file}: {error.strerror}") from error
    except BadInputError as error:
        raise BadInputError(f"--voices: {file}: {error}") from error
    return samples


def decode_recording(
    data: bytes, rate_hz: int, max_s: float = MAX_S, min_s: float = MIN_S
) -> Samples:
    """read_recording of a file's contents, whose name the error does not say."""
    limits = Limits(max_s=max_s, min_rate_hz=MIN_RATE_HZ)
    samples = decode_samples(data, rate_hz=rate_hz, limits=limits)
    if len(samples) < min_s * rate_hz:
        found_s = len(samples) / rate_hz
        raise BadInputError(f"It lasts {found_s:.2f} s, a voice needs at least {min_s:g} s.")
    return samples


def words_of(file: Path) -> str:
    """What is said in a recording. Raises BadInputError if no file beside it tells."""
    words = file.with_suffix(_WORDS)
    try:
        text = words.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"--voices: cannot read {words}: this model needs the words of each recording ({error})"
        ) from error
    if not text:
        raise BadInputError(f"--voices: {words} is empty: it has to have the recording's words")
    return text
