"""`/v1/batches`: create, get, list, cancel, as OpenAI's client calls them.

`LocalBatches` owns the files, the batches and the routes of both. It belongs to one app, which
stops it before the engine.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.batches.file_store import FileStore
from quickstep.server.batches.files import Files, page_of
from quickstep.server.batches.jobs import BatchJobs, BatchRecord
from quickstep.server.batches.lines import batch_endpoints
from quickstep.server.batches.request_types import BatchQuery, BatchRequest
from quickstep.server.batches.response_types import BatchList, BatchObject
from quickstep.server.fields.decode import decode_values
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import Observers
from quickstep.server.generate.conversation import checked_metadata
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.options import ServerOptions

_WINDOW = re.compile(r"(?P<count>[1-9]\d{0,3})(?P<unit>[mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400


class LocalBatches:
    """The files and batches of one server."""

    def __init__(self, models: ModelRegistry, observers: Observers, options: ServerOptions) -> None:
        self._models = models
        weight_of = options.api_keys.weight_of
        self._store = FileStore(options.files, weight_of=weight_of)
        endpoints = batch_endpoints(models, observers)
        self._jobs = BatchJobs(
            self._store, endpoints, options.batches, models.server.limits, weight_of
        )
        self._files = Files(self._store, options.connections.upload_s, models.server)

    def start(self) -> None:
        """Load the index of the files in `--files-dir`. Raises ConfigError."""
        self._store.open()

    async def stop(self) -> None:
        """Cancel the running batches and remove temporary files."""
        await self._jobs.stop()
        self._store.close()

    def routes(self) -> list[ApiRoute]:
        """The routes of files and of batches."""
        path = "/v1/batches"
        one = f"{path}/{{batch_id}}"
        return [
            *self._files.routes(),
            ApiRoute(
                "POST",
                path,
                self.create,
                "Process a file of requests, at a lower priority than live ones.",
                request=BatchRequest,
                response=BatchObject,
            ),
            ApiRoute(
                "GET",
                path,
                self.batches,
                "The batches of this key.",
                response=BatchList,
                query=BatchQuery,
            ),
            ApiRoute("GET", one, self.batch, "One batch.", response=BatchObject),
            ApiRoute("POST", f"{one}/cancel", self.cancel, "Cancel a batch.", response=BatchObject),
        ]

    async def create(self, request: Request) -> Response:
        """Create a batch."""
        body = body_of(request)
        reader = FieldReader(self._models.server.field_rules)
        fields = await self._models.server.lanes.of(caller_of(request)).do(
            len(body), lambda: reader.decode(body, BatchRequest)
        )
        report_ignored(request, reader.ignored)
        if fields.endpoint not in self._jobs.urls:
            raise RequestError(
                f"endpoint is {fields.endpoint[:100]!r}, it must be one of "
                f"{', '.join(self._jobs.urls)}",
                param="endpoint",
            )
        if fields.metadata is not None:
            checked_metadata(fields.metadata, self._models.server.limits)
        batch = BatchRecord(
            owner=caller_of(request),
            request=fields,
            model=self._models.default.name,
            created_at=self._store.now(),
            window_s=_window_s(fields.completion_window),
        )
        return json_response(self._jobs.create(batch).to_object())

    async def batches(self, request: Request) -> Response:
        """Return the batches of this key, the newest first."""
        query = decode_values(request.query_params, BatchQuery)
        found = self._jobs.batches(caller_of(request))
        page, has_more = page_of(found, query.after, query.limit)
        ends = (page[0].id, page[-1].id) if page else (None, None)
        objects = [batch.to_object() for batch in page]
        return json_response(
            BatchList(data=objects, has_more=has_more, first_id=ends[0], last_id=ends[1])
        )

    async def batch(self, request: Request) -> Response:
        """Return one batch."""
        return json_response(self._find(request).to_object())

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch."""
        return json_response(self._jobs.cancel(self._find(request)).to_object())

    def _find(self, request: Request) -> BatchRecord:
        return self._jobs.get(caller_of(request), request.path_params["batch_id"])


def _window_s(window: str) -> int:
    """The seconds of `24h`, OpenAI's only value, or of any number of minutes, hours or days."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match["count"]) * _UNIT_S[match["unit"]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise RequestError(
            f"completion_window is {window[:100]!r}, it must be 24h or another time such as 30m "
            "or 7d, up to 30d",
            param="completion_window",
        )
    return seconds
