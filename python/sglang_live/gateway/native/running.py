"""Names of requests that run in the engine: each is used by one request at a time.

SGLang keeps a request's state by its name, and answers of an earlier request of the same name,
such as an abort's, end the state of the later one.
"""

import asyncio
import re
from collections.abc import Iterable

from sglang_live.gateway.native.checks import ParameterError

# A client has its answer a moment before the name is free: it may use it again at once.
WAIT_S = 2.0
# What the engine still says of a request whose client hung up.
_LAST_WORDS_S = 1.0
_NUMBER = re.compile(r"_\d{1,6}$")  # SGLang's own of a prompt in a batch


class RunningNames:
    def __init__(self, wait_s: float = WAIT_S):
        self._wait_s = wait_s
        self._ends: dict[str, asyncio.Event] = {}

    async def take(self, names: Iterable[str]) -> list[str]:
        """All of the names, once none of them is used; to be given to `free`.

        Raises:
            ParameterError: a request of one of them goes on.
        """
        taken = list(dict.fromkeys(_NUMBER.sub("", name) for name in names))
        try:
            async with asyncio.timeout(self._wait_s):
                while busy := [name for name in taken if name in self._ends]:
                    await self._ends[busy[0]].wait()
        except TimeoutError:
            raise ParameterError("rid", "is the name of a request that is running.") from None
        self._ends |= dict.fromkeys(taken, asyncio.Event())
        return taken

    def free(self, taken: list[str], *, hung_up: bool = False) -> None:
        if hung_up:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.free, taken)
            return
        for name in taken:
            self._ends.pop(name).set()
