"""Pages in one file, as swap: each has a fixed place, and a checksum that stays in memory.

Owner: whoever stores pages. One thread may write and read while another takes places and gives
them back, as long as a place in use by one is let alone by the other.
"""

import os
import tempfile
import zlib
from pathlib import Path

import numpy as np


class PageFile:
    """
    Args:
        directory: where. The file has no name in it, so nothing is left when its process dies.
        page_bytes: of one page.
        max_bytes: the file does not get longer.
    Raises:
        OSError: directory cannot be written.
        ValueError: not one page fits.
    """

    def __init__(self, directory: Path, page_bytes: int, max_bytes: int):
        self.n_places = max_bytes // page_bytes
        if self.n_places < 1:
            raise ValueError(f"{max_bytes} bytes of storage have no room for {page_bytes}")
        self._page_bytes = page_bytes
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115, we close it
        self._n_touched = 0  # places from here on were never taken
        self._given_back: list[int] = []
        self._checksums: dict[int, int] = {}

    @property
    def n_free(self) -> int:
        return self.n_places - self._n_touched + len(self._given_back)

    def take(self, n: int) -> list[int] | None:
        """n places, or None if there are not so many."""
        if n > self.n_free:
            return None
        n_old = min(n, len(self._given_back))
        places = [self._given_back.pop() for _ in range(n_old)]
        places += range(self._n_touched, self._n_touched + n - n_old)
        self._n_touched += n - n_old
        return places

    def give_back(self, places: list[int]) -> None:
        self._given_back += places

    def write(self, place: int, page: np.ndarray) -> None:
        """page: uint8 [page_bytes]. Raises OSError: the disk is full, or broken."""
        left, at = memoryview(page), place * self._page_bytes
        while len(left):
            n = os.pwrite(self._file.fileno(), left, at)
            left, at = left[n:], at + n
        self._checksums[place] = zlib.crc32(page)

    def read(self, place: int, page: np.ndarray) -> bool:
        """Into page: uint8 [page_bytes]. False: what is there is not what was written."""
        left, at = memoryview(page), place * self._page_bytes
        while len(left):
            n = os.preadv(self._file.fileno(), [left], at)
            if n == 0:
                return False
            left, at = left[n:], at + n
        return zlib.crc32(page) == self._checksums[place]

    def close(self) -> None:
        self._file.close()
