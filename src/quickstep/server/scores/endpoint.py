"""`/v1/rerank`, `/v2/rerank` and `/v1/score`: how well documents answer a query.

Each pair is one prompt, or query and document are one prompt each, as the model scores them
(`engine.retrieval`); the prompts pass the limits, the queue and the scheduler as embeddings do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quickstep.engine.retrieval.card import Scoring
from quickstep.engine.retrieval.pairs import (
    Pairs,
    TextLimits,
    class_probabilities,
    pair_pooling,
    pair_prompts,
    pair_sampling,
    pair_scores,
    text_prompts,
)
from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import Observers
from quickstep.server.generate.endpoint import (
    BYTES_PER_TOKEN,
    caller_of,
    endpoint_of,
)
from quickstep.server.generate.generation import with_client_field
from quickstep.server.generate.prompt_runs import PromptFields, PromptRun
from quickstep.server.generate.prompts import check_num_tokens
from quickstep.server.http.body import body_of, body_parsed, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED, json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.response_types import EmbeddingUsage
from quickstep.server.options import bounded
from quickstep.server.scores.request_types import (
    ClassifyRequest,
    RerankRequest,
    ScoreRequest,
    TextDocument,
)
from quickstep.server.scores.response_types import (
    ApiVersion,
    ClassifyData,
    ClassifyList,
    RerankMeta,
    RerankResponse,
    RerankResult,
    RerankTokens,
    ScoreData,
    ScoreList,
)
from quickstep.types import Pooling, SamplingParams

# A first pair is computed before the others if they share so many blocks with it.
_SHARED_BLOCKS = 4
_POOLED = SamplingParams(max_tokens=1)  # of which nothing is sampled


class _Scored(msgspec.Struct, frozen=True):
    """The scores of the pairs, and the tokens of their prompts."""

    scores: list[float]
    num_tokens: int
    num_outputs: int


class Scores:
    """Scores pairs of texts."""

    def __init__(
        self, models: ModelRegistry, observers: Observers, clock: Callable[[], float] = time.time
    ) -> None:
        self._models = models
        self._observers = observers
        self._clock = clock

    async def rerank(self, request: HttpRequest) -> Response:
        """Sort documents by their scores. Raises RequestError, EngineError."""
        return await self._answer(request, self._reranked)

    async def score(self, request: HttpRequest) -> Response:
        """Score pairs of texts. Raises RequestError, EngineError."""
        return await self._answer(request, self._scores)

    async def classify(self, request: HttpRequest) -> Response:
        """The classes of texts. Raises RequestError, EngineError."""
        return await self._answer(request, self._classified)

    async def _answer(
        self,
        request: HttpRequest,
        work: Callable[[HttpRequest, bytes, FieldReader], Coroutine[Any, Any, msgspec.Struct]],
    ) -> Response:
        try:
            self._models.server.limiter.check(caller_of(request))
            reader = FieldReader(self._models.server.field_rules)
            body = body_of(request)
            answer = await unless_disconnected(request.receive, work(request, body, reader))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        report_ignored(request, reader.ignored)
        return json_response(answer)

    async def _reranked(
        self, request: HttpRequest, body: bytes, reader: FieldReader
    ) -> RerankResponse:
        caller = caller_of(request)
        model = await self._models.of_body(body, caller)
        fields = await model.server.lanes.of(caller).parse(
            len(body), lambda: reader.decode(body, RerankRequest)
        )
        bounded("documents", len(fields.documents), model.server.limits.prompts, "entries")
        texts = [_text(document) for document in fields.documents]
        pairs = Pairs([_text(fields.query)], texts, "query", "documents")
        scored = await self._scored(request, model, fields, pairs)
        with_texts = fields.return_documents is not False
        order = sorted(range(len(texts)), key=lambda index: -scored.scores[index])
        results = [
            RerankResult(
                index, scored.scores[index], TextDocument(texts[index]) if with_texts else None
            )
            for index in order[: fields.top_n or None]
        ]
        tokens = RerankTokens(scored.num_tokens, scored.num_outputs)
        return RerankResponse(
            f"rerank-{secrets.token_hex(16)}",
            "list",
            model.name_or_default(fields.model),
            results,
            EmbeddingUsage(scored.num_tokens, scored.num_tokens),
            RerankMeta(ApiVersion("2"), tokens),
        )

    async def _scores(self, request: HttpRequest, body: bytes, reader: FieldReader) -> ScoreList:
        caller = caller_of(request)
        model = await self._models.of_body(body, caller)
        fields = await model.server.lanes.of(caller).parse(
            len(body), lambda: reader.decode(body, ScoreRequest)
        )
        queries, documents = _texts(fields.text_1), _texts(fields.text_2)
        for name, texts in (("text_1", queries), ("text_2", documents)):
            bounded(name, len(texts), model.server.limits.prompts, "entries")
        pairs = Pairs(queries, documents, "text_1", "text_2")
        scored = await self._scored(request, model, fields, pairs)
        return ScoreList(
            f"score-{secrets.token_hex(16)}",
            "list",
            int(self._clock()),
            model.name_or_default(fields.model),
            [ScoreData(index, "score", score) for index, score in enumerate(scored.scores)],
            EmbeddingUsage(scored.num_tokens, scored.num_tokens),
        )

    async def _classified(
        self, request: HttpRequest, body: bytes, reader: FieldReader
    ) -> ClassifyList:
        caller = caller_of(request)
        model = await self._models.of_body(body, caller)
        fields = await model.server.lanes.of(caller).parse(
            len(body), lambda: reader.decode(body, ClassifyRequest)
        )
        body_parsed(request)
        texts = _texts(fields.input)
        bounded("input", len(texts), model.server.limits.prompts, "entries")
        engine, server, labels = model.engine, model.server, model.engine.retrieval.labels
        if not labels:
            raise RequestError(
                f"{engine.model_name} has no classification head; /v1/score and "
                "response_format choose among texts",
                param="model",
            )
        run = _prompt_run(request, model, fields)
        limits, num_chars = TextLimits(fields.truncate_prompt_tokens), sum(map(len, texts))
        reservation = server.limiter.admit(caller, num_chars // BYTES_PER_TOKEN, in_batch=False)
        try:
            prompts = await server.lanes.of(caller).run(
                num_chars, lambda: text_prompts(engine, texts, "input", limits)
            )
            check_num_tokens(prompts, _POOLED, engine.max_model_len, server.limits)
            deltas = await run.answers(self._observers, prompts, _POOLED, Pooling.CLASSES, "input")
        finally:
            reservation.release()
        data = []
        for index, delta in enumerate(deltas):
            probs = list(class_probabilities(delta.embedding or ()))
            label = labels[probs.index(max(probs))]
            data.append(ClassifyData(index, label, probs, len(probs)))
        num_tokens = sum(map(len, prompts))
        return ClassifyList(
            f"classify-{secrets.token_hex(16)}",
            "list",
            int(self._clock()),
            model.name_or_default(fields.model),
            data,
            EmbeddingUsage(num_tokens, num_tokens),
        )

    async def _scored(
        self,
        request: HttpRequest,
        model: ServedModel,
        fields: RerankRequest | ScoreRequest,
        pairs: Pairs,
    ) -> _Scored:
        body_parsed(request)
        caller, server, engine = caller_of(request), model.server, model.engine
        run = _prompt_run(request, model, fields)
        generates = engine.retrieval.scoring is Scoring.TOKENS
        sampling = pair_sampling(engine.retrieval)
        reservation = server.limiter.admit(
            caller, pairs.num_chars // BYTES_PER_TOKEN, in_batch=False
        )
        try:
            limits = TextLimits(fields.truncate_prompt_tokens, fields.max_tokens_per_doc)
            try:
                prompts = await server.lanes.of(caller).run(
                    pairs.num_chars, lambda: pair_prompts(engine, pairs, fields.instruction, limits)
                )
            except RequestError as error:
                raise with_client_field(error, "", pairs.document_field) from None
            check_num_tokens(prompts, sampling, engine.max_model_len, server.limits)
            deltas = await run.answers(
                self._observers,
                prompts,
                sampling,
                pair_pooling(engine.retrieval),
                pairs.document_field,
                shares_prefix=generates and _has_shared_prefix(prompts, engine.block_size),
            )
        finally:
            reservation.release()
        return _Scored(
            pair_scores(engine.retrieval, deltas, pairs),
            sum(map(len, prompts)),
            len(prompts) if generates else 0,
        )


def _prompt_run(
    request: HttpRequest,
    model: ServedModel,
    fields: RerankRequest | ScoreRequest | ClassifyRequest,
) -> PromptRun:
    common = PromptFields(
        fields.model, fields.user, fields.priority, fields.cache_salt, fields.timeout_s
    )
    return PromptRun(model, common, caller_of(request), endpoint_of(request))


def _has_shared_prefix(prompts: Sequence[Sequence[int]], block_size: int) -> bool:
    """Whether it pays that the first prompt is computed before the others."""
    if len(prompts) < 3:
        return False
    num_shared = next(
        (
            number
            for number, (a, b) in enumerate(zip(prompts[0], prompts[1], strict=False))
            if a != b
        ),
        min(len(prompts[0]), len(prompts[1])),
    )
    return num_shared >= _SHARED_BLOCKS * block_size


def _text(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text


def _texts(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
