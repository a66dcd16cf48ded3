"""The socket of one client, as a link sees it."""

from typing import Protocol

from starlette.websockets import WebSocket

CLOSE_NORMAL = 1000
CLOSE_NO_STATUS = 1005
CLOSE_ABNORMAL = 1006
CLOSE_INTERNAL_ERROR = 1011
CLOSE_TRY_AGAIN_LATER = 1013


class Wire(Protocol):
    """A socket of text frames.

    is_lost: the client has left without a close frame.
    """

    @property
    def is_lost(self) -> bool: ...

    async def receive(self) -> str | bytes | None:
        """The next frame; bytes for a binary frame, None after the client has left."""
        ...

    async def send(self, frame: str) -> None: ...

    async def close(self, code: int, reason: str) -> None: ...


class SocketWire:
    """A Starlette socket as a Wire."""

    def __init__(self, socket: WebSocket):
        self._socket = socket
        self.is_lost = False

    async def receive(self) -> str | bytes | None:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            # uvicorn says 1005 of a lost connection, too; a close frame has a reason, be it empty.
            code = message.get("code", CLOSE_NO_STATUS)
            self.is_lost = code == CLOSE_ABNORMAL or (
                code == CLOSE_NO_STATUS and message.get("reason") is None
            )
            return None
        text = message.get("text")
        return text if text is not None else message.get("bytes") or b""

    async def send(self, frame: str) -> None:
        await self._socket.send_text(frame)

    async def close(self, code: int, reason: str) -> None:
        await self._socket.close(code, reason)
