"""`/v1/files`: upload, list, read, delete, as OpenAI's client calls them; for batches only.

A body streams through a bounded form parser to disk; what it may keep in memory on the way counts
as bytes of a body. The API key determines the owner of a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from quickstep.errors import RequestError
from quickstep.server.batches.file_store import (
    BATCH,
    USER_DATA,
    FileStore,
    FileWriter,
    StoredFile,
)
from quickstep.server.batches.request_types import FileForm, FileQuery
from quickstep.server.batches.response_types import DeletedFile, FileList, FileObject
from quickstep.server.fields.decode import decode_values
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.errors import CLIENT_CLOSED, error_body, json_response
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.time_limits import patient_timeout
from quickstep.server.http.work_lanes import INLINE_BYTES
from quickstep.server.models.server_state import ServerState

_Result = TypeVar("_Result")
_PURPOSES = (BATCH, USER_DATA)  # of uploads
_MEDIA_TYPE = "application/jsonl"
_FORM_FIELDS = 8
_FIELD_BYTES = 4096
# boundaries, headers and the other fields of the form
_FORM_BYTES = 64 * 1024
_NESTED = re.compile(r"(?P<outer>\w+)\[(?P<inner>\w+)\]")
_DRAINED_LIMITS = 4
_RANGE = re.compile(r" *bytes *= *([0-9]{0,18}) *- *([0-9]{0,18}) *", re.ASCII | re.IGNORECASE)


class Files:
    """The endpoints of files."""

    def __init__(self, store: FileStore, upload_s: float, server: ServerState) -> None:
        self._store = store
        self._upload_s = upload_s
        self._reception = server.reception
        self._lanes = server.lanes

    def routes(self) -> list[ApiRoute]:
        """The routes of files."""
        path = "/v1/files"
        one = f"{path}/{{file_id}}"
        return [
            ApiRoute(
                "POST",
                path,
                self.upload,
                "Upload a file: requests of a batch, or data of the user's own.",
                response=FileObject,
            ),
            ApiRoute(
                "GET",
                path,
                self.files,
                "The files of this key.",
                response=FileList,
                query=FileQuery,
            ),
            ApiRoute("GET", one, self.file, "One file.", response=FileObject),
            ApiRoute("DELETE", one, self.delete, "Delete a file.", response=DeletedFile),
            ApiRoute(
                "GET",
                f"{one}/content",
                self.content,
                "The content of a file.",
                content_type="application/jsonl",
            ),
        ]

    async def upload(self, request: Request) -> Response:
        """Store the file of a form. Its bytes are reserved before the first one is read."""
        writer = self._store.new(caller_of(request), "", BATCH)
        room = self._reception.room(request)
        try:
            room.reserve(min(self._store.file_bytes, MultiPartParser.spool_max_size))
            stored = await self._receive(request, writer)
        except ClientDisconnect:
            writer.discard()
            return Response(status_code=CLIENT_CLOSED)
        except BaseException:
            writer.discard()
            raise
        finally:
            room.release()
        return json_response(_file_object(stored))

    async def _receive(self, request: Request, writer: FileWriter) -> StoredFile:
        try:
            async with patient_timeout(self._upload_s):
                form = await self._form(request, writer)
        except TimeoutError:
            raise RequestError(
                f"the file did not arrive within {self._upload_s:g} s; send it faster", status=408
            ) from None
        try:
            return await self._store_upload(writer, form, caller_of(request))
        finally:
            await form.close()

    async def files(self, request: Request) -> Response:
        """Return the files of this key, the newest first unless `order` is `asc`."""
        query = decode_values(request.query_params, FileQuery)
        found = self._store.files(caller_of(request))
        if query.order == "desc":
            found.reverse()
        if query.purpose is not None:
            found = [file for file in found if file.purpose == query.purpose]
        page, has_more = page_of([_file_object(file) for file in found], query.after, query.limit)
        ends = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(
            FileList(data=page, has_more=has_more, first_id=ends[0], last_id=ends[1])
        )

    async def file(self, request: Request) -> Response:
        """Return one file."""
        return json_response(_file_object(self._find(request)))

    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        file = self._find(request)
        self._store.delete(file)
        return json_response(DeletedFile(id=file.id))

    async def content(self, request: Request) -> Response:
        """Return the bytes as they were written."""
        file = self._find(request)
        refusal = _range_refusal(request, file.num_bytes)
        if refusal is not None:
            return refusal
        path = self._store.path(file)
        if "range" in request.headers or file.num_bytes > INLINE_BYTES:
            return FileResponse(path, media_type=_MEDIA_TYPE)
        read = partial(_complete_file, path)
        try:
            return await self._with_disk(caller_of(request), file.num_bytes, read)
        except FileNotFoundError:
            self._find(request)  # it was deleted meanwhile
            raise

    def _find(self, request: Request) -> StoredFile:
        return self._store.get(caller_of(request), request.path_params["file_id"])

    async def _form(self, request: Request, writer: FileWriter) -> FormData:
        """The parsed form; `writer` reserves its bytes. Raises RequestError."""
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("multipart/form-data"):
            raise RequestError("send the file as multipart/form-data, in the field `file`")
        limit = self._store.file_bytes + _FORM_BYTES
        parser = MultiPartParser(
            request.headers,
            _limited_body(request, limit, writer),
            max_files=1,
            max_fields=_FORM_FIELDS,
            max_part_size=_FIELD_BYTES,
        )
        try:
            return await parser.parse()
        except MultiPartException as error:
            raise RequestError(f"the form cannot be read: {error.message}") from None
        except FormParserError as error:  # older versions of Starlette pass it on
            raise RequestError(f"the form cannot be read: {error}") from None

    async def _store_upload(self, writer: FileWriter, form: FormData, caller: str) -> StoredFile:
        upload = form.get("file")
        fields = decode_values(
            _nested({name: value for name, value in form.multi_items() if name != "file"}),
            FileForm,
        )
        if not isinstance(upload, UploadFile):
            raise RequestError("file is missing", param="file")
        if fields.purpose not in _PURPOSES:
            raise RequestError(
                f"purpose is {fields.purpose[:100]!r}; this server keeps files for "
                f"{' and '.join(_PURPOSES)}",
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
        writer.describe(upload.filename or "", fields.purpose, life_s)
        writer.resize(size)

        def store() -> None:
            writer.fill(upload.file)
            writer.complete()

        await self._with_disk(caller, size, store)
        return writer.commit()

    async def _with_disk(self, key: str, size: int, work: Callable[[], _Result]) -> _Result:
        """Read or write `size` bytes in a lane, where keys take turns, which they do not in the
        threads that all share. Short files in a temporary directory are done at once: a thread
        comes back for the interpreter after each call of the system, and waits for it longer.
        """
        if size <= INLINE_BYTES and self._store.is_temporary:
            return work()
        return await self._lanes.of(key).finish(size, work)


def _complete_file(path: Path) -> Response:
    """What FileResponse sends of a file, read at once."""
    with path.open("rb") as file:
        described = FileResponse(path, media_type=_MEDIA_TYPE, stat_result=os.fstat(file.fileno()))
        return Response(file.read(), headers=dict(described.headers))


def _range_refusal(request: Request, num_bytes: int) -> Response | None:
    """The answer to a `Range` header that cannot be followed; None if it can, or if there is none.

    Raises:
        RequestError: It is not one range of bytes.
    """
    wanted = request.headers.get("range")
    if wanted is None:
        return None
    match = _RANGE.fullmatch(wanted)
    first, last = match.groups() if match is not None else ("", "")
    if (not first and not last) or (first and last and int(first) > int(last)):
        raise RequestError(
            f"range is {wanted[:100]!r}; send one range, as `bytes=0-99`, `bytes=100-` or "
            "`bytes=-100`",
            param="range",
        )
    if not (int(first) < num_bytes if first else int(last) and num_bytes):
        message = f"range is {wanted[:100]!r}, the file has {num_bytes} bytes"
        end = {"content-range": f"bytes */{num_bytes}"}
        return json_response(error_body(message, 416, "range"), 416, end)
    if not first and int(last) > num_bytes:  # older versions of Starlette refuse it
        others = [(name, value) for name, value in request.scope["headers"] if name != b"range"]
        request.scope["headers"] = [*others, (b"range", b"bytes=0-")]
    return None


def page_of(items: list[Any], after: str | None, limit: int) -> tuple[list[Any], bool]:
    """The page after the item with the id `after`, and whether more items follow it."""
    begin = 0
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise RequestError(f"after is {after[:100]!r}, which is not in the list", param="after")
        begin = ids.index(after) + 1
    page = items[begin : begin + limit]
    return page, begin + len(page) < len(items)


async def _limited_body(
    request: Request, limit: int, writer: FileWriter
) -> AsyncGenerator[bytes, None]:
    """The chunks of the body, up to a limit; `writer` reserves their bytes, those of the
    `content-length` in advance. Raises RequestError 413.

    A client reads the response only after it has sent everything, so a body that is a little
    longer than the limit is read and dropped; if it is much longer, the connection is closed.
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
    """Turn fields such as `expires_after[seconds]`, the spelling of forms, into objects."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        inner = _NESTED.fullmatch(name)
        outer = name if inner is None else inner.group("outer")
        known = nested.get(outer)
        if outer in nested and (inner is None or not isinstance(known, dict)):
            raise RequestError(f"the form has {outer[:100]!r} twice", param=outer[:100])
        if inner is None:
            nested[name] = value if isinstance(value, str) else ""
        else:
            nested.setdefault(outer, {})[inner.group("inner")] = value
    return nested


def _purpose_of(file: StoredFile) -> Literal["batch", "batch_output", "user_data"]:
    if file.purpose == USER_DATA:
        return "user_data"
    return "batch" if file.purpose == BATCH else "batch_output"


def _file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        filename=file.name,
        purpose=_purpose_of(file),
        expires_at=file.expires_at,
    )
