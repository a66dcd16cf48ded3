"""Opening a session of SGLang's own API, bounded before its client hears of it."""

import logging

import aiohttp
import orjson
from starlette.responses import Response

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.native.headers import returned
from sglang_live.gateway.native.relay import unreachable
from sglang_live.gateway.native.request_check import Checked
from sglang_live.gateway.native.routes import OPEN_SESSION
from sglang_live.gateway.native.sessions import NativeSessions
from sglang_live.gateway.native.upstream import Upstream
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.session import Orchestrator

log = logging.getLogger(__name__)


class SessionOpening:
    def __init__(self, upstream: Upstream, sessions: NativeSessions, orchestrator: Orchestrator):
        self._upstream, self._sessions = upstream, sessions
        self._orchestrator = orchestrator

    async def open(self, sent, checked: Checked, owner: str) -> Response:
        """Open a session and bound it, and only then say so.

        The engine has confirmed the bound when the client gets its answer: no request that the
        client sends from then on runs without it. A client that hangs up changes nothing; if the
        bound cannot be had, the session is closed again.
        """
        opened = False
        try:
            async with await sent as response:
                body = await response.read()
            if response.status == 200:
                session_id = orjson.loads(body)
                if checked.retention is not None:
                    await self._bound(session_id, checked.retention)
                opened, body = True, orjson.dumps(checked.session)
            answer = Response(body, response.status)
            answer.raw_headers += returned(response.headers)
            return answer
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
