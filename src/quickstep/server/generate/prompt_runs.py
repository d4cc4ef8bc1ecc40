"""`PromptRun`: the prompts of one HTTP request, each of which is a request to the engine with one
answer: its embedding, or the logprobs of its next token. For embeddings, rerank, scores, classes.

The prompts are submitted together, so that they share steps. When the client disconnects, running
requests are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, Self

import msgspec
from starlette.requests import Request as HttpRequest

from quickstep.engine.interface import TokenStream
from quickstep.engine.requests import part_id
from quickstep.errors import EngineError, RequestError
from quickstep.server.generate.api import Observers, PromptsObserver
from quickstep.server.generate.endpoint import caller_of, endpoint_of
from quickstep.server.generate.generation import together, with_client_field
from quickstep.server.generate.prompts import check_num_tokens
from quickstep.server.generate.sampling import label
from quickstep.server.http.errors import GenerationFailed
from quickstep.server.http.turns import leave_turn
from quickstep.server.models.served_model import ServedModel
from quickstep.server.usage.api_keys import cache_salt_of, priority_of_key, tenant_of_key
from quickstep.server.usage.recorder import BATCHES
from quickstep.types import Delta, FinishReason, Pooling, Request, SamplingParams

# Of prompts of which nothing is sampled.
POOLED = SamplingParams(max_tokens=1)
# A first prompt is computed before the others if they share so many blocks with it.
_SHARED_BLOCKS = 4


class PromptFields(Protocol):
    """What a body says about all of its prompts, as the request's fields of these names do."""

    @property
    def model(self) -> str | None:
        """The name of a model or an adapter."""

    @property
    def user(self) -> str | None:
        """The account."""

    @property
    def priority(self) -> int | None:
        """Lower runs first."""

    @property
    def cache_salt(self) -> str | None:
        """Separates users in the prefix cache."""

    @property
    def timeout_s(self) -> float | None:
        """Seconds until the answer is useless."""


class PromptAnswers(msgspec.Struct, frozen=True):
    """The tokens of each prompt, and the last delta of each."""

    prompts: Sequence[Sequence[int]]
    deltas: list[Delta]

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


