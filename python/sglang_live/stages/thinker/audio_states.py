"""The thinker's states at audio and pictures, collected from the scheduler's process."""

import asyncio
import time
from collections import OrderedDict

import numpy as np

from sglang_live.errors import StageFailedError
from sglang_live.messages import HiddenRows, Picture

# States leave the scheduler before the first token does, but through another socket.
ARRIVAL_TIMEOUT_S = 5.0
# States of requests of SGLang's own API, and of aborted prefills, are dropped after this; and what
# still comes of a request whose states were taken, until this.
KEEP_S = 60.0


class AudioStates:
    def __init__(self) -> None:
        # By request id, oldest first: when the first of its states came, and all of them.
        self._chunks: OrderedDict[str, tuple[float, list[HiddenRows]]] = OrderedDict()
        self._taken: OrderedDict[str, float] = OrderedDict()
        self._changed = asyncio.Condition()

    async def of(self, rid: str, n_rows: int, begin: int) -> tuple[np.ndarray, list[Picture]]:
        """Of one request: the states [n_rows, thinker_hidden], in prompt order and in the engine's
        dtype (engine_channel/states.py); and its pictures, with places in the session.

        Args:
            begin: position of the request's first new token. It may compute older ones again.
        Raises:
            StageFailedError: the states did not come.
        """
        try:
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: len(self._positions(rid, begin)) >= n_rows)
        except TimeoutError as error:
            got = len(self._positions(rid, begin))
            raise StageFailedError(f"{got} of {n_rows} audio states arrived") from error
        _, chunks = self._chunks.pop(rid)
        self._taken[rid] = time.monotonic()
        at = np.concatenate([np.asarray(c.at, dtype=np.int64) for c in chunks])
        rows = np.concatenate(
            [np.frombuffer(c.rows, c.dtype).reshape(len(c.at), -1) for c in chunks]
        )
        # A retracted prefill reports its positions twice, with the same states.
        positions, first = np.unique(at, return_index=True)
        pictures = sorted(
            {picture for c in chunks for picture in c.pictures if picture[0] >= begin}
        )
        return rows[first[positions >= begin]], pictures

    def _positions(self, rid: str, begin: int) -> set[int]:
        _, chunks = self._chunks.get(rid, (0.0, []))
        return {at for chunk in chunks for at in chunk.at if at >= begin}

    async def add(self, report: HiddenRows) -> None:
        now_s = time.monotonic()
        async with self._changed:
            while self._chunks and now_s - next(iter(self._chunks.values()))[0] > KEEP_S:
                self._chunks.popitem(last=False)
            while self._taken and now_s - next(iter(self._taken.values())) > KEEP_S:
                self._taken.popitem(last=False)
            if report.rid in self._taken:
                return  # a retracted prefill has reported its positions again
            self._chunks.setdefault(report.rid, (now_s, []))[1].append(report)
            self._changed.notify_all()
