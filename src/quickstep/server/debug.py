"""`/debug`, for operators: the newest records of the step log, and where a request's time went.

`GET /debug/steps` sends the records as lines of JSON: steps (`"kind": "step"`) and ended sequences
(`"sequence"`). With `follow=true` it continues with new ones; a reader that is too slow loses
records, and a line with `"kind": "lost"` has their number. `GET /debug/requests/{id}` explains a
request, live or ended, by `core.explanation`.

The id is the engine's, or that of the HTTP request (the header `x-request-id` of its response),
with which the engine's ids begin.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.core.explanation import ExplainedRequest, explain
from quickstep.engine.step_log import SequenceRecord
from quickstep.errors import RequestError
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.http.event_stream import NDJSON, EventStream
from quickstep.server.http.route import ApiRoute
from quickstep.server.openai.request_types import decode_values
from quickstep.types import StepRecord

__all__ = ["Debug", "LostRecords", "StepsQuery"]

_MAX_QUEUED = 4096  # records that wait for a reader
_LINES_PER_FRAME = 256
_ENCODE = msgspec.json.Encoder().encode

Record = StepRecord | SequenceRecord


class StepsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /debug/steps`: records of the last seconds; whether to wait for more."""

    last_s: float = 30.0
    follow: bool = False


class LostRecords(msgspec.Struct, frozen=True, tag_field="kind", tag="lost"):
    """The reader was too slow for so many records."""

    num_records: int


class _Follower:
    """The records that one reader has not got yet, at most `_MAX_QUEUED`."""

    def __init__(self) -> None:
        self._queue: deque[Record] = deque()
        self._num_lost = 0
        self._has_records = asyncio.Event()

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""
        self._add(record)

    def add_gap(self, seconds: float) -> None:
        """Gaps are not sent: the records of steps have the times."""

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""
        self._add(record)

    def _add(self, record: Record) -> None:
        if len(self._queue) == _MAX_QUEUED:
            self._queue.popleft()
            self._num_lost += 1
        self._queue.append(record)
        self._has_records.set()

    async def take(self) -> list[Record | LostRecords]:
        """Wait for records. Returns them, after the number of those that were lost before them."""
        await self._has_records.wait()
        self._has_records.clear()
        lost = [LostRecords(self._num_lost)] if self._num_lost else []
        records = [*lost, *self._queue]
        self._queue.clear()
        self._num_lost = 0
        return records


class Debug:
    """The endpoints of one engine."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def routes(self) -> list[ApiRoute]:
        """The routes, all of which need an admin key."""
        return [
            ApiRoute(
                "GET",
                "/debug/steps",
                self.steps,
                "The newest steps and ended sequences, as lines of JSON.",
                streams=True,
                events=(StepRecord, SequenceRecord, LostRecords),
                stream_type=NDJSON,
                query=StepsQuery,
                needs_admin=True,
            ),
            ApiRoute(
                "GET",
                "/debug/requests/{request_id:path}",
                self.request,
                "Where the time of a request went.",
                response=ExplainedRequest,
                needs_admin=True,
            ),
        ]

    async def steps(self, request: Request) -> Response:
        """Send the records. Raises RequestError for an invalid query."""
        query = decode_values(request.query_params, StepsQuery)
        if not query.last_s >= 0.0:
            raise RequestError(f"last_s is {query.last_s:g}, it must be at least 0", param="last_s")
        log, follower = self._engine.step_log, _Follower()
        records = self._since(self._engine.stats().now_s - query.last_s)
        if query.follow:
            log.follow(follower)

        async def close() -> None:
            if query.follow:
                log.unfollow(follower)

        return EventStream(_frames(records, follower if query.follow else None), close, NDJSON)

    def _since(self, since_s: float) -> list[Record]:
        """The records that end after `since_s`, in the order of their ends."""
        log = self._engine.step_log
        ended: list[tuple[float, Record]] = [(one.committed_at_s, one) for one in log.steps]
        ended += [(one.timings.finished_s, one) for one in log.sequences]
        recent = [item for item in ended if item[0] >= since_s]
        return [record for _, record in sorted(recent, key=lambda item: item[0])]

    async def request(self, request: Request) -> Response:
        """Explain a request. Raises RequestError 404 if it is unknown."""
        wanted: str = request.path_params["request_id"]
        log = self._engine.step_log
        steps = log.steps
        found = [
            explain(one.request_id, one.timings, steps, index=one.index)
            for one in log.sequences
            if _is_of(one.request_id, wanted)
        ]
        for live_id in self._engine.request_ids:
            if _is_of(live_id, wanted):
                timings = await self._engine.live_timings(live_id)
                found += [
                    explain(live_id, one, log.steps, index=index, is_finished=False)
                    for index, one in sorted(timings.items())
                ]
        if not found:
            raise RouteNotFound(
                f"request {wanted[:64]!r} is not in the log, which has the last "
                f"{len(log.sequences)} sequences; its id is the header x-request-id",
                param="request_id",
                code="request_not_found",
            )
        return json_response(ExplainedRequest(wanted, tuple(found)))


def _is_of(engine_id: str, wanted: str) -> bool:
    """Whether `wanted` is the engine's id of a request, or that of its HTTP request."""
    return engine_id == wanted or engine_id.rpartition("-")[0] == wanted


async def _frames(records: list[Record], follower: _Follower | None) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(records), _LINES_PER_FRAME):
        yield _lines(records[start : start + _LINES_PER_FRAME])
    while follower is not None:
        for_reader = await follower.take()
        for start in range(0, len(for_reader), _LINES_PER_FRAME):
            yield _lines(for_reader[start : start + _LINES_PER_FRAME])


def _lines(records: list[Record] | list[Record | LostRecords]) -> bytes:
    return b"".join(_ENCODE(record) + b"\n" for record in records)
