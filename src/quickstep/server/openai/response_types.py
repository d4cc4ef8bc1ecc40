"""The JSON responses of OpenAI's routes, as types: encoded as they are, and read by
`/openapi.json` and the reference.

Fields are in the order of the encoded JSON; UNSET ones are left out. Names beyond OpenAI's are
`seed` (what reproduces the response) and vLLM's.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.generate.generation import TokenCounts
from quickstep.server.generate.timings import RequestTimings
from quickstep.types import PromptProgress, SequenceTimings

FinishReason = Literal["stop", "length", "timeout", "repetition", "tool_calls", "content_filter"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens, those of the reasoning, up to its closing tag."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request. A prompt counts once for its n choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, counts: TokenCounts, num_reasoning_tokens: int | None) -> Usage:
        """The request's tokens so far; those of the reasoning are None for completions."""
        return cls(
            counts.num_prompt_tokens,
            counts.num_output_tokens,
            counts.num_prompt_tokens + counts.num_output_tokens,
            PromptTokensDetails(counts.num_cached_tokens),
            UNSET
            if num_reasoning_tokens is None
            else CompletionTokensDetails(num_reasoning_tokens),
        )


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer with its likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class AnsweredFunction(msgspec.Struct, frozen=True):
    """Name and JSON text of the arguments."""

    name: str
    arguments: str


class AnsweredToolCall(msgspec.Struct, frozen=True):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(msgspec.Struct, frozen=True):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnsweredToolCall] | UnsetType = UNSET


class PromptProgressReport(msgspec.Struct, frozen=True):
    """How much of a prompt is computed, by llama.cpp's names: tokens, of which `cache` were cached
    and `processed` are computed or cached, and the milliseconds since its prefill began.
    """

    total: int
    cache: int
    processed: int
    time_ms: float

    @classmethod
    def of(cls, progress: PromptProgress, num_prompt_tokens: int) -> PromptProgressReport:
        """Of the engine's."""
        time_ms = progress.seconds * 1e3
        return cls(num_prompt_tokens, progress.num_cached, progress.num_processed, time_ms)


class RankedLogprob(msgspec.Struct, frozen=True):
    """A token of the prompt, or an alternative to one."""

    logprob: float
    rank: int | None
    decoded_token: str


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of n messages. A request with its `seed` and n 1 reproduces it."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    finish_reason: FinishReason
    stop_reason: int | str | None
    seed: int


class ResponseMetrics(msgspec.Struct, frozen=True):
    """How long a request took, by vLLM's names; times without the wait before its first step."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None

    @classmethod
    def of(cls, timings: SequenceTimings) -> ResponseMetrics:
        """From the scheduler's clock. What needs a first token is None without one."""
        queue_ms = timings.queue_s * 1e3
        first_s, started_s = timings.first_token_s, timings.first_scheduled_s
        if first_s is None or started_s is None:
            return cls(None, None, queue_ms, None, None)
        generation_s = timings.finished_s - first_s
        num_gaps = timings.num_output_tokens - 1
        return cls(
            time_to_first_token_ms=(first_s - started_s) * 1e3,
            generation_time_ms=generation_s * 1e3,
            queue_time_ms=queue_ms,
            mean_itl_ms=generation_s * 1e3 / num_gaps if num_gaps > 0 else None,
            tokens_per_second=(
                timings.num_output_tokens / generation_s if generation_s > 0 else None
            ),
        )


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's next message."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics | UnsetType = UNSET
    quickstep: RequestTimings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET
    seed: int | None
    metadata: dict[str, str] | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET


class StreamedFunction(msgspec.Struct, frozen=True):
    """A piece of a call."""

    name: str | UnsetType | None = UNSET
    arguments: str | UnsetType | None = UNSET


class StreamedToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the call with this index."""

    index: int
    id: str | UnsetType | None = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: StreamedFunction


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[StreamedToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A delta of one choice; the seed is sent with its finish reason. `draft`, true, says to
    a client that requested timings that the token is an accepted draft.
    """

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    draft: bool | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat's stream; the last one is `[DONE]`."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    seed: int | None
    metadata: dict[str, str] | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    quickstep: RequestTimings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET
    prompt_progress: PromptProgressReport | UnsetType = UNSET


class TextLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's four parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of n texts of a prompt. A request with its `seed` and n 1 reproduces it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET
    finish_reason: FinishReason
    stop_reason: int | str | None
    seed: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Text that continues the prompts."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    metrics: ResponseMetrics | UnsetType = UNSET
    quickstep: RequestTimings | UnsetType = UNSET
    seed: int | None


class TextChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A delta of one choice; the seed is sent with its finish reason. `draft`, true, says to
    a client that requested timings that the token is an accepted draft.
    """

    index: int
    text: str
    logprobs: TextLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    draft: bool | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a completion's stream; the last one is `[DONE]`."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    seed: int | None
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    quickstep: RequestTimings | UnsetType = UNSET
    prompt_progress: PromptProgressReport | UnsetType = UNSET


class Embedding(msgspec.Struct, frozen=True):
    """A vector of length 1: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """The answer, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RopeScaling(msgspec.Struct, frozen=True):
    """As in a checkpoint's `config.json`."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int


class ModelCardStatus(msgspec.Struct, frozen=True):
    """Where one of several models is; `value` is llama.cpp's word for `state`. `failure` is why it
    could not be loaded.
    """

    value: Literal["unloaded", "loading", "loaded"]
    state: Literal["absent", "loading", "ready", "asleep", "draining", "failed"]
    size_bytes: int
    is_pinned: bool
    num_waiting: int
    failed: bool
    failure: str | None


class ModelCard(msgspec.Struct, frozen=True):
    """A served name. `root` is the engine's model, `max_model_len` its context in tokens;
    `rope_scaling` how positions are scaled where that is beyond the model's own limit. A server
    with several models reports where each is and what it takes in memory; the context of one that
    was never loaded is null.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    rope_scaling: RopeScaling | None
    status: ModelCardStatus | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True):
    """All names that are served."""

    object: Literal["list"]
    data: list[ModelCard]
