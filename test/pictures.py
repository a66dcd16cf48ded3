"""Pictures for tests: noise, of which a model that sees says something else than of other noise."""

import base64
import io

import numpy as np
from PIL import Image

from sglang_live.core import ImagePart


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def uri_of(image: Image.Image, kind: str = "PNG") -> str:
    data = base64.b64encode(file_of(image, kind)).decode()
    return f"data:image/{kind.lower()};base64,{data}"


def part_of(image: Image.Image) -> ImagePart:
    return ImagePart(file_of(image), *image.size)
