"""Programs that mostly wait, for speech in real time, some of them at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

N_AT_ONCE = 3
Key = TypeVar("Key")
Told = TypeVar("Told")


class Together(Generic[Key, Told]):
    """What each of some runs has told, or its error.

    run: called with each key, in their order.
    """

    def __init__(self, keys: Iterable[Key], run: Callable[[Key], Awaitable[Told]]):
        self._run, self._ended = run, dict[Key, Told | BaseException]()
        asyncio.run(self._run_all([*keys]))

    async def _run_all(self, keys: list[Key]) -> None:
        places = asyncio.Semaphore(N_AT_ONCE)

        async def one(key: Key) -> Told:
            async with places:
                return await self._run(key)

        ends = await asyncio.gather(*map(one, keys), return_exceptions=True)
        self._ended.update(zip(keys, ends, strict=True))

    def __getitem__(self, key: Key) -> Told:
        end = self._ended[key]
        if isinstance(end, BaseException):
            raise end
        return end
