"""`/v1/rerank`, `/v2/rerank` and `/v1/score`: how well documents answer a query; `/v1/classify`:
the classes of texts.

Each pair is one prompt, or query and document are one prompt each, as the model scores them
(`engine.retrieval`); the prompts pass the limits, the queue and the scheduler as embeddings do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

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
)
from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import Observers
from quickstep.server.generate.endpoint import BYTES_PER_TOKEN, caller_of
from quickstep.server.generate.prompt_runs import POOLED, PromptRun
from quickstep.server.generate.prompts import TextPrompt, bounded_ids
from quickstep.server.http.body import body_of, body_parsed, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED, json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.work_lanes import BYTES_PER_NUMBER
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
from quickstep.types import Pooling

_Answer = tuple[msgspec.Struct, int]  # and its size, in numbers or characters
_Fields = TypeVar("_Fields", RerankRequest, ScoreRequest, ClassifyRequest)


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
        work: Callable[[HttpRequest, bytes, FieldReader], Coroutine[Any, Any, _Answer]],
    ) -> Response:
        try:
            self._models.server.limiter.check(caller_of(request))
            reader = FieldReader(self._models.server.field_rules)
            body = body_of(request)
            answer, size = await unless_disconnected(request.receive, work(request, body, reader))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        report_ignored(request, reader.ignored)
        lanes = self._models.server.lanes.of(caller_of(request))
        return await lanes.do(size * BYTES_PER_NUMBER, lambda: json_response(answer))

    async def _fields(
        self, request: HttpRequest, body: bytes, reader: FieldReader, body_type: type[_Fields]
    ) -> tuple[ServedModel, _Fields]:
        """The model that answers, and the fields of the body. Raises RequestError."""
        caller = caller_of(request)
        model = await self._models.of_body(body, caller)
        fields = await model.server.lanes.of(caller).do(
            len(body), lambda: reader.decode(body, body_type)
        )
        return model, fields

    async def _reranked(self, request: HttpRequest, body: bytes, reader: FieldReader) -> _Answer:
        model, fields = await self._fields(request, body, reader, RerankRequest)
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
        answer = RerankResponse(
            f"rerank-{secrets.token_hex(16)}",
            "list",
            model.name_or_default(fields.model),
            results,
            EmbeddingUsage(scored.num_tokens, scored.num_tokens),
            RerankMeta(ApiVersion("2"), tokens),
        )
        return answer, sum(len(texts[result.index]) for result in results if with_texts)

    async def _scores(self, request: HttpRequest, body: bytes, reader: FieldReader) -> _Answer:
        model, fields = await self._fields(request, body, reader, ScoreRequest)
        queries, documents = _texts(fields.text_1), _texts(fields.text_2)
        for name, texts in (("text_1", queries), ("text_2", documents)):
            bounded(name, len(texts), model.server.limits.prompts, "entries")
        pairs = Pairs(queries, documents, "text_1", "text_2")
        scored = await self._scored(request, model, fields, pairs)
        answer = ScoreList(
            f"score-{secrets.token_hex(16)}",
            "list",
            int(self._clock()),
            model.name_or_default(fields.model),
            [ScoreData(index, "score", score) for index, score in enumerate(scored.scores)],
            EmbeddingUsage(scored.num_tokens, scored.num_tokens),
        )
        return answer, len(answer.data)

    async def _classified(self, request: HttpRequest, body: bytes, reader: FieldReader) -> _Answer:
        model, fields = await self._fields(request, body, reader, ClassifyRequest)
        body_parsed(request)
        texts = [TextPrompt(text) for text in _texts(fields.input)]
        if not texts:
            raise RequestError("input is an empty list", param="input")
        bounded("input", len(texts), model.server.limits.prompts, "entries")
        engine, labels = model.engine, model.engine.retrieval.labels
        if not labels:
            raise RequestError(
                f"{engine.model_name} has no classification head; /v1/score and "
                "response_format choose among texts",
                param="model",
            )
        run = PromptRun.of(request, model, fields)
        most = TextLimits(fields.truncate_prompt_tokens).checked(engine.max_model_len)

        answers = await run.answers(
            self._observers,
            len(texts),
            sum(len(prompt.text) for prompt in texts) // BYTES_PER_TOKEN,
            partial(bounded_ids, engine, texts, run.lanes, most),
            POOLED,
            Pooling.CLASSES,
            "input",
        )
        data = []
        for index, delta in enumerate(answers.deltas):
            probs = list(class_probabilities(delta.embedding or ()))
            label = labels[probs.index(max(probs))]
            data.append(ClassifyData(index, label, probs, len(probs)))
        answer = ClassifyList(
            f"classify-{secrets.token_hex(16)}",
            "list",
            int(self._clock()),
            model.name_or_default(fields.model),
            data,
            EmbeddingUsage(answers.num_tokens, answers.num_tokens),
        )
        return answer, len(data) * len(labels)

    async def _scored(
        self,
        request: HttpRequest,
        model: ServedModel,
        fields: RerankRequest | ScoreRequest,
        pairs: Pairs,
    ) -> _Scored:
        body_parsed(request)
        engine, retrieval = model.engine, model.engine.retrieval
        run = PromptRun.of(request, model, fields)
        limits = TextLimits(fields.truncate_prompt_tokens, fields.max_tokens_per_doc)
        num_chars = pairs.num_chars(retrieval.scoring)

        prompts = partial(pair_prompts, engine, pairs, fields.instruction, limits)
        answers = await run.answers(
            self._observers,
            len(pairs.documents),
            num_chars // BYTES_PER_TOKEN,
            lambda: run.lanes.run(num_chars, prompts),
            pair_sampling(retrieval),
            pair_pooling(retrieval),
            pairs.document_field,
        )
        size = sum(len(delta.embedding or ()) for delta in answers.deltas)
        scores = await run.lanes.do(size, lambda: pair_scores(retrieval, answers.deltas, pairs))
        generates = retrieval.scoring is Scoring.TOKENS
        return _Scored(scores, answers.num_tokens, len(answers.prompts) if generates else 0)


def _text(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text


def _texts(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
