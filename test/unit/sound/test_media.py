"""Media files: what FFmpeg decodes in a process of its own, and what is refused."""

import contextlib
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import psutil
import pytest

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.audio.files import read_audio
from sglang_live.sound import media

RATE_HZ = 16_000
# More by hand: MEDIA_FUZZ_DRAWS=2000.
N_DRAWS = int(os.environ.get("MEDIA_FUZZ_DRAWS", "60"))
FORMS = {
    "m4a": ("ipod", "aac", 44_100),
    "mp4": ("mp4", "aac", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "mkv": ("matroska", "pcm_s16le", 22_050),
    "aac": ("adts", "aac", 24_000),
    "3gp": ("3gp", "libopencore_amrnb", 8_000),
    "amr": ("amr", "libopencore_amrnb", 8_000),
    "wma": ("asf", "wmav2", 44_100),
    "alac": ("ipod", "alac", 44_100),
}


@pytest.fixture(scope="module", autouse=True)
def decoder() -> Iterator[None]:
    yield
    media.close()
    assert not psutil.Process().children()


def sweep(rate_hz: int, seconds: float = 2.0) -> np.ndarray:
    at_s = np.arange(int(seconds * rate_hz)) / rate_hz
    return (12_000 * np.sin(2 * np.pi * (200 * at_s + 300 * at_s**2))).astype(np.int16)


def silent(rate_hz: int, seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * rate_hz), np.int16)


def written(
    container: str, codec: str, rate_hz: int, seconds: float = 2.0, sound=sweep, **options
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as out:
        stream = out.add_stream(codec, rate=rate_hz, layout="mono")
        stream.bit_rate = 12_200 if "amr" in codec else 64_000
        resampler = av.AudioResampler(stream.format, "mono", rate_hz, stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(
            sound(rate_hz, seconds)[None], format="s16", layout="mono"
        )
        frame.sample_rate = rate_hz
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def heard(data: bytes, max_s: float = 30.0) -> np.ndarray:
    return read_audio(data, max_s=max_s).pcm


@pytest.mark.parametrize("name", FORMS)
def test_a_media_file_sounds_as_what_was_written(name):
    container, codec, rate_hz = FORMS[name]
    found = heard(written(container, codec, rate_hz)).astype(float)
    assert len(found) == pytest.approx(2 * RATE_HZ, rel=0.06)  # padding of the codecs
    wanted = sweep(RATE_HZ).astype(float)
    n = min(len(found), len(wanted))
    spectrum = np.fft.rfft(found[:n]) * np.conj(np.fft.rfft(wanted[:n]))
    likeness = np.abs(np.fft.irfft(spectrum)).max() / np.sqrt(
        (found[:n] ** 2).sum() * (wanted[:n] ** 2).sum()
    )
    assert likeness > 0.8, likeness


def test_a_file_whose_index_is_at_its_end_and_one_in_fragments_are_read():
    for options in ({}, {"movflags": "frag_keyframe+empty_moov"}):
        data = written("mp4", "aac", 48_000, **options)
        assert len(heard(data)) == pytest.approx(2 * RATE_HZ, rel=0.06)


def test_files_decode_side_by_side_in_processes_of_their_own():
    data = {name: written(*form) for name, form in FORMS.items()}
    alone = {name: heard(one) for name, one in data.items()}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: (name, heard(data[name])), [*data] * 4))
    for name, pcm in found:
        np.testing.assert_array_equal(pcm, alone[name])


def test_a_file_without_sound_is_refused():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        out.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(BadInputError, match="has no sound"):
        heard(file.getvalue())


def test_a_file_that_is_too_long_is_refused_early():
    # Silence costs next to nothing in the file.
    data = written("ipod", "aac", 44_100, seconds=90.0)
    with pytest.raises(BadInputError, match="longer than 30 s"):
        heard(data)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6])
def test_a_cut_file_is_refused(share):
    """The index of an mp4 file is at its end."""
    data = written("mp4", "aac", 48_000)
    with pytest.raises(BadInputError, match="damaged"):
        heard(data[: int(share * len(data))])


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:5,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=audio 5004 RTP/AVP 0\r\n",
    ],
)
def test_lists_of_other_files_never_reach_the_decoder(data):
    assert media.container_of(data) is None
    with pytest.raises(BadInputError, match="no audio file that can be read"):
        heard(data)


def test_what_takes_too_long_is_not_waited_for(monkeypatch):
    hour = written("ipod", "aac", 8_000, seconds=3.0)
    monkeypatch.setattr(media, "WALL_S", -6.0)  # of the wait here
    began_s = time.monotonic()
    with pytest.raises(BadInputError, match="more time or memory"):
        heard(hour)
    assert time.monotonic() - began_s < 5


def test_changed_files_are_heard_or_refused_and_the_decoder_lives():
    rng = random.Random(1)
    files = [written(*FORMS[name], seconds=0.3) for name in ("m4a", "webm", "amr", "wma", "3gp")]
    heard(files[0])
    host = media._running[-1]._process.pid
    outcomes = set()
    for _ in range(N_DRAWS):
        data = bytearray(rng.choice(files))
        for _ in range(rng.choice((1, 5, 50))):
            data[rng.randrange(12, len(data))] = rng.randrange(256)
        try:
            outcomes.add(bool(len(heard(bytes(data)))))
        except BadInputError:
            outcomes.add(False)
    assert outcomes == {True, False}
    assert media._running[-1]._process.pid == host


