"""Pictures of clients: PNG and JPEG files, decoded within bounds, outside of this process.

In: bytes, as they were sent. Out: a PNG file that this server wrote itself, so that neither gateway
nor engine reads a client's file.
"""

from dataclasses import dataclass

from sglang_live.errors import BadInputError
from sglang_live.sound import media

# A camera's 48 megapixels, 144 MB as RGB. Models scale pictures down to a few megapixels.
MAX_PIXELS = 50_000_000
_BEGINS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
_OTHERS = {
    b"GIF8": "GIF",
    b"RIFF": "WebP",
    b"BM": "BMP",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"%PDF": "PDF",
}


@dataclass(frozen=True, slots=True)
class Decoded:
    """width, height: of the picture in the file."""

    png: bytes
    width: int
    height: int


def decode(data: bytes, most_pixels: int) -> Decoded:
    """Decode a picture, turn it as its camera was held, and scale it down.

    Blocks; several threads may call it.

    Args:
        most_pixels: of the result.
    Raises:
        BadInputError: it is neither PNG nor JPEG, is damaged, is too large or too narrow, or takes
            more time or memory than a file may.
        LiveError: the decoder cannot be started.
    """
    check_kind(data)
    asked = {"most_pixels": most_pixels, "max_pixels": MAX_PIXELS, "max_ratio": media.MAX_RATIO}
    sides, png = media.decoded(data, asked, "picture")
    width, height = (int.from_bytes(side, "little") for side in (sides[:4], sides[4:]))
    return Decoded(png, width, height)


def check_kind(data: bytes) -> None:
    """Raises BadInputError: it is neither PNG nor JPEG."""
    if not data.startswith(_BEGINS):
        kind = next((name for begin, name in _OTHERS.items() if data.startswith(begin)), None)
        found = f"This is a {kind} file" if kind else "This is no picture"
        raise BadInputError(f"{found}: pictures are PNG or JPEG files.")
