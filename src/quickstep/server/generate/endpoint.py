"""Runs any API: parse, submit, then a JSON response or a stream.

A disconnect of the client cancels both forms, unless the client has said that it will come back
(`kept_streams`). In every case the generation is closed at the end,
which aborts what still runs and frees its blocks.

    GeneratingApi.parse -> open_generation -> EventStream | JSON
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import msgspec
from msgspec import structs
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.fallback.chain import Chain, run_chain
from quickstep.server.fallback.forward import Bill, forward
from quickstep.server.fields.field_reader import loosened_keyword
from quickstep.server.generate.api import (
    NO_HEADERS,
    GeneratingApi,
    LineResult,
    Observers,
    RequestObserver,
)
from quickstep.server.generate.generation import (
    BackgroundWriter,
    Generation,
    Head,
    ParsedRequest,
    Writer,
    open_generation,
)
from quickstep.server.generate.timings import TIMINGS_HEADER
from quickstep.server.http.body import body_of, body_parsed, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED, json_response
from quickstep.server.http.event_stream import SERVER_SENT_EVENTS, EventStream, close_response
from quickstep.server.http.middleware import key_name, report_ignored
from quickstep.server.http.work_lanes import INLINE_BYTES
from quickstep.server.kept_streams.kept_request import (
    CONVERSATION_HEADER,
    RESPONSE_NAME,
    without_client,
)
from quickstep.server.kept_streams.kept_stream import KeptResponse, StreamName
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import ConnectionOptions
from quickstep.server.usage.api_keys import cache_salt_of, priority_of_key, tenant_of_key
from quickstep.server.usage.limits import Reservation
from quickstep.server.usage.price_book import Price
from quickstep.server.usage.recorder import BATCHES, UpstreamAnswer
from quickstep.types import Delta, RequestClass
from quickstep.types import Request as EngineRequest

_ENCODED_BYTES = 16  # about, of a token or an alternative in a response
_USUAL_OUTPUTS = 256  # of a request that declares no limit
BYTES_PER_TOKEN = 4


class _Answer(msgspec.Struct, frozen=True):
    """A submitted request and how its answer is written."""

    generation: Generation
    writer: Writer
    observer: RequestObserver
    reservation: Reservation

    async def close(self) -> None:
        """Abort what still runs, and count the request. Idempotent."""
        try:
            await self.generation.aclose()
        finally:
            self.observer.close(self.generation)
            self.reservation.release()


class _Urgency(msgspec.Struct, frozen=True):
    """The fields of `SamplingFields` that decide how soon a request is served."""

    priority: int | None = None
    request_class: RequestClass | None = None
    ttft_deadline_ms: float | None = None


_URGENCY = msgspec.json.Decoder(_Urgency)


class GeneratingRoute:
    """The endpoint of one API.

    `has_sampling_fields`: Bodies have the names of `SamplingFields`, not names of their own.
    `optional_tag`: Names of models may end with it.
    """

    def __init__(
        self,
        api: GeneratingApi,
        models: ModelRegistry,
        observers: Observers,
        has_sampling_fields: bool = False,
        optional_tag: str = "",
    ) -> None:
        self._api = api
        self._has_sampling_fields = has_sampling_fields
        self._optional_tag = optional_tag
        self._models = models
        self._observers = observers

    async def answer(self, request: Request) -> Response:
        """Answer one request. Raises RequestError, EngineError."""
        body, caller, endpoint = body_of(request), caller_of(request), endpoint_of(request)
        received_s: float = request.scope["state"]["received_s"]
        server = self._models.server
        server.limiter.check(caller)
        if not server.fallbacks.routes:
            return await self._attempt(request, body, caller, endpoint)
        name = self._models.default.name
        http_id: str = request.scope["state"]["request_id"]
        chain = server.fallbacks.chain_of(body, name, received_s, endpoint, http_id)
        if chain is None:
            return await self._attempt(request, body, caller, endpoint)
        return await run_chain(
            chain, request, lambda: self._attempt(request, body, caller, endpoint, chain)
        )

    async def _attempt(
        self,
        request: Request,
        body: bytes,
        caller: str,
        endpoint: str,
        chain: Chain | None = None,
    ) -> Response:
        """The response as the request came, or by the present step of its fallback chain."""
        received_s: float = request.scope["state"]["received_s"]
        if chain is None:
            model = await self._models.of_body(body, caller, self._optional_tag)
        elif chain.upstream is not None:
            return await self._forward(request, body, caller, endpoint, chain)
        else:
            wait_s = chain.time_left.least_s
            model = await self._models.ready(chain.model, caller, self._optional_tag, wait_s)
        if self._has_sampling_fields and model.engine.has_queue:
            _check_admission(model, body, caller, received_s)
        parsed = await model.server.lanes.of(caller).do(
            len(body), lambda: self._parse(body, model, caller, endpoint)
        )
        body_parsed(request)
        report_ignored(request, parsed.ignored)
        http_id: str = request.scope["state"]["request_id"]
        named = structs.replace(parsed.request, request_id=http_id, received_s=received_s)
        if chain is not None:
            named = chain.applied(named)
            if chain.leaves_model:
                parsed = replace(parsed, model=model.name)
        parsed = replace(parsed, request=named)
        if _wants_timings(request):
            if parsed.timings is None or parsed.beams is not None:
                report_ignored(request, [TIMINGS_HEADER])
            else:
                parsed = replace(parsed, timings=True)
        # before the prompt is tokenised, and before the event loop runs anything else
        num_sequences = parsed.sampling.n * len(parsed.prompts)
        model.engine.check_admission(parsed.request, num_sequences)
        if parsed.in_background:
            return await self._in_background(request, parsed, model, chain)
        try:
            answer = await unless_disconnected(
                request.receive,
                self._open(parsed, model, caller, len(body), request.headers, chain),
                close=_Answer.close,
            )
            report_ignored(request, answer.generation.loosened)
            if parsed.stream:
                deltas = await self._deltas(request, answer, chain is not None)
                frames = _frames(answer, deltas, request.scope["state"])
                return EventStream(frames, answer.close, parsed.stream_type)
            return await self._complete(request, answer)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)

    async def _in_background(
        self, request: Request, parsed: ParsedRequest, model: ServedModel, chain: Chain | None
    ) -> Response:
        """The stream of a response that continues without its client, or its present state."""
        streams, caller = model.server.kept_streams, caller_of(request)
        if CONVERSATION_HEADER in request.headers:
            raise RequestError(
                "a response in the background is found by its own id; leave out X-Conversation-Id",
                param=CONVERSATION_HEADER,
            )
        streams.check_room(caller)
        num_bytes = len(body_of(request))
        answer = await self._open(parsed, model, caller, num_bytes, request.headers, chain)
        report_ignored(request, answer.generation.loosened)
        writer = answer.writer
        assert isinstance(writer, BackgroundWriter), "the API allows it"
        frames = _frames(answer, answer.generation.deltas(), request.scope["state"])
        response = EventStream(frames, answer.close, parsed.stream_type)
        try:
            stream = streams.start(
                (StreamName(caller, RESPONSE_NAME, writer.response_id),),
                without_client(request.scope, response),
                request.scope["state"],
                source=writer,
                cancelled=writer.cancellation,
            )
        except RequestError:  # another request has taken the last place
            await answer.close()
            raise
        stream.begin(response.status_code, response.raw_headers)
        return KeptResponse(stream) if parsed.stream else json_response(writer.snapshot())

    async def _forward(
        self, request: Request, body: bytes, caller: str, endpoint: str, chain: Chain
    ) -> Response:
        """The response of an upstream, to a request that this server would accept, too."""
        model = self._models.default
        parsed = await model.server.lanes.of(caller).do(
            len(body), lambda: self._parse(body, model, caller, endpoint)
        )
        body_parsed(request)
        assert chain.upstream is not None, "the step is an upstream's"
        name, server = chain.upstream.upstream.model, model.server
        price = None if server.price_book is None else server.price_book.price(name)
        num_tokens = _expected_tokens(parsed, len(body))
        reservation = server.limiter.admit(
            caller,
            num_tokens,
            usd=0.0 if price is None else price.most_usd(num_tokens),
            is_counted=chain.is_counted,
        )
        chain.is_counted = True
        http_id: str = request.scope["state"]["request_id"]
        answer = UpstreamAnswer(http_id, caller, name, endpoint)
        report = server.fallbacks.report_answer
        bill = Bill(server.limiter, reservation, price or Price(), answer, report)
        try:
            return await unless_disconnected(
                request.receive,
                forward(body, chain, bill, request.scope["state"]),
                close=close_response,
            )
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)

    async def _deltas(
        self, request: Request, answer: _Answer, may_fall_back: bool
    ) -> AsyncIterator[Delta]:
        """The deltas of a stream. With a deadline for the first token, or with a fallback chain,
        they begin with it, so that a request that cannot meet it gets an error status and not an
        error within a stream; but the stream begins when its first comment is due, which keeps the
        connection open.
        """
        deltas = answer.generation.deltas()
        parsed = answer.generation.request
        if parsed.request.ttft_deadline_s is None and not may_fall_back:
            return deltas
        connections: ConnectionOptions = request.scope["state"]["connections"]
        has_comments = parsed.stream_type == SERVER_SENT_EVENTS and connections.comment_every_s > 0
        wait_s = connections.comment_every_s if has_comments else None
        try:
            return await unless_disconnected(
                request.receive, _from_first(answer.generation, deltas, wait_s)
            )
        except BaseException:
            await answer.close()
            raise

    async def answer_line(
        self, body: bytes, caller: str = "", added_priority: int = 0
    ) -> LineResult:
        """The JSON response to one line of a batch.

        `added_priority` puts the line after requests of waiting clients.
        Raises RequestError, EngineError.
        """
        model = await self._models.of_body(body, caller, self._optional_tag)
        parsed = await model.server.lanes.of(caller).do(
            len(body), lambda: self._parse(body, model, caller, BATCHES, added_priority)
        )
        answer = await self._open(parsed, model, caller, len(body))
        try:
            await _collect(answer)
        finally:
            await answer.close()
        lanes = model.server.lanes.of(caller)
        response = await lanes.do(_size_of(answer), answer.writer.complete)
        return LineResult(response, (*parsed.ignored, *answer.generation.loosened))

    def _parse(
        self,
        body: bytes,
        model: ServedModel,
        caller: str,
        endpoint: str,
        added_priority: int = 0,
    ) -> ParsedRequest:
        """The request with what follows from the caller's key: its account, its part of the cache,
        its priority, its deadline. Raises RequestError.
        """
        in_batch = endpoint == BATCHES
        parsed = self._api.parse(body, model, caller)
        request = parsed.request
        if in_batch and parsed.stream:
            raise RequestError("stream is not supported in a batch", param="stream")
        if in_batch and parsed.in_background:
            raise RequestError("background is not supported in a batch", param="background")
        timeout_s = request.timeout_s
        # the operator's default is for clients that wait
        if timeout_s is not None or not (in_batch or parsed.in_background):
            timeout_s = model.server.deadlines.of(timeout_s)
        owned = structs.replace(
            request,
            priority=priority_of_key(
                caller, request.priority, model.server.api_keys, added_priority
            ),
            tenant=tenant_of_key(caller, request.tenant),
            tenant_weight=model.server.api_keys.weight_of(caller),
            cache_salt=cache_salt_of(caller, request.cache_salt, model.server.shares_prefix_cache),
            timeout_s=timeout_s,
            endpoint=endpoint,
            adapter=model.adapter(parsed.model) if parsed.adapter is None else parsed.adapter,
        )
        return replace(parsed, request=owned, timeout_reason=model.server.deadlines.finish_reason)

    async def _open(
        self,
        parsed: ParsedRequest,
        model: ServedModel,
        caller: str,
        body_bytes: int,
        headers: Mapping[str, str] = NO_HEADERS,
        chain: Chain | None = None,
    ) -> _Answer:
        """Submit a request that the limits of the caller's key admit."""
        in_batch = parsed.request.endpoint == BATCHES
        num_tokens = _expected_tokens(parsed, body_bytes)
        price = model.price(parsed.request.adapter)
        usd = 0.0 if price is None else price.most_usd(num_tokens)
        is_counted = chain is not None and chain.is_counted
        reservation = model.server.limiter.admit(caller, num_tokens, in_batch, usd, is_counted)
        if chain is not None:
            chain.is_counted = True
        try:
            return await self._submit(parsed, model, caller, reservation, headers)
        except BaseException:
            reservation.release()
            raise

    async def _submit(
        self,
        parsed: ParsedRequest,
        model: ServedModel,
        caller: str,
        reservation: Reservation,
        headers: Mapping[str, str],
    ) -> _Answer:
        assert parsed.writer is not None, "every API names its writer"
        observer = self._observers.of_request(model, parsed, headers)
        generation = await open_generation(
            model.engine, parsed, model.server.limits, model.server.lanes.of(caller)
        )
        observer.opened(generation)
        if generation.loosened and model.server.field_rules.refuse_hints:
            await generation.aclose()
            raise loosened_keyword(generation.loosened[0])
        head = Head(created=int(time.time()), fingerprint=model.engine.fingerprint)
        return _Answer(generation, parsed.writer(generation, head), observer, reservation)

    async def _complete(self, request: Request, answer: _Answer) -> Response:
        try:
            await unless_disconnected(request.receive, _collect(answer))
        finally:
            await answer.close()
        lanes = self._models.server.lanes.of(caller_of(request))
        return await lanes.do(_size_of(answer), lambda: json_response(answer.writer.complete()))


