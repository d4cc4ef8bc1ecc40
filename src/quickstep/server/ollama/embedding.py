"""`/api/embed` and the older `/api/embeddings`: vectors as the OpenAI route computes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from quickstep.server.generate.adapter import Served
from quickstep.server.generate.endpoint import CLIENT_CLOSED, caller_of
from quickstep.server.generate.prompts import TextPrompt
from quickstep.server.generate.sampling import bounded
from quickstep.server.http.body import ClientDisconnect, body_of, unless_disconnected
from quickstep.server.http.errors import json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.metrics import Metrics
from quickstep.server.ollama.models import known_model
from quickstep.server.ollama.request_types import OllamaEmbeddingsRequest, OllamaEmbedRequest
from quickstep.server.ollama.response_types import OllamaEmbedAnswer, OllamaEmbeddingsAnswer
from quickstep.server.openai.embeddings import Embeddings
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.openai.response_types import EmbeddingList
from quickstep.server.schema.field_reader import FieldReader

__all__ = ["OllamaEmbedding"]


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
