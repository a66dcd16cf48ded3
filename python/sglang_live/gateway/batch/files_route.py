"""/v1/files: upload, list, retrieve, content, delete, as OpenAI has them, for the Batch API."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from typing import BinaryIO

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.batch.database import StorageFullError
from sglang_live.gateway.batch.file_store import NoSuchFileError, new_input
from sglang_live.gateway.batch.forms import kept_s
from sglang_live.gateway.batch.ids import FILE
from sglang_live.gateway.batch.pages import list_body, read_page
from sglang_live.gateway.batch.records import INPUT, File
from sglang_live.gateway.batch.store import Store
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.http.body import Streamed, multipart, refuse_query

log = logging.getLogger(__name__)

_MOST_LISTED = 10_000
_FORM_BYTES = 1 << 16  # all of a form but the file
_MAX_NAME = 255
_READ_BYTES = 1 << 18
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)


class TooManyUploadsError(LiveError):
    code = "too_many_uploads"
    http_status = 429


class FilesRoute:
    def __init__(self, store: Store, keys: Keys):
        self._store, self._keys = store, keys
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
            most=_MOST_LISTED,
            default=_MOST_LISTED,
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
