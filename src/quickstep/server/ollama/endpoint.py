"""`/api/chat`, `/api/generate` and the embedding routes: the responses as JSON or as lines of JSON.

A stream is lines of JSON (NDJSON); the last one has `done: true`, token counts and durations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quickstep.engine.tool_calls.message_delta import CallDelta, MessageDelta
from quickstep.server.generate.adapter import Adapter, Served
from quickstep.server.generate.endpoint import CLIENT_CLOSED, GeneratingRoute, caller_of
from quickstep.server.generate.generation import ChoiceDelta, Generation, Head, ParsedRequest
from quickstep.server.generate.message import message_reader, partial_object
from quickstep.server.generate.prompts import TextPrompt
from quickstep.server.generate.sampling import bounded
from quickstep.server.http.body import ClientDisconnect, body_of, unless_disconnected
from quickstep.server.http.errors import error_facts, json_response, ollama_shape
from quickstep.server.http.event_stream import NDJSON
from quickstep.server.http.middleware import report_ignored
from quickstep.server.metrics import Metrics
from quickstep.server.ollama.request import chat_request, generate_request, known_model
from quickstep.server.ollama.request_types import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateFields,
    OllamaGenerateRequest,
)
from quickstep.server.ollama.response_types import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaFunction,
    OllamaGenerateAnswer,
    OllamaLogprob,
    OllamaMadeCall,
    OllamaSpokenMessage,
)
from quickstep.server.openai.choices import token_logprob
from quickstep.server.openai.embeddings import Embeddings
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.openai.response_types import EmbeddingList
from quickstep.server.schema.field_reader import FieldReader
from quickstep.types import TokenLogprobs

__all__ = ["OllamaChat", "OllamaEmbedding", "OllamaGenerate", "OllamaRoute", "rfc3339"]

Answer = OllamaChatAnswer | OllamaGenerateAnswer
Spoken = Callable[..., Answer]  # content, reasoning and calls of an answer, and its other fields
_UNLOADING = (0, "0", "0s")


class NoPrompt(Exception):
    """The request has nothing to answer: it only loads the model, which is loaded."""

    def __init__(self, answer: Answer, ignored: tuple[str, ...]) -> None:
        super().__init__("the model is loaded")
        self.answer = answer
        self.ignored = ignored


class OllamaRoute:
    """The endpoint of one of the two."""

    def __init__(self, adapter: Adapter, served: Served, metrics: Metrics) -> None:
        self._generating = GeneratingRoute(adapter, served, metrics)

    async def answer(self, request: Request) -> Response:
        """Answer one request. Raises RequestError, EngineError."""
        try:
            return await self._generating.answer(request)
        except NoPrompt as nothing:
            report_ignored(request, nothing.ignored)
            return json_response(nothing.answer)


class OllamaChat:
    """The API of `/api/chat`."""

    def parse(self, body: bytes, served: Served, caller: str) -> ParsedRequest:
        """Validate. Raises RequestError."""
        reader = FieldReader(served.field_rules)
        fields = reader.decode(body, OllamaChatRequest)
        if not fields.messages:
            raise _nothing(fields, served, reader, _chat_answer)
        request = chat_request(fields, served, reader, len(body))
        writer = partial(_Lines, served, _chat_answer)
        return replace(request, ignored=reader.ignored, writer=writer, stream_type=NDJSON)


class OllamaGenerate:
    """The API of `/api/generate`."""

    def parse(self, body: bytes, served: Served, caller: str) -> ParsedRequest:
        """Validate. Raises RequestError."""
        reader = FieldReader(served.field_rules)
        fields = reader.decode(body, OllamaGenerateRequest)
        if not fields.prompt and not fields.suffix:
            raise _nothing(fields, served, reader, _generate_answer)
        request = generate_request(fields, served, reader)
        writer = partial(_Lines, served, _generate_answer)
        return replace(request, ignored=reader.ignored, writer=writer, stream_type=NDJSON)


def _nothing(
    fields: OllamaGenerateFields, served: Served, reader: FieldReader, answer: Spoken
) -> NoPrompt:
    known_model(fields.model, served)
    reason = "unload" if fields.keep_alive in _UNLOADING else "load"
    told = {"model": fields.model, "created_at": rfc3339(time.time()), "done": True}
    return NoPrompt(answer("", "", [], done_reason=reason, **told), reader.ignored)


def _chat_answer(
    content: str, reasoning: str, calls: list[OllamaMadeCall], **more: Any
) -> OllamaChatAnswer:
    message = OllamaSpokenMessage(
        content=content, thinking=reasoning or UNSET, tool_calls=calls or UNSET
    )
    return OllamaChatAnswer(message=message, **more)


def _generate_answer(
    content: str, reasoning: str, calls: list[OllamaMadeCall], **more: Any
) -> OllamaGenerateAnswer:
    return OllamaGenerateAnswer(response=content, thinking=reasoning or UNSET, **more)


class _Lines:
    """One answer: lines as they come, or all in one object."""

    def __init__(
        self,
        served: Served,
        answer: Spoken,
        generation: Generation,
        head: Head,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._answer = answer
        self._generation = generation
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._tokenizer = served.engine.tokenizer
        (self._choice,) = generation.choices
        self._reader = message_reader(generation, self._choice, self._tokenizer)
        self._calls: list[OllamaMadeCall] = []
        self._call = CallDelta(0)
        self._arguments: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def opening(self) -> Iterator[bytes]:
        """Nothing."""
        return iter(())

    def delta(self, item: ChoiceDelta) -> Iterator[bytes]:
        """A line, if there is anything to say; a call is complete in its line."""
        said, calls = self._read(item)
        logprobs = self._logprobs(item.delta.logprobs)
        if said.content or said.reasoning or calls or logprobs:
            yield self._line(
                self._answer(
                    said.content,
                    said.reasoning,
                    calls,
                    done=False,
                    logprobs=logprobs or UNSET,
                    **self._about(),
                )
            )

    def ending(self) -> Iterator[bytes]:
        """The line with the figures."""
        yield self._line(self._answer("", "", [], **self._about(), **self._figures()))

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as the last line."""
        yield self._line(ollama_shape(error_facts(error))[1])

    def collect(self, item: ChoiceDelta) -> None:
        """Collect what is new."""
        said, _ = self._read(item)
        self._content.append(said.content)
        self._reasoning.append(said.reasoning)

    def complete(self) -> Answer:
        """The complete answer with the figures."""
        return self._answer(
            "".join(self._content),
            "".join(self._reasoning),
            self._calls,
            logprobs=self._logprobs(self._choice.logprobs) or UNSET,
            **self._about(),
            **self._figures(),
        )

    def _line(self, answer: object) -> bytes:
        return msgspec.json.encode(answer) + b"\n"

    def _about(self) -> dict[str, Any]:
        return {
            "model": self._generation.request.model,
            "created_at": rfc3339(self._clock()),
        }

    def _read(self, item: ChoiceDelta) -> tuple[MessageDelta, list[OllamaMadeCall]]:
        """What became certain, and the calls that ended with it."""
        if self._first_s is None:
            self._first_s = self._clock()
        delta = item.delta
        said = self._reader.read(delta.text, delta.finish_reason is not None)
        num_known = len(self._calls)
        for part in said.parts:
            if isinstance(part, CallDelta):
                self._add(part)
        return said, self._calls[num_known:]

    def _add(self, part: CallDelta) -> None:
        if part.name:
            self._call = part
            self._arguments = []
        self._arguments.append(part.arguments)
        if part.is_last:
            # an object has no other place for arguments that the limit cut
            arguments = partial_object("".join(self._arguments))
            function = OllamaFunction(len(self._calls), self._call.name, arguments)
            self._calls.append(OllamaMadeCall(self._call.call_id, function))

    def _figures(self) -> dict[str, Any]:
        """Why it ended, and how long what took: the engine's figures, else the clock's."""
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
        return {
            "done": True,
            "done_reason": "length" if reason and reason.openai == "length" else "stop",
            "total_duration": _nanoseconds(total_s),
            "load_duration": 0,
            "prompt_eval_count": len(self._generation.prompt_token_ids(choice)),
            "prompt_eval_duration": _nanoseconds(prompt_s),
            "eval_count": len(choice.token_ids),
            "eval_duration": _nanoseconds(eval_s),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> list[OllamaLogprob]:
        if self._generation.request.sampling.logprobs is None:
            return []
        num_top = self._generation.request.sampling.logprobs
        return [self._logprob(each, with_top=bool(num_top)) for each in logprobs]

    def _logprob(self, logprobs: TokenLogprobs, with_top: bool) -> OllamaLogprob:
        each = token_logprob(self._tokenizer, logprobs)
        top = each.top_logprobs if with_top else UNSET
        return OllamaLogprob(each.token, each.logprob, each.bytes, top)


def _nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, round(seconds * 1e9))


