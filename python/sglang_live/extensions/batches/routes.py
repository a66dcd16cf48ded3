"""/v1/files and /v1/batches, as OpenAI has them: what a client may send, and the answers."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from typing import Annotated, BinaryIO

from msgspec import Meta
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.errors import LiveError
from sglang_live.extensions.batches.database import StorageFullError
from sglang_live.extensions.batches.file_store import NoSuchFileError, new_input
from sglang_live.extensions.batches.pages import list_body, read_page
from sglang_live.extensions.batches.records import BATCH, FILE, INPUT, Batch, File
from sglang_live.extensions.batches.runner import Runner
from sglang_live.extensions.batches.store import Store
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.http.body import (
    Streamed,
    multipart,
    read_body,
    read_json,
    refuse_query,
)
from sglang_live.gateway.json_forms import Strict

log = logging.getLogger(__name__)

_MOST_FILES = 10_000
_FORM_BYTES = 1 << 16  # all of a form but the file
_MAX_NAME = 255
_READ_BYTES = 1 << 18
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)
_MOST_BATCHES = 100
_LISTED_BATCHES = 20
_MAX_BODY_BYTES = 1 << 17
# OpenAI's bounds.
LEAST_S, MOST_S = 3600, 2_592_000
_MAX_PAIRS = 16
WINDOW = "24h"

Value = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(max_length=64)]


class TooManyUploadsError(LiveError):
    code = "too_many_uploads"
    http_status = 429


class ExpiresAfter(Strict):
    anchor: str
    seconds: int


class BatchForm(Strict):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Name, Value], Meta(max_length=_MAX_PAIRS)] | None = None
    output_expires_after: ExpiresAfter | None = None

    def results_kept_s(self) -> int | None:
        """Lifetime of the files of results; None: the client leaves it to the server."""
        after = self.output_expires_after
        if after is None:
            return None
        return kept_s(after.anchor, str(after.seconds), "output_expires_after")


def kept_s(anchor: object, seconds: object, param: str) -> int | None:
    """The lifetime of a file in seconds; None if the client names none.

    Raises:
        ClientEventError: with `param`.
    """
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ClientEventError("anchor must be 'created_at'.", param=f"{param}.anchor")
    is_number = isinstance(seconds, str) and seconds.isascii() and seconds.isdigit()
    if not is_number or not LEAST_S <= int(str(seconds)[:9]) <= MOST_S:
        raise ClientEventError(f"seconds must be {LEAST_S} to {MOST_S}.", param=f"{param}.seconds")
    return int(str(seconds))


class FilesRoute:
    def __init__(self, store: Store, keys: Keys):
        self._store = store
        self._keys = keys
        self._uploads: Counter[str] = Counter()

    async def upload(self, request: Request) -> Response:
        refuse_query(request)
        owner, config = self._owner(request), self._store.config
        if self._uploads[owner] >= config.max_key_uploads:
            raise TooManyUploadsError(
                f"This key uploads {config.max_key_uploads} files at the moment, its limit."
            )
        self._uploads[owner] += 1
        try:
            max_bytes = config.max_file_bytes + _FORM_BYTES
            async with multipart(request, max_bytes, max_fields=len(_FIELDS)) as form:
                return JSONResponse((await self._stored(owner, form)).to_json())
        except OSError as error:  # the folder for temporary files is full
            log.error("upload_not_kept error=%s", error)
            raise StorageFullError from error
        finally:
            self._uploads[owner] -= 1

    async def _stored(self, owner: str, form: FormData) -> File:
        _check_fields(form)
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ClientEventError(
                "The form needs a 'file'.", code="missing_required_parameter", param="file"
            )
        lifetime_s = kept_s(form.get(_ANCHOR), form.get(_SECONDS), "expires_after")
        store = self._store
        file_id, n_bytes = await asyncio.to_thread(store.files.write, file.file)
        added = new_input(
            file_id,
            owner=owner,
            name=(file.filename or "input.jsonl")[:_MAX_NAME],
            n_bytes=n_bytes,
            created_s=int(store.now_s()),
            kept_s=lifetime_s or store.config.kept_s,
        )
        await store.run(store.files.add, added)
        return added

    async def list(self, request: Request) -> Response:
        page = read_page(
            request.query_params,
            prefix=FILE,
            most=_MOST_FILES,
            default=_MOST_FILES,
            others=("purpose",),
        )
        purpose = request.query_params.get("purpose")
        files, has_more = await self._store.run(
            self._store.files.page, self._owner(request), page, purpose
        )
        return JSONResponse(list_body([file.to_json() for file in files], has_more))

    async def retrieve(self, request: Request) -> Response:
        return JSONResponse((await self._get(request)).to_json())

    async def content(self, request: Request) -> Response:
        file = await self._get(request)
        try:
            opened = await asyncio.to_thread(self._store.files.path(file.id).open, "rb")
        except FileNotFoundError:  # deleted meanwhile
            raise NoSuchFileError(file.id) from None
        headers = {"content-length": str(file.n_bytes)}
        return Streamed(_pieces(opened), headers=headers, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        await self._store.run(self._store.files.delete, self._owner(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _get(self, request: Request) -> File:
        file_id = request.path_params["id"]
        return await self._store.run(self._store.files.get, self._owner(request), file_id)

    def _owner(self, request: Request) -> str:
        return self._store.owner_of(self._keys.owner(request.headers))


def _check_fields(form: FormData) -> None:
    names = [name for name, _ in form.multi_items()]
    for name in names:
        if name not in _FIELDS:
            raise ClientEventError(
                f"Unknown parameter: {cut(name)!r}.", code="unknown_parameter", param=name
            )
        if names.count(name) > 1:
            raise ClientEventError(f"'{name}' occurs twice.", param=name)
    if (purpose := form.get("purpose")) != INPUT:
        raise ClientEventError(
            f"purpose must be '{INPUT}': this server keeps files for its Batch API only.",
            code="missing_required_parameter" if purpose is None else "invalid_value",
            param="purpose",
        )


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    try:
        while piece := await asyncio.to_thread(file.read, _READ_BYTES):
            yield piece
    finally:
        file.close()


class BatchesRoute:
    """model: name of the served model. endpoints: that it really serves."""

    def __init__(
        self, store: Store, runner: Runner, keys: Keys, model: str, endpoints: Collection[str]
    ):
        self._store = store
        self._runner = runner
        self._keys = keys
        self._model = model
        self._endpoints = tuple(endpoints)

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
        page = read_page(
            request.query_params, prefix=BATCH, most=_MOST_BATCHES, default=_LISTED_BATCHES
        )
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
