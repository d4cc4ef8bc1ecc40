"""Complete answers, as `LLM.generate` returns them: vLLM's names, and how each was served.

`best_of` picks the best of a request's sequences, as OpenAI's field of that name does.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from quickstep.engine.beam_search import Hypothesis
from quickstep.engine.stream import Stream
from quickstep.errors import EngineError, RequestError
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Delta, FinishReason, SamplingParams, SequenceTimings, TokenLogprobs


class Logprob(msgspec.Struct, frozen=True):
    """One token's natural-log probability; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionOutput(msgspec.Struct, frozen=True):
    """One of a request's n sequences.

    Attributes:
        cumulative_logprob: Sum over the tokens; None unless logprobs were requested.
        logprobs: Per token, the chosen one's and the most likely ones' by token id.
        finish_reason: OpenAI's name: `stop`, `length`, `abort` or `error`.
        stop_reason: The stop string or stop token that ended it, else None.
        ended_by: The exact reason.
        error: Why, when it ended with an error.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str
    stop_reason: int | str | None
    ended_by: FinishReason
    error: str = ""


class RequestMetrics(msgspec.Struct, frozen=True):
    """How a request was served; the seed reproduces it.

    `sequences` has one entry per output, None for one that the engine's own failure ended.
    """

    seed: int
    sequences: tuple[SequenceTimings | None, ...]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first sequence took from the prefix cache."""
        first = self.sequences[0]
        return 0 if first is None else first.num_cached_tokens


class RequestOutput(msgspec.Struct, frozen=True):
    """A finished request. `prompt` is None if the prompt was token ids.

    `prompt_logprobs` has an entry per prompt token, None for the first; None if not requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None


class BeamSearchSequence(msgspec.Struct, frozen=True):
    """A hypothesis, best first in its output. As vLLM's, `tokens` and `text` begin with the prompt.

    Hypotheses are ranked by `score`; `logprobs` are those of the generated tokens.
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, Logprob], ...]
    cum_logprob: float
    finish_reason: str
    stop_reason: int | str | None
    score: float
    output_token_ids: tuple[int, ...]


class BeamSearchOutput(msgspec.Struct, frozen=True):
    """The `beam_width` hypotheses of a prompt."""

    sequences: tuple[BeamSearchSequence, ...]


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """A vector of length 1, as float32 values."""

    embedding: tuple[float, ...]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct, frozen=True):
    """A prompt's embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    finished: bool


class ScoringOutput(msgspec.Struct, frozen=True):
    """How well a document answers a query: from 0 to 1, or a cosine from -1 to 1."""

    score: float


class ScoringRequestOutput(msgspec.Struct, frozen=True):
    """The score of one pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    finished: bool


class ClassificationOutput(msgspec.Struct, frozen=True):
    """The probabilities of the classes, which `label` is the likeliest of."""

    probs: tuple[float, ...]
    label: str

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


class ClassificationRequestOutput(msgspec.Struct, frozen=True):
    """The classes of one text."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    finished: bool


class RerankOutput(msgspec.Struct, frozen=True):
    """A document of `LLM.rerank`, by its index."""

    index: int
    relevance_score: float
    document: str


class PromptAnswer(msgspec.Struct, frozen=True):
    """The answer of a request that has only one; `delta` has it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    delta: Delta
    num_cached_tokens: int


class _Collected:
    """One sequence's deltas so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.last = delta


class Readable(Protocol):
    """A request's stream, or one made of several streams (beam search, `best_of`)."""

    @property
    def request_id(self) -> str:
        """The engine's id."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""

    @property
    def seed(self) -> int:
        """The seed of the sampling noise."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate the deltas."""


async def collect(
    stream: Readable, prompt: str | None, sampling: SamplingParams, tokenizer: Tokenizer
) -> RequestOutput:
    """Read a stream to its end and return the complete output."""
    sequences = [_Collected() for _ in range(sampling.n)]
    async for delta in stream:
        sequences[delta.index].add(delta)
    with_logprobs = sampling.logprobs is not None
    scores = sequences[0].prompt_logprobs
    scored = sampling.prompt_logprobs is not None
    outputs = tuple(_completion(sequence, tokenizer, with_logprobs) for sequence in sequences)
    timings = tuple(sequence.last.timings if sequence.last else None for sequence in sequences)
    return RequestOutput(
        request_id=stream.request_id,
        prompt=prompt,
        prompt_token_ids=stream.prompt_token_ids,
        outputs=outputs,
        finished=True,
        metrics=RequestMetrics(stream.seed, timings),
        prompt_logprobs=_by_token(scores, tokenizer) if scored else None,
    )


