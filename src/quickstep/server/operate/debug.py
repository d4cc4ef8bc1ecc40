"""`/debug`, for operators: the newest records of the step log, and where a request's time went.

`GET /debug/steps` sends the records as lines of JSON: steps (`"kind": "step"`), ended sequences
(`"sequence"`) and, last, those that have not ended (`"live"`). With `follow=true` it continues with
new records instead of the live sequences; a reader that is too slow loses
records, and a line with `"kind": "lost"` has their number. `GET /debug/requests/{id}` explains a
request, live or ended, by `core.explanation`: of many sequences those that took longest.

The id is the engine's, or that of the HTTP request (the header `x-request-id` of its response, or
the id of a chat completion or completion), with which the engine's ids begin.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.core.explanation import ExplainedRequest, FallbackAttempt, explain
from quickstep.engine.records.step_log import LiveSequence, SequenceRecord
from quickstep.errors import RequestError
from quickstep.server.fields.decode import decode_values
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.http.event_stream import NDJSON, EventStream
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.types import SequenceTimings, StepRecord

_MAX_LIVE = 1024  # live requests that are reported
_MAX_EXPLAINED = 32  # sequences of one request; clients choose ids, which may repeat
_MAX_QUEUED = 4096  # records that wait for a reader
_LINES_PER_FRAME = 256
_GATHER_S = 0.05  # between two frames of a reader: one a step costs the engine 6 % of 4,000 steps/s
_BYTES_PER_STEP = 1024  # reading a step's record takes as long as parsing so many bytes
_PREFIXES = ("chatcmpl-", "cmpl-")  # of the ids of responses
_ENCODE = msgspec.json.Encoder().encode

Record = StepRecord | SequenceRecord


class StepsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /debug/steps`: records of the last seconds; whether to wait for more."""

    last_s: float = 30.0
    follow: bool = False


class LostRecords(msgspec.Struct, frozen=True, tag_field="kind", tag="lost"):
    """The reader was too slow for so many records."""

    num_records: int


Line = StepRecord | SequenceRecord | LiveSequence | LostRecords


class _RecordQueue:
    """The records that one reader has not got yet, at most `_MAX_QUEUED`."""

    def __init__(self) -> None:
        self._queue: deque[Record] = deque()
        self._num_lost = 0
        self._has_records = asyncio.Event()

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""
        self._add(record)

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""
        self._add(record)

    def _add(self, record: Record) -> None:
        if len(self._queue) == _MAX_QUEUED:
            self._queue.popleft()
            self._num_lost += 1
        self._queue.append(record)
        self._has_records.set()

    async def take(self) -> list[Line]:
        """Wait for records, and for more. Returns them, after how many were lost before them."""
        await self._has_records.wait()
        await asyncio.sleep(_GATHER_S)
        self._has_records.clear()
        lost = [LostRecords(self._num_lost)] if self._num_lost else []
        records: list[Line] = [*lost, *self._queue]
        self._queue.clear()
        self._num_lost = 0
        return records


class Debug:
    """The endpoints; each searches the step logs of all models."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._logs = [model.engine.step_log for model in models]
        self._followers: set[_RecordQueue] = set()
        models.follow(self._opened)

    async def _opened(self, model: ServedModel) -> None:
        """A model is loaded for the first time: readers follow it as well."""
        self._logs.append(model.engine.step_log)
        for follower in self._followers:
            model.engine.step_log.follow(follower)

    def routes(self) -> list[ApiRoute]:
        """The routes, all of which need an admin key."""
        return [
            ApiRoute(
                "GET",
                "/debug/steps",
                self.steps,
                "The newest steps, and sequences, as lines of JSON.",
                streams=True,
                events=(StepRecord, SequenceRecord, LiveSequence, LostRecords),
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
        follower = _RecordQueue()
        lines = self._since(query.last_s)
        if query.follow:
            self._followers.add(follower)
            for log in self._logs:
                log.follow(follower)
        else:
            for model in self._models:
                lines += await _live(model)

        async def close() -> None:
            if follower in self._followers:  # once: a response may be closed twice
                self._followers.remove(follower)
                for log in self._logs:
                    log.unfollow(follower)

        return EventStream(_frames(lines, follower if query.follow else None), close, NDJSON)

    def _since(self, last_s: float) -> list[Line]:
        """The records that ended in the last seconds, in the order of their ends."""
        recent: list[tuple[float, Record]] = []
        for model in self._models:
            log, since_s = model.engine.step_log, model.engine.stats().now_s - last_s
            ended: list[tuple[float, Record]] = [(step.committed_at_s, step) for step in log.steps]
            ended += [(sequence.timings.finished_s, sequence) for sequence in log.sequences]
            recent += [item for item in ended if item[0] >= since_s]
        return [record for _, record in sorted(recent, key=lambda item: item[0])]

    def _fallbacks(self, wanted: str) -> tuple[FallbackAttempt, ...]:
        """The steps of a request's fallback chain, by any of its ids."""
        http_ids = [wanted, wanted.rpartition("-")[0]]
        http_ids += [wanted.removeprefix(prefix) for prefix in _PREFIXES]
        noted = map(self._models.server.fallbacks.attempts_of, http_ids)
        return next((attempts for attempts in noted if attempts), ())

    async def request(self, request: Request) -> Response:
        """Explain a request. Raises RequestError 404 if it is unknown."""
        wanted: str = request.path_params["request_id"]
        num_logged = 0
        found: list[ExplainedRequest] = []
        fallbacks = self._fallbacks(wanted)
        lanes = self._models.server.lanes.of(caller_of(request))
        for model in self._models:
            answer = await _explanation(wanted, model, lanes)
            if answer.sequences:
                found.append(answer)
                if not fallbacks:  # else it may have been at several models
                    break
            num_logged += len(model.engine.step_log.sequences)
        if found or fallbacks:
            sequences = tuple(sequence for answer in found for sequence in answer.sequences)
            num_more = sum(answer.num_more for answer in found)
            return json_response(ExplainedRequest(wanted, sequences, num_more, fallbacks))
        raise RouteNotFound(
            f"request {wanted[:64]!r} is not in the log, which has the last {num_logged} "
            "sequences; its id is in the header x-request-id",
            param="request_id",
            code="request_not_found",
        )


