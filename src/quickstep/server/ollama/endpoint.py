"""`/api/chat`, `/api/generate` and the embedding routes: the responses as JSON or as lines of JSON.

A stream is lines of JSON (NDJSON); the last one has `done: true`, token counts and durations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

from msgspec import UNSET, UnsetType, structs
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quickstep.json_line import json_line
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import GeneratingApi, Observers
from quickstep.server.generate.endpoint import (
    GeneratingRoute,
    caller_of,
)
from quickstep.server.generate.generation import Generation, Head, ParsedRequest
from quickstep.server.generate.message import message_reader, partial_object
from quickstep.server.generate.prompt_runs import PromptRun
from quickstep.server.generate.prompts import TextPrompt
from quickstep.server.generate.timings import requested_timings
from quickstep.server.http.body import body_of, body_parsed, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED, error_facts, json_response, ollama_shape
from quickstep.server.http.event_stream import NDJSON
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.work_lanes import BYTES_PER_NUMBER
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.ollama.keep_alive import keep_alive_s, kept_model
from quickstep.server.ollama.request import (
    LATEST,
    chat_request,
    generate_request,
    known_model,
)
from quickstep.server.ollama.request_types import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateFields,
    OllamaGenerateRequest,
)
from quickstep.server.ollama.response_types import (
    OllamaChatResponse,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaFunction,
    OllamaGenerateResponse,
    OllamaLogprob,
    OllamaProgress,
    OllamaResponseMessage,
    OllamaToolCall,
)
from quickstep.server.openai.choices import token_logprob
from quickstep.server.openai.embeddings import Embeddings
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.openai.response_types import EmbeddingList
from quickstep.server.options import bounded
from quickstep.text.tool_calls.message_delta import CallDelta, MessageDelta
from quickstep.types import Delta, TokenLogprobs

OllamaResponse = OllamaChatResponse | OllamaGenerateResponse
# the response with these content, reasoning, calls and other fields
BuildResponse = Callable[[str, str, list[OllamaToolCall], OllamaProgress], OllamaResponse]
_CUT = ("length", "repetition")  # finish reasons of OpenAI's API that are length here


class NoPrompt(Exception):
    """The request has no prompt: it only loads the model, which is loaded already."""

    def __init__(self, response: OllamaResponse, ignored: tuple[str, ...]) -> None:
        super().__init__("the model is loaded")
        self.response = response
        self.ignored = ignored


class OllamaRoute:
    """The endpoint of `/api/chat` or `/api/generate`."""

    def __init__(self, api: GeneratingApi, models: ModelRegistry, observers: Observers) -> None:
        self._models = models
        self._generating = GeneratingRoute(api, models, observers, optional_tag=LATEST)

    async def answer(self, request: Request) -> Response:
        """Answer one request. Raises RequestError, EngineError."""
        self._models.server.limiter.check(caller_of(request))  # before the body is decoded
        kept = await kept_model(request, self._models)
        try:
            response = await self._generating.answer(request)
        except NoPrompt as loaded:
            report_ignored(request, loaded.ignored)
            response = json_response(loaded.response)
        if kept is not None:
            self._models.keep(kept.name, kept.idle_s, LATEST)
        return response


class OllamaChat:
    """The API of `/api/chat`."""

    def parse(self, body: bytes, model: ServedModel, caller: str) -> ParsedRequest:
        """Parse and validate a body. Raises RequestError, NoPrompt."""
        reader = FieldReader(model.server.field_rules)
        fields = reader.decode(body, OllamaChatRequest)
        if not fields.messages:
            raise _no_prompt(fields, reader, _chat_response)
        request = chat_request(fields, model, reader, len(body))
        writer = partial(_OllamaWriter, model, _chat_response)
        return replace(
            request, timings=False, ignored=reader.ignored, writer=writer, stream_type=NDJSON
        )


class OllamaGenerate:
    """The API of `/api/generate`."""

    def parse(self, body: bytes, model: ServedModel, caller: str) -> ParsedRequest:
        """Parse and validate a body. Raises RequestError, NoPrompt."""
        reader = FieldReader(model.server.field_rules)
        fields = reader.decode(body, OllamaGenerateRequest)
        if not fields.prompt and not fields.suffix:
            raise _no_prompt(fields, reader, _generate_response)
        request = generate_request(fields, model, reader)
        writer = partial(_OllamaWriter, model, _generate_response)
        return replace(
            request, timings=False, ignored=reader.ignored, writer=writer, stream_type=NDJSON
        )


def _no_prompt(fields: OllamaGenerateFields, reader: FieldReader, build: BuildResponse) -> NoPrompt:
    progress = OllamaProgress(
        model=fields.model,
        created_at=rfc3339(time.time()),
        done=True,
        done_reason="unload" if _unloads(fields) else "load",
    )
    return NoPrompt(build("", "", [], progress), reader.ignored)


def _unloads(fields: OllamaGenerateFields) -> bool:
    return fields.keep_alive is not None and keep_alive_s(fields.keep_alive) == 0


def _chat_response(
    content: str, reasoning: str, calls: list[OllamaToolCall], progress: OllamaProgress
) -> OllamaChatResponse:
    message = OllamaResponseMessage(
        content=content, thinking=reasoning or UNSET, tool_calls=calls or UNSET
    )
    return OllamaChatResponse(message=message, **structs.asdict(progress))


def _generate_response(
    content: str, reasoning: str, calls: list[OllamaToolCall], progress: OllamaProgress
) -> OllamaGenerateResponse:
    return OllamaGenerateResponse(
        response=content, thinking=reasoning or UNSET, **structs.asdict(progress)
    )


class _OllamaWriter:
    """Writes one response: lines of JSON in a stream, or one object."""

    def __init__(
        self,
        model: ServedModel,
        build: BuildResponse,
        generation: Generation,
        head: Head,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._build = build
        self._generation = generation
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._tokenizer = model.engine.tokenizer
        (self._choice,) = generation.choices
        self._reader = message_reader(generation, self._choice, self._tokenizer)
        self._calls: list[OllamaToolCall] = []
        self._call = CallDelta(0)
        self._arguments: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def opening(self) -> Iterator[bytes]:
        """A stream has no lines before the first delta."""
        return iter(())

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """A line, if the delta has any content; a call is complete in its line."""
        message, calls = self._read(delta)
        logprobs = self._logprobs(delta.logprobs)
        if message.content or message.reasoning or calls or logprobs:
            progress = OllamaProgress(
                model=self._generation.request.model,
                created_at=rfc3339(self._clock()),
                done=False,
                logprobs=logprobs or UNSET,
            )
            yield _line(self._build(message.content, message.reasoning, calls, progress))

    def ending(self) -> Iterator[bytes]:
        """The line with the durations and token counts."""
        yield _line(self._build("", "", [], self._final_progress()))

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as the last line."""
        yield _line(ollama_shape(error_facts(error))[1])

    def collect(self, delta: Delta) -> None:
        """Collect the text of a delta."""
        message, _ = self._read(delta)
        self._content.append(message.content)
        self._reasoning.append(message.reasoning)

    def complete(self) -> OllamaResponse:
        """The complete response with the durations and token counts."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        logprobs = self._logprobs(self._choice.logprobs) or UNSET
        return self._build(content, reasoning, self._calls, self._final_progress(logprobs))

    def _read(self, delta: Delta) -> tuple[MessageDelta, list[OllamaToolCall]]:
        """The message's new text, and the calls that are complete with it."""
        if self._first_s is None:
            self._first_s = self._clock()
        message = self._reader.read(delta)
        num_known = len(self._calls)
        for part in message.parts:
            if isinstance(part, CallDelta):
                self._add(part)
        return message, self._calls[num_known:]

    def _add(self, part: CallDelta) -> None:
        if part.name:
            self._call = part
            self._arguments = []
        self._arguments.append(part.arguments)
        if part.is_last:
            # arguments that the token limit cut are completed to an object
            arguments = partial_object("".join(self._arguments))
            function = OllamaFunction(len(self._calls), self._call.name, arguments)
            self._calls.append(OllamaToolCall(self._call.call_id, function))

    def _final_progress(self, logprobs: list[OllamaLogprob] | UnsetType = UNSET) -> OllamaProgress:
        """The fields of the end; durations are the engine's, or the clock's if it has none."""
        choice, timings = self._choice, self._choice.timings
        reason = choice.finish_reason
        if timings is None or timings.first_token_s is None:
            now_s = self._clock()
            first_s = now_s if self._first_s is None else self._first_s
            total_s, prompt_s, eval_s = (
                now_s - self._started_s,
                first_s - self._started_s,
                now_s - first_s,
            )
        else:
            total_s = timings.finished_s - timings.arrival_s
            prompt_s = timings.prefill_s
            eval_s = timings.finished_s - timings.first_token_s
        return OllamaProgress(
            model=self._generation.request.model,
            created_at=rfc3339(self._clock()),
            done=True,
            done_reason="length" if reason and reason.openai in _CUT else "stop",
            logprobs=logprobs,
            total_duration=_nanoseconds(total_s),
            load_duration=0,
            prompt_eval_count=len(self._generation.prompt_token_ids(choice)),
            prompt_eval_duration=_nanoseconds(prompt_s),
            eval_count=len(choice.token_ids),
            eval_duration=_nanoseconds(eval_s),
            quickstep=requested_timings(self._generation, self._model),
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> list[OllamaLogprob]:
        if self._generation.request.sampling.logprobs is None:
            return []
        num_top = self._generation.request.sampling.logprobs
        return [self._logprob(each, with_top=bool(num_top)) for each in logprobs]

    def _logprob(self, logprobs: TokenLogprobs, with_top: bool) -> OllamaLogprob:
        each = token_logprob(self._tokenizer, logprobs)
        top = each.top_logprobs if with_top else UNSET
        return OllamaLogprob(each.token, each.logprob, each.bytes, top)


def _line(content: object) -> bytes:
    return json_line(content) + b"\n"


def _nanoseconds(seconds: float) -> int:
    """The nanoseconds, at least 1: clients divide by them."""
    return max(1, round(seconds * 1e9))


def rfc3339(seconds: float) -> str:
    """Seconds since 1970 as a date and time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaEmbedding:
    """The endpoints `/api/embed` and `/api/embeddings`: the vectors of the OpenAI route."""

    def __init__(
        self,
        models: ModelRegistry,
        observers: Observers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._embeddings = Embeddings(models, observers)
        self._clock = clock

    async def embed(self, request: Request) -> Response:
        """Return a vector for each input. Raises RequestError, EngineError."""
        started_s = self._clock()
        body, reader = self._body(request)
        fields = await self._models.server.lanes.of(caller_of(request)).do(
            len(body), lambda: reader.decode(body, OllamaEmbedRequest)
        )
        inputs = [fields.input] if isinstance(fields.input, str) else fields.input
        bounded("input", len(inputs), self._models.server.limits.prompts, "entries")
        model = await self._models.ready(fields.model, caller_of(request), LATEST)
        embedding = EmbeddingRequest(
            input=list(inputs),
            model=known_model(fields.model, model),
            dimensions=fields.dimensions,
        )
        result = await self._vectors(
            request, model, embedding, inputs, fields.truncate is not False
        )
        if result is None:
            return Response(status_code=CLIENT_CLOSED)
        report_ignored(request, reader.ignored)
        answer = OllamaEmbedResponse(
            model=fields.model,
            embeddings=[_numbers(item.embedding) for item in result.data],
            total_duration=round((self._clock() - started_s) * 1e9),
            load_duration=0,
            prompt_eval_count=result.usage.prompt_tokens,
        )
        num_bytes = sum(map(len, answer.embeddings)) * BYTES_PER_NUMBER
        lanes = self._models.server.lanes.of(caller_of(request))
        return await lanes.do(num_bytes, lambda: json_response(answer))

    async def embeddings(self, request: Request) -> Response:
        """Return the vector of one prompt. Raises RequestError, EngineError."""
        body, reader = self._body(request)
        fields = await self._models.server.lanes.of(caller_of(request)).do(
            len(body), lambda: reader.decode(body, OllamaEmbeddingsRequest)
        )
        model = await self._models.ready(fields.model, caller_of(request), LATEST)
        embedding = EmbeddingRequest(input=fields.prompt, model=known_model(fields.model, model))
        result = await self._vectors(request, model, embedding, [fields.prompt], True, "prompt")
        if result is None:
            return Response(status_code=CLIENT_CLOSED)
        report_ignored(request, reader.ignored)
        return json_response(OllamaEmbeddingsResponse(_numbers(result.data[0].embedding)))

    def _body(self, request: Request) -> tuple[bytes, FieldReader]:
        self._models.server.limiter.check(caller_of(request))
        body = body_of(request)
        return body, FieldReader(self._models.server.field_rules)

    async def _vectors(
        self,
        request: Request,
        model: ServedModel,
        embedding: EmbeddingRequest,
        inputs: list[str],
        truncates: bool,
        input_field: str = "input",
    ) -> EmbeddingList | None:
        """The vectors, None if the client has disconnected."""
        body_parsed(request)
        kept = await kept_model(request, self._models)
        prompts = [TextPrompt(text) for text in inputs]
        work = self._embeddings.embed(
            PromptRun.of(request, model, embedding),
            embedding,
            prompts,
            truncates=truncates,
            input_field=input_field,
        )
        try:
            vectors = await unless_disconnected(request.receive, work)
        except ClientDisconnect:
            return None
        if kept is not None:
            self._models.keep(kept.name, kept.idle_s, LATEST)
        return vectors


def _numbers(embedding: list[float] | str) -> list[float]:
    assert not isinstance(embedding, str), "the request does not ask for base64"
    return embedding