async def collect_answer(stream: Stream) -> PromptAnswer:
    """Read the one answer of a prompt: its embedding, or the logprobs of one token.

    Raises:
        EngineError: The model failed, or the engine was stopped.
    """
    last: Delta | None = None
    found: Delta | None = None
    async for delta in stream:
        last = delta
        if delta.embedding is not None or delta.logprobs:
            found = delta
    if last is None or found is None or last.error:
        raise EngineError(last.error if last and last.error else "the prompt was not computed")
    return PromptAnswer(
        request_id=stream.request_id,
        prompt_token_ids=stream.prompt_token_ids,
        delta=found,
        num_cached_tokens=last.timings.num_cached_tokens if last.timings else 0,
    )


async def collect_embedding(stream: Stream) -> EmbeddingRequestOutput:
    """Read the answer of a request with `pooling`. Raises EngineError."""
    answer = await collect_answer(stream)
    return EmbeddingRequestOutput(
        request_id=answer.request_id,
        outputs=EmbeddingOutput(answer.delta.embedding or ()),
        prompt_token_ids=answer.prompt_token_ids,
        num_cached_tokens=answer.num_cached_tokens,
        finished=True,
    )


def beam_search_output(
    prompt_token_ids: Sequence[int], hypotheses: Sequence[Hypothesis], tokenizer: Tokenizer
) -> BeamSearchOutput:
    """The hypotheses of a search, in vLLM's form."""
    sequences = []
    for hypothesis in hypotheses:
        assert hypothesis.reason is not None, "a search ends with ends"
        tokens = (*prompt_token_ids, *hypothesis.token_ids)
        sequence = BeamSearchSequence(
            tokens=tokens,
            text=tokenizer.decode(tokens),
            logprobs=tuple(ranked_logprobs(token, tokenizer) for token in hypothesis.logprobs),
            cum_logprob=hypothesis.total,
            finish_reason=hypothesis.reason.openai,
            stop_reason=None,
            score=hypothesis.score,
            output_token_ids=hypothesis.token_ids,
        )
        sequences.append(sequence)
    return BeamSearchOutput(tuple(sequences))


def _completion(
    collected: _Collected, tokenizer: Tokenizer, with_logprobs: bool
) -> CompletionOutput:
    last = collected.last
    assert last is not None and last.finish_reason is not None, "a stream ends with an end"
    logprobs = collected.logprobs
    return CompletionOutput(
        index=last.index,
        text="".join(collected.text),
        token_ids=tuple(collected.token_ids),
        cumulative_logprob=math.fsum(logprob.logprob for logprob in logprobs)
        if with_logprobs
        else None,
        logprobs=tuple(ranked_logprobs(logprob, tokenizer) for logprob in logprobs)
        if with_logprobs
        else None,
        finish_reason=last.finish_reason.openai,
        stop_reason=last.stop_reason,
        ended_by=last.finish_reason,
        error=last.error,
    )


def _by_token(
    logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer
) -> tuple[dict[int, Logprob] | None, ...]:
    return tuple(
        None if logprob is None else ranked_logprobs(logprob, tokenizer) for logprob in logprobs
    )


def ranked_logprobs(one: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """By token id: the token itself, then the most likely ones."""

    def entry(token_id: int, logprob: float, rank: int) -> Logprob:
        decoded = tokenizer.token_bytes(token_id).decode(errors="replace")
        return Logprob(logprob, rank, decoded)

    chosen = {one.token_id: entry(one.token_id, one.logprob, one.rank)}
    top = {
        token_id: entry(token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(one.top, 1)
    }
    return chosen | top | chosen


def best_indices(logprobs: Sequence[Sequence[float]], num_kept: int) -> list[int]:
    """The sequences with the best mean logprob, best first: equal means in their order, empty
    sequences last.
    """

    def mean(index: int) -> float:
        values = logprobs[index]
        return math.fsum(values) / len(values) if values else -math.inf

    return sorted(range(len(logprobs)), key=lambda index: -mean(index))[:num_kept]


def best_of(output: RequestOutput, num_kept: int) -> RequestOutput:
    """The request with its `num_kept` best outputs, best first; indices and metrics stay theirs.

    Raises:
        RequestError: It has no logprobs, or fewer outputs.
    """
    if not 1 <= num_kept <= len(output.outputs):
        raise RequestError(
            f"best_of keeps {num_kept} of {len(output.outputs)} outputs", param="best_of"
        )
    chosen: list[list[float]] = []
    for sequence in output.outputs:
        if sequence.logprobs is None:
            raise RequestError("best_of needs outputs with logprobs", param="logprobs")
        pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
        chosen.append([entry[token_id].logprob for token_id, entry in pairs])
    kept = best_indices(chosen, num_kept)
    return replace(output, outputs=tuple(output.outputs[index] for index in kept))