def test_a_decoder_that_died_is_started_again():
    data = written(*FORMS["m4a"])
    before = heard(data)
    os.kill(media._running[-1]._process.pid, 9)
    media._running[-1]._process.wait()
    np.testing.assert_array_equal(heard(data), before)


def test_without_pyav_the_format_and_the_extra_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"webm is not read .* sglang-live\[media\]"):
        heard(b"\x1aE\xdf\xa3" + bytes(100))


# --- hostile files: an error within 10 s and 256 MB, whatever they say of themselves ---


def peak_and_time(read: Callable[[], object]) -> tuple[str, float, int]:
    """The error of reading a file, or "", its seconds, and the most memory that its process had
    beyond its parent's."""
    heard(written(*FORMS["m4a"], seconds=0.1))
    host = psutil.Process(media._running[-1]._process.pid)
    base, most = host.memory_info().rss, 0
    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(read)
        while not result.done():
            for child in host.children():
                with contextlib.suppress(psutil.Error):
                    most = max(most, child.memory_info().rss - base)
            time.sleep(0.005)
    error = result.exception()
    assert isinstance(error, BadInputError | None), error
    return str(error or ""), time.monotonic() - began_s, most


def hours_of_silence() -> bytes:
    """Ten hours in 10 MB."""
    return encoded(bytes(48_000))[0] * 36_000


def with_table_of(n_entries: int) -> bytes:
    """An mp4 whose table of sample sizes says that it has n_entries."""
    data = bytearray(written("mp4", "aac", 48_000))
    at = data.index(b"stsz")
    data[at + 8 : at + 12] = bytes(4)
    data[at + 12 : at + 16] = n_entries.to_bytes(4, "big")
    return bytes(data)


HOSTILE = {
    "ten hours": hours_of_silence,
    "four billion samples": lambda: with_table_of(2**32 - 1),
    "a moov cut short": lambda: written("mp4", "aac", 48_000)[:-200],
    "minutes without a sound": lambda: written(
        "ipod", "alac", 192_000, seconds=300.0, sound=silent
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_an_error_soon_and_in_little_memory(name):
    data = HOSTILE[name]()
    error, took_s, most_bytes = peak_and_time(lambda: heard(data, max_s=30.0))
    assert "longer than 30 s" in error or "damaged" in error, error
    assert took_s < 10
    assert most_bytes < 256 << 20


def test_ten_hours_end_at_the_servers_own_limit():
    data = hours_of_silence()
    error, took_s, most_bytes = peak_and_time(lambda: heard(data, max_s=600.0))
    assert error == "The audio is longer than 600 s."
    assert took_s < 10
    assert most_bytes < 256 << 20


# --- the way back ---


def encoded(pcm: bytes, piece_bytes: int = 4800) -> tuple[bytes, list[int]]:
    """The file, and how much of it had come after each piece."""
    with contextlib.closing(media.AacEncoder(24_000)) as encoder:
        file, sizes = b"", []
        for begin in range(0, len(pcm), piece_bytes):
            file += encoder.push(pcm[begin : begin + piece_bytes])
            sizes.append(len(file))
        return file + encoder.finish(), sizes


def test_aac_sounds_as_what_was_spoken_and_grows():
    pcm = sweep(24_000, 5.0)
    file, sizes = encoded(pcm.tobytes())
    assert 0 < sizes[-1] < len(file)
    found = heard(file).astype(float)
    assert len(found) == pytest.approx(5 * RATE_HZ, rel=0.02)
    wanted = sweep(RATE_HZ, 5.0).astype(float)
    n = min(len(found), len(wanted))
    spectrum = np.fft.rfft(found[:n]) * np.conj(np.fft.rfft(wanted[:n]))
    likeness = np.abs(np.fft.irfft(spectrum)).max() / np.sqrt((wanted[:n] ** 2).sum() ** 2)
    assert likeness > 0.8, likeness


@pytest.mark.parametrize("n_bytes", [0, 2, 10_000_000])
def test_aac_of_any_length_ends(n_bytes):
    file, _ = encoded(bytes(n_bytes), piece_bytes=n_bytes or 1)
    assert (len(file) > 0) == (n_bytes > 0)


def test_an_encoder_that_is_left_ends_its_process():
    encoder = media.AacEncoder(24_000)
    while not encoder.push(bytes(4_800)):
        time.sleep(0.01)
    host = psutil.Process(media._running[-1]._process.pid)
    assert host.children()
    encoder.close()
    psutil.wait_procs(host.children(), timeout=10)
    assert not host.children()


def test_an_encoder_whose_process_died_says_so():
    with contextlib.closing(media.AacEncoder(24_000)) as encoder:
        while not encoder.push(bytes(4_800)):
            time.sleep(0.01)
        for child in psutil.Process(media._running[-1]._process.pid).children():
            child.kill()
        with pytest.raises(LiveError, match="aac has ended"):
            encoder.finish()
