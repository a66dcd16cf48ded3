"""Checks a request to SGLang's own API and rewrites its body.

In: a client's request and its body. Out: CheckedRequest, or an error for the client. The new body
holds only checked fields, and names that belong to this client alone.
"""

import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson
from starlette.requests import Request

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.auth import Keys, owner_salt
from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.flex.tier import ORDINARY, Tier
from sglang_live.gateway.http.media_guard import MediaGuard
from sglang_live.gateway.json_forms import broken_json
from sglang_live.gateway.native.forms import forms
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.names import (
    RunningNames,
    flex_prefix,
    put_names,
    request_name,
    session_name,
)
from sglang_live.gateway.native.routes import (
    ABORT,
    CHAT,
    CLOSE_SESSION,
    FLUSH,
    GENERATING,
    OF_A_MODEL,
    OPEN_SESSION,
    is_host,
)
from sglang_live.gateway.native.sessions import IDLE_S, NativeSessions, take_retention
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.same_machine import ForeignPageError
from sglang_live.kv.retention import RetentionConfig

# In the scope of a request: Unix time until which its response is of use. Lines of batches have it.
OF_USE_UNTIL = "sglang_live.of_use_until"
_FLEX_PRIORITY = -1


class OperatorOnlyError(LiveError):
    code = "operator_key_required"
    http_status = 403


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that may go to SGLang.

    body: the JSON that is sent on.
    n_completions: prompts times n; 0 if the route generates nothing.
    streams: whether the response is a stream of events.
    session: the client's name of the session that it opens; "" on other routes.
    retention: bounds of the session that it opens; None: no bounds.
    names: the engine's names of the requests that it starts.
    tier: the service tier that it gets.
    """

    body: bytes = b""
    n_completions: int = 0
    streams: bool = False
    session: str = ""
    retention: RetentionConfig | None = None
    names: tuple[str, ...] = ()
    tier: Tier = ORDINARY


class RequestCheck:
    """The checks of one gateway. Each raises LiveError before it changes any state."""

    def __init__(
        self,
        parts: GatewayParts,
        sessions: NativeSessions,
        limits: NativeLimits,
        running: RunningNames,
    ):
        self._parts = parts
        self._config = parts.config
        self._sessions = sessions
        self._forms = forms(limits, parts.answers)
        self._guard = MediaGuard(parts.config.media)
        self._limits = limits
        self._running = running

    def sender(self, request: Request, route: str) -> None:
        """Check whether the web page and the key of the request may use the route."""
        host = request.headers.get("host")
        if host is not None and not is_host(host):
            raise ParameterError("Host", "must be a name, and a port if there is one.")
        is_foreign = request.headers.get("sec-fetch-site") == "cross-site"
        if is_foreign and (route == FLUSH or not self._config.keys.api_keys):
            raise ForeignPageError("A page of another site may not send this.")
        if route == FLUSH:
            known = self._config.keys.operator_key
            if not known or not Keys((known,)).allow(request.headers):
                raise OperatorOnlyError("/flush_cache is for the holder of --operator-key.")

    async def body(self, request: Request, raw: bytes, owner: str) -> CheckedRequest:
        """Check and rewrite the body; only the fields that were checked are sent on."""
        route = request.scope["path"]
        form = self._forms.get(route)
        if form is None:
            return CheckedRequest()
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise broken_json(raw, error) from None
        if route in OF_A_MODEL:
            self._check_model(body)
        retention = None
        if route == OPEN_SESSION:
            self._parts.tiers.check_heard(owner)
            retention = take_retention(body, self._config.retention)
        try:
            checked = form(body)
        except RecursionError:
            raise BadInputError("Invalid request: nested too deep.") from None
        await self._guard.check(checked.body)
        tier = self._take_tier(request, checked.body) if route in GENERATING else ORDINARY
        prefix = flex_prefix(request.scope.get(OF_USE_UNTIL)) if tier.flex else ""
        session = self._rewrite(route, checked.body, owner, prefix)
        streams = bool(checked.body.get("stream"))
        rid = checked.body["rid"] if route in GENERATING else ()
        return CheckedRequest(
            orjson.dumps(checked.body),
            checked.n_completions,
            streams,
            session,
            retention,
            (rid,) if isinstance(rid, str) else tuple(rid),
            tier,
        )

    def _take_tier(self, request: Request, body: dict[str, Any]) -> Tier:
        """Remove the tier from a checked body, and give a flex one SGLang's mark of it.

        Raises:
            ParameterError: flex in a session, whose turns follow one another.
        """
        tier = self._parts.tiers.of(request.headers, body.pop("service_tier", None))
        if body.pop("priority", 0) < 0:
            tier = Tier(flex=True, named=True)
        if tier.flex and "session_params" in body:
            raise ParameterError("session_params", "cannot be used by a flex request.")
        if tier.flex and self._limits.takes_priority:
            body["priority"] = _FLEX_PRIORITY
        return tier

    def _rewrite(self, route: str, body: dict[str, Any], owner: str, prefix: str) -> str:
        """Put in the owner's names and salt.

        prefix: of the names of its class.
        Returns the client's name of a session that is opened; "" on other routes.
        """
        session = ""
        if route == CHAT:
            for name in ("messages", "tools"):
                if name in body:
                    body[name] = without_control_tokens(body[name])
        if route in GENERATING:
            if params := body.get("session_params"):
                self._sessions.used(owner, params["id"])
            put_names(body, owner, prefix)
            body["cache_salt"] = owner_salt(owner)
        elif route == ABORT:
            body["rid"] = self._running.running_as(request_name(owner, body["rid"]))
        elif route == OPEN_SESSION:
            session = body.get("session_id") or uuid4().hex
            idle_s = body.setdefault("timeout", IDLE_S)
            self._sessions.open(owner, session, idle_s)
            body["session_id"] = session_name(owner, session)
        elif route == CLOSE_SESSION:
            self._sessions.close(owner, body["session_id"])
            body["session_id"] = session_name(owner, body["session_id"])
        return session

    def _check_model(self, body: object) -> None:
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str):  # the form refuses all else
            self._parts.check_model(model)


# --- control tokens in clients' texts, made plain text ---
# SGLang renders a chat to one string before it tokenizes it, so that `<|im_end|>` in a user's words
# would end the message, and `<|audio_pad|>` would stand for a clip. Prompts of /generate and
# /v1/completions are rendered by their clients and stay as they are.


_NAME = r"[A-Za-z0-9_]"
_CONTROL = re.compile(rf"<(?=\|{_NAME}{{1,48}}\|>|tts_{_NAME}{{1,48}}>)")
# The beginning of a token at the end of a part: templates join the texts of one message directly.
_BEGUN = re.compile(rf"<(?=(?:\|(?:{_NAME}{{1,48}}\|?)?|t|tt|tts|tts_{_NAME}{{0,48}})?\Z)")
# An invisible character, which keeps its two neighbors from forming one token.
_APART = "<\u200b"
_MEDIA = frozenset({"image_url", "audio_url", "video_url", "input_audio"})


def without_control_tokens(value: Any, *, is_part: bool = False) -> Any:
    """Returns a copy of a JSON value whose texts hold no control token.

    is_part: whether other texts may follow the value directly.
    """
    match value:
        case str():
            text = _CONTROL.sub(_APART, value)
            return _BEGUN.sub(_APART, text) if is_part else text
        case list():
            return [without_control_tokens(part, is_part=True) for part in value]
        case dict():
            return {
                without_control_tokens(key): part
                if key in _MEDIA
                else without_control_tokens(part, is_part=is_part)
                for key, part in value.items()
            }
    return value