def _check_admission(model: ServedModel, body: bytes, caller: str, received_s: float) -> None:
    """Raise RequestError for a body that could not be accepted now, whatever else is in it.

    While requests wait, most others may end here, at half of the cost of parsing all of their
    fields. A body that is not valid passes: the parser says what is wrong with it.
    """
    if len(body) > INLINE_BYTES:
        return
    try:
        urgency = _URGENCY.decode(body)
    except msgspec.DecodeError:
        return
    deadline_ms = urgency.ttft_deadline_ms
    if deadline_ms is not None and not 0 < deadline_ms < math.inf:
        return
    urgent = EngineRequest(
        priority=priority_of_key(caller, urgency.priority or 0, model.server.api_keys),
        request_class=urgency.request_class or RequestClass.INTERACTIVE,
        ttft_deadline_s=None if deadline_ms is None else deadline_ms / 1e3,
        received_s=received_s,
        tenant=tenant_of_key(caller, ""),
        tenant_weight=model.server.api_keys.weight_of(caller),
    )
    model.engine.check_admission(urgent, num_sequences=1)


def _wants_timings(request: Request) -> bool:
    """Whether the header asks for timings in the response. Raises RequestError."""
    value = request.headers.get(TIMINGS_HEADER, "false").strip().lower()
    if value not in ("true", "false"):
        raise RequestError(
            f"the header {TIMINGS_HEADER} is {value[:64]!r}, it must be true or false",
            param=TIMINGS_HEADER,
        )
    return value == "true"