class PromptRun:
    """The prompts of one HTTP request of the API key `caller`, through `endpoint`; deadlines count
    from `received_s` (`Request.received_s`).

    Raises RequestError for a bad field of `fields`.
    """

    def __init__(
        self,
        model: ServedModel,
        fields: PromptFields,
        caller: str,
        endpoint: str,
        received_s: float | None = None,
        added_priority: int = 0,
        request_id: str = "",
    ) -> None:
        server, timeout_s = model.server, fields.timeout_s
        if timeout_s is not None and not timeout_s > 0:
            raise RequestError(f"timeout_s is {timeout_s}, it must be above 0", param="timeout_s")
        # the operator's default is for clients that wait
        if timeout_s is not None or endpoint != BATCHES:
            timeout_s = server.deadlines.of(timeout_s)
        salt = label("cache_salt", fields.cache_salt, server.limits)
        self.model = model
        self.lanes = server.lanes.of(caller)
        self._caller = caller
        self._common = Request(
            request_id,
            priority=priority_of_key(caller, fields.priority or 0, server.api_keys, added_priority),
            tenant=tenant_of_key(caller, label("user", fields.user, server.limits)),
            tenant_weight=server.api_keys.weight_of(caller),
            cache_salt=cache_salt_of(caller, salt, server.shares_prefix_cache),
            timeout_s=timeout_s,
            received_s=received_s,
            endpoint=endpoint,
            adapter=model.adapter(model.name_or_default(fields.model)),
        )

    @classmethod
    def of(cls, request: HttpRequest, model: ServedModel, fields: PromptFields) -> Self:
        """The prompts of an HTTP request with the body `fields`. Raises RequestError."""
        state = request.scope["state"]
        received_s: float = state["received_s"]
        http_id: str = state["request_id"]
        caller, endpoint = caller_of(request), endpoint_of(request)
        return cls(model, fields, caller, endpoint, received_s, request_id=http_id)

    async def answers(
        self,
        observers: Observers,
        num_prompts: int,
        expected_tokens: int,
        tokenize: Callable[[], Awaitable[Sequence[Sequence[int]]]],
        sampling: SamplingParams,
        pooling: Pooling | None,
        input_field: str,
    ) -> PromptAnswers:
        """Tokenize prompts that the limits of the caller's key admit, and have them answered.

        `expected_tokens` are those of all prompts before they are tokenized, which they are only if
        the queue has places for them; `pooling` is None for prompts of which a token is sampled;
        the prompts came in the body's `input_field`.

        Raises:
            RequestError: A limit is reached, it names `input_field`, or the time is over.
            EngineError: The model failed.
        """
        model, server = self.model, self.model.server
        price = model.price(self._common.adapter)
        usd = 0.0 if price is None else price.most_usd(expected_tokens)
        in_batch = self._common.endpoint == BATCHES
        model.engine.check_admission(self._common, num_prompts)
        reservation = server.limiter.admit(self._caller, expected_tokens, in_batch, usd)
        try:
            prompts = await tokenize()
            check_num_tokens(prompts, sampling, model.engine.max_model_len, server.limits)
            requests = [
                msgspec.structs.replace(
                    self._common,
                    request_id=part_id(self._common.request_id),
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling,
                    pooling=pooling,
                    speculation=False,
                )
                for prompt in prompts
            ]
            return PromptAnswers(prompts, await self._deltas(observers, requests))
        except RequestError as error:
            raise with_client_field(error, "", input_field) from None
        finally:
            reservation.release()

    async def _deltas(self, observers: Observers, requests: Sequence[Request]) -> list[Delta]:
        """The last delta of each. With a shared prefix the first request is computed before the
        others, which then find it in the cache.
        """
        if not requests:
            return []
        engine, prompts = self.model.engine, [request.prompt_token_ids for request in requests]
        observer = observers.of_prompts(self.model, [len(prompt) for prompt in prompts])
        goes_ahead = _share_prefix(prompts, engine.block_size) and requests[0].pooling is None
        first, *others = together(requests)
        streams: list[TokenStream] = []
        try:
            deltas: list[Delta] = []
            streams.append(engine.stream(first))
            if others:
                await streams[0].accepted()
            if goes_ahead:
                leave_turn()
                deltas.append(await _last(streams[0], observer))
            for request in others:  # one that is refused leaves the others to be closed
                streams.append(engine.stream(request))
            leave_turn()
            runs = (_last(stream, observer) for stream in streams[len(deltas) :])
            return [*deltas, *await asyncio.gather(*runs)]
        finally:
            for stream in streams:
                await stream.aclose()
            observer.close()


def _share_prefix(prompts: Sequence[Sequence[int]], block_size: int) -> bool:
    """Whether it pays that the first prompt is computed before the others."""
    if len(prompts) < 3:
        return False
    first, second = prompts[:2]
    num_shared = next(
        (number for number, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    return num_shared >= _SHARED_BLOCKS * block_size


async def _last(stream: TokenStream, observer: PromptsObserver) -> Delta:
    await stream.accepted()
    observer.accepted()
    logprobs: Delta | None = None
    async for delta in stream:
        observer.observe(delta)
        if delta.logprobs:
            logprobs = delta
        if delta.finish_reason is None:
            continue
        if delta.finish_reason.is_failure:
            raise GenerationFailed(delta.error or "the model failed on this request")
        if delta.finish_reason is FinishReason.DEADLINE:
            raise RequestError(
                "the answer was not there within timeout_s; allow it more time",
                param="timeout_s",
                status=408,
            )
        if delta.embedding is not None or logprobs is not None:
            return logprobs or delta
    raise EngineError("the server is shutting down; send the request again")
