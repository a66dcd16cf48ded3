"""Sound files are decoded exactly and within bounds, also with wrong headers."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from sglang_live.errors import BadInputError
from sglang_live.sound.decoder import Limits, decode, decode_samples

from .files import RATE_HZ, chunk, extensible, fmt, tone, wav, written

FORMATS = Path(__file__).parents[2] / "data" / "formats"
HEARD = np.load(FORMATS / "heard.npz")
LIMITS = Limits(max_s=30)
PCM = tone()
# Tolerances in parts of full scale where two decoders of one codec differ: rounding of a lossy
# decoder; for ADPCM the state between blocks (aiff) or its width (w64); for Opus the filter to
# 16 kHz.
TOLERANCE = {"opus": 0.02, "ms.w64": 0.01, "ima.aiff": 0.005, "adpcm_ima_qt.aiff": 0.005}


def samples(data: bytes) -> np.ndarray:
    return np.concatenate([*decode(data, LIMITS).blocks])


def heard(data: bytes, **how) -> np.ndarray:
    return decode_samples(data, rate_hz=RATE_HZ, limits=LIMITS, **how)


def pcm16(data: bytes) -> list[int]:
    return np.rint(samples(data)[:, 0] * 32768).astype(int).tolist()


# --- against ffmpeg ---


@pytest.mark.parametrize("name", HEARD.files)
def test_every_codec_and_container_decodes_as_ffmpeg_does(name):
    expected, mine = HEARD[name], samples((FORMATS / name).read_bytes())
    # ffmpeg keeps samples of the last Vorbis block beyond the stated end, and drops an odd last
    # block of GSM.
    spare = {"vorbis.ogg": 256, "vorbis_2ch.ogg": 256, "gsm610.wav": -320}.get(name, 0)
    n_common = min(len(expected), len(mine))
    assert len(expected) - len(mine) in (0, spare) or 0 < len(expected) - len(mine) <= spare
    assert np.abs(expected).max() > 0.5
    allowed = next((t for part, t in TOLERANCE.items() if part in name), 4e-5)
    assert np.abs(mine[:n_common] - expected[:n_common]).max() <= allowed


# --- plain samples ---


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("width", [2, 4, 8])
def test_integers_of_both_byte_orders_come_out_exactly(order, width):
    wide = (PCM.astype(np.int64) << (8 * width - 16)).astype(f"{order}i{width}")
    name = b"RIFX" if order == ">" else b"RIFF"
    data = wav(fmt(1, 8 * width, order=order), wide.tobytes(), order=order, name=name)
    assert pcm16(data) == PCM.tolist()


@pytest.mark.parametrize("order", "<>")
def test_24_bits_of_both_byte_orders_come_out_exactly(order):
    wide = (PCM.astype(np.int32) << 16).astype(f"{order}i4").view(np.uint8).reshape(-1, 4)
    octets = wide[:, 1:] if order == "<" else wide[:, :3]
    name = b"RIFX" if order == ">" else b"RIFF"
    form = fmt(1, 24, order=order)
    assert pcm16(wav(form, octets.tobytes(), order=order, name=name)) == PCM.tolist()


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("width", [4, 8])
def test_floats_come_out_exactly(order, width):
    name = b"RIFX" if order == ">" else b"RIFF"
    floats = (PCM / 32768).astype(f"{order}f{width}")
    data = wav(fmt(3, 8 * width, order=order), floats.tobytes(), order=order, name=name)
    assert pcm16(data) == PCM.tolist()


@pytest.mark.parametrize(
    ("stored", "valid"), [(16, 12), (16, 14), (32, 20), (32, 24), (24, 20), (64, 40)]
)
@pytest.mark.parametrize("is_extensible", [True, False])
def test_samples_narrower_than_their_container_use_its_upper_bits(stored, valid, is_extensible):
    kept = (PCM >> max(0, 16 - valid) << max(0, 16 - valid)).astype(np.int64)
    wide = (kept << (stored - 16)).astype("<i8").view(np.uint8).reshape(-1, 8)
    form = extensible(1, stored, valid) if is_extensible else fmt(1, valid, stored=stored)
    assert pcm16(wav(form, wide[:, : stored // 8].tobytes())) == kept.tolist()


@pytest.mark.parametrize("tail", ["000000001000800000aa00389b71", "00002107d3118644c8c1ca000000"])
def test_every_extensible_subformat_is_read(tail):
    floats = (PCM / 32768).astype("<f4").tobytes()
    assert pcm16(wav(extensible(1, 16, 16, tail=tail), PCM.tobytes())) == PCM.tolist()
    assert pcm16(wav(extensible(3, 32, 32, tail=tail), floats)) == PCM.tolist()


# --- wrong lengths ---


@pytest.mark.parametrize("riff_size", [0, 4, 36, 0xFFFFFFFF, 0x7FFFFFFF])
@pytest.mark.parametrize("data_size", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFDB, 1 << 24, None])
def test_a_wav_with_any_length_in_its_header_is_read_to_its_end(riff_size, data_size):
    data = wav(fmt(1, 16), PCM.tobytes(), riff_size=riff_size, data_size=data_size)
    assert pcm16(data) == PCM.tolist()


@pytest.mark.parametrize("name", [b"RF64", b"BW64"])
@pytest.mark.parametrize("long_size", [0, 2 * len(PCM), 0xFFFFFFFFFFFFFFFF, 1 << 40])
def test_a_64_bit_wav_is_read_to_its_end(name, long_size):
    ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, long_size, 0, 0))
    whole = wav(fmt(1, 16), PCM.tobytes(), data_size=0xFFFFFFFF)
    data = name + b"\xff" * 4 + b"WAVE" + ds64 + whole[12:]
    assert pcm16(data) == PCM.tolist()


@pytest.mark.parametrize("n_bytes", range(12, 60))
def test_a_64_bit_wav_that_breaks_off_in_its_header_is_refused(n_bytes):
    ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, 400, 400, 0))
    data = b"RF64" + b"\xff" * 4 + b"WAVE" + ds64 + wav(fmt(1, 16), PCM.tobytes())[12:]
    with pytest.raises(BadInputError):
        samples(data[:n_bytes])


@pytest.mark.parametrize("n_odd", [1, 3, 5])
@pytest.mark.parametrize("padded", [True, False])
def test_chunks_of_odd_length_before_the_data_are_skipped(n_odd, padded):
    odd = chunk(b"LIST", b"INFO" + b"x" * n_odd)
    data = wav(fmt(1, 16), PCM.tobytes(), before=odd if padded else odd[:-1])
    assert pcm16(data) == PCM.tolist()


def test_chunks_after_the_data_are_not_decoded():
    after = chunk(b"LIST", b"INFOISFT" + b"\x7f" * 40)
    assert pcm16(wav(fmt(1, 16), PCM.tobytes(), after=after)) == PCM.tolist()
    odd = wav(fmt(1, 8), b"\x80" * 401, after=after)
    assert len(samples(odd)) == 401


def test_an_empty_wav_with_chunks_after_the_data_is_empty():
    with pytest.raises(BadInputError, match="no samples"):
        samples(wav(fmt(1, 16), b"", after=chunk(b"LIST", b"INFO" + b"x" * 400)))


@pytest.mark.parametrize("form", ["adpcm_ima.wav", "adpcm_ms.wav", "gsm610.wav", "mp3.wav"])
@pytest.mark.parametrize("claimed", [0, 0xFFFFFFFF])
def test_a_coded_wav_is_read_to_its_end(form, claimed):
    data = bytearray((FORMATS / form).read_bytes())
    at = data.index(b"data")
    struct.pack_into("<I", data, at + 4, claimed)
    assert len(samples(bytes(data))) >= len(HEARD[form])


@pytest.mark.parametrize(
    ("container", "find", "offset", "form"),
    [
        ("AIFF", b"SSND", 4, ">I"),
        ("AU", b".snd", 8, ">I"),
        ("CAF", b"data", 4, ">q"),
        ("W64", b"data\xf3\xac\xd3\x11", 16, "<Q"),
    ],
)
@pytest.mark.parametrize("claimed", ["0", "all ones", "more"])
def test_other_containers_are_read_to_their_end(container, find, offset, form, claimed):
    data = bytearray(written(PCM, container, "PCM_16"))
    top = 2 ** (8 * struct.calcsize(form)) - 1
    value = {"0": 0, "all ones": -1 if "q" in form else top, "more": 1 << 24}[claimed]
    struct.pack_into(form, data, data.index(find) + offset, value)
    if container == "AIFF":
        struct.pack_into(">I", data, data.index(b"COMM") + 10, 0)  # number of frames
    assert pcm16(bytes(data)) == PCM.tolist()


@pytest.mark.parametrize("name", ["pcm_s16le.wav", "pcm_f32le.wav", "adpcm_ms.wav", "flac_16.flac"])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.95])
def test_a_file_that_breaks_off_is_decoded_up_to_there_or_refused(name, part):
    whole = (FORMATS / name).read_bytes()
    try:
        mine = samples(whole[: int(part * len(whole))])
    except BadInputError:
        assert "flac" in name or part == 0.3  # less than one block of the codec
        return
    assert 0 < len(mine) <= len(HEARD[name])
    n_whole = max(0, len(mine) - 600)  # the last block of a codec may be damaged
    assert np.abs(mine[:n_whole] - HEARD[name][:n_whole]).max(initial=0) < 1e-4


def flac_of(n_samples: int) -> bytes:
    """A FLAC file of PCM. n_samples: length in its header."""
    data = bytearray(written(PCM, "FLAC", "PCM_16"))
    high = int.from_bytes(data[18:26], "big") >> 36 << 36
    data[18:26] = (high | n_samples).to_bytes(8, "big")
    return bytes(data)


@pytest.mark.parametrize("claimed", [0, len(PCM) + 1, 2**36 - 1])
def test_a_flac_without_a_length_is_read_to_its_end(claimed):
    assert pcm16(flac_of(claimed)) == PCM.tolist()


def test_part_of_a_last_frame_is_ignored():
    assert len(samples(wav(fmt(1, 16, n_channels=2), PCM.tobytes()[:-3]))) == len(PCM) // 2 - 1


# --- invalid samples ---


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("tag", "width"), [(3, 4), (3, 8)])
def test_samples_that_are_not_finite_are_refused(value, tag, width):
    floats = (PCM / 32768).astype(f"<f{width}")
    floats[-1] = value
    with pytest.raises(BadInputError, match="not numbers"):
        samples(wav(fmt(tag, 8 * width), floats.tobytes()))


def test_a_double_beyond_float_is_refused():
    with pytest.raises(BadInputError, match="not numbers"):
        samples(wav(fmt(3, 64), np.array([1e300]).tobytes()))


def test_overshoot_is_clipped():
    data = wav(fmt(3, 32), np.array([1.5, -2.0, 0.5, 1.0, -1.0], "<f4").tobytes())
    assert samples(data)[:, 0].tolist() == [1.0, -1.0, 0.5, 1.0, -1.0]


def test_integers_in_a_float_file_are_refused_instead_of_clipped():
    with pytest.raises(BadInputError, match="floats go from -1 to 1"):
        samples(wav(fmt(3, 32), PCM.astype("<f4").tobytes()))


# --- bounds ---


@pytest.mark.parametrize(
    ("n_channels", "rate_hz"), [(9, 16_000), (20_000, 16_000), (1, 1), (1, 3_999), (1, 400_000)]
)
def test_impossible_channels_or_rates_are_refused_before_decoding(n_channels, rate_hz):
    with pytest.raises(BadInputError, match=f"{n_channels} channels at {rate_hz} Hz"):
        decode(wav(fmt(1, 16, n_channels=n_channels, rate_hz=rate_hz), b"\0" * 400), LIMITS)


@pytest.mark.parametrize(("n_channels", "rate_hz"), [(0, 16_000), (1, 0)])
def test_no_channels_or_a_rate_of_zero_are_refused(n_channels, rate_hz):
    form = bytearray(fmt(1, 16))
    struct.pack_into("<HI", form, 2, n_channels, rate_hz)
    with pytest.raises(BadInputError, match="channels at"):
        decode(wav(bytes(form), b"\0" * 400), LIMITS)


@pytest.mark.parametrize("n_channels", [1, 2, 3, 8])
@pytest.mark.parametrize("rate_hz", [4_000, 44_100, 384_000])
def test_channels_are_averaged_at_any_rate(n_channels, rate_hz):
    mono = tone(0.5, rate_hz)
    spread = np.zeros((len(mono), n_channels), "<i2")
    spread[:, -1] = mono
    data = wav(fmt(1, 16, n_channels=n_channels, rate_hz=rate_hz), spread.tobytes())
    audio = heard(data)
    assert len(audio) == pytest.approx(RATE_HZ / 2, abs=2)
    assert np.abs(audio[800:-800]).max() == pytest.approx(8000 / 32768 / n_channels, rel=0.03)
    assert heard(data, mono=False).shape == (len(audio), n_channels)


def test_a_codec_that_was_not_compared_is_refused_by_name():
    with pytest.raises(BadInputError, match="Not G721_32 in AU"):
        samples(written(PCM, "AU", "G721_32"))
    with pytest.raises(BadInputError, match=r"in XI|no audio file"):
        samples(written(PCM, "XI", "DPCM_16"))


@pytest.mark.parametrize(
    "data", [b"", b"RIFF", b"no audio at all", b"\0" * 5000, b"RIFF\0\0\0\0WAVE"]
)
def test_a_file_without_audio_is_refused(data):
    with pytest.raises(BadInputError, match=r"no audio file|no 'data' chunk"):
        samples(data)


# --- mp3 behind something else ---


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("junk", [b"ICY 200 OK\r\n\r\n", b"\xff" * 700, bytes(range(256)) * 40])
def test_mp3_is_found_behind_what_is_no_sound(rate_hz, junk):
    file = io.BytesIO()
    sf.write(file, np.tile(PCM, 4), rate_hz, format="MP3", subtype="MPEG_LAYER_III")
    plain = file.getvalue()
    np.testing.assert_array_equal(samples(junk + plain), samples(plain))


def test_what_resembles_a_frame_is_no_sound():
    rng = np.random.default_rng(1)
    for size in (10, 100_000):
        with pytest.raises(BadInputError, match="no audio file"):
            samples(b"no sound" + rng.integers(0, 256, size, np.uint8).tobytes())
    header = b"\xff\xfb\x90\x00"
    with pytest.raises(BadInputError, match="no audio file"):
        samples(b"no sound" + header + bytes(3000))


# --- chained ogg ---


@pytest.mark.parametrize("coding", ["VORBIS", "OPUS"])
def test_all_links_of_a_chained_file_are_heard(coding):
    rate_hz = 16_000
    parts = [
        encoded(PCM[a:b], rate_hz, coding) for a, b in ((0, 3_000), (3_000, 3_100), (3_100, 4_000))
    ]
    whole = samples(b"".join(parts))
    alone = [samples(part) for part in parts]
    np.testing.assert_array_equal(whole, np.concatenate(alone))
    assert len(heard(b"".join(parts))) == pytest.approx(len(PCM), abs=400)


def test_a_chained_file_that_is_cut_is_heard_up_to_there():
    link = encoded(np.tile(PCM, 100), 16_000, "VORBIS")
    cut = decode(link + link[: len(link) * 3 // 4], Limits(max_s=60))
    whole = np.concatenate([*cut.blocks])
    assert 400_000 < len(whole) < 800_000


def test_links_of_other_forms_are_refused_by_name():
    parts = encoded(PCM, 16_000, "VORBIS"), encoded(PCM, 24_000, "VORBIS")
    with pytest.raises(
        BadInputError, match="from 1 channels at 16000 Hz to 1 channels at 24000 Hz"
    ):
        samples(b"".join(parts))


def test_the_length_of_a_chained_file_is_bounded():
    part = encoded(np.zeros(16_000 * 16, np.float32), 16_000, "VORBIS")
    with pytest.raises(BadInputError, match="longer than 30 s"):
        samples(part + part)


def encoded(pcm: np.ndarray, rate_hz: int, coding: str) -> bytes:
    file = io.BytesIO()
    sf.write(file, pcm, rate_hz, format="OGG", subtype=coding)
    return file.getvalue()
