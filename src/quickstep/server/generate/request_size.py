"""How much work one request may be, before any of it is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from quickstep.errors import RequestError
from quickstep.server.options import RequestLimits
from quickstep.types import SamplingParams

__all__ = ["check_num_sequences", "check_num_tokens"]


def check_num_sequences(num_prompts: int, num_each: int, limits: RequestLimits, field: str) -> None:
    """Prompts times sequences of each. Raises RequestError that names `field`."""
    if num_prompts * num_each > limits.sequences:
        raise RequestError(
            f"{field} is {num_each} for {num_prompts} prompts, which makes "
            f"{num_prompts * num_each} sequences; the limit is {limits.sequences} per request",
            param=field,
        )


def check_num_tokens(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    max_model_len: int,
    limits: RequestLimits,
) -> None:
    """Tokens of the prompts, and all that may be generated. Raises RequestError."""
    num_tokens = 0
    for prompt in prompts:
        room = max(0, max_model_len - len(prompt))
        num_outputs = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        num_tokens += len(prompt) + sampling.n * num_outputs
    if num_tokens > limits.tokens:
        raise RequestError(
            f"the request may take {num_tokens} tokens with its prompts and n times max_tokens, "
            f"the limit is {limits.tokens}; lower n or max_tokens, or send fewer prompts",
            param="max_tokens" if sampling.n == 1 else "n",
        )
