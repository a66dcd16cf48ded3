"""A journal in a Valkey server (or one of its protocol, such as Redis), which gateways share.

A session is one hash, so that a cluster of servers keeps it in one place.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from valkey.asyncio import Valkey
from valkey.exceptions import ValkeyError

from sglang_live.errors import BadInputError
from sglang_live.journal.store import Kept, Outcome, StoreError, Write

SCHEMES = ("valkey", "valkeys")
# A server that does not answer in this time counts as away. It answers within milliseconds.
_TIMEOUT_S = 2.0
_PREFIX = "sglang_live:journal:"
# Of records' names, beside "epoch" and "token".
_RECORD = b"."

# ARGV: epoch, whether the session is begun, milliseconds to keep it, token, number of names to
# delete, these names, then names and data.
_WRITE = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch and ARGV[2] == '0' then return 'gone' end
if epoch and epoch ~= ARGV[1] then return 'taken' end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'token', ARGV[4]) end
local first = 6 + tonumber(ARGV[5])
for n = 6, first - 1 do redis.call('HDEL', KEYS[1], ARGV[n]) end
for n = first, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[n], ARGV[n + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'written'
"""
_TAKE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HDEL', KEYS[1], 'token')
return 1
"""
_DELETE = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


def connect(url: str) -> Valkey:
    """A pool of connections, made at first use.

    Args:
        url: valkey://[[USER]:PASSWORD@]HOST[:PORT][/DB], or valkeys:// over TLS, whose certificate
            must be of HOST, and by an authority of the machine's, or in FILE of ?ssl_ca_certs=FILE.
    Raises:
        BadInputError: for another URL.
    """
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        if not is_known:
            raise ValueError("not valkey://HOST:PORT or valkeys://HOST:PORT")
        # By default any certificate of a known authority would do.
        tls = {"ssl_check_hostname": True} if parts.scheme == "valkeys" else {}
        server: Valkey = Valkey.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, **tls
        )
        return server
    except ValueError as error:
        # Without the URL, which may have a password.
        raise BadInputError(f"the URL of a Valkey server: {error}") from None


class ValkeyStore:
    def __init__(self, url: str):
        self._server = connect(url)

    async def open(self) -> None:
        await self._answer(self._server.ping())

    async def write(self, writes: Sequence[Write], keep_s: float) -> list[Outcome]:
        # One way there and back for all; each script is a step of its own.
        lines = self._server.pipeline(transaction=False)
        for write in writes:
            gone = [_RECORD + k.encode() for k, data in write.records.items() if data is None]
            arguments: list[Any] = [write.epoch, int(write.is_first), round(1000 * keep_s)]
            arguments += [write.token, len(gone), *gone]
            for name, data in write.records.items():
                arguments += () if data is None else (_RECORD + name.encode(), data)
            lines.eval(_WRITE, 1, _PREFIX + write.session_id, *arguments)
        return [Outcome(answer.decode()) for answer in await self._answer(lines.execute())]

    async def read(self, session_id: str) -> Kept | None:
        found = await self._answer(self._server.hgetall(_PREFIX + session_id))
        if b"epoch" not in found:
            return None
        epoch, token = int(found.pop(b"epoch")), found.pop(b"token", b"").decode()
        records = {name.removeprefix(_RECORD).decode(): data for name, data in found.items()}
        return Kept(session_id, epoch, token, records)

    async def take(self, session_id: str, epoch: int, token: str) -> bool:
        return bool(await self._run(_TAKE, session_id, epoch, token))

    async def delete(self, session_id: str, epoch: int) -> None:
        await self._run(_DELETE, session_id, epoch)

    async def close(self) -> None:
        await self._server.aclose()

    async def _run(self, script: str, session_id: str, *arguments: Any) -> Any:
        return await self._answer(self._server.eval(script, 1, _PREFIX + session_id, *arguments))

    async def _answer(self, asked: Any) -> Any:
        try:
            return await asked
        except (ValkeyError, OSError) as error:
            raise StoreError(f"journal: {type(error).__name__}: {error}") from error
