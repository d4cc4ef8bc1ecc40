"""One request followed from its submission to its end, with the times of its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from quickstep.bench.subject import Subject
from quickstep.errors import EngineError
from quickstep.sampling_params import SamplingParams
from quickstep.types import FinishReason

__all__ = ["Life", "Mark", "follow"]


class Mark(msgspec.Struct, frozen=True):
    """Tokens arrived at the reader: when, and how long the kernels had run by then."""

    at_s: float
    kernel_s: float
    num_tokens: int


class Life(msgspec.Struct, frozen=True):
    """A finished request."""

    submitted_s: float
    marks: tuple[Mark, ...]

    @property
    def time_to_first_token_s(self) -> float:
        """From submission to the first token."""
        return self.marks[0].at_s - self.submitted_s

    @property
    def time_per_output_token_s(self) -> float:
        """(end - first token) / (output tokens - 1); 0 for a single token."""
        num_gaps = self.num_tokens - 1
        return (self.marks[-1].at_s - self.marks[0].at_s) / num_gaps if num_gaps else 0.0

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(mark.num_tokens for mark in self.marks)


async def follow(subject: Subject, prompt: Sequence[int], num_outputs: int) -> Life:
    """Submit a greedy request that gives exactly `num_outputs` tokens, and read it to its end.

    Raises:
        EngineError: It failed.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    submitted_s = time.perf_counter()
    marks = []
    async with subject.engine.generate(prompt, sampling) as stream:
        async for delta in stream:
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineError(f"a request of the benchmark failed: {delta.error}")
            if delta.token_ids:
                marks.append(Mark(time.perf_counter(), subject.kernel_s(), len(delta.token_ids)))
    life = Life(submitted_s, tuple(marks))
    if life.num_tokens != num_outputs:
        raise EngineError(f"a request gave {life.num_tokens} tokens, {num_outputs} were expected")
    return life
