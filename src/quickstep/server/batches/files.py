"""`/v1/files`: upload, list, read, delete, as OpenAI's client calls them; for batches only.

A body streams through a bounded form parser to disk; nothing of a file stands in memory. Whose
files they are says the API key.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from quickstep.errors import RequestError
from quickstep.server.batches.file_store import FileStore, FileWriter, StoredFile
from quickstep.server.batches.request_types import FileForm, FileQuery
from quickstep.server.batches.response_types import DeletedFile, FileList, FileObject
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.errors import json_response
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.time_limits import patient_timeout
from quickstep.server.http.work_lanes import done_in_thread
from quickstep.server.openai.request_types import decode_values

__all__ = ["Files", "page_of"]

_PURPOSE = "batch"
_FORM_FIELDS = 8
_FIELD_BYTES = 4096
# boundaries, headers and the other fields of the form
_FORM_BYTES = 64 * 1024
_NESTED = re.compile(r"(?P<outer>\w+)\[(?P<inner>\w+)\]")
_DRAINED_LIMITS = 4
_CLIENT_CLOSED = 499


class Files:
    """The endpoints, by name."""

    def __init__(self, store: FileStore, upload_s: float) -> None:
        self._store = store
        self._upload_s = upload_s

    def routes(self) -> list[ApiRoute]:
        """All of them."""
        path = "/v1/files"
        one = f"{path}/{{file_id}}"
        return [
            ApiRoute("POST", path, self.upload, "Keep a file of requests.", response=FileObject),
            ApiRoute(
                "GET",
                path,
                self.files,
                "The files of this key.",
                response=FileList,
                query=FileQuery,
            ),
            ApiRoute("GET", one, self.file, "One file.", response=FileObject),
            ApiRoute("DELETE", one, self.delete, "Forget a file.", response=DeletedFile),
            ApiRoute(
                "GET",
                f"{one}/content",
                self.content,
                "What stands in a file.",
                content_type="application/jsonl",
            ),
        ]

    async def upload(self, request: Request) -> Response:
        """Keep the file of a form. Its room is there before its first byte is taken."""
        writer = self._store.new(caller_of(request), "", _PURPOSE)
        try:
            stored = await self._uploaded(request, writer)
        except ClientDisconnect:
            writer.discard()
            return Response(status_code=_CLIENT_CLOSED)
        except BaseException:
            writer.discard()
            raise
        return json_response(_shown(stored))

    async def _uploaded(self, request: Request, writer: FileWriter) -> StoredFile:
        try:
            async with patient_timeout(self._upload_s):
                form = await self._form(request, writer)
        except TimeoutError:
            raise RequestError(
                f"the file did not arrive within {self._upload_s:g} s; send it faster", status=408
            ) from None
        try:
            return await self._kept(writer, form)
        finally:
            await form.close()

    async def files(self, request: Request) -> Response:
        """The files of this key, the newest first unless asked otherwise."""
        query = decode_values(request.query_params, FileQuery)
        found = self._store.files(caller_of(request))
        if query.order == "desc":
            found.reverse()
        if query.purpose is not None:
            found = [file for file in found if file.purpose == query.purpose]
        page, has_more = page_of([_shown(file) for file in found], query.after, query.limit)
        ends = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(
            FileList(data=page, has_more=has_more, first_id=ends[0], last_id=ends[1])
        )

    async def file(self, request: Request) -> Response:
        """One file."""
        return json_response(_shown(self._asked(request)))

    async def delete(self, request: Request) -> Response:
        """Forget a file."""
        file = self._asked(request)
        self._store.delete(file)
        return json_response(DeletedFile(id=file.id))

    async def content(self, request: Request) -> Response:
        """The bytes as they were written."""
        path = self._store.path(self._asked(request))
        return FileResponse(path, media_type="application/jsonl")

    def _asked(self, request: Request) -> StoredFile:
        return self._store.get(caller_of(request), request.path_params["file_id"])

    async def _form(self, request: Request, writer: FileWriter) -> FormData:
        """The parsed form, for which `writer` reserves room. Raises RequestError."""
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("multipart/form-data"):
            raise RequestError("send the file as multipart/form-data, in the field `file`")
        limit = self._store.file_bytes + _FORM_BYTES
        parser = MultiPartParser(
            request.headers,
            _bounded(request, limit, writer),
            max_files=1,
            max_fields=_FORM_FIELDS,
            max_part_size=_FIELD_BYTES,
        )
        try:
            return await parser.parse()
        except MultiPartException as error:
            raise RequestError(f"the form cannot be read: {error.message}") from None

    async def _kept(self, writer: FileWriter, form: FormData) -> StoredFile:
        upload = form.get("file")
        fields = decode_values(
            _nested({name: value for name, value in form.multi_items() if name != "file"}),
            FileForm,
        )
        if not isinstance(upload, UploadFile):
            raise RequestError("file is missing", param="file")
        if fields.purpose != _PURPOSE:
            raise RequestError(
                f"purpose is {fields.purpose[:100]!r}; this server keeps files for {_PURPOSE} only",
                param="purpose",
            )
        size = upload.size or 0
        if size > self._store.file_bytes:
            raise RequestError(
                f"file has {size} bytes, the limit is {self._store.file_bytes}",
                param="file",
                status=413,
            )
        life_s = None if fields.expires_after is None else fields.expires_after.seconds
        writer.describe(upload.filename or "", life_s)
        writer.resize(size)
        await done_in_thread(lambda: writer.fill(upload.file))
        return writer.commit()


def page_of(items: list[Any], after: str | None, limit: int) -> tuple[list[Any], bool]:
    """What follows the item with the id `after`, and whether there is more behind it."""
    begin = 0
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise RequestError(f"after is {after[:100]!r}, which is not in the list", param="after")
        begin = ids.index(after) + 1
    page = items[begin : begin + limit]
    return page, begin + len(page) < len(items)


async def _bounded(request: Request, limit: int, writer: FileWriter) -> AsyncGenerator[bytes, None]:
    """The chunks of the body, up to a limit; `writer` reserves room for them beforehand, as far as
    the client says how many there are. Raises RequestError 413.

    A client reads the answer only once it has sent everything, so that a little more than the
    limit is dropped first; of much more, the connection is simply closed.
    """
    announced = request.headers.get("content-length", "")
    expected = int(announced) if announced.isdecimal() else 0
    if expected > limit:
        raise _too_large(limit)
    reserved, size = max(0, expected - _FORM_BYTES), 0
    writer.reserve(reserved)
    async for chunk in request.stream():
        size += len(chunk)
        if size - _FORM_BYTES > reserved and size <= limit:
            writer.reserve(size - _FORM_BYTES - reserved)
            reserved = size - _FORM_BYTES
        if size <= limit:
            yield chunk
        elif size > limit * _DRAINED_LIMITS:
            break
    if size > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the upload is larger than {limit} bytes; split the file", status=413)


def _nested(fields: Mapping[str, object]) -> dict[str, object]:
    """`expires_after[seconds]` as an object, as forms spell it."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        inner = _NESTED.fullmatch(name)
        if inner is None:
            nested[name] = value if isinstance(value, str) else ""
        else:
            nested.setdefault(inner.group("outer"), {})[inner.group("inner")] = value
    return nested


def _shown(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        filename=file.name,
        purpose="batch" if file.purpose == _PURPOSE else "batch_output",
        expires_at=file.expires_at,
    )
