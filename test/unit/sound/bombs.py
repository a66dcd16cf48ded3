"""Files that grow when they are decoded, tried in a child process with little memory.

    python -m test.unit.sound.bombs

Prints a JSON object by name of the file: the error, and the growth of the process in MB.
"""

import io
import json
import resource
import struct
from pathlib import Path

import numpy as np
import soundfile as sf

from sglang_live.bridge.platform.audio_input import load_audio
from sglang_live.errors import BadInputError
from sglang_live.gateway.audio.files import read_audio
from test.unit.sound.files import chunk, fmt, wav, written

MAX_S = 30.0
# Address space beyond that in use when decoding begins.
ROOM_BYTES = 400 << 20


def bombs() -> dict[str, bytes]:
    silence = np.zeros(3_000 * 16_000, np.int16)
    header = fmt(1, 16, rate_hz=1)
    many = fmt(1, 8, n_channels=1023, rate_hz=16_000)
    ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, 1 << 62, 1 << 62, 0))
    return {
        "1 KB at 1 Hz": wav(header, b"\1\0" * 500),
        "2 MB at 1 Hz": wav(header, b"\1\0" * 1_000_000),
        "a thousand channels": wav(many, b"\x80" * 2_000_000),
        "hours at 4 kHz in 8 bits": wav(fmt(1, 8, rate_hz=4_000), b"\x80" * 16_000_000),
        "50 minutes of silence as flac": written(silence, "FLAC", "PCM_16"),
        "50 minutes of silence as ogg": ogg_of_silence(),
        "50 minutes of silence as mp3": written(silence[: 1000 * 16_000], "MP3", "MPEG_LAYER_III"),
        "a data chunk of 2**62 bytes": b"RF64\xff\xff\xff\xffWAVE" + ds64 + wav(header, b"\0")[12:],
        "a flac of 2**36 samples": flac_of(2**36 - 1),
    }


def ogg_of_silence() -> bytes:
    file = io.BytesIO()
    with sf.SoundFile(file, "w", 16_000, 1, "VORBIS", format="OGG") as ogg:
        for _ in range(60):
            ogg.write(np.zeros(16_000, np.int16))
    return file.getvalue()


def flac_of(n_samples: int) -> bytes:
    """A file with a tenth of a second of sound. n_samples: length in its header."""
    data = bytearray(written(np.zeros(1600, np.int16), "FLAC", "PCM_16"))
    low = int.from_bytes(data[18:26], "big") >> 36 << 36
    data[18:26] = (low | n_samples).to_bytes(8, "big")
    return bytes(data)


def tried(data: bytes, decode) -> dict[str, object]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_kb()
    error = None
    try:
        decode(data)
    except (BadInputError, ValueError) as refused:
        error = str(refused)
    return {"error": error, "grown_mb": (_peak_kb() - before) / 1024}


def _peak_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    made = bombs()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    in_use = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ROOM_BYTES, resource.RLIM_INFINITY))
    results = {}
    for name, data in made.items():
        results[f"{name}, uploaded"] = tried(data, lambda d: read_audio(d, max_s=MAX_S))
        results[f"{name}, native"] = tried(data, load_audio)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
