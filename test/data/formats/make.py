"""Make the files of this folder: each codec and container, and what ffmpeg hears in it.

    python test/data/formats/make.py --ffmpeg /usr/bin/ffmpeg

Made with ffmpeg 9.0.2 (as in imageio-ffmpeg's wheel) and libsndfile 1.2.2, which writes the codecs
that ffmpeg only reads. `heard.npz` holds float32 [n, n_channels] by file name.
"""

import argparse
import io
import subprocess
from pathlib import Path

import numpy as np
import soundfile as sf

FOLDER = Path(__file__).parent
CLIP = FOLDER.parent / "audio" / "sp_jfk.flac"
RATE_HZ = 16_000
# Of ffmpeg: file name, codec, and further arguments. "2ch": in stereo.
BY_FFMPEG = [
    *((f"pcm_{codec}.wav", f"pcm_{codec}", "") for codec in ("u8", "s16le", "s24le", "s32le")),
    *((f"pcm_{codec}.wav", f"pcm_{codec}", "") for codec in ("s64le", "f32le", "f64le")),
    *((f"pcm_{codec}.wav", f"pcm_{codec}", "") for codec in ("alaw", "mulaw")),
    ("pcm_s24le_2ch.wav", "pcm_s24le", "-ac 2"),
    ("pcm_f32le_2ch.wav", "pcm_f32le", "-ac 2"),
    ("pcm_s16le_6ch.wav", "pcm_s16le", "-ac 6"),
    ("adpcm_ima.wav", "adpcm_ima_wav", "-block_size 256"),
    ("adpcm_ima_2ch.wav", "adpcm_ima_wav", "-ac 2 -block_size 256"),
    ("adpcm_ms.wav", "adpcm_ms", "-block_size 256"),
    ("adpcm_ms_2ch.wav", "adpcm_ms", "-ac 2 -block_size 256"),
    ("rf64.wav", "pcm_s16le", "-rf64 always"),
    ("pcm_s16le.w64", "pcm_s16le", ""),
    ("pcm_f32le.w64", "pcm_f32le", ""),
    ("pcm_alaw.w64", "pcm_alaw", ""),
    *((f"pcm_{codec}.aiff", f"pcm_{codec}", "") for codec in ("s8", "s16be", "s24be", "s32be")),
    *((f"pcm_{codec}.aiff", f"pcm_{codec}", "") for codec in ("f32be", "f64be", "s16le")),
    *((f"pcm_{codec}.aiff", f"pcm_{codec}", "") for codec in ("alaw", "mulaw")),
    ("adpcm_ima_qt.aiff", "adpcm_ima_qt", ""),
    *((f"pcm_{codec}.au", f"pcm_{codec}", "") for codec in ("s8", "s16be", "s24be", "s32be")),
    *((f"pcm_{codec}.au", f"pcm_{codec}", "") for codec in ("f32be", "f64be", "alaw", "mulaw")),
    *((f"pcm_{codec}.caf", f"pcm_{codec}", "") for codec in ("s16be", "s24be", "s32be")),
    *((f"pcm_{codec}.caf", f"pcm_{codec}", "") for codec in ("s16le", "s24le", "s32le", "f32le")),
    *((f"pcm_{codec}.caf", f"pcm_{codec}", "") for codec in ("f64le", "alaw", "mulaw")),
    ("flac_16.flac", "flac", "-sample_fmt s16"),
    ("flac_24.flac", "flac", "-sample_fmt s32"),
    ("flac_2ch.flac", "flac", "-ac 2"),
    ("vorbis.ogg", "libvorbis", ""),
    ("vorbis_2ch.ogg", "libvorbis", "-ac 2"),
    ("opus.ogg", "libopus", ""),
    ("opus_2ch.opus", "libopus", "-ac 2"),
    ("cbr.mp3", "libmp3lame", "-b:a 64k"),
    ("vbr.mp3", "libmp3lame", "-q:a 4"),
    ("44100_2ch.mp3", "libmp3lame", "-ar 44100 -ac 2"),
    ("no_tag.mp3", "libmp3lame", "-b:a 64k -write_xing 0 -id3v2_version 0"),
    ("mp3.wav", "libmp3lame", "-b:a 64k"),
    ("layer2.mp2", "mp2", "-b:a 64k"),
]
# Of libsndfile: file name, container, subtype, byte order.
BY_SNDFILE = [
    ("gsm610.wav", "WAV", "GSM610", "FILE"),
    ("extensible_u8.wav", "WAVEX", "PCM_U8", "FILE"),
    ("extensible_16.wav", "WAVEX", "PCM_16", "FILE"),
    ("extensible_24.wav", "WAVEX", "PCM_24", "FILE"),
    ("extensible_32.wav", "WAVEX", "PCM_32", "FILE"),
    ("extensible_float.wav", "WAVEX", "FLOAT", "FILE"),
    ("extensible_double.wav", "WAVEX", "DOUBLE", "FILE"),
    ("extensible_alaw.wav", "WAVEX", "ALAW", "FILE"),
    ("extensible_mulaw.wav", "WAVEX", "ULAW", "FILE"),
    ("ima.w64", "W64", "IMA_ADPCM", "FILE"),
    ("ms.w64", "W64", "MS_ADPCM", "FILE"),
    ("gsm610.aiff", "AIFF", "GSM610", "FILE"),
    ("ima.aiff", "AIFF", "IMA_ADPCM", "FILE"),
    ("flac_8.flac", "FLAC", "PCM_S8", "FILE"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ffmpeg", default="ffmpeg")
    ffmpeg = parser.parse_args().ffmpeg
    pcm, _ = sf.read(CLIP, start=10_000, frames=1600, dtype="int16")
    source = io.BytesIO()
    sf.write(source, pcm, RATE_HZ, format="WAV", subtype="PCM_16")
    for name, codec, more in BY_FFMPEG:
        how = ["-c:a", codec, *more.split(), "-bitexact", "-y", str(FOLDER / name)]
        run([ffmpeg, "-i", "-", *how], source.getvalue())
    for name, container, subtype, order in BY_SNDFILE:
        how = {"format": container, "subtype": subtype, "endian": order}
        sf.write(FOLDER / name, pcm / 32768, RATE_HZ, **how)
    heard = {}
    for name in sorted(entry[0] for entry in (*BY_FFMPEG, *BY_SNDFILE)):
        # libsndfile decodes Opus at the rate of what was encoded, ffmpeg at 48 kHz.
        rate = ["-ar", str(RATE_HZ)] if "opus" in name else []
        how = [*rate, "-f", "f32le", "-c:a", "pcm_f32le", "-"]
        decoded = run([ffmpeg, "-i", str(FOLDER / name), *how])
        n_channels = next((n for n in (2, 6) if f"_{n}ch" in name), 1)
        heard[name] = np.frombuffer(decoded, "<f4").reshape(-1, n_channels)
    np.savez_compressed(FOLDER / "heard.npz", **heard)


def run(command: list[str], stdin: bytes = b"") -> bytes:
    quiet = [command[0], "-v", "error", *command[1:]]
    return subprocess.run(quiet, input=stdin, stdout=subprocess.PIPE, check=True).stdout


if __name__ == "__main__":
    main()
