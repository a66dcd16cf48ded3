"""The gateway as one ASGI application.

In: an Orchestrator. Out: /v1/realtime, /v1/live/sessions, /v1/audio/*, /v1/chat/completions,
/v1/models, /v1/capacity, /health, /metrics, /openapi.json, the page, SGLang's own HTTP API behind a
guard, and what extensions add.
Without a language model it refuses what needs one, with an error that says so.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from sglang_live.aio import close_all
from sglang_live.clock import MonotonicClock
from sglang_live.errors import LiveError
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.connection_guard import Framing
from sglang_live.gateway.draining import Drain, DrainGate
from sglang_live.gateway.errors import (
    ERROR_FORMS,
    LIVE_PATH,
    REALTIME_PATH,
    CallsOnlyError,
    InvalidKeyError,
    NoLanguageModelError,
    OwnWordsError,
    ParameterError,
    unknown_path,
)
from sglang_live.gateway.http import openapi
from sglang_live.gateway.http.chat import ChatRoute
from sglang_live.gateway.http.health import Health, HealthRoute, capacity_body
from sglang_live.gateway.http.page import notice, page_routes
from sglang_live.gateway.http.speech import SpeechRoute
from sglang_live.gateway.http.transcription import TranscriptionRoute
from sglang_live.gateway.live.route import LiveRoute
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.proxy import NativeProxy
from sglang_live.gateway.native.routes import FLUSH, LIMITED, ROUTES
from sglang_live.gateway.parts import Endpoint, GatewayAddition, GatewayParts, refusing
from sglang_live.gateway.realtime.calls import CALLS_PATH, RealtimeCalls
from sglang_live.gateway.realtime.client_secrets import ClientSecrets, ClientSecretsRoute
from sglang_live.gateway.realtime.route import RealtimeRoute
from sglang_live.gateway.same_machine import SameMachine
from sglang_live.gateway.telephony.route import TELEPHONY_PATH, TelephonyRoute
from sglang_live.gateway.webrtc.calls import OpenCalls
from sglang_live.interaction.endpoint import EndpointModel
from sglang_live.interaction.filters.voiceprint import SpeakerModel
from sglang_live.interaction.silero import SileroModel, SpeechModel
from sglang_live.orchestrator.sessions import Orchestrator
from sglang_live.orchestrator.suspects import Suspects
from sglang_live.sound import media
from sglang_live.telemetry.metrics import GatewayMetrics

if TYPE_CHECKING:  # without one it is not imported
    from sglang_live.journal.journal import Journal


def build_app(
    orchestrator: Orchestrator,
    *,
    config: GatewayConfig,
    native_url: str | None,
    health: Callable[[], Health],
    metrics: GatewayMetrics | None = None,
    speech_model: SpeechModel | None = None,
    endpoint_model: EndpointModel | None = None,
    speaker_model: SpeakerModel | None = None,
    suspects: Suspects | None = None,
    drain: Drain | None = None,
    native_limits: NativeLimits | None = None,
    journal: "Journal | None" = None,
    additions: Iterable[Callable[[GatewayParts], GatewayAddition | None]] = (),
) -> Starlette:
    """Build the gateway's ASGI application.

    Args:
        native_url: base URL of SGLang's own HTTP server; None: its routes are left out.
        health: read on each GET /health; must not block.
        metrics: counters behind /metrics; None: a new registry.
        speech_model: shared by all sessions; None: Silero, loaded now.
        endpoint_model: judges turns for semantic_vad; None: silence alone ends turns.
        speaker_model: for sessions that ignore other voices; None: none can.
        suspects: requests that were running when an engine died.
        drain: set when the process is about to stop; None: never.
        native_limits: limits on bodies for SGLang's own API.
        journal: of calls, for other gateways; None: calls end with this one.
        additions: further routes, made of the gateway's parts.
    Raises:
        FileNotFoundError: if the default speech model is not installed.
    """
    parts = GatewayParts(
        orchestrator=orchestrator,
        config=config,
        speech_model=speech_model or SileroModel(),
        endpoint_model=endpoint_model,
        speaker_model=speaker_model,
        metrics=metrics or GatewayMetrics(CollectorRegistry()),
        drain=drain or Drain(),
        suspects=suspects or Suspects(MonotonicClock()),
        journal=journal,
    )
    if native_url:
        parts.proxy = NativeProxy(parts, native_url, native_limits or NativeLimits())
    added = [one for add in additions if (one := add(parts)) is not None]
    routes = _Routes(parts)
    secrets = ClientSecrets(shared=parts.shared.secrets if parts.shared else None)
    calls = OpenCalls(parts)
    realtime_calls = RealtimeCalls(parts, secrets, calls)
    realtime = RealtimeRoute(parts, secrets, realtime_calls)
    routes.found.append(WebSocketRoute(REALTIME_PATH, realtime.__call__))
    live = LiveRoute(parts, calls)
    routes.found.append(WebSocketRoute(LIVE_PATH, live.__call__))
    routes.found.append(WebSocketRoute(f"{LIVE_PATH}/{{session_id}}/attach", live.attach))
    routes.add(LIVE_PATH, live.begin, "GET", "POST")
    routes.add(f"{LIVE_PATH}/{{session_id}}/hangup", live.hang_up, "POST")
    is_duplex = bool(orchestrator.duplex_s)
    refusal = OwnWordsError() if orchestrator.own_voice else None
    _add_speech(routes, parts, CallsOnlyError() if is_duplex else refusal)
    if config.model.has_language_model:
        _add_generating(routes, parts, secrets)
        # They check keys and client secrets themselves.
        routes.add(CALLS_PATH, realtime_calls.begin, "POST", keyed=False)
        routes.add(CALLS_PATH + "/{call_id}/hangup", realtime_calls.hang_up, "POST", keyed=False)
        if config.telephony.telephony_token or config.keys.api_keys:
            phones = TelephonyRoute(parts, calls)
            routes.found.append(WebSocketRoute(TELEPHONY_PATH + "/{service}", phones.__call__))
    else:
        _add_refusals(routes, CallsOnlyError() if is_duplex else NoLanguageModelError())
    _add_descriptions(routes, parts, added)
    # Load balancers read /health without a key, as in SGLang itself. /metrics needs one: counters
    # show when sessions come and go.
    routes.add("/health", HealthRoute(health, parts.drain).__call__, keyed=False)
    routes.add("/metrics", partial(_metrics, parts.metrics.registry))
    for addition in added:
        for (path, method), endpoint in addition.routes.items():
            routes.add(path, endpoint, method)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        parts.start()
        for addition in added:
            addition.start()
        yield
        closing = (calls, *added, parts, parts.proxy)
        ends = [part.close for part in closing if part is not None]
        await close_all(*ends, partial(asyncio.to_thread, media.close))

    middleware = [Middleware(Framing), Middleware(DrainGate, drain=parts.drain)]
    if not config.keys.allow_anonymous and not config.keys.api_keys:
        middleware.append(Middleware(SameMachine, refused=parts.metrics.errors))
    if origins := config.webrtc.cors_origin:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-openai-agents-sdk"],
                expose_headers=["Location"],
            ),
        )
    app = Starlette(
        routes=routes.found,
        middleware=middleware,
        exception_handlers=ERROR_FORMS,
        lifespan=lifespan,
    )
    # A redirect to the same path with a slash would go to any host that the request's Host names.
    app.router.redirect_slashes = False
    app.router.default = unknown_path
    return app


class _Routes:
    """The routes of one application, each behind its checks."""

    def __init__(self, parts: GatewayParts):
        self._keys = parts.keys
        self._limits = parts.rate_limits
        self.found: list[BaseRoute] = []

    def add(
        self,
        path: str,
        endpoint: Endpoint,
        *methods: str,
        keyed: bool = True,
        limited: bool = False,
    ) -> None:
        """
        Args:
            methods: GET if there is none.
            keyed: whether the route needs a key of the server.
            limited: whether its requests count as responses of their key.
        """

        async def checked(request: Request) -> Response:
            if keyed and not self._keys.allow(request.headers):
                raise InvalidKeyError
            if limited:
                await self._limits.take(self._keys.owner(request.headers))
            return await endpoint(request)

        self.found.append(Route(path, checked, methods=list(methods) or ["GET"]))

    def shown(self, path: str, what: Callable[[Request], Any]) -> None:
        """Add a route whose response is an object in JSON."""

        async def show(request: Request) -> Response:
            return JSONResponse(what(request))

        self.add(path, show)


def _add_generating(routes: _Routes, parts: GatewayParts, secrets: ClientSecrets) -> None:
    """What a server with a language model serves beside speech."""
    proxy, config = parts.proxy, parts.config
    transcribe = TranscriptionRoute(parts)
    routes.add("/v1/audio/transcriptions", transcribe.__call__, "POST", limited=True)
    translate = TranscriptionRoute(parts, translates=True)
    routes.add("/v1/audio/translations", translate.__call__, "POST", limited=True)
    # SGLang's route would write codes into the text.
    by_sglang = None if parts.orchestrator.own_voice else proxy
    chat = ChatRoute(parts, text_only=by_sglang.pass_on if by_sglang else None)
    routes.add("/v1/chat/completions", chat.__call__, "POST", limited=True)
    make_secret = ClientSecretsRoute(parts, secrets)
    routes.add("/v1/realtime/client_secrets", make_secret.__call__, "POST")
    if proxy is not None:
        for path, methods in ROUTES.items():
            keyed = path != FLUSH  # the proxy checks the operator's key
            routes.add(path, proxy.__call__, *methods, keyed=keyed, limited=path in LIMITED)
    # Without a key, a server with keys says nothing of its model.
    model = {
        "name": parts.orchestrator.model_name,
        "about": config.model.about,
        "suggestions": list(config.model.suggestions),
    }
    routes.found += page_routes({} if config.keys.api_keys else model)


def _add_refusals(routes: _Routes, error: LiveError) -> None:
    """What a server without a language model says on the routes that need one."""
    refused = dict.fromkeys(openapi.OF_LANGUAGE_MODEL, ("POST",)) | dict(ROUTES)
    for path, methods in refused.items():
        routes.add(path, refusing(error), *methods)
    routes.found.append(Route("/", partial(notice, error)))


def _add_speech(routes: _Routes, parts: GatewayParts, refusal: LiveError | None) -> None:
    """refusal: why the model speaks no text that it is given."""

    def voices(request: Request) -> dict[str, Any]:
        owner = parts.keys.owner(request.headers)
        custom = parts.custom_voices.names(owner) if parts.custom_voices else ()
        found = [*((name, name) for name in parts.orchestrator.voices), *custom]
        if request.query_params.get("legacy") in ("true", "1"):
            return {"voices": [voice for voice, _ in found]}
        return {"voices": [{"id": voice, "name": name} for voice, name in found]}

    speech = SpeechRoute(parts).__call__ if refusal is None else refusing(refusal)
    routes.add("/v1/audio/speech", speech, "POST", limited=refusal is None)
    routes.shown("/v1/audio/voices", voices)


def _add_descriptions(
    routes: _Routes, parts: GatewayParts, added: Iterable[GatewayAddition]
) -> None:
    name = parts.orchestrator.model_name
    model = {"id": name, "object": "model", "created": 0, "owned_by": "sglang_live"}
    description = openapi.document(parts.config.model.has_language_model)
    for addition in added:
        description["paths"].update(addition.paths)
        description["components"]["schemas"].update(addition.schemas)

    def one_model(request: Request) -> dict[str, Any]:
        parts.check_model(request.path_params["model"])
        return model

    async def capacity(request: Request) -> Response:
        match request.query_params.get("scope", "gateway"):
            case "gateway":
                now = parts.loop_lag.limited(parts.orchestrator.capacity_now())
                return JSONResponse(capacity_body(now))
            case "fleet" if parts.shared:
                return JSONResponse(await parts.shared.fleet())
            case "fleet":
                raise ParameterError("scope", "is fleet with --shared-limits alone.")
        raise ParameterError("scope", "is gateway or fleet.")

    routes.shown("/v1/models", lambda _: {"object": "list", "data": [model]})
    routes.shown("/v1/models/{model:path}", one_model)
    routes.add("/v1/capacity", capacity)
    routes.shown("/openapi.json", lambda _: description)


async def _metrics(registry: CollectorRegistry, _request: Request) -> Response:
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
