"""/v1/batches: create, list, retrieve, cancel, as OpenAI has them."""

from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.gateway.auth import Keys
from sglang_live.gateway.batch.forms import WINDOW, BatchForm
from sglang_live.gateway.batch.ids import BATCH
from sglang_live.gateway.batch.pages import list_body, read_page
from sglang_live.gateway.batch.records import Batch
from sglang_live.gateway.batch.runner import Runner
from sglang_live.gateway.batch.store import Store
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.http.body import read_body, read_json, refuse_query

_MOST_LISTED, _LISTED = 100, 20
_MAX_BODY_BYTES = 1 << 17


class BatchesRoute:
    """model: name of the served model. endpoints: that it really serves."""

    def __init__(
        self, store: Store, runner: Runner, keys: Keys, model: str, endpoints: Collection[str]
    ):
        self._store, self._runner, self._keys = store, runner, keys
        self._model, self._endpoints = model, tuple(endpoints)

    async def create(self, request: Request) -> Response:
        refuse_query(request)
        form = read_json(await read_body(request, _MAX_BODY_BYTES), BatchForm)
        if form.endpoint not in self._endpoints:
            raise ClientEventError(
                f"The model '{self._model}' has no batches for {cut(form.endpoint)!r}. "
                f"Its endpoints are: {', '.join(self._endpoints)}.",
                param="endpoint",
            )
        if form.completion_window != WINDOW:
            raise ClientEventError(
                f"completion_window must be '{WINDOW}'.", param="completion_window"
            )
        batch = await self._store.run(
            self._store.batches.create,
            owner=self._owner(request),
            endpoint=form.endpoint,
            input_file=form.input_file_id,
            metadata=form.metadata,
            results_kept_s=form.results_kept_s(),
        )
        self._runner.wake()
        return self._shown(batch)

    async def list(self, request: Request) -> Response:
        page = read_page(request.query_params, prefix=BATCH, most=_MOST_LISTED, default=_LISTED)
        batches, has_more = await self._store.run(
            self._store.batches.page, self._owner(request), page
        )
        return JSONResponse(list_body([self._to_json(batch) for batch in batches], has_more))

    async def retrieve(self, request: Request) -> Response:
        batch_id = request.path_params["id"]
        batch = await self._store.run(self._store.batches.get, self._owner(request), batch_id)
        return self._shown(batch)

    async def cancel(self, request: Request) -> Response:
        batch_id = request.path_params["id"]
        batch = await self._store.run(self._store.batches.cancel, self._owner(request), batch_id)
        self._runner.wake()
        return self._shown(batch)

    def _shown(self, batch: Batch) -> Response:
        return JSONResponse(self._to_json(batch))

    def _to_json(self, batch: Batch) -> dict[str, object]:
        return batch.to_json(self._model, self._runner.paused(batch))

    def _owner(self, request: Request) -> str:
        return self._store.owner_of(self._keys.owner(request.headers))
