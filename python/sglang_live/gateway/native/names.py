"""Names of requests and sessions in the engine: each belongs to one owner.

SGLang aborts every request whose name begins with the given one, and opens a session to every
client that names it. The names made here contain an HMAC of their owner, so that no owner can
write the name of another owner's request or session.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from sglang_live.gateway.auth import owned_digest
from sglang_live.gateway.errors import ParameterError
from sglang_live.ids import BATCH_PREFIX

_PREFIX = "native-"
_OWN = re.compile(r"native-([0-9a-f]{12})[0-9a-f]{20}(_\d{1,6})?")
# What precedes the name of a flex request. Clients copy it from responses.
_CLASS = re.compile(rf"{BATCH_PREFIX}(by\d{{1,12}}-)?(?=native-)")
_TAG_CHARS = 12
# A client gets its response a moment before the name is free, and may use it again at once.
_WAIT_S = 2.0
# Time in which the engine may still report on a request whose client hung up.
_LATE_REPORTS_S = 1.0
_NUMBER = re.compile(r"_\d{1,6}$")  # SGLang appends it for a prompt of a batch


def request_name(owner: str, name: str | None = None) -> str:
    """The engine's name of a request.

    name: chosen by the client, or copied from a response; None: a random name.
    """
    tag = owned_digest("request tag", owner, "")[:_TAG_CHARS]
    name = _CLASS.sub("", name, count=1) if name else None
    if not name:
        digits = uuid4().hex
    elif (known := _OWN.fullmatch(name)) and known[1] == tag:
        return name
    else:
        digits = owned_digest("request", owner, name)
    return f"{_PREFIX}{tag}{digits[: 32 - _TAG_CHARS]}"


def session_name(owner: str, name: str) -> str:
    return _PREFIX + owned_digest("session", owner, name)


def flex_prefix(by_s: int | None) -> str:
    """Of the names of flex requests. by_s: Unix time until which it is of use; None: none."""
    return BATCH_PREFIX if by_s is None else f"{BATCH_PREFIX}by{by_s}-"


def put_names(body: dict[str, Any], owner: str, prefix: str = "") -> None:
    """Replace the client's names in a checked body; a request without a name gets one.

    prefix: of the class of the requests.
    """
    rid = body.get("rid")
    if isinstance(rid, list):
        body["rid"] = [prefix + request_name(owner, one) for one in rid]
    else:
        body["rid"] = prefix + request_name(owner, rid)
    if session := body.get("session_params"):
        session["id"] = session_name(owner, session["id"])
        if "rid" in session:
            session["rid"] = request_name(owner, session["rid"])


class RunningNames:
    """Names of requests that run in the engine: at most one request has a name at a time.

    SGLang keeps a request's state by its name. Output of an earlier request of the same name, such
    as that of an abort, would end the state of the later one.
    """

    def __init__(self, wait_s: float = _WAIT_S):
        self._wait_s = wait_s
        self._ends: dict[str, asyncio.Event] = {}
        self._classed: dict[str, str] = {}  # the whole name of a flex request, by that of its owner

    def running_as(self, name: str) -> str:
        """The engine's name of the running request that its owner calls so."""
        return self._classed.get(_NUMBER.sub("", name), name)

    async def take(self, names: Iterable[str]) -> list[str]:
        """Take all of the names, once none of them is in use; returns what `free` expects.

        Raises:
            ParameterError: a request of one of the names still runs.
        """
        whole = dict.fromkeys(_NUMBER.sub("", name) for name in names)
        classed = {_CLASS.sub("", name, count=1): name for name in whole}
        taken = list(classed)
        try:
            async with asyncio.timeout(self._wait_s):
                while busy := [name for name in taken if name in self._ends]:
                    await self._ends[busy[0]].wait()
        except TimeoutError:
            raise ParameterError("rid", "is the name of a request that is running.") from None
        self._ends |= dict.fromkeys(taken, asyncio.Event())
        self._classed |= classed
        return taken

    def free(self, taken: list[str], *, hung_up: bool = False) -> None:
        if hung_up:
            asyncio.get_running_loop().call_later(_LATE_REPORTS_S, self.free, taken)
            return
        for name in taken:
            self._classed.pop(name, None)
            self._ends.pop(name).set()
