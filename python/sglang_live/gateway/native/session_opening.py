"""Opens a session of SGLang's own API, and bounds it before its client gets the response."""

import logging
from collections.abc import Awaitable

import aiohttp
import orjson
from starlette.responses import Response

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.native.relay import unreachable
from sglang_live.gateway.native.request_check import CheckedRequest
from sglang_live.gateway.native.routes import OPEN_SESSION, returned
from sglang_live.gateway.native.sessions import NativeSessions
from sglang_live.gateway.native.upstream import Upstream
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.session import Orchestrator

log = logging.getLogger(__name__)


class SessionOpening:
    def __init__(self, upstream: Upstream, sessions: NativeSessions, orchestrator: Orchestrator):
        self._upstream, self._sessions = upstream, sessions
        self._orchestrator = orchestrator

    async def open(
        self, upstream: Awaitable[aiohttp.ClientResponse], checked: CheckedRequest, owner: str
    ) -> Response:
        """Open a session, bound it, and then return the response.

        The engine has confirmed the bounds when the client gets the response, so that no request of
        the session runs without them. A client that hangs up changes nothing. If the session cannot
        be bounded, it is closed again.
        """
        opened = False
        try:
            async with await upstream as response:
                body = await response.read()
            if response.status == 200:
                session_id = orjson.loads(body)
                if checked.retention is not None:
                    await self._bound(session_id, checked.retention)
                opened, body = True, orjson.dumps(checked.session)
            passed_on = Response(body, response.status)
            passed_on.raw_headers += returned(response.headers)
            return passed_on
        except (aiohttp.ClientError, TimeoutError) as error:
            return unreachable(OPEN_SESSION, error)
        except LiveError as error:
            return error_response(error)
        finally:
            if not opened:
                self._sessions.close(owner, checked.session)

    async def _bound(self, session_id: str, retention: RetentionConfig) -> None:
        try:
            await self._orchestrator.retain_native(session_id, retention)
        except LiveError as error:
            log.warning("native_not_bounded session=%s error=%r", session_id, error)
            await self._upstream.close_session(session_id)
            raise
