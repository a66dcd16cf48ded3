"""The gateway as one ASGI application.

In: an Orchestrator. Out: /v1/realtime, /v1/audio/*, /v1/chat/completions, /v1/models,
/v1/capacity, /health, /metrics, /openapi.json, the page, SGLang's own HTTP API behind a guard, and
what extensions add.
Without a language model it refuses what needs one, with an error that says so.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import WebSocketRoute

from sglang_live.aio import close_all
from sglang_live.clock import Clock, MonotonicClock
from sglang_live.errors import ModelNotFoundError
from sglang_live.gateway.additions import Endpoint, GatewayAddition, GatewayParts, refusing
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.chat.messages import SpokenAnswers
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.connection_guard import Framing
from sglang_live.gateway.draining import Drain, DrainGate
from sglang_live.gateway.errors import NoLanguageModelError, add_error_forms, error_response
from sglang_live.gateway.flex.gate import FlexGate
from sglang_live.gateway.flex.tier import Tiers
from sglang_live.gateway.http import openapi
from sglang_live.gateway.http.chat import ChatRoute
from sglang_live.gateway.http.health import Health, HealthRoute, capacity_body
from sglang_live.gateway.http.page import add_notice, add_page
from sglang_live.gateway.http.speech import SpeechRoute
from sglang_live.gateway.http.transcription import TranscriptionRoute
from sglang_live.gateway.model import check_model
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.proxy import NativeProxy
from sglang_live.gateway.native.routes import FLUSH, LIMITED, ROUTES
from sglang_live.gateway.rate_limits import RateLimitError, RateLimits
from sglang_live.gateway.realtime.client_secrets import ClientSecrets, ClientSecretsRoute
from sglang_live.gateway.realtime.connection import RealtimeRoute, unauthorized
from sglang_live.gateway.realtime.services import RealtimeServices
from sglang_live.gateway.same_machine import SameMachine
from sglang_live.interaction.endpoint import EndpointModel
from sglang_live.interaction.silero import SileroModel, SpeechModel
from sglang_live.interaction.voiceprint import SpeakerModel
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.orchestrator.suspects import Suspects
from sglang_live.telemetry.metrics import GatewayMetrics


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
    clock: Clock | None = None,
    suspects: Suspects | None = None,
    drain: Drain | None = None,
    native_limits: NativeLimits | None = None,
    additions: Iterable[Callable[[GatewayParts], GatewayAddition | None]] = (),
) -> FastAPI:
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
        additions: further routes, made of the gateway's parts.
    Raises:
        FileNotFoundError: if the default speech model is not installed.
    """
    metrics = metrics or GatewayMetrics(CollectorRegistry())
    drain = drain or Drain()
    services = RealtimeServices(
        drain=drain,
        orchestrator=orchestrator,
        config=config,
        speech_model=speech_model or SileroModel(),
        endpoint_model=endpoint_model,
        speaker_model=speaker_model,
        clock=clock or MonotonicClock(),
        metrics=metrics,
    )
    keys = Keys(config.api_keys)
    flex = _flex_gate(config, metrics)
    answers, proxy = SpokenAnswers(), None
    if native_url:
        proxy = NativeProxy(
            native_url,
            config,
            metrics,
            orchestrator,
            suspects,
            services.rate_limits,
            native_limits,
            flex,
            answers,
        )

    parts = GatewayParts(services=services, keys=keys, proxy=proxy, answers=answers)
    added = [one for add in additions if (one := add(parts)) is not None]

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        services.start()
        for addition in added:
            addition.start()
        yield
        closing = (*added, services, proxy)
        await close_all(*(part.close for part in closing if part is not None))

    # A redirect to the same path with a slash would go to any host that the request's Host names.
    app = FastAPI(title="sglang_live", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    if config.own_pages_only and not config.api_keys:
        app.add_middleware(SameMachine, refused=metrics.errors)
    app.add_middleware(DrainGate, drain=drain)
    app.add_middleware(Framing)
    add_error_forms(app)
    secrets = ClientSecrets()
    _add_realtime(app, keys, services, secrets)
    _add_speech(app, keys, services, flex)
    _add_models(app, keys, orchestrator)
    _add_capacity(app, keys, services)
    _add_description(app, keys, config, added)
    _add_operations(app, keys, health, metrics, drain)
    if config.has_language_model:
        _add_generating(app, keys, services, proxy, secrets, flex, answers)
        add_page(app, _introduction(config, orchestrator.model_name))
    else:
        _add_refusals(app, keys)
        add_notice(app)
    if proxy:
        _add_native(app, keys, services.rate_limits, proxy)
    for addition in added:
        for (path, method), endpoint in addition.routes.items():
            app.add_route(path, _guarded(keys, endpoint), methods=[method])
    return app


def _flex_gate(config: GatewayConfig, metrics: GatewayMetrics) -> FlexGate:
    gate = FlexGate(config.flex, lambda outcome: metrics.flex_requests.labels(outcome).inc())
    metrics.flex_running.set_function(lambda: gate.n_running)
    metrics.flex_waiting.set_function(lambda: gate.n_waiting)
    return gate


def _introduction(config: GatewayConfig, name: str) -> dict[str, Any]:
    """What the page says of the model. Without a key, a server with keys says nothing."""
    if config.api_keys:
        return {}
    return {"name": name, "about": config.about, "suggestions": list(config.suggestions)}


def _add_realtime(
    app: FastAPI, keys: Keys, services: RealtimeServices, secrets: ClientSecrets
) -> None:
    realtime = RealtimeRoute(services, keys, secrets)
    app.router.routes.append(WebSocketRoute("/v1/realtime", realtime.__call__))


def _add_speech(app: FastAPI, keys: Keys, services: RealtimeServices, flex: FlexGate) -> None:
    orchestrator, tiers = services.orchestrator, Tiers(services.config.batch_only_keys)
    route = SpeechRoute(orchestrator, services.metrics, tiers, flex)
    speak = _limited(keys, services.rate_limits, route.__call__)

    async def voices(request: Request) -> Response:
        names = orchestrator.voices
        if request.query_params.get("legacy") in ("true", "1"):
            return JSONResponse({"voices": list(names)})
        return JSONResponse({"voices": [{"id": name, "name": name} for name in names]})

    app.add_route("/v1/audio/speech", _guarded(keys, speak), methods=["POST"])
    app.add_route("/v1/audio/voices", _guarded(keys, voices), methods=["GET"])


def _add_refusals(app: FastAPI, keys: Keys) -> None:
    refused = dict.fromkeys(openapi.OF_LANGUAGE_MODEL, ("POST",)) | dict(ROUTES)
    for path, methods in refused.items():
        app.add_route(path, _guarded(keys, refusing(NoLanguageModelError())), methods=list(methods))


def _add_generating(
    app: FastAPI,
    keys: Keys,
    services: RealtimeServices,
    proxy: NativeProxy | None,
    secrets: ClientSecrets,
    flex: FlexGate,
    answers: SpokenAnswers,
) -> None:
    orchestrator, config, metrics = services.orchestrator, services.config, services.metrics
    chat = ChatRoute(
        orchestrator,
        config,
        metrics,
        text_only=proxy.pass_on if proxy else None,
        owner=keys.owner,
        flex=flex,
        answers=answers,
    )
    transcribe = TranscriptionRoute(orchestrator, config, services.speech_model, flex)
    routes: dict[str, Endpoint] = {
        "/v1/audio/transcriptions": transcribe.__call__,
        "/v1/chat/completions": chat.__call__,
    }
    for path, route in routes.items():
        endpoint = _limited(keys, services.rate_limits, route)
        app.add_route(path, _guarded(keys, endpoint), methods=["POST"])
    make_secret = ClientSecretsRoute(services, keys, secrets).__call__
    app.add_route("/v1/realtime/client_secrets", _guarded(keys, make_secret), methods=["POST"])


def _add_native(app: FastAPI, keys: Keys, limits: RateLimits, proxy: NativeProxy) -> None:
    limited = _limited(keys, limits, proxy.__call__)
    for path, methods in ROUTES.items():
        endpoint = limited if path in LIMITED else proxy.__call__
        if path != FLUSH:  # the proxy checks the operator's key
            endpoint = _guarded(keys, endpoint)
        app.add_route(path, endpoint, methods=list(methods))


def _add_models(app: FastAPI, keys: Keys, orchestrator: Orchestrator) -> None:
    name = orchestrator.model_name
    model = {"id": name, "object": "model", "created": 0, "owned_by": "sglang_live"}

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        try:
            check_model(name, request.path_params["model"])
        except ModelNotFoundError as error:
            return error_response(error)
        return JSONResponse(model)

    app.add_route("/v1/models", _guarded(keys, models), methods=["GET"])
    app.add_route("/v1/models/{model:path}", _guarded(keys, one_model), methods=["GET"])


def _add_capacity(app: FastAPI, keys: Keys, services: RealtimeServices) -> None:
    async def capacity(_request: Request) -> Response:
        now = services.loop_lag.limited(services.orchestrator.capacity_now())
        return JSONResponse(capacity_body(now))

    app.add_route("/v1/capacity", _guarded(keys, capacity), methods=["GET"])


def _add_description(
    app: FastAPI, keys: Keys, config: GatewayConfig, added: Iterable[GatewayAddition]
) -> None:
    description = openapi.document(config.has_language_model)
    for addition in added:
        description["paths"].update(addition.paths)
        description["components"]["schemas"].update(addition.schemas)

    async def describe(_request: Request) -> Response:
        return JSONResponse(description)

    app.add_route("/openapi.json", _guarded(keys, describe), methods=["GET"])


def _add_operations(
    app: FastAPI,
    keys: Keys,
    health: Callable[[], Health],
    metrics: GatewayMetrics,
    drain: Drain,
) -> None:
    # Load balancers read /health without a key, as in SGLang itself. /metrics needs one: counters
    # show when sessions come and go.
    async def show_metrics(_request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/health", HealthRoute(health, drain).__call__, methods=["GET"])
    app.add_route("/metrics", _guarded(keys, show_metrics), methods=["GET"])


def _guarded(keys: Keys, endpoint: Endpoint) -> Endpoint:
    async def checked(request: Request) -> Response:
        if not keys.allow(request.headers):
            return unauthorized()
        return await endpoint(request)

    return checked


def _limited(keys: Keys, limits: RateLimits, endpoint: Endpoint) -> Endpoint:
    async def counted(request: Request) -> Response:
        try:
            limits.take(keys.owner(request.headers))
        except RateLimitError as error:
            return error_response(error)
        return await endpoint(request)

    return counted