def _expected_tokens(parsed: ParsedRequest, body_bytes: int) -> int:
    """How many tokens a request may need: like OpenAI, by the length of its text and its
    `max_tokens`, or a usual length if that is not given: a limit holds then, too.
    """
    max_tokens = parsed.sampling.max_tokens
    num_each = _USUAL_OUTPUTS if max_tokens is None else max_tokens
    num_outputs = parsed.sampling.n * len(parsed.prompts) * num_each
    return body_bytes // BYTES_PER_TOKEN + num_outputs


def _size_of(answer: _Answer) -> int:
    """About how many bytes a complete response has."""
    return answer.generation.size * _ENCODED_BYTES


async def _collect(answer: _Answer) -> None:
    async for delta in answer.generation.deltas():
        answer.generation.add(delta)
        answer.observer.observe(delta)
        answer.writer.collect(delta)


async def _from_first(
    generation: Generation, deltas: AsyncIterator[Delta], wait_s: float | None
) -> AsyncGenerator[Delta, None]:
    """Wait for the first delta, for at most `wait_s`, and raise its error; returns all of them."""
    first = generation.first = asyncio.ensure_future(anext(deltas, None))
    await asyncio.wait({first}, timeout=wait_s)
    delta = first.result() if first.done() else None
    if delta is not None and delta.finish_reason is not None:
        generation.end(delta)

    async def from_first() -> AsyncGenerator[Delta, None]:
        delta = await first
        if delta is not None:
            yield delta
        async for delta in deltas:
            yield delta

    return from_first()


async def _frames(
    answer: _Answer, deltas: AsyncIterator[Delta], state: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream; an error becomes its last frames, and is noted in the request's
    state.
    """
    writer = answer.writer
    try:
        for frame in writer.opening():
            yield frame
        async for delta in deltas:
            answer.generation.add(delta)
            answer.observer.observe(delta)
            for frame in writer.delta(delta):
                yield frame
        for frame in writer.ending():
            yield frame
    except asyncio.CancelledError:
        raise
    except Exception as error:  # the stream's top: its status is sent already
        state["has_failed"] = True
        for frame in writer.failure(error):
            yield frame


def caller_of(request: Request) -> str:
    """The name of the request's API key, "" without keys: the owner of what the server stores."""
    return key_name(request)


def endpoint_of(request: Request) -> str:
    """The path of the request's route, below the root path that the operator set."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))
