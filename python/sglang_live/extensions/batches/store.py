"""All that the Batch API keeps: one database and its files, used from one thread.

In: calls of a FileStore and a BatchStore. Out: their results, without blocking the event loop.
Owner: one Store per process and folder.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from sglang_live.extensions.batches.batch_store import BatchStore
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.database import Database
from sglang_live.extensions.batches.file_store import FileStore
from sglang_live.extensions.batches.records import OrderedIds

P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """
    Attributes:
        files, batches: to be called through `run`.
    """

    def __init__(
        self,
        folder: Path,
        config: BatchConfig | None = None,
        now_s: Callable[[], float] = time.time,
    ):
        """Raises BadInputError: the folder cannot be used, or another server uses it."""
        self.config = config or BatchConfig()
        self.now_s = now_s
        self._database = Database(folder)
        ids = OrderedIds()
        self.files = FileStore(self._database, ids, self.config, now_s)
        self.batches = BatchStore(self._database, self.files, ids, self.config, now_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))

    def owner_of(self, key: str) -> str:
        return self._database.owner_of(key)

    def close(self) -> None:
        """No effect if it is closed. What runs in the thread ends first."""
        self._thread.shutdown(wait=True)
        self._database.close()
