"""Settings of WebRTC calls."""

import argparse
import ipaddress
import re
from dataclasses import dataclass

from sglang_live.errors import BadInputError
from sglang_live.settings import Settings, flag
from sglang_live.webrtc.network import Network, Turn

# What aiortc reads: no IPv6 address, and TLS over TCP alone.
_TURN = re.compile(
    r"turn:[^\s?:]+(:\d{1,5})?(\?transport=(udp|tcp))?|turns:[^\s?:]+(:\d{1,5})?(\?transport=tcp)?"
)


def _ports(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: two numbers, such as 40000-40100")
    return int(first), int(last)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebRtcConfig(Settings):
    cors_origin: tuple[str, ...] = flag(
        (),
        "origin, such as https://app.example, whose pages may use this API from a browser; may be "
        "given several times",
        name="cors-origin",
        value="ORIGIN",
        unset="none",
    )
    ports: tuple[int, int] | None = flag(
        None,
        "UDP ports for WebRTC calls",
        name="webrtc-ports",
        value="FIRST-LAST",
        unset="any",
        read=_ports,
    )
    public_address: str = flag(
        "",
        "address at which WebRTC clients reach this machine, behind a NAT that keeps the ports",
        name="webrtc-public-address",
        value="IP",
        unset="those of the machine",
    )
    turn_url: str = flag(
        "",
        "relay for WebRTC clients whose UDP does not reach this machine, such as "
        "turn:relay.example:3478",
        name="turn-url",
        value="URL",
        unset="none",
    )
    turn_username: str = flag("", "its user", name="turn-username", value="NAME", unset="none")
    turn_password: str = flag(
        "",
        "its password",
        name="turn-password",
        value="TEXT",
        env="SGLANG_LIVE_TURN_PASSWORD",
        unset="none",
    )

    def check(self) -> None:
        if self.ports and not 1024 <= self.ports[0] <= self.ports[1] < 65_536:
            raise BadInputError("--webrtc-ports: from 1024 to 65535, the smaller one first")
        if self.turn_url and not _TURN.fullmatch(self.turn_url):
            raise BadInputError(
                f"--turn-url: {self.turn_url!r} is none as turn:HOST:PORT?transport=udp or "
                "turns:HOST:PORT"
            )
        if self.turn_url and not (self.turn_username and self.turn_password):
            raise BadInputError("--turn-url needs --turn-username and --turn-password")
        if self.public_address:
            try:
                ipaddress.ip_address(self.public_address)
            except ValueError as error:
                raise BadInputError(f"--webrtc-public-address: {error}") from error

    def network(self, *, is_loopback: bool) -> Network:
        """is_loopback: the server listens for this machine alone."""
        return Network(
            addresses=("127.0.0.1",) if is_loopback else (),
            ports=self.ports,
            public_address=self.public_address,
            turn=Turn(self.turn_url, self.turn_username, self.turn_password)
            if self.turn_url
            else None,
        )
