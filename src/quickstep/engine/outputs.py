"""Whole answers, as `LLM.generate` returns them: vLLM's names, and how each was served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quickstep.engine.stream import Delta, Stream
from quickstep.engine.tokenizer import Tokenizer
from quickstep.types import FinishReason, SamplingParams, SequenceTimings, TokenLogprobs

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "collect"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's n sequences.

    Attributes:
        cumulative_logprob: Sum over the tokens; None unless logprobs were asked for.
        logprobs: Per token, the chosen one's and the most likely ones' by token id.
        finish_reason: OpenAI's word: `stop`, `length`, `abort` or `error`.
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


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """How a request was served; the seed reproduces it.

    `sequences` has one entry per output, None for one that the engine lost track of (its own
    failure).
    """

    seed: int
    sequences: tuple[SequenceTimings | None, ...]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first sequence took from the prefix cache."""
        first = self.sequences[0]
        return 0 if first is None else first.num_cached_tokens


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. `prompt` is None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics


class _Collected:
    """One sequence's deltas so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.last = delta


async def collect(
    stream: Stream, prompt: str | None, sampling: SamplingParams, tokenizer: Tokenizer
) -> RequestOutput:
    """Read a stream to its end."""
    sequences = [_Collected() for _ in range(sampling.n)]
    async for delta in stream:
        sequences[delta.index].add(delta)
    with_logprobs = sampling.logprobs is not None
    outputs = tuple(_completion(one, tokenizer, with_logprobs) for one in sequences)
    timings = tuple(one.last.timings if one.last else None for one in sequences)
    return RequestOutput(
        request_id=stream.request_id,
        prompt=prompt,
        prompt_token_ids=stream.prompt_token_ids,
        outputs=outputs,
        finished=True,
        metrics=RequestMetrics(stream.seed, timings),
    )


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
        cumulative_logprob=math.fsum(one.logprob for one in logprobs) if with_logprobs else None,
        logprobs=_by_token(logprobs, tokenizer) if with_logprobs else None,
        finish_reason=last.finish_reason.openai,
        stop_reason=last.stop_reason,
        ended_by=last.finish_reason,
        error=last.error,
    )


def _by_token(
    logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> tuple[dict[int, Logprob], ...]:
    def entry(token_id: int, logprob: float, rank: int) -> Logprob:
        decoded = tokenizer.token_bytes(token_id).decode(errors="replace")
        return Logprob(logprob, rank, decoded)

    positions = []
    for one in logprobs:
        top = {
            token_id: entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(one.top, 1)
        }
        chosen = {one.token_id: entry(one.token_id, one.logprob, one.rank)}
        positions.append(chosen | top | chosen)
    return tuple(positions)
