"""A stream's sequences put together, with what they took: what `generate`, `chat` and `demo` print.

The figures come from the engine's own timings of each sequence, the ones in its step log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from quickstep.core.sequence import sequence_seed
from quickstep.errors import EngineError
from quickstep.types import FinishReason, SequenceTimings

if TYPE_CHECKING:
    from quickstep.engine.stream import Stream

__all__ = ["Answer", "collect"]


class Answer(msgspec.Struct):
    """One finished sequence. `seed` alone reproduces it."""

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    timings: SequenceTimings | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        """Arrival to first token."""
        timings = self.timings
        if timings is None or timings.first_token_s is None:
            return None
        return timings.first_token_s - timings.arrival_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """(end - first token) / (tokens - 1); None below two tokens."""
        timings = self.timings
        if timings is None or timings.first_token_s is None or timings.num_output_tokens < 2:
            return None
        span = timings.finished_s - timings.first_token_s
        return span / (timings.num_output_tokens - 1)

    def as_json(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        timings = self.timings
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value if self.finish_reason else None,
            "seed": self.seed,
            "num_cached_tokens": timings.num_cached_tokens if timings else 0,
            "num_blocks": timings.num_blocks if timings else 0,
            "time_to_first_token_s": self.time_to_first_token_s,
            "time_per_output_token_s": self.time_per_output_token_s,
            "queue_s": timings.queue_s if timings else None,
            "device_s": timings.device_s if timings else None,
        }


async def collect(
    stream: Stream, n: int, write: Callable[[str], None] | None = None
) -> list[Answer]:
    """Read a stream to its end, passing text on as it comes. Raises EngineError if it failed."""
    answers = [Answer(index, sequence_seed(stream.seed, index)) for index in range(n)]
    async with stream:
        async for delta in stream:
            answer = answers[delta.index]
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.finish_reason = delta.finish_reason
            answer.timings = delta.timings or answer.timings
            if write is not None and delta.text:
                write(delta.text)
            if delta.finish_reason is not None and delta.finish_reason.is_failure:
                raise EngineError(delta.error or "the model failed on this request")
    return answers
