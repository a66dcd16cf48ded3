"""Pictures of clients: what is seen of them, and what is refused."""

import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from PIL import Image

from sglang_live.errors import BadInputError
from sglang_live.sound import media, pictures
from test.pictures import file_of, noise

MOST = 1 << 21


@pytest.fixture(scope="module", autouse=True)
def decoder() -> Iterator[None]:
    yield
    media.close()
    assert not psutil.Process().children()


def seen(data: bytes, most_pixels: int = MOST) -> np.ndarray:
    decoded = pictures.decode(data, most_pixels)
    image = Image.open(io.BytesIO(decoded.png))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (decoded.width, decoded.height))
    return np.asarray(image)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "I;16"])
def test_a_png_is_seen_as_it_is(mode):
    image = noise(40, 24).convert(mode if mode != "I;16" else "L")
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    expected = Image.open(io.BytesIO(file_of(image))).convert("RGB")
    assert (seen(file_of(image)) == np.asarray(expected)).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_is_seen_as_it_is(mode):
    data = file_of(noise(40, 24).convert(mode), "JPEG")
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    assert (seen(data) == np.asarray(expected)).all()


def test_a_picture_is_turned_as_its_camera_was_held():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    data = file_of(noise(40, 24), "JPEG", exif=exif)
    expected = Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_270)
    assert (seen(data) == np.asarray(expected)).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_large_picture_is_scaled_down(kind):
    decoded = pictures.decode(file_of(Image.new("RGB", (3000, 1000), "teal"), kind), 512 * 512)
    assert decoded.width * decoded.height <= 512 * 512
    assert decoded.width / decoded.height == pytest.approx(3, rel=0.01)


def png_head(width: int, height: int) -> bytes:
    """A PNG file whose header promises a picture that never comes."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    data = b"IDAT" + zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", len(data) - 4) + data
        + struct.pack(">I", zlib.crc32(data))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no picture"),
        (b"hello", "no picture"),
        (file_of(noise(8, 8), "GIF"), "GIF"),
        (file_of(noise(8, 8), "BMP"), "BMP"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "WebP"),
        (png_head(60_000, 60_000), "60000 x 60000 pixels"),
        (png_head(7_500, 7_500), "7500 x 7500 pixels"),
        (png_head(4_000, 10), "100 times"),
        (png_head(64, 64), "cannot be read"),
        (file_of(noise(64, 64))[:2000], "cannot be read"),
        (file_of(noise(64, 64), "JPEG")[:700], "cannot be read"),
        (b"\xff\xd8\xff" + bytes(100), "cannot be read"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "cannot be read"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(data, why):
    with pytest.raises(BadInputError, match=why):
        pictures.decode(data, MOST)
    assert seen(file_of(noise(8, 8))).shape == (8, 8, 3)


def test_mutated_files_are_seen_or_refused():
    rng = np.random.default_rng(3)
    n_refused = 0
    for n in range(40):
        data = bytearray(file_of(noise(32, 32), ("PNG", "JPEG")[n % 2]))
        for at in rng.integers(8, len(data), 6):
            data[at] = rng.integers(256)
        try:
            pictures.decode(bytes(data), MOST)
        except BadInputError:
            n_refused += 1
    assert 0 < n_refused < 40


def test_pictures_need_no_pyav():
    code = (
        "import sys; sys.modules['av'] = None\n"
        "import importlib.util as u; u.find_spec = lambda name: None\n"
        "from sglang_live.sound import media_host as host; host._warm_up()\n"
        "from PIL import Image; import io\n"
        "file = io.BytesIO(); Image.new('RGB', (9, 7)).save(file, 'PNG')\n"
        "asked = {'most_pixels': 99, 'max_pixels': 99, 'max_ratio': 2}\n"
        "print(host._seen(io.BytesIO(file.getvalue()), asked).size)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "(9, 7)\n"
