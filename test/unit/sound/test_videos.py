"""Videos of clients: which frames are seen of them, and what is refused."""

import io
import random
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
import psutil
import pytest
from PIL import Image
from transformers import Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

from sglang_live.errors import BadInputError
from sglang_live.sound import media, videos
from test.pictures import file_of
from test.pictures import noise as picture
from test.unit.sound.test_media import peak_and_time, written
from test.videos import film, grey, numbers

FPS, MOST = 2, 4096 * 1024


@pytest.fixture(scope="module", autouse=True)
def decoder() -> Iterator[None]:
    yield
    media.close()
    assert not psutil.Process().children()


def watched(data: bytes, max_s: float = 30.0, most_pixels: int = MOST) -> videos.Decoded:
    return videos.decode(data, fps=FPS, max_s=max_s, most_pixels=most_pixels)


FORMS = {
    "mp4": ("mp4", "mpeg4"),
    "h264": ("mp4", "libx264"),
    "mov": ("mov", "mjpeg"),
    "webm": ("webm", "libvpx"),
    "mkv": ("matroska", "ffv1"),
}


@pytest.mark.parametrize("name", FORMS)
def test_two_frames_of_each_second_are_seen(name):
    container, codec = FORMS[name]
    found = watched(film(grey(35), 10, container, codec))
    assert found.frames.shape == (6, 48, 64, 3)
    assert numbers(found.frames) == [0, 5, 11, 17, 23, 29]
    assert found.duration_s == pytest.approx(3.5, rel=0.02)


def test_frames_are_chosen_as_transformers_chooses_them():
    draw, processor = random.Random(1), Qwen2VLVideoProcessor()
    for _ in range(300):
        rate = draw.choice((1, 9.97, 24, 25, 29.97, 30, 60))
        n_frames = draw.randrange(2, int(120 * rate) + 2)
        facts = VideoMetadata(total_num_frames=n_frames, fps=rate)
        expected = processor.sample_frames(facts, fps=FPS).tolist()
        found = videos.chosen(n_frames, rate, FPS)
        assert found == expected[: len(found)]
        # It has one more where the division leaves a rest, which may be behind the end.
        assert len(expected) - len(found) in (0, 1)


@pytest.mark.parametrize(
    ("n_frames", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1]), (5, [0, 1, 2, 3])]
)
def test_a_short_video_has_few_frames(n_frames, expected):
    assert numbers(watched(film(grey(n_frames))).frames) == expected


def test_the_sound_of_a_video_is_left_out():
    assert len(watched(film(grey(20), sound=True)).frames) == 4


def test_a_video_is_turned_as_its_camera_was_held():
    left_is_white = np.zeros((48, 64, 3), np.uint8)
    left_is_white[:, :32] = 255
    data = bytearray(film([left_is_white] * 4))
    at = data.index(b"tkhd") + 44
    quarter = (0, 1, 0, -1, 0, 0, 0, 0, 0x4000)  # to the right
    data[at : at + 36] = b"".join((n << 16).to_bytes(4, "big", signed=True) for n in quarter)
    frames = watched(bytes(data)).frames
    assert frames.shape[1:] == (64, 48, 3)
    assert frames[:, :28].min() > 200 and frames[:, -28:].max() < 60


@pytest.mark.parametrize(
    ("n_frames", "most_pixels", "limit"),
    [(4, MOST, 768 * 1024), (20, MOST, MOST // 10), (4, 0, 135 * 1024)],
)
def test_large_frames_are_scaled_down(n_frames, most_pixels, limit):
    frames = watched(film(grey(n_frames, 1280, 960), 2), most_pixels=most_pixels).frames
    n, height, width, _ = frames.shape
    assert n == n_frames and 0.97 * limit < width * height <= limit
    assert width / height == pytest.approx(4 / 3, rel=0.01)
    assert numbers(frames) == list(range(n_frames))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no video"),
        (b"#EXTM3U\n#EXTINF:5,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "no video"),
        (file_of(picture(8, 8), "GIF"), "no video"),
        (written("adts", "aac", 24_000, 0.5), "no video"),
        (written("mp4", "aac", 48_000, 0.5), "has no video"),
        (film(grey(20))[:-200], "damaged"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(100), "damaged"),
        (b"\x1aE\xdf\xa3" + bytes(100), "damaged"),
        (film(grey(40), 1), "longer than 30 s"),
        (film(grey(40), 1, "webm", "libvpx"), "longer than 30 s"),
        (film(grey(2, 4096, 32)), "100 times"),
        (film(grey(2, 4096, 2176), codec="mjpeg", container="mov"), "4096 x 2176 pixels"),
    ],
)
def test_what_is_no_video_within_the_bounds_is_refused_by_name(data, why):
    with pytest.raises(BadInputError, match=why):
        watched(data)


def leafed(files: list[bytes], rate: float = FPS, max_s: float = 30.0, most_pixels: int = MOST):
    return videos.of_pictures(files, rate, fps=FPS, max_s=max_s, most_pixels=most_pixels)


def pages(n: int, kind: str = "PNG", width: int = 64, height: int = 48) -> list[bytes]:
    return [file_of(Image.fromarray(frame), kind) for frame in grey(n, width, height)]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    ("n", "rate", "seen"),
    [
        (1, 2, [0]),
        (5, 2, [0, 1, 2, 3, 4]),
        (3, 1, [0, 0, 1, 1, 2, 2]),
        (2, 0.5, [0] * 4 + [1] * 4),
        (3, 0.3, [0] * 7 + [1] * 7 + [2] * 6),
        (10, 10, [0, 5]),
        (7, 3, [0, 1, 3, 4, 6]),
    ],
)
def test_of_pictures_the_one_is_seen_that_lasts(kind, n, rate, seen):
    found = leafed(pages(n, kind), rate)
    assert found.frames.shape == (len(seen), 48, 64, 3)
    assert numbers(found.frames) == seen
    assert found.duration_s == pytest.approx(n / rate)


