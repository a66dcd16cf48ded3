"""Secrets for browsers and phones, which open realtime sessions only and expire.

In: a key's owner, settings of the sessions to open. Out: a secret.
Owner: one ClientSecrets per process; a restart deletes all of them. With --shared-limits other
gateways know them too (shared_limits.py).
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.errors import CapacityError
from sglang_live.gateway.http.body import read_body, read_json, refuse_query
from sglang_live.gateway.json_forms import Strict
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import SessionForm
from sglang_live.gateway.realtime.session_config import config_json, first_config
from sglang_live.gateway.realtime.transcription_session import (
    TRANSCRIPTION,
    transcription_defaults,
    transcription_json,
    update_transcription,
)
from sglang_live.ids import new_id

if TYPE_CHECKING:  # off by default
    from sglang_live.gateway.shared_limits import SharedSecrets

_PREFIX = "ek_"
_RANDOM_BYTES = 24
# Each secret holds its settings: a client that makes secrets in a loop must not fill the memory,
# nor leave no secrets for others.
_MAX, MAX_OF_OWNER = 10_000, 1_000
_DEFAULT_S = 600


class ExpiryForm(Strict):
    """Expiry of a secret in OpenAI's form. seconds: after its creation."""

    anchor: Literal["created_at"] | None = None
    seconds: Annotated[int, Meta(ge=10, le=7200)] | None = None


class ClientSecretForm(Strict):
    expires_after: ExpiryForm | None = None
    session: SessionForm | None = None


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """
    expires_at_s: Unix time.
    owner: the key that made it.
    session: settings of the sessions that it opens; None: the defaults.
    """

    value: str
    expires_at_s: float
    owner: str
    session: SessionForm | None


class ClientSecrets:
    """shared: with other gateways; None: they are of this one alone."""

    def __init__(
        self, now_s: Callable[[], float] = time.time, shared: "SharedSecrets | None" = None
    ):
        self._now_s = now_s
        self._shared = shared
        self._secrets: dict[str, ClientSecret] = {}

    async def make(self, form: ClientSecretForm, owner: str) -> ClientSecret:
        """Raises CapacityError if too many secrets have not expired yet."""
        now_s = self._now_s()
        self._secrets = {v: s for v, s in self._secrets.items() if s.expires_at_s > now_s}
        if len(self._secrets) >= _MAX:
            raise CapacityError(f"full: {_MAX} client secrets", retry_after_s=60)
        if sum(secret.owner == owner for secret in self._secrets.values()) >= MAX_OF_OWNER:
            raise CapacityError(f"{MAX_OF_OWNER} client secrets of one key", retry_after_s=60)
        seconds = (form.expires_after or ExpiryForm()).seconds or _DEFAULT_S
        value = _PREFIX + token_urlsafe(_RANDOM_BYTES)
        secret = ClientSecret(value, now_s + seconds, owner, form.session)
        if self._shared is not None:
            await self._shared.keep(secret)
        self._secrets[value] = secret
        return secret

    async def find(self, offered: Iterable[str]) -> ClientSecret | None:
        """The first offered secret that exists and has not expired."""
        for value in offered:
            # The time of a dictionary lookup does not depend on how much of a secret is right.
            secret = self._secrets.get(value)
            if secret is None and self._shared is not None and value.startswith(_PREFIX):
                secret = await self._shared.find(value)
            if secret is not None and secret.expires_at_s > self._now_s():
                return secret
        return None


# --- POST /v1/realtime/client_secrets: a client with a key makes secrets for others ---


_MAX_BODY_BYTES = 1 << 16


class ClientSecretsRoute:
    """Mounted behind the guard of keys, so a secret cannot make secrets."""

    def __init__(self, parts: GatewayParts, secrets: ClientSecrets):
        self._parts = parts
        self._secrets = secrets

    async def __call__(self, request: Request) -> Response:
        owner = self._parts.keys.owner(request.headers)
        self._parts.tiers.check_heard(owner)
        body = await read_body(request, _MAX_BODY_BYTES)
        refuse_query(request)
        form = read_json(body or b"{}", ClientSecretForm)
        # Faulty settings are refused here: the client that uses the secret cannot change them.
        shown = await self._checked(form.session, owner)
        secret = await self._secrets.make(form, owner)
        return JSONResponse(
            {
                "value": secret.value,
                "expires_at": int(secret.expires_at_s),
                "session": shown,
            }
        )

    async def _checked(self, form: SessionForm | None, owner: str) -> dict[str, Any]:
        """The settings of the sessions, as the protocol shows them."""
        orchestrator, gateway = self._parts.orchestrator, self._parts.config
        session_id = new_id("sess")
        if form is not None and form.type == TRANSCRIPTION:
            default = transcription_defaults(orchestrator, gateway)
            return transcription_json(
                update_transcription(default, form, default, gateway), session_id
            )
        config = first_config(orchestrator, gateway, form, self._parts.voices_of(owner))
        if form is not None:
            default = first_config(orchestrator, gateway)
            limit = self._parts.context_limit
            has_tools = form.tools is not UNSET
            await limit.check_settings(config, default, "session", changes_tools=has_tools)
        return config_json(config, session_id)
