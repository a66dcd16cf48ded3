"""Pages in one file, as in swap: each has a fixed place, and a checksum that stays in memory.

Owner: bridge/tiers/storage.py. One thread may write and read while another takes and frees places,
as long as no place is in use by both.
"""

import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

Page = npt.NDArray[np.uint8]


class PageFile:
    """
    Args:
        directory: directory of the file, which has no name in it, so nothing is left when its
            process dies.
        page_bytes: size of a page.
        max_bytes: maximum size of the file.
    Raises:
        OSError: if the directory cannot be written.
        ValueError: if not one page fits.
    """

    def __init__(self, directory: Path, page_bytes: int, max_bytes: int):
        self.n_places = max_bytes // page_bytes
        if self.n_places < 1:
            raise ValueError(f"{max_bytes} bytes of storage have no room for {page_bytes}")
        self._page_bytes = page_bytes
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115, close() does
        self._n_touched = 0  # places from here on were never taken
        self._freed: list[int] = []
        self._checksums: dict[int, int] = {}

    @property
    def n_free(self) -> int:
        return self.n_places - self._n_touched + len(self._freed)

    def take(self, n: int) -> list[int] | None:
        """Returns n places, or None if fewer are free."""
        if n > self.n_free:
            return None
        n_old = min(n, len(self._freed))
        places = [self._freed.pop() for _ in range(n_old)]
        places += range(self._n_touched, self._n_touched + n - n_old)
        self._n_touched += n - n_old
        return places

    def free(self, places: list[int]) -> None:
        self._freed += places

    def write(self, place: int, page: Page) -> None:
        """page: uint8 [page_bytes]. Raises OSError if the disk is full or broken."""
        left, at = page.data, place * self._page_bytes
        while len(left):
            n = os.pwrite(self._file.fileno(), left, at)
            left, at = left[n:], at + n
        self._checksums[place] = zlib.crc32(page.data)

    def read(self, place: int, page: Page) -> bool:
        """Read into page, uint8 [page_bytes]. Returns False if the file holds other bytes than were
        written."""
        left, at = page.data, place * self._page_bytes
        while len(left):
            n = os.preadv(self._file.fileno(), [left], at)
            if n == 0:
                return False
            left, at = left[n:], at + n
        return zlib.crc32(page.data) == self._checksums[place]

    def close(self) -> None:
        self._file.close()
