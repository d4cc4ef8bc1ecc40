"""What the engine refuses before a request reaches the scheduler.

Ranges of single fields are `SamplingParams`' own business; here stands what depends on the model.
Every refusal is a RequestError that names the field, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quickstep.errors import PromptTooLong, RequestError
from quickstep.types import Pooling, SamplingParams

__all__ = ["check_deadline", "check_pooling", "check_sampling", "check_token_ids"]


def check_token_ids(
    ids: Sequence[int], vocab_size: int, max_model_len: int, prompt_only: bool = False
) -> tuple[int, ...]:
    """A prompt's token ids, checked: integers in the vocabulary, some, and not too many.

    Behind a prompt there is room for one token of output, unless `prompt_only`.
    """
    if not isinstance(ids, Sequence):
        raise RequestError("a prompt is text or a list of integer token ids", param="prompt")
    if not ids:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    num_outputs = 0 if prompt_only else 1
    if len(ids) + num_outputs > max_model_len:
        raise PromptTooLong(len(ids), max_model_len, num_outputs=num_outputs)
    if any(type(token_id) is not int for token_id in ids):
        raise RequestError("a prompt is text or a list of integer token ids", param="prompt")
    _check_ids("prompt", ids, vocab_size)
    return tuple(ids)


def check_sampling(
    sampling: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]
) -> None:
    """Token ids are in the vocabulary, logprobs no more than tokens, and some token can follow."""
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logprob_token_ids", sampling.logprob_token_ids, vocab_size)
    asked = {"logprobs": sampling.logprobs, "prompt_logprobs": sampling.prompt_logprobs}
    for name, num_top in asked.items():
        if num_top is not None and num_top > vocab_size:
            raise RequestError(
                f"{name} is {num_top}, the vocabulary has {vocab_size} tokens", param=name
            )
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
    if (
        sampling.min_tokens
        and sampling.allowed_token_ids
        and ends.issuperset(sampling.allowed_token_ids)
    ):
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, but allowed_token_ids has only tokens that end "
            "the output; allow another token",
            param="allowed_token_ids",
        )


def check_deadline(deadline_s: float | None) -> None:
    """A deadline is in the future."""
    if deadline_s is not None and not deadline_s > 0:
        raise RequestError(f"deadline_s is {deadline_s}, it must be above 0", param="deadline_s")


def check_pooling(pooling: Pooling | None, sampling: SamplingParams) -> None:
    """A prompt has one embedding."""
    if pooling is not None and sampling.n != 1:
        raise RequestError(f"n is {sampling.n}, a prompt has one embedding", param="n")


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id!r}, ids go from 0 to {vocab_size - 1}",
                param=param,
            )