def test_pictures_without_pyav(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert numbers(leafed(pages(3)).frames) == [0, 1, 2]


@pytest.mark.parametrize(("n", "most"), [(4, MOST), (40, MOST)])
def test_large_pictures_are_scaled_down_as_frames_are(n, most):
    found = leafed(pages(n, "JPEG", 1280, 960), most_pixels=most).frames
    whole = watched(film(grey(n, 1280, 960), 2), most_pixels=most).frames
    assert len(found) == n and numbers(found) == [k % 40 for k in range(n)]
    assert found.shape == pytest.approx(whole.shape, abs=1)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([*pages(2), b""], "Picture 2: This is no picture"),
        ([pages(1)[0], file_of(picture(8, 8), "GIF")], "Picture 1: This is a GIF"),
        ([pages(1)[0], pages(1)[0][:60]], "Picture 1: The picture cannot be read"),
        ([*pages(3), *pages(1, width=96)], "Picture 3 has another size"),
        ([*pages(3), *pages(1, width=48, height=64)], "Picture 3 has another size"),
        (pages(1, width=3300, height=32), "100 times"),
        (pages(1, width=4096, height=2176), "4096 x 2176 pixels"),
        (pages(1) * 61, "longer than 30 s"),
    ],
)
def test_pictures_that_are_no_video_are_refused_by_their_number(files, why):
    with pytest.raises(BadInputError, match=why):
        leafed(files)


def test_without_pyav_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"video is not read .* sglang-live\[media\]"):
        watched(b"\x1aE\xdf\xa3" + bytes(100))


def with_table_of(n_entries: int) -> bytes:
    """A film whose table of sample sizes says that it has n_entries."""
    data = bytearray(film(grey(4)))
    at = data.index(b"stsz")
    data[at + 8 : at + 12] = bytes(4)
    data[at + 12 : at + 16] = n_entries.to_bytes(4, "big")
    return bytes(data)


def of_4k(n_frames: int) -> bytes:
    """Frames in which nothing changes take no space in a file."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(film(grey(2, 3840, 2160)))) as first,
        av.open(file, "w", format="mp4") as out,
    ):
        stream = out.add_stream_from_template(first.streams.video[0])
        packets = [packet for packet in first.demux() if packet.size]
        for n in range(n_frames):
            packet = av.Packet(bytes(packets[min(n, 1)]))
            packet.pts = packet.dts = n
            packet.time_base, packet.stream = Fraction(1, 30), stream
            packet.is_keyframe = n == 0
            out.mux(packet)
    return file.getvalue()


HOSTILE = {
    "ten hours": (lambda: film(grey(3600, 16, 16), 0.1), "longer than 30 s"),
    "ten hours of webm": (lambda: film(grey(3600, 16, 16), 0.1, "webm", "libvpx"), "longer than"),
    "four billion frames": (lambda: with_table_of(2**32 - 1), "damaged"),
    "frames of 4K": (lambda: of_4k(90), ""),
    "pictures of 4K": (lambda: pages(1, "JPEG", 3840, 2160) * 20, ""),
    "a picture of 50 megapixels": (lambda: [file_of(Image.new("1", (50_000, 1000)))], "pixels"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_soon_and_in_little_memory(name):
    make, why = HOSTILE[name]
    data = make()
    look = leafed if isinstance(data, list) else watched
    error, took_s, most_bytes = peak_and_time(lambda: look(data))
    assert why in error and bool(why) == bool(error)
    assert took_s < 10 and most_bytes < 256 << 20


def test_changed_files_are_seen_or_refused_and_the_decoder_lives():
    rng = random.Random(1)
    files = [film(grey(8), 10, *FORMS[name]) for name in FORMS]
    watched(files[0])
    host = media._running[-1]._process.pid
    outcomes = set()
    for _ in range(60):
        data = bytearray(rng.choice(files))
        for _ in range(rng.choice((1, 5, 50))):
            data[rng.randrange(12, len(data))] = rng.randrange(256)
        try:
            outcomes.add(bool(len(watched(bytes(data)).frames)))
        except BadInputError:
            outcomes.add(False)
    assert outcomes == {True, False}
    assert media._running[-1]._process.pid == host
