"""POST /v1/realtime/client_secrets: a client with a key makes secrets for clients without one.

In: OpenAI's request. Out: a secret, and the settings of the sessions that it opens.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.flex.tier import Tiers
from sglang_live.gateway.http.body import read_body, read_json, refuse_query
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.client_secrets import ClientSecretForm, ClientSecrets
from sglang_live.gateway.realtime.services import RealtimeServices
from sglang_live.gateway.realtime.session_config import first_config

_MAX_BODY_BYTES = 1 << 16


class ClientSecretsRoute:
    """Mounted behind the guard of keys, so a secret cannot make secrets."""

    def __init__(self, services: RealtimeServices, keys: Keys, secrets: ClientSecrets):
        self._services, self._keys, self._secrets = services, keys, secrets
        self._tiers = Tiers(services.config.batch_only_keys)

    async def __call__(self, request: Request) -> Response:
        try:
            owner = self._keys.owner(request.headers)
            self._tiers.check_heard(owner)
            body = await read_body(request, _MAX_BODY_BYTES)
            refuse_query(request)
            form = read_json(body or b"{}", ClientSecretForm)
            # Faulty settings are refused here: the client that uses the secret cannot change them.
            orchestrator, gateway = self._services.orchestrator, self._services.config
            config = first_config(orchestrator, gateway, form.session)
            if form.session is not None:
                default = first_config(orchestrator, gateway, None)
                limit = self._services.context_limit
                await limit.check_settings(config, form.session, default, "session")
            secret = self._secrets.make(form, owner)
        except LiveError as error:
            return error_response(error)
        return JSONResponse(
            {
                "value": secret.value,
                "expires_at": int(secret.expires_at_s),
                "session": config.to_json(new_id("sess")),
            }
        )
