"""A relay for calls (TURN over UDP, RFC 8656): what passes it, and from whom.

It lets packets through from addresses alone that its user has named, as all do. Tools of messages
are aioice's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aioice import stun
from aioice.turn import is_channel_data, make_integrity_key

USER, PASSWORD, REALM = "user", "secret", "test"
_NONCE = b"once"
_KEY = make_integrity_key(USER, REALM, PASSWORD)
_LIFETIME_S = 600

Address = tuple[str, int]


class _Peers(asyncio.DatagramProtocol):
    """The relayed address of one user."""

    def __init__(self, relay: "Relay", user: Address):
        self._relay, self._user = relay, user
        self.transport: asyncio.DatagramTransport | None = None
        self.channels: dict[int, Address] = {}
        self.allowed: set[str] = set()  # addresses that may send

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def allow(self, number: int, peer: Address) -> None:
        self.channels[number] = peer
        self.allowed.add(peer[0])

    def datagram_received(self, data: bytes, peer: Any) -> None:
        if peer[0] not in self.allowed:
            self._relay.n_refused += 1
            return
        self._relay.n_relayed += 1
        for number, bound in self.channels.items():
            if bound == peer:
                head = number.to_bytes(2, "big") + len(data).to_bytes(2, "big")
                return self._relay.send(head + data, self._user)
        said = stun.Message(stun.Method.DATA, stun.Class.INDICATION)
        said.attributes |= {"XOR-PEER-ADDRESS": peer, "DATA": data}
        self._relay.send(bytes(said), self._user)


class Relay(asyncio.DatagramProtocol):
    """
    Attributes:
        url: as for --turn-url.
        users: those that have an address here.
        n_relayed: packets of peers that were let through. n_refused: those that were not.
    """

    url = ""

    def __init__(self) -> None:
        self.users: dict[Address, _Peers] = {}
        self.n_relayed = self.n_refused = 0
        self._making: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, data: bytes, to: Address) -> None:
        self._transport.sendto(data, to)

    def datagram_received(self, data: bytes, user: Any) -> None:
        peers = self.users.get(user)
        if is_channel_data(data):
            peer = peers and peers.channels.get(int.from_bytes(data[:2], "big"))
            if peers and peer:
                peers.transport.sendto(data[4 : 4 + int.from_bytes(data[2:4], "big")], peer)
            return
        asked = stun.parse_message(data)
        if not asked.check_message_integrity(_KEY):
            return self._refuse(asked, user, 401, "Unauthorized")
        answers: dict[int, Callable[[], None]] = {
            stun.Method.ALLOCATE: lambda: self._allocate(asked, user),
            stun.Method.REFRESH: lambda: self._refresh(asked, user),
            stun.Method.CHANNEL_BIND: lambda: self._bind(asked, user),
        }
        answers[asked.message_method]()

    def _allocate(self, asked: stun.Message, user: Address) -> None:
        async def make() -> None:
            loop = asyncio.get_running_loop()
            transport, peers = await loop.create_datagram_endpoint(
                lambda: _Peers(self, user), local_addr=("127.0.0.1", 0)
            )
            self.users[user] = peers
            self._answer(
                asked,
                user,
                {
                    "XOR-RELAYED-ADDRESS": transport.get_extra_info("sockname"),
                    "XOR-MAPPED-ADDRESS": user,
                    "LIFETIME": _LIFETIME_S,
                },
            )

        task = asyncio.get_running_loop().create_task(make())
        self._making.add(task)
        task.add_done_callback(self._making.discard)

    def _refresh(self, asked: stun.Message, user: Address) -> None:
        lifetime_s = asked.attributes["LIFETIME"]
        if not lifetime_s and (peers := self.users.pop(user, None)):
            peers.transport.close()
        self._answer(asked, user, {"LIFETIME": lifetime_s})

    def _bind(self, asked: stun.Message, user: Address) -> None:
        wanted = asked.attributes
        self.users[user].allow(wanted["CHANNEL-NUMBER"], wanted["XOR-PEER-ADDRESS"])
        self._answer(asked, user, {})

    def _answer(self, asked: stun.Message, user: Address, attributes: dict[str, Any]) -> None:
        said = stun.Message(
            asked.message_method, stun.Class.RESPONSE, asked.transaction_id, attributes
        )
        said.add_message_integrity(_KEY)
        self.send(bytes(said), user)

    def _refuse(self, asked: stun.Message, user: Address, code: int, why: str) -> None:
        said = stun.Message(asked.message_method, stun.Class.ERROR, asked.transaction_id)
        said.attributes |= {"ERROR-CODE": (code, why), "NONCE": _NONCE, "REALM": REALM}
        said.add_fingerprint()
        self.send(bytes(said), user)

    def close(self) -> None:
        for peers in self.users.values():
            peers.transport.close()
        self._transport.close()


@asynccontextmanager
async def relaying() -> AsyncIterator[Relay]:
    loop = asyncio.get_running_loop()
    transport, relay = await loop.create_datagram_endpoint(Relay, local_addr=("127.0.0.1", 0))
    host, port = transport.get_extra_info("sockname")
    relay.url = f"turn:{host}:{port}"
    try:
        yield relay
    finally:
        relay.close()
