"""A request of SGLang's own API held against what is allowed, and rewritten.

In: a client's request and its body. Out: Checked, whose body is exactly what was checked, with
names that belong to the client alone; or an error that the client sees.
"""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson
from starlette.requests import Request

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.http.media_guard import MediaGuard
from sglang_live.gateway.json_forms import broken_json
from sglang_live.gateway.model import check_model
from sglang_live.gateway.native.checks import ParameterError
from sglang_live.gateway.native.control_tokens import without_control_tokens
from sglang_live.gateway.native.forms import forms
from sglang_live.gateway.native.headers import is_host
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.names import put_names, request_name, session_name
from sglang_live.gateway.native.retention import take_retention
from sglang_live.gateway.native.routes import (
    ABORT,
    ANSWERING,
    CHAT,
    CLOSE_SESSION,
    FLUSH,
    OF_A_MODEL,
    OPEN_SESSION,
)
from sglang_live.gateway.native.sessions import IDLE_S, NativeSessions
from sglang_live.gateway.owner import owner_salt
from sglang_live.gateway.same_machine import ForeignPageError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.session import Orchestrator

_UNNAMED_MODEL = "default"  # what SGLang takes for the model it has


class OperatorOnlyError(LiveError):
    code = "operator_key_required"
    http_status = 403


@dataclass(frozen=True, slots=True)
class Checked:
    """body: what is sent on. n_answers: 0 where no model answers. session: the client's name.

    names: of the requests that run in the engine.
    """

    body: bytes = b""
    n_answers: int = 0
    streams: bool = False
    session: str = ""
    retention: RetentionConfig | None = None
    names: tuple[str, ...] = ()


class RequestCheck:
    """Its checks raise LiveError for what is refused; nothing was changed then."""

    def __init__(
        self,
        config: GatewayConfig,
        orchestrator: Orchestrator,
        sessions: NativeSessions,
        limits: NativeLimits,
    ):
        self._config, self._orchestrator, self._sessions = config, orchestrator, sessions
        self._forms, self._guard = forms(limits), MediaGuard(config)

    def sender(self, request: Request, route: str) -> None:
        """Whether this page, or this key, may use the route."""
        host = request.headers.get("host")
        if host is not None and not is_host(host):
            raise ParameterError("Host", "must be a name, and a port if there is one.")
        is_foreign = request.headers.get("sec-fetch-site") == "cross-site"
        if is_foreign and (route == FLUSH or not self._config.api_keys):
            raise ForeignPageError("A page from elsewhere may not send this.")
        if route == FLUSH:
            known = self._config.operator_key
            if not known or not Keys((known,)).allow(request.headers):
                raise OperatorOnlyError("/flush_cache is for the holder of --operator-key.")

    async def body(self, route: str, raw: bytes, owner: str) -> Checked:
        """Check and rewrite the body: what is sent on is exactly what was checked."""
        form = self._forms.get(route)
        if form is None:
            return Checked()
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise broken_json(raw, error) from None
        if route in OF_A_MODEL:
            self._check_model(body)
        retention = None
        if route == OPEN_SESSION:
            retention = take_retention(body, self._config.retention)
        try:
            asked = form(body)
        except RecursionError:
            raise BadInputError("Invalid request: nested too deep.") from None
        await self._guard.check(asked.body)
        session = self._rewrite(route, asked.body, owner)
        streams = bool(asked.body.get("stream"))
        rid = asked.body["rid"] if route in ANSWERING else ()
        return Checked(
            orjson.dumps(asked.body),
            asked.n_answers,
            streams,
            session,
            retention,
            (rid,) if isinstance(rid, str) else tuple(rid),
        )

    def _rewrite(self, route: str, sent: dict[str, Any], owner: str) -> str:
        """Names and salts of the owner. Returns the client's name of a session that is opened."""
        session = ""
        if route == CHAT:
            for name in ("messages", "tools"):
                if name in sent:
                    sent[name] = without_control_tokens(sent[name])
        if route in ANSWERING:
            if params := sent.get("session_params"):
                self._sessions.used(owner, params["id"])
            put_names(sent, owner)
            sent["cache_salt"] = owner_salt(owner)
        elif route == ABORT:
            sent["rid"] = request_name(owner, sent["rid"])
        elif route == OPEN_SESSION:
            session = sent.get("session_id") or uuid4().hex
            idle_s = sent.setdefault("timeout", IDLE_S)
            self._sessions.open(owner, session, idle_s)
            sent["session_id"] = session_name(owner, session)
        elif route == CLOSE_SESSION:
            self._sessions.close(owner, sent["session_id"])
            sent["session_id"] = session_name(owner, sent["session_id"])
        return session

    def _check_model(self, body: object) -> None:
        model = body.get("model") if isinstance(body, dict) else None
        if model != _UNNAMED_MODEL:
            check_model(self._orchestrator, model)
