"""Ids of files and batches: in the order of their creation, and safe as names of files.

A list is read page by page after an id, which need not exist any more: the order is in the id.
"""

import re
import time
from secrets import token_hex

FILE, BATCH = "file-", "batch_"
# Milliseconds since 1970, then random digits; OpenAI's ids are at most 32 characters.
_TIME_DIGITS, _RANDOM_DIGITS = 11, 15
_ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{{_TIME_DIGITS + _RANDOM_DIGITS}}}")


class OrderedIds:
    """Each id is greater than those before it. Owner: one OrderedIds per process."""

    def __init__(self) -> None:
        self._latest_ms = 0

    def new(self, prefix: str) -> str:
        self._latest_ms = max(self._latest_ms + 1, time.time_ns() // 1_000_000)
        return f"{prefix}{self._latest_ms:0{_TIME_DIGITS}x}{token_hex(8)[:_RANDOM_DIGITS]}"


def is_id(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and _ID.fullmatch(text) is not None