async def _live(model: ServedModel) -> list[LiveSequence]:
    """The sequences that have not ended, of the oldest requests."""
    live_ids = model.engine.request_ids[:_MAX_LIVE]
    reports = await asyncio.gather(*map(model.engine.live_timings, live_ids))
    return [
        LiveSequence(live_id, index, timings)
        for live_id, of_request in zip(live_ids, reports, strict=True)
        for index, timings in sorted(of_request.items())
    ]


async def _explanation(wanted: str, model: ServedModel, lanes: WorkLanes) -> ExplainedRequest:
    """Where the time of a request to one model went; without sequences if that has no such one."""
    engine, log = model.engine, model.engine.step_log
    steps, sequences = log.steps, log.sequences
    live_ids = list(filter(_matcher(wanted), engine.request_ids))
    reports = await asyncio.gather(*map(engine.live_timings, live_ids[:_MAX_EXPLAINED]))
    found = [
        _Timed(live_id, index, timings, is_finished=False)
        for live_id, of_request in zip(live_ids, reports, strict=False)
        for index, timings in of_request.items()
    ]
    # the log is long, and one request may have many sequences
    size = len(steps) * _BYTES_PER_STEP
    return await lanes.run(size, lambda: _explained(wanted, found, sequences, steps))


class _Timed(msgspec.Struct, frozen=True):
    """A sequence and where its time went so far."""

    request_id: str
    index: int
    timings: SequenceTimings
    is_finished: bool = True


def _explained(
    wanted: str,
    live: Sequence[_Timed],
    ended: Sequence[SequenceRecord],
    steps: Sequence[StepRecord],
) -> ExplainedRequest:
    """The sequences that took longest, in the order of their ids."""
    is_meant = _matcher(wanted)
    found = [
        _Timed(record.request_id, record.index, record.timings)
        for record in ended
        if is_meant(record.request_id)
    ]
    found += live
    found.sort(key=lambda timed: timed.timings.arrival_s - timed.timings.finished_s)
    most = sorted(found[:_MAX_EXPLAINED], key=lambda timed: (timed.request_id, timed.index))
    replicas = {timed.timings.replica for timed in most}
    steps_of = {
        replica: [step for step in steps if step.replica == replica] for replica in replicas
    }
    explained = tuple(
        explain(
            timed.request_id,
            timed.timings,
            steps_of[timed.timings.replica],
            index=timed.index,
            is_finished=timed.is_finished,
        )
        for timed in most
    )
    return ExplainedRequest(wanted, explained, len(found) - len(explained))


def _matcher(wanted: str) -> Callable[[str], bool]:
    """Whether an engine's id of a request is the one that a client wants, who knows it or the id of
    its HTTP request.
    """
    http_ids = {wanted, *(wanted.removeprefix(prefix) for prefix in _PREFIXES)}
    return lambda engine_id: engine_id == wanted or engine_id.rpartition("-")[0] in http_ids


async def _frames(lines: list[Line], follower: _RecordQueue | None) -> AsyncGenerator[bytes, None]:
    while True:
        for start in range(0, len(lines), _LINES_PER_FRAME):
            some = lines[start : start + _LINES_PER_FRAME]
            yield b"".join(_ENCODE(line) + b"\n" for line in some)
        if follower is None:
            return
        lines = await follower.take()
