"""The endpoints that lines of batches may name: the routes of clients, with a bound of their own.

In: the parts of the gateway. Out: endpoints by path, those that the model of the server has. Lines
are flex requests (in_process.py); they wait for no place, because the runner decides how many
there are, and count for no limit of responses per minute.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from sglang_live.gateway.auth import Keys
from sglang_live.gateway.batch.in_process import (
    CHAT,
    COMPLETIONS,
    SPEECH,
    TRANSCRIPTIONS,
    Endpoint,
)
from sglang_live.gateway.chat.answers import SpokenAnswers
from sglang_live.gateway.flex.gate import FlexGate
from sglang_live.gateway.flex.tier import Tiers
from sglang_live.gateway.http.body import read_body
from sglang_live.gateway.http.chat import ChatRoute
from sglang_live.gateway.http.speech import SpeechRoute
from sglang_live.gateway.http.transcription import TranscriptionRoute
from sglang_live.gateway.native.proxy import NativeProxy
from sglang_live.gateway.realtime.services import RealtimeServices


def line_endpoints(
    services: RealtimeServices,
    keys: Keys,
    proxy: NativeProxy | None,
    flex: FlexGate,
    answers: SpokenAnswers,
) -> dict[str, Endpoint]:
    """
    proxy: to SGLang's own API; None: chats are turns, and there are no completions.
    flex: bound on lines.
    answers: to which the messages of chats may refer.
    """
    orchestrator, config = services.orchestrator, services.config
    metrics, max_bytes = services.metrics, config.max_body_bytes
    speech = SpeechRoute(orchestrator, metrics, Tiers(), flex)
    endpoints: dict[str, Endpoint] = {SPEECH: speech.__call__}
    if not config.has_language_model:
        return endpoints
    speech_model = services.speech_model
    transcribe = TranscriptionRoute(orchestrator, config, speech_model, flex)
    endpoints[TRANSCRIPTIONS] = transcribe.__call__
    pass_on = partial(proxy.pass_on, counted=False, flex=flex) if proxy else None
    chat = ChatRoute(orchestrator, config, metrics, pass_on, keys.owner, flex, answers)
    endpoints[CHAT] = chat.__call__
    if pass_on:

        async def complete(request: Request) -> Response:
            return await pass_on(request, await read_body(request, max_bytes))

        endpoints[COMPLETIONS] = complete
    return endpoints
