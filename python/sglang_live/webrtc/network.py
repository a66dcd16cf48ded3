"""Where calls are reachable: ports, the address outside, a relay.

aioice has neither a range of ports nor an address outside, and leaves out 127.0.0.1.
"""

import asyncio
import random
from functools import partial
from typing import Any

import msgspec

# A relay forgets whose packets it lets through after 5 minutes (RFC 8656, section 9); aioice tells
# it again after more than 8.
_TELL_RELAY_S = 240


class Turn(msgspec.Struct, frozen=True):
    """url: "turn:host:port", with ?transport=tcp for TCP."""

    url: str
    username: str
    password: str


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """
    addresses: of this machine that are offered; (): all but the loopback ones.
    ports: the first and the last that are used, for UDP; None: any.
    public_address: in the place of those of this machine, behind a NAT that keeps the ports.
    turn: a relay; None: none.
    """

    addresses: tuple[str, ...] = ()
    ports: tuple[int, int] | None = None
    public_address: str = ""
    turn: Turn | None = None

    def apply(self, loop: asyncio.AbstractEventLoop, ice: Any) -> None:
        """ice: the module aioice.ice. For this whole process."""
        if self.addresses:
            ice.get_host_addresses = lambda use_ipv4, use_ipv6: list(self.addresses)
        if self.ports is not None:
            _choose_ports(loop, *self.ports)
        if self.turn is not None:
            ice.turn.create_turn_endpoint = partial(
                ice.turn.create_turn_endpoint, channel_refresh_time=_TELL_RELAY_S
            )

    def as_seen_from_outside(self, sdp: str) -> str:
        if not self.public_address:
            return sdp
        return "\r\n".join((*map(self._outside, sdp.splitlines()), ""))

    def _outside(self, line: str) -> str:
        fields = line.split(" ")
        if line.startswith("a=candidate:") and fields[6:8] == ["typ", "host"]:
            fields[4] = self.public_address
        elif line.startswith("c=IN "):
            fields[1:] = ["IP6" if ":" in self.public_address else "IP4", self.public_address]
        return " ".join(fields)


def _choose_ports(loop: Any, first: int, last: int) -> None:
    create = loop.create_datagram_endpoint

    async def create_in_range(protocol: Any, local_addr: Any = None, **options: Any) -> Any:
        if local_addr is None or local_addr[1] != 0:
            return await create(protocol, local_addr=local_addr, **options)
        ports = list(range(first, last + 1))
        random.shuffle(ports)
        for port in ports:
            try:
                return await create(protocol, local_addr=(local_addr[0], port), **options)
            except OSError:
                continue
        raise OSError(f"no UDP port from {first} to {last} is free")

    loop.create_datagram_endpoint = create_in_range
