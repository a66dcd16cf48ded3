"""The server's port: bound before minutes of loading, opened when all stages serve.

Until it is open, the system refuses connections, as if no server ran.
"""

import socket

from sglang_live.errors import LiveError

_BACKLOG = 2048  # connections that wait to be accepted; uvicorn's default


class ListenSocket:
    """
    Raises:
        LiveError: another process has the address, or it is not of this machine.
    """

    def __init__(self, host: str, port: int):
        self._name = f"{host}:{port}"
        try:
            kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
            family, _, protocol, _, address = socket.getaddrinfo(host, port, 0, kind, 0, flags)[0]
            self.socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._unavailable(error) from None
        try:
            # Without it, a server that was just stopped would block its port for a minute.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(address)
        except OSError as error:
            self.close()
            raise self._unavailable(error) from None

    def open(self) -> None:
        """Raises LiveError if another server that was starting too has opened the port first."""
        try:
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise self._unavailable(error) from None

    def close(self) -> None:
        self.socket.close()

    def _unavailable(self, error: OSError) -> LiveError:
        return LiveError(f"cannot listen on {self._name}: {error.strerror}")
