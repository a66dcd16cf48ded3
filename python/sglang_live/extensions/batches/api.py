"""The Batch API of one server: its routes, and what runs behind them.

In: a Store, and the parts of the gateway. Out: routes and their description.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sglang_live.errors import LiveError
from sglang_live.extension import Addition
from sglang_live.extensions.batches.config import ROUTES, BatchConfig
from sglang_live.extensions.batches.in_process import InProcess, line_endpoints
from sglang_live.extensions.batches.line_run import LineRuns
from sglang_live.extensions.batches.metrics import BatchMetrics
from sglang_live.extensions.batches.pace import Load
from sglang_live.extensions.batches.routes import (
    LEAST_S,
    MOST_S,
    BatchesRoute,
    BatchForm,
    FilesRoute,
)
from sglang_live.extensions.batches.runner import Runner
from sglang_live.extensions.batches.store import Store
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.flex.gate import FlexConfig, FlexGate
from sglang_live.gateway.http import openapi
from sglang_live.gateway.parts import Endpoint, GatewayAddition, GatewayParts

_INPUT_FILE = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_S, "maximum": MOST_S},
    },
}


class Batches(Addition):
    def __init__(self, folder: Path, config: BatchConfig):
        self.folder = folder
        self.config = config
        self.requests_at_once = config.at_once

    def start(self, run_dir: Path) -> None:
        """Raises BadInputError: the folder cannot be used, or another server uses it."""
        self._store = Store(self.folder, self.config)

    def gateway(self, parts: GatewayParts) -> GatewayAddition:
        return BatchApi(self._store, parts)


class BatchApi(GatewayAddition):
    """store: closed with the gateway."""

    def __init__(self, store: Store, parts: GatewayParts):
        orchestrator, keys = parts.orchestrator, parts.keys
        metrics = BatchMetrics(parts.metrics.registry)

        def load() -> Load:
            capacity = orchestrator.capacity_now()
            return Load(
                n_sessions=capacity.n_sessions,
                n_more=capacity.n_more,
                best_effort=orchestrator.best_effort_now(),
            )

        # The runner decides how many lines run; the gate makes them flex requests without sessions.
        gate = FlexGate(FlexConfig(at_once=store.config.at_once, run_s=store.config.line_s))
        execute = InProcess(line_endpoints(parts, gate))
        lines = LineRuns(execute, store.config, lambda code: metrics.retries.labels(code).inc())
        self._runner = Runner(
            store,
            lines,
            keys=parts.config.keys.accepted or (ANONYMOUS,),
            check_model=parts.check_model,
            load=load,
            drain=parts.drain,
            metrics=metrics,
        )
        files = FilesRoute(store, keys)
        model = orchestrator.model_name
        batches = BatchesRoute(store, self._runner, keys, model, execute.endpoints)
        served = (
            *(files.upload, files.list, files.retrieve, files.delete, files.content),
            *(batches.create, batches.list, batches.retrieve, batches.cancel),
        )
        self.routes = {
            route: with_errors(endpoint) for route, endpoint in zip(ROUTES, served, strict=True)
        }
        self.paths, self.schemas = described()

    def start(self) -> None:
        self._runner.start()

    async def close(self) -> None:
        await self._runner.close()


def with_errors(route: Callable[[Request], Awaitable[Response]]) -> Endpoint:
    async def answered(request: Request) -> Response:
        try:
            return await route(request)
        except LiveError as error:
            return error_response(error)

    return answered


def described() -> tuple[dict[str, Any], dict[str, Any]]:
    """The routes and the forms of their bodies, for /openapi.json."""
    (batch,), schemas = msgspec.json.schema_components((BatchForm,), ref_template=openapi.REFERENCE)
    upload = {"multipart/form-data": {"schema": _INPUT_FILE}}
    path_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    of_one = {"parameters": [path_id]}
    refused = openapi.refusals(400, 401, 404, 409, 503)

    def get(summary: str, media_type: str = openapi.JSON) -> dict[str, Any]:
        return openapi.get(summary, media_type, refused)

    cancelling = {
        "summary": "Cancels a batch.",
        "responses": {**openapi.done(openapi.JSON), **refused},
    }
    deleting = {
        "summary": "Deletes a file.",
        "responses": {**openapi.done(openapi.JSON), **refused},
    }
    making = openapi.post("Makes a batch.", {openapi.JSON: {"schema": batch}}, openapi.JSON)
    paths = {
        "/v1/files": openapi.post("Uploads requests.", upload, openapi.JSON)
        | get("The files of the key."),
        "/v1/files/{id}": of_one | get("A file.") | {"delete": deleting},
        "/v1/files/{id}/content": of_one | get("What is in a file.", "application/octet-stream"),
        "/v1/batches": making | get("The batches of the key."),
        "/v1/batches/{id}": of_one | get("A batch."),
        "/v1/batches/{id}/cancel": of_one | {"post": cancelling},
    }
    return paths, schemas
