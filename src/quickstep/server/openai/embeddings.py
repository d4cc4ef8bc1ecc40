"""`/v1/embeddings`: texts or token ids in, a vector of length 1 for each out.

The prompts are submitted together, so that they share steps; the answer waits for all of them.
When the client disconnects, running requests are aborted.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quickstep.engine.interface import TokenStream
from quickstep.errors import EngineError, RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import LineResult, Observers, PromptsObserver
from quickstep.server.generate.endpoint import (
    BYTES_PER_TOKEN,
    caller_of,
    endpoint_of,
)
from quickstep.server.generate.generation import with_client_field
from quickstep.server.generate.prompts import TextPrompt, TokenPrompt, check_num_tokens, prompts_ids
from quickstep.server.generate.sampling import label, token_ids_of
from quickstep.server.http.body import body_of, body_parsed, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED, GenerationFailed, json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.openai.response_types import Embedding, EmbeddingList, EmbeddingUsage
from quickstep.server.options import bounded
from quickstep.server.usage.api_keys import cache_salt_of, priority_of_key, tenant_of_key
from quickstep.server.usage.recorder import BATCHES
from quickstep.types import FinishReason, Pooling, Request, SamplingParams

# Larger answers, in numbers, are written in a thread.
_INLINE_NUMBERS = 16_384
_SAMPLING = SamplingParams(max_tokens=1)  # of which nothing is sampled


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
        if sum(len(item.embedding) for item in answer.data) <= _INLINE_NUMBERS:
            return json_response(answer)
        return await asyncio.to_thread(json_response, answer)

    async def answer_line(
        self, body: bytes, caller: str = "", added_priority: int = 0
    ) -> LineResult:
        """The JSON response to one line of a batch."""
        reader = FieldReader(self._models.server.field_rules)
        model = await self._models.of_body(body, caller)
        fields, prompts = await _parsed(body, reader, model, caller)
        answer = await self.embed(model, fields, prompts, caller, BATCHES, added_priority)
        return LineResult(answer, reader.ignored)

    async def _embed(self, request: HttpRequest, body: bytes, reader: FieldReader) -> EmbeddingList:
        caller = caller_of(request)
        model = await self._models.of_body(body, caller)
        fields, prompts = await _parsed(body, reader, model, caller)
        body_parsed(request)
        return await self.embed(model, fields, prompts, caller, endpoint_of(request))

    async def embed(
        self,
        model: ServedModel,
        fields: EmbeddingRequest,
        prompts: Sequence[TextPrompt | TokenPrompt],
        caller: str,
        endpoint: str,
        added_priority: int = 0,
        truncates: bool = False,
        input_field: str = "input",
    ) -> EmbeddingList:
        """The vectors of `prompts`; with `truncates`, only the beginning of a prompt that is too
        long is read. Raises RequestError that names `input_field`, EngineError.
        """
        longest = model.engine.max_model_len
        if truncates:
            prompts = [_beginning(prompt, model) for prompt in prompts]
        priority = priority_of_key(
            caller, fields.priority or 0, model.server.api_keys, added_priority
        )
        fields = msgspec.structs.replace(fields, priority=priority)
        if fields.dimensions is not None and fields.dimensions < 1:
            raise RequestError(
                f"dimensions is {fields.dimensions}, it must be at least 1", param="dimensions"
            )
        engine = model.engine
        expected = sum(map(_expected_tokens, prompts))
        reservation = model.server.limiter.admit(caller, expected, in_batch=endpoint == BATCHES)
        try:
            try:
                most = None if truncates else longest
                ids = await prompts_ids(engine, prompts, model.server.lanes.of(caller), most)
            except RequestError as error:
                raise with_client_field(error, "", input_field) from None
            if truncates:
                ids = [prompt_ids[:longest] for prompt_ids in ids]
            check_num_tokens(ids, _SAMPLING, engine.max_model_len, model.server.limits)
            num_tokens = sum(map(len, ids))
            vectors = await self._vectors(model, ids, fields, caller, endpoint, input_field)
        finally:
            reservation.release()
        as_text = fields.encoding_format == "base64"
        data = [
            Embedding("embedding", index, _base64(vector) if as_text else list(vector))
            for index, vector in enumerate(vectors)
        ]
        return EmbeddingList(
            "list",
            data,
            model.name_or_default(fields.model),
            EmbeddingUsage(num_tokens, num_tokens),
        )

    async def _vectors(
        self,
        model: ServedModel,
        prompts: Sequence[Sequence[int]],
        fields: EmbeddingRequest,
        caller: str,
        endpoint: str,
        input_field: str,
    ) -> list[Sequence[float]]:
        engine, limits = model.engine, model.server.limits
        pooling = engine.default_pooling if fields.pooling is None else Pooling(fields.pooling)
        tenant = tenant_of_key(caller, label("user", fields.user, limits))
        timeout_s = model.server.deadlines.of(_timeout(fields))
        salt = label("cache_salt", fields.cache_salt, limits)
        cache_salt = cache_salt_of(caller, salt, model.server.shares_prefix_cache)
        observer = self._observers.of_prompts(model, [len(prompt) for prompt in prompts])
        streams: list[TokenStream] = []
        try:
            for prompt in prompts:
                request = Request(
                    prompt_token_ids=tuple(prompt),
                    sampling=_SAMPLING,
                    priority=fields.priority or 0,
                    tenant=tenant,
                    tenant_weight=model.server.api_keys.weight_of(caller),
                    cache_salt=cache_salt,
                    timeout_s=timeout_s,
                    pooling=pooling,
                    endpoint=endpoint,
                    adapter=model.adapter(model.name_or_default(fields.model)),
                )
                streams.append(engine.stream(request))
            vectors = await asyncio.gather(*(_vector(stream, observer) for stream in streams))
            return [_shortened(vector, fields.dimensions) for vector in vectors]
        except RequestError as error:
            raise with_client_field(error, "", input_field) from None
        finally:
            for stream in streams:
                await stream.aclose()
            observer.close()


async def _parsed(
    body: bytes, reader: FieldReader, model: ServedModel, caller: str
) -> tuple[EmbeddingRequest, list[TextPrompt | TokenPrompt]]:
    def parse() -> tuple[EmbeddingRequest, list[TextPrompt | TokenPrompt]]:
        fields = reader.decode(body, EmbeddingRequest)
        return fields, _prompts(fields, model)

    return await model.server.lanes.of(caller).parse(len(body), parse)


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


def _beginning(prompt: TextPrompt | TokenPrompt, model: ServedModel) -> TextPrompt | TokenPrompt:
    """As much of a text as fits the longest prompt, so that no more is tokenised."""
    longest = model.engine.max_model_len
    if isinstance(prompt, TokenPrompt):
        return prompt
    num_tokens = model.engine.tokenizer.least_tokens(prompt.text)
    if num_tokens <= longest + 1:
        return prompt
    # a token has at most as many bytes as the text has per token, one rounded off
    bytes_per_token = len(prompt.text.encode()) // (num_tokens - 1) + 1
    return replace(prompt, text=prompt.text[: longest * bytes_per_token])


def _timeout(fields: EmbeddingRequest) -> float | None:
    if fields.timeout_s is not None and not fields.timeout_s > 0:
        raise RequestError(
            f"timeout_s is {fields.timeout_s}, it must be above 0", param="timeout_s"
        )
    return fields.timeout_s


async def _vector(stream: TokenStream, observer: PromptsObserver) -> Sequence[float]:
    await stream.accepted()
    observer.accepted()
    async for delta in stream:
        observer.observe(delta)
        if delta.embedding is not None:
            return delta.embedding
        if delta.finish_reason is not None and delta.finish_reason.is_failure:
            raise GenerationFailed(delta.error or "the model failed on this request")
        if delta.finish_reason is FinishReason.DEADLINE:
            raise RequestError(
                "the embedding was not there within timeout_s; allow it more time",
                param="timeout_s",
                status=408,
            )
    raise EngineError("the server is shutting down; send the request again")


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