def rfc3339(seconds: float) -> str:
    """Seconds since 1970 as a date and time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaEmbedding:
    """The two endpoints."""

    def __init__(
        self, served: Served, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._served = served
        self._embeddings = Embeddings(served, metrics)
        self._clock = clock

    async def embed(self, request: Request) -> Response:
        """A vector for each input. Raises RequestError, EngineError."""
        started_s = self._clock()
        body, reader = self._body(request)
        fields = await self._served.lanes.parse(
            len(body), lambda: reader.decode(body, OllamaEmbedRequest)
        )
        inputs = [fields.input] if isinstance(fields.input, str) else fields.input
        bounded("input", len(inputs), self._served.limits.prompts, "entries")
        wanted = EmbeddingRequest(
            input=list(inputs),
            model=known_model(fields.model, self._served),
            dimensions=fields.dimensions,
        )
        answer = await self._vectors(request, wanted, inputs, fields.truncate is not False)
        if answer is None:
            return Response(status_code=CLIENT_CLOSED)
        report_ignored(request, reader.ignored)
        return await asyncio.to_thread(
            json_response,
            OllamaEmbedAnswer(
                model=fields.model,
                embeddings=[_numbers(one.embedding) for one in answer.data],
                total_duration=round((self._clock() - started_s) * 1e9),
                load_duration=0,
                prompt_eval_count=answer.usage.prompt_tokens,
            ),
        )

    async def embeddings(self, request: Request) -> Response:
        """The vector of one prompt. Raises RequestError, EngineError."""
        body, reader = self._body(request)
        fields = await self._served.lanes.parse(
            len(body), lambda: reader.decode(body, OllamaEmbeddingsRequest)
        )
        model = known_model(fields.model, self._served)
        wanted = EmbeddingRequest(input=fields.prompt, model=model)
        answer = await self._vectors(request, wanted, [fields.prompt], True, "prompt")
        if answer is None:
            return Response(status_code=CLIENT_CLOSED)
        report_ignored(request, reader.ignored)
        return json_response(OllamaEmbeddingsAnswer(_numbers(answer.data[0].embedding)))

    def _body(self, request: Request) -> tuple[bytes, FieldReader]:
        body = body_of(request)
        return body, FieldReader(self._served.field_rules)

    async def _vectors(
        self,
        request: Request,
        wanted: EmbeddingRequest,
        inputs: list[str],
        truncates: bool,
        input_field: str = "input",
    ) -> EmbeddingList | None:
        """None if the client has gone."""
        prompts = [TextPrompt(text) for text in inputs]
        work = self._embeddings.embed(
            wanted, prompts, caller_of(request), truncates=truncates, input_field=input_field
        )
        try:
            return await unless_disconnected(request.receive, work)
        except ClientDisconnect:
            return None


def _numbers(embedding: list[float] | str) -> list[float]:
    assert not isinstance(embedding, str), "base64 was not asked for"
    return embedding
