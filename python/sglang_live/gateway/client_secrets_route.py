"""POST /v1/realtime/client_secrets: who has a key makes a secret for who has none."""

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.client_secrets import ClientSecretForm, ClientSecrets
from sglang_live.gateway.http_body import read_body
from sglang_live.gateway.http_errors import error_response
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.services import RealtimeServices
from sglang_live.gateway.session_config import first_config

_MAX_BODY_BYTES = 1 << 16


class ClientSecretsRoute:
    """Mounted behind the keys' guard: a secret makes no secrets."""

    def __init__(self, services: RealtimeServices, keys: Keys, secrets: ClientSecrets):
        self._services, self._keys, self._secrets = services, keys, secrets

    async def __call__(self, request: Request) -> Response:
        try:
            form = _read(await read_body(request, _MAX_BODY_BYTES))
            # What a session cannot be is told now, to those who can change it.
            config = first_config(self._services.orchestrator, self._services.config, form.session)
            secret = self._secrets.make(form, self._keys.owner(request.headers))
        except LiveError as error:
            return error_response(error)
        return JSONResponse(
            {
                "value": secret.value,
                "expires_at": int(secret.expires_at_s),
                "session": config.to_wire(new_id("sess")),
            }
        )


def _read(body: bytes) -> ClientSecretForm:
    try:
        return msgspec.json.decode(body or b"{}", type=ClientSecretForm)
    except msgspec.MsgspecError as error:
        raise BadInputError(f"Invalid request: {error}.") from None
