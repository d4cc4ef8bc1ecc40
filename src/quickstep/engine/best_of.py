"""The best of several sequences of one request: by the mean logprob of their tokens, as OpenAI.

Used with `SamplingParams(n=..., logprobs=...)`; here the best are picked afterwards, by the
server for its field `best_of`, and by whoever has a `RequestOutput`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from quickstep.engine.outputs import RequestOutput
from quickstep.errors import RequestError

__all__ = ["best_indices", "best_of"]


def best_indices(logprobs: Sequence[Sequence[float]], num_kept: int) -> list[int]:
    """Which sequences to keep, best first: equal means in their order, empty sequences last."""

    def mean(index: int) -> float:
        values = logprobs[index]
        return math.fsum(values) / len(values) if values else -math.inf

    return sorted(range(len(logprobs)), key=lambda index: -mean(index))[:num_kept]


def best_of(output: RequestOutput, num_kept: int) -> RequestOutput:
    """The request with its `num_kept` best outputs, best first; indices and metrics stay theirs.

    Raises:
        RequestError: It was not asked for logprobs, or has fewer outputs.
    """
    if not 1 <= num_kept <= len(output.outputs):
        raise RequestError(
            f"best_of keeps {num_kept} of {len(output.outputs)} outputs", param="best_of"
        )
    chosen: list[list[float]] = []
    for one in output.outputs:
        if one.logprobs is None:
            raise RequestError("best_of needs outputs with logprobs", param="logprobs")
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        chosen.append([entry[token_id].logprob for token_id, entry in pairs])
    kept = best_indices(chosen, num_kept)
    return replace(output, outputs=tuple(output.outputs[index] for index in kept))
