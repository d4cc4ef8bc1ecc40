"""`PromptRun`: the prompts of one HTTP request, each of which is a request to the engine with one
answer: its embedding, or the logprobs of its next token. For embeddings, rerank and scores.

The prompts are submitted together, so that they share steps. When the client disconnects, running
requests are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from quickstep.engine.interface import TokenStream
from quickstep.errors import EngineError, RequestError
from quickstep.server.generate.api import Observers, PromptsObserver
from quickstep.server.generate.generation import with_client_field
from quickstep.server.generate.sampling import label
from quickstep.server.http.errors import GenerationFailed
from quickstep.server.models.served_model import ServedModel
from quickstep.server.usage.api_keys import cache_salt_of, priority_of_key, tenant_of_key
from quickstep.types import Delta, FinishReason, Pooling, Request, SamplingParams


class PromptFields(msgspec.Struct, frozen=True):
    """What a body says about all of its prompts, as the request's fields of these names do."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None


class PromptRun:
    """The prompts of one HTTP request of the API key `caller`, through `endpoint`.

    Raises RequestError for a bad field of `fields`.
    """

    def __init__(
        self,
        model: ServedModel,
        fields: PromptFields,
        caller: str,
        endpoint: str,
        added_priority: int = 0,
    ) -> None:
        server = model.server
        if fields.timeout_s is not None and not fields.timeout_s > 0:
            raise RequestError(
                f"timeout_s is {fields.timeout_s}, it must be above 0", param="timeout_s"
            )
        salt = label("cache_salt", fields.cache_salt, server.limits)
        self._model = model
        self._common = Request(
            priority=priority_of_key(caller, fields.priority or 0, server.api_keys, added_priority),
            tenant=tenant_of_key(caller, label("user", fields.user, server.limits)),
            tenant_weight=server.api_keys.weight_of(caller),
            cache_salt=cache_salt_of(caller, salt, server.shares_prefix_cache),
            timeout_s=server.deadlines.of(fields.timeout_s),
            endpoint=endpoint,
            adapter=model.adapter(model.name_or_default(fields.model)),
        )

    async def answers(
        self,
        observers: Observers,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        pooling: Pooling | None,
        input_field: str,
        shares_prefix: bool = False,
    ) -> list[Delta]:
        """The last delta of each prompt. With `shares_prefix` the first prompt is computed before
        the others, which then find its beginning in the cache.

        Raises:
            RequestError: It names `input_field`, or the time is over.
            EngineError: The model failed.
        """
        observer = observers.of_prompts(self._model, [len(prompt) for prompt in prompts])
        requests = [
            msgspec.structs.replace(
                self._common,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                pooling=pooling,
                speculation=False,
            )
            for prompt in prompts
        ]
        num_first = 1 if shares_prefix else len(requests)
        streams: list[TokenStream] = []
        try:
            deltas: list[Delta] = []
            for part in (requests[:num_first], requests[num_first:]):
                first = len(streams)
                for request in part:  # one that is refused leaves the others to be closed
                    streams.append(self._model.engine.stream(request))
                runs = (_last(stream, observer) for stream in streams[first:])
                deltas += await asyncio.gather(*runs)
            return deltas
        except RequestError as error:
            raise with_client_field(error, "", input_field) from None
        finally:
            for stream in streams:
                await stream.aclose()
            observer.close()


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
