"""The server's port: bound before minutes of loading, opened when all stages serve.

Until it is open, the system refuses connections, as if no server ran.
"""

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from sglang_live.errors import BadInputError, LiveError
from sglang_live.settings import Settings, flag

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BACKLOG = 2048  # connections that wait to be accepted; uvicorn's default


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig(Settings):
    host: str = flag(
        "127.0.0.1",
        "address to listen on; other machines reach 0.0.0.0, or :: with IPv6, which need --api-key "
        "or --allow-anonymous",
        read=lambda text: text.removeprefix("[").removesuffix("]"),
    )
    port: int = flag(30000, "to listen on; 0: any that is free, which is printed", value="PORT")
    agent_port: int | None = flag(
        None, "of HAProxy's agent check, which learns the room for new sessions there", value="PORT"
    )
    ssl_certfile: Path | None = flag(None, "serve https and wss with this certificate (PEM)")
    ssl_keyfile: Path | None = flag(None, "its private key, if that is another file")

    @property
    def is_loopback(self) -> bool:
        return self.host in _LOOPBACK

    def check(self) -> None:
        for port in (self.port, self.agent_port or 0):
            if not 0 <= port < 65_536:
                raise BadInputError(f"port {port} is out of range")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise BadInputError("--ssl-keyfile without --ssl-certfile")
        for file in (self.ssl_certfile, self.ssl_keyfile):
            if file and not file.is_file():
                raise BadInputError(f"there is no file {file}")


def _net_location(host: str, port: int) -> str:
    """HOST:PORT as in a URL, where an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ListenSocket:
    """
    location: HOST:PORT, with the port that the system chose in place of 0.

    Raises:
        BadInputError: another process has the address, or it is not of this machine.
    """

    def __init__(self, host: str, port: int):
        self.location = _net_location(host, port)
        try:
            kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
            family, _, protocol, _, address = socket.getaddrinfo(host, port, 0, kind, 0, flags)[0]
            self.socket = socket.socket(family, kind, protocol)
        except UnicodeError:  # of the encoding that names of hosts have
            raise BadInputError(f"--host: {host!r} is no name of a host") from None
        except OSError as error:
            raise BadInputError(self._unavailable(error)) from None
        try:
            # Without it, a server that was just stopped would block its port for a minute.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(address)
            self.location = _net_location(host, self.socket.getsockname()[1])
        except OSError as error:
            self.close()
            raise BadInputError(self._unavailable(error)) from None

    def open(self) -> None:
        """Raises LiveError if another server that was starting too has opened the port first."""
        try:
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise LiveError(self._unavailable(error)) from None

    def close(self) -> None:
        self.socket.close()

    def _unavailable(self, error: OSError) -> str:
        hint = "; another --port may be free" if error.errno == errno.EADDRINUSE else ""
        return f"cannot listen on {self.location}: {error.strerror}{hint}"
