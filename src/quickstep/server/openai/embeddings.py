"""`/v1/embeddings`: texts or token ids in, a vector of length 1 for each out.

The prompts are submitted together, so that they share steps; the answer waits for all of them.
When the client disconnects, running requests are aborted.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quickstep.engine.interface import ServedEngine
from quickstep.engine.retrieval.pairs import TextLimits, prompt_of_task
from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import LineResult, Observers
from quickstep.server.generate.endpoint import BYTES_PER_TOKEN, caller_of
from quickstep.server.generate.prompt_runs import POOLED, PromptRun
from quickstep.server.generate.prompts import TextPrompt, TokenPrompt, bounded_ids
from quickstep.server.generate.sampling import token_ids_of
from quickstep.server.http.body import body_of, body_parsed, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED, json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.work_lanes import BYTES_PER_NUMBER
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.openai.response_types import Embedding, EmbeddingList, EmbeddingUsage
from quickstep.server.options import bounded
from quickstep.server.usage.recorder import BATCHES
from quickstep.types import Pooling


class Embeddings:
    """Embeds texts and token ids."""

    def __init__(self, models: ModelRegistry, observers: Observers) -> None:
        self._models = models
        self._observers = observers

    async def answer(self, request: HttpRequest) -> Response:
        """Answer one request. Raises RequestError, EngineError."""
        try:
            self._models.server.limiter.check(caller_of(request))
            body = body_of(request)
            reader = FieldReader(self._models.server.field_rules)
            answer = await unless_disconnected(request.receive, self._embed(request, body, reader))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        report_ignored(request, reader.ignored)
        num_bytes = sum([len(item.embedding) for item in answer.data]) * BYTES_PER_NUMBER
        lanes = self._models.server.lanes.of(caller_of(request))
        return await lanes.do(num_bytes, lambda: json_response(answer))

    async def answer_line(
        self, body: bytes, caller: str = "", added_priority: int = 0
    ) -> LineResult:
        """The JSON response to one line of a batch."""
        reader = FieldReader(self._models.server.field_rules)
        model = await self._models.of_body(body, caller)
        fields, prompts = await _parsed(body, reader, model, caller)
        run = PromptRun(model, fields, caller, BATCHES, added_priority=added_priority)
        return LineResult(await self.embed(run, fields, prompts), reader.ignored)

    async def _embed(self, request: HttpRequest, body: bytes, reader: FieldReader) -> EmbeddingList:
        caller = caller_of(request)
        model = await self._models.of_body(body, caller)
        fields, prompts = await _parsed(body, reader, model, caller)
        body_parsed(request)
        return await self.embed(PromptRun.of(request, model, fields), fields, prompts)

    async def embed(
        self,
        run: PromptRun,
        fields: EmbeddingRequest,
        prompts: Sequence[TextPrompt | TokenPrompt],
        truncates: bool = False,
        input_field: str = "input",
    ) -> EmbeddingList:
        """The vectors of `prompts`; with `truncates`, only the beginning of a prompt that is too
        long is read. Raises RequestError that names `input_field`, EngineError.
        """
        engine = run.model.engine
        if engine.retrieval.refusal:
            raise RequestError(engine.retrieval.refusal, param="model")
        if fields.dimensions is not None and fields.dimensions < 1:
            raise RequestError(
                f"dimensions is {fields.dimensions}, it must be at least 1", param="dimensions"
            )
        limits = TextLimits(-1 if truncates else fields.truncate_prompt_tokens)
        most = limits.checked(engine.max_model_len)
        pooling = engine.retrieval.pooling
        if fields.pooling is not None:
            pooling = Pooling(fields.pooling)

        texts = _with_task(prompts, fields, engine)
        answers = await run.answers(
            self._observers,
            len(texts),
            sum(map(_expected_tokens, prompts)),
            partial(bounded_ids, engine, texts, run.lanes, most),
            POOLED,
            pooling,
            input_field,
        )
        vectors = [delta.embedding or () for delta in answers.deltas]
        num_bytes = sum(map(len, vectors)) * BYTES_PER_NUMBER
        data = await run.lanes.do(num_bytes, lambda: _embeddings(vectors, fields))
        return EmbeddingList(
            "list",
            data,
            run.model.name_or_default(fields.model),
            EmbeddingUsage(answers.num_tokens, answers.num_tokens),
        )


async def _parsed(
    body: bytes, reader: FieldReader, model: ServedModel, caller: str
) -> tuple[EmbeddingRequest, list[TextPrompt | TokenPrompt]]:
    def parse() -> tuple[EmbeddingRequest, list[TextPrompt | TokenPrompt]]:
        fields = reader.decode(body, EmbeddingRequest)
        return fields, _prompts(fields, model)

    return await model.server.lanes.of(caller).do(len(body), parse)


def _prompts(fields: EmbeddingRequest, model: ServedModel) -> list[TextPrompt | TokenPrompt]:
    given, special = fields.input, fields.add_special_tokens is not False
    vocab_size = model.engine.tokenizer.vocab_size
    if isinstance(given, str):
        return [TextPrompt(given, special)]
    if not given:
        raise RequestError("input is an empty list", param="input")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [TokenPrompt(token_ids_of("input", ids, vocab_size))]
    bounded("input", len(given), model.server.limits.prompts, "entries")
    texts = [TextPrompt(item, special) for item in given if isinstance(item, str)]
    lists = [
        TokenPrompt(token_ids_of("input", item, vocab_size))
        for item in given
        if isinstance(item, list)
    ]
    if len(given) not in (len(texts), len(lists)):
        raise RequestError("input mixes texts, token ids and lists of token ids", param="input")
    return [*texts, *lists]


def _with_task(
    prompts: Sequence[TextPrompt | TokenPrompt], fields: EmbeddingRequest, engine: ServedEngine
) -> Sequence[TextPrompt | TokenPrompt]:
    """The prompts after the model's text for their task. Raises RequestError."""
    before = prompt_of_task(engine.retrieval, fields.input_type)
    if fields.input_type is not None and any(isinstance(prompt, TokenPrompt) for prompt in prompts):
        raise RequestError(
            "input_type adds a text before texts, input has token ids", param="input_type"
        )
    if not before:
        return prompts
    return [
        replace(prompt, text=before + prompt.text) if isinstance(prompt, TextPrompt) else prompt
        for prompt in prompts
    ]


def _embeddings(vectors: Sequence[Sequence[float]], fields: EmbeddingRequest) -> list[Embedding]:
    """The vectors in the form that the request asks for. Raises RequestError."""
    as_text = fields.encoding_format == "base64"
    shortened = [_shortened(vector, fields.dimensions) for vector in vectors]
    return [
        Embedding("embedding", index, _base64(vector) if as_text else list(vector))
        for index, vector in enumerate(shortened)
    ]


def _shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first `dimensions`, of length 1 again."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            f"dimensions is {dimensions}, the model's embeddings have {len(vector)}",
            param="dimensions",
        )
    head = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in head)) or 1.0
    return struct.unpack(f"<{dimensions}f", _floats([value / length for value in head]))


def _expected_tokens(prompt: TextPrompt | TokenPrompt) -> int:
    """How many tokens a prompt may have, before it is tokenised."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.token_ids)
    return len(prompt.text) // BYTES_PER_TOKEN


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(_floats(vector)).decode()


def _floats(vector: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(vector)}f", *vector)
