"""What may be added to the gateway beside its own routes.

In: the parts that the gateway's own routes use. Out: routes, their description, work in the
background.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.chat.messages import SpokenAnswers
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.native.proxy import NativeProxy
from sglang_live.gateway.realtime.services import RealtimeServices

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """
    proxy: to SGLang's own API; None: this server has none.
    answers: to which the messages of chats may refer.
    """

    services: RealtimeServices
    keys: Keys
    proxy: NativeProxy | None
    answers: SpokenAnswers


class GatewayAddition:
    """
    Attributes:
        routes: by path and method, for requests with a key of the server.
        paths: that /openapi.json describes. schemas: that they refer to.
    """

    routes: Mapping[tuple[str, str], Endpoint] = {}
    paths: Mapping[str, Any] = {}
    schemas: Mapping[str, Any] = {}

    def start(self) -> None:
        """When the application starts."""

    async def close(self) -> None:
        """When it ends."""


def refusing(error: LiveError) -> Endpoint:
    async def refuse(_request: Request) -> Response:
        return error_response(error)

    return refuse
