"""Requests before they enter an engine: they are checked, and get an id and a seed.

`RequestIntake` belongs to the object that accepts requests from clients: the engine itself, or its
client in the server's process, so that a request is checked before it is sent. `SamplingParams`
checks the ranges of single fields; this module checks what depends on the model. The scheduler
checks the sizes that it knows (`core.scheduler`). Every refusal is a RequestError that names the
field, the value and the limit.
"""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections.abc import Container, Iterable, Sequence

from msgspec import structs

from quickstep.engine.retrieval.card import Retrieval
from quickstep.errors import PromptTooLong, RequestError
from quickstep.types import Pooling, Request, SamplingParams

# seeds stay below 2^53, so that every JSON reader gets them exactly
_SEED_BITS = 53
_LARGEST_PRIORITY = 2**53 - 1


def open_seeds(seed: int | None) -> random.Random:
    """A source of seeds: reproducible for a `seed`, from the system's entropy for None."""
    return random.SystemRandom() if seed is None else random.Random(seed)


def part_id(request_id: str) -> str:
    """An id for one of the engine's requests that a client's request becomes, of which there may be
    several, and which clients may send twice. `""`, for any free id, stays so.
    """
    return f"{request_id}-{secrets.token_hex(4)}" if request_id else ""


class RequestIntake:
    """Checks requests and completes them. `live` contains the ids in use."""

    def __init__(self, seeds: random.Random, live: Container[str]) -> None:
        self._seeds = seeds
        self._live = live
        self._numbers = itertools.count()

    def take(
        self,
        request: Request,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        retrieval: Retrieval,
    ) -> Request:
        """Check a request. Returns it with its id, its seed and the model's end tokens.

        Raises:
            RequestError: The model cannot serve it, or its id is in use.
        """
        check_request(request, vocab_size, max_model_len, eos_token_ids)
        _check_kind(request, retrieval)
        name = request.request_id or self._free_id()
        if name in self._live:
            raise RequestError(f"request_id {name!r} is in use; choose another", param="request_id")
        seed = request.sampling.seed
        return structs.replace(
            request,
            request_id=name,
            seed=self._seeds.getrandbits(_SEED_BITS) if seed is None else seed,
            eos_token_ids=eos_token_ids,
        )

    def _free_id(self) -> str:
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._live)


def check_request(
    request: Request, vocab_size: int, max_model_len: int, eos_token_ids: frozenset[int]
) -> None:
    """Raise RequestError if a model with these sizes and end tokens cannot serve the request."""
    n = request.sampling.n
    _check_numbers(request)
    if request.pooling is not None and n != 1:
        raise RequestError(f"n is {n}, a prompt has one embedding", param="n")
    check_token_ids(request.prompt_token_ids, vocab_size, max_model_len, request.prompt_only)
    _check_sampling(request.sampling, vocab_size, eos_token_ids)
    if request.resumed:
        _check_resumed(request, vocab_size)


def _check_kind(request: Request, retrieval: Retrieval) -> None:
    """Raise RequestError for what this kind of model does not give."""
    if retrieval.text_refusal and request.pooling is None:
        raise RequestError(retrieval.text_refusal, param="model")
    if request.pooling is Pooling.CLASSES and not retrieval.labels:
        raise RequestError("the model has no classification head", param="model")


def _check_numbers(request: Request) -> None:
    """Check what the scheduler computes with: a limit of time and a weight are above 0 and finite,
    a priority is an integer.
    """
    above_0 = {
        "timeout_s": request.timeout_s,
        "ttft_deadline_s": request.ttft_deadline_s,
        "tenant_weight": request.tenant_weight,
    }
    for name, value in above_0.items():
        if value is not None and not 0 < value < math.inf:
            raise RequestError(f"{name} is {value}, it must be above 0 and finite", param=name)
    received_s, priority = request.received_s, request.priority
    if received_s is not None and not math.isfinite(received_s):
        raise RequestError(f"received_s is {received_s}, it must be finite", param="received_s")
    if not isinstance(priority, int) or abs(priority) > _LARGEST_PRIORITY:
        limits = f"from {-_LARGEST_PRIORITY} to {_LARGEST_PRIORITY}"
        raise RequestError(f"priority must be an integer {limits}", param="priority")


def as_token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """A prompt's token ids as a tuple. Raises RequestError if they are no sequence."""
    if not isinstance(ids, Sequence):
        raise RequestError("a prompt is text or a list of integer token ids", param="prompt")
    return tuple(ids)


def check_token_ids(
    ids: tuple[int, ...], vocab_size: int, max_model_len: int, prompt_only: bool = False
) -> None:
    """Raise RequestError for ids outside the vocabulary, or for none or too many of them: one token
    of output has to fit after them, unless `prompt_only`.
    """
    if not ids:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    num_outputs = 0 if prompt_only else 1
    if len(ids) + num_outputs > max_model_len:
        raise PromptTooLong(len(ids), max_model_len, num_outputs=num_outputs)
    if any(type(token_id) is not int for token_id in ids):
        raise RequestError("a prompt is text or a list of integer token ids", param="prompt")
    _check_ids("prompt", ids, vocab_size)


def _check_sampling(
    sampling: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]
) -> None:
    """Check token ids, numbers of logprobs, and that some token can follow."""
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logprob_token_ids", sampling.logprob_token_ids, vocab_size)
    counts = {"logprobs": sampling.logprobs, "prompt_logprobs": sampling.prompt_logprobs}
    for name, num_top in counts.items():
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


def _check_resumed(request: Request, vocab_size: int) -> None:
    """Check what the client already has of a request that another engine accepted. The scheduler
    and the stop strings refuse tokens after an end, the sampler those that a grammar does not take.
    """
    n, problem = request.sampling.n, ""
    indices = [part.index for part in request.resumed]
    if request.is_in_search:
        problem = "belongs to a beam search, which sends its own beams again"
    elif any(not 0 <= index < n for index in indices):
        problem = f"names the sequences {indices}, n is {n}"
    elif len(set(indices)) < len(indices):
        problem = f"names a sequence twice: {indices}"
    elif not request.indices:
        problem = f"says that all {n} sequences have ended; there is nothing to generate"
    elif request.prompt_only and any(part.token_ids for part in request.resumed):
        problem = "holds output tokens, the request generates none"
    elif any(part.num_prompt_logprobs < 0 for part in request.resumed):
        problem = "holds a number of prompt logprobs below 0"
    if problem:
        raise RequestError(f"resumed {problem}", param="resumed")
    for part in request.resumed:
        _check_ids("resumed", part.token_ids, vocab_size)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id!r}, ids go from 0 to {vocab_size - 1}",
                param=param,
            )
