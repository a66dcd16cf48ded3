"""The Batch API of one server: its routes, and what runs behind them.

In: a Store, and the endpoints of the server. Out: routes by path and method.
Without a Store the routes refuse, with an error that names the flag.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS, Keys
from sglang_live.gateway.batch.batches_route import BatchesRoute
from sglang_live.gateway.batch.files_route import FilesRoute
from sglang_live.gateway.batch.in_process import Endpoint, InProcess
from sglang_live.gateway.batch.line_run import LineRuns
from sglang_live.gateway.batch.pace import Load
from sglang_live.gateway.batch.runner import Runner
from sglang_live.gateway.batch.store import Store
from sglang_live.gateway.draining import Drain
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.model import check_model
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.telemetry.batch_metrics import BatchMetrics

FILES, FILE, CONTENT = "/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"
BATCHES, BATCH, CANCEL = "/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/cancel"
# Path and method.
ROUTES = (
    *((FILES, "POST"), (FILES, "GET"), (FILE, "GET"), (FILE, "DELETE"), (CONTENT, "GET")),
    *((BATCHES, "POST"), (BATCHES, "GET"), (BATCH, "GET"), (CANCEL, "POST")),
)


class NoBatchesError(LiveError):
    code = "batches_off"
    http_status = 404

    def __init__(self) -> None:
        super().__init__("This server has no Batch API: it runs without --batch-dir.")


class BatchApi:
    """endpoints: by path; they count no limits of responses."""

    def __init__(
        self,
        store: Store,
        *,
        endpoints: Mapping[str, Endpoint],
        orchestrator: Orchestrator,
        keys: Keys,
        names: Iterable[str],
        drain: Drain,
        metrics: BatchMetrics,
    ):
        """names: the keys themselves; none: all clients share one."""

        def load() -> Load:
            capacity = orchestrator.capacity_now()
            return Load(
                n_sessions=capacity.n_sessions,
                n_more=capacity.n_more,
                best_effort=orchestrator.best_effort_now(),
            )

        execute = InProcess(endpoints)
        lines = LineRuns(execute, store.config, lambda code: metrics.retries.labels(code).inc())
        self._runner = Runner(
            store,
            lines,
            keys=tuple(names) or (ANONYMOUS,),
            check_model=lambda name: check_model(orchestrator.model_name, name),
            load=load,
            drain=drain,
            metrics=metrics,
        )
        files = FilesRoute(store, keys)
        model = orchestrator.model_name
        batches = BatchesRoute(store, self._runner, keys, model, execute.endpoints)
        served = (
            *(files.upload, files.list, files.retrieve, files.delete, files.content),
            *(batches.create, batches.list, batches.retrieve, batches.cancel),
        )
        self.routes: dict[tuple[str, str], Endpoint] = {
            route: with_errors(endpoint) for route, endpoint in zip(ROUTES, served, strict=True)
        }

    def start(self) -> None:
        self._runner.start()

    async def close(self) -> None:
        await self._runner.close()


async def refuse(_request: Request) -> Response:
    return error_response(NoBatchesError())


def with_errors(route: Callable[[Request], Awaitable[Response]]) -> Endpoint:
    async def answered(request: Request) -> Response:
        try:
            return await route(request)
        except LiveError as error:
            return error_response(error)

    return answered
