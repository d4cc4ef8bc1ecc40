"""A request that an upstream serves: its body, its response or stream, and what it is charged."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, MutableMapping
from typing import Any

import msgspec
from msgspec import structs
from starlette.responses import Response

from quickstep.errors import EngineError
from quickstep.server.fallback.chain import Chain
from quickstep.server.http.errors import error_of, json_response
from quickstep.server.http.event_stream import DONE, EventStream, data_frame
from quickstep.server.usage.limits import KeyLimiter, Reservation
from quickstep.server.usage.price_book import Price, SequenceUsage, cost
from quickstep.server.usage.recorder import UpstreamAnswer
from quickstep.types import FinishReason

# OpenAI's fields of chat and completions; another server may refuse those of this one.
_FIELDS = frozenset(
    (
        *("messages", "prompt", "suffix", "echo", "best_of", "stream", "stream_options", "user"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"),
        *("verbosity", "prediction", "metadata", "safety_identifier", "prompt_cache_key"),
    )
)


_UNKNOWN_REASON = ""
_MAX_REASON = 40  # characters of what an upstream says


class Bill:
    """Charges the key of a request for what an upstream has generated, once, and reports it.

    `answer` is what is known of the answer before it comes.
    """

    def __init__(
        self,
        limiter: KeyLimiter,
        reservation: Reservation,
        price: Price,
        answer: UpstreamAnswer,
        report: Callable[[UpstreamAnswer], None],
    ) -> None:
        self._limiter = limiter
        self._reservation = reservation
        self._price = price
        self._answer = answer
        self._report = report
        self._usage = SequenceUsage()
        self._num_chunks = 0
        self._finish_reason = FinishReason.ABORTED.value
        self._is_closed = False

    def add(self, content: dict[str, Any]) -> None:
        """Note the usage so far; without one, each chunk of a stream counts as a token."""
        self._num_chunks += bool(content["choices"])
        for choice in content["choices"]:
            if isinstance(choice, dict) and isinstance(choice.get("finish_reason"), str):
                self._finish_reason = choice["finish_reason"][:_MAX_REASON]
        usage = content.get("usage")
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        num_prompt = _count(usage.get("prompt_tokens"))
        num_cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
        self._usage = SequenceUsage(
            num_prompt, min(num_cached, num_prompt), _count(usage.get("completion_tokens"))
        )

    def end(self) -> None:
        """The answer is complete, whether it has said why it ends or not."""
        if self._finish_reason == FinishReason.ABORTED.value:
            self._finish_reason = _UNKNOWN_REASON

    def fail(self) -> None:
        """The upstream has failed after the first byte."""
        self._finish_reason = FinishReason.ERROR.value

    async def close(self) -> None:
        """Charge the key, release what it had reserved, report the answer if there is one.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        usage = self._usage
        if not usage.num_output_tokens:
            usage = SequenceUsage(usage.num_prompt_tokens, 0, self._num_chunks)
        costs = cost(usage, self._price)
        self._limiter.charge(self._answer.key_name, usage, costs)
        self._reservation.release()
        if self._num_chunks:
            reason = self._finish_reason
            self._report(
                structs.replace(self._answer, usage=usage, costs=costs, finish_reason=reason)
            )


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**40 else 0


async def forward(
    body: bytes, chain: Chain, bill: Bill, state: MutableMapping[str, Any]
) -> Response:
    """The response of the chain's upstream. Raises UpstreamFailed while no byte is sent; a later
    failure is noted in the request's state.
    """
    client, path = chain.upstream, chain.path
    assert client is not None and path is not None, "the chain has chosen an upstream"
    fields = {name: value for name, value in msgspec.json.decode(body).items() if name in _FIELDS}
    try:
        if not fields.get("stream"):
            fields.pop("stream", None)
            content = await client.complete(path, fields, chain.time_left)
            bill.add(content)
            bill.end()
            await bill.close()
            return json_response(content)
        options = fields.get("stream_options") or {}
        fields["stream_options"] = {"include_usage": True}  # of what the key is charged for
        contents = client.stream(path, fields, chain.time_left)
        first = await anext(contents, None)
    except BaseException:
        await bill.close()
        raise
    frames = _frames(first, contents, bill, bool(options.get("include_usage")), state)

    async def close() -> None:
        await contents.aclose()
        await bill.close()

    return EventStream(frames, close)


async def _frames(
    first: dict[str, Any] | None,
    contents: AsyncGenerator[dict[str, Any], None],
    bill: Bill,
    has_usage: bool,
    state: MutableMapping[str, Any],
) -> AsyncGenerator[bytes, None]:
    """The upstream's chunks in this server's framing; a failure is the last event."""
    try:
        if first is not None:
            bill.add(first)
            if first["choices"] or has_usage:
                yield data_frame(first)
        async for content in contents:
            bill.add(content)
            if content["choices"] or has_usage:
                yield data_frame(content)
        bill.end()
    except EngineError as error:  # the status is sent already
        bill.fail()
        state["has_failed"] = True
        yield data_frame(error_of(error)[1])
    yield DONE
