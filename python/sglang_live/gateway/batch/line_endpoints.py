"""The endpoints that lines of batches may name: the routes of clients, set up for best effort.

In: the parts of the gateway. Out: endpoints by path, those that the model of the server has. Their
turns are flex, take no session, and count for no limit of responses per minute.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from sglang_live.gateway.auth import Keys
from sglang_live.gateway.batch.best_effort import BestEffortOrchestrator
from sglang_live.gateway.batch.in_process import (
    CHAT,
    COMPLETIONS,
    SPEECH,
    TRANSCRIPTIONS,
    Endpoint,
)
from sglang_live.gateway.http.body import read_body
from sglang_live.gateway.http.chat import ChatRoute
from sglang_live.gateway.http.speech import SpeechRoute
from sglang_live.gateway.http.transcription import TranscriptionRoute
from sglang_live.gateway.native.proxy import NativeProxy
from sglang_live.gateway.realtime.services import RealtimeServices


def line_endpoints(
    services: RealtimeServices, keys: Keys, proxy: NativeProxy | None
) -> dict[str, Endpoint]:
    """proxy: to SGLang's own API; None: chats are turns, and there are no completions."""
    orchestrator, config = BestEffortOrchestrator(services.orchestrator), services.config
    metrics, max_bytes = services.metrics, config.max_body_bytes
    endpoints: dict[str, Endpoint] = {SPEECH: SpeechRoute(orchestrator, metrics).__call__}
    if not config.has_language_model:
        return endpoints
    speech_model = services.speech_model
    endpoints[TRANSCRIPTIONS] = TranscriptionRoute(orchestrator, config, speech_model).__call__
    pass_on = partial(proxy.pass_on, counted=False) if proxy else None
    chat = ChatRoute(orchestrator, config, metrics, text_only=pass_on, owner=keys.owner)
    endpoints[CHAT] = chat.__call__
    if pass_on:

        async def complete(request: Request) -> Response:
            return await pass_on(request, await read_body(request, max_bytes))

        endpoints[COMPLETIONS] = complete
    return endpoints
