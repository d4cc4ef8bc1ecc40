"""From the request schema's sampling fields to bounded, frozen `SamplingParams`.

The client's field overrides its preset, and the preset overrides the checkpoint's own values.

`SamplingParams` checks the ranges of its own fields. This module checks the bounds of the HTTP API
(how many stops, how many choices) and translates the names that differ between the two.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from quickstep.errors import RequestError
from quickstep.sampling_params import RepetitionDetectionParams, preset_values
from quickstep.server.fields.sampling_fields import BUDGET_NAMES, SamplingFields
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import RequestLimits, bounded
from quickstep.text.tool_calls.formats import check_reasoning_tags
from quickstep.types import Request, RequestClass, SamplingParams

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_range",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
_LOGIT_BIAS_LIMIT = 100.0


def sampling_params(
    fields: SamplingFields,
    model: ServedModel,
    own: Mapping[str, Any],
    renamed: Mapping[str, str],
    usual_budget: int | None = None,
) -> SamplingParams:
    """The request's sampling parameters. Raises RequestError that names the client's field.

    A field that the client leaves out comes from its preset, the checkpoint, or `SamplingParams`.
    `own` overrides all: the fields that the API resolved itself (`max_tokens`, `logprobs`);
    `renamed` maps their names to the client's. `usual_budget` is the reasoning budget of requests
    that give none.
    """
    message = fields.reasoning_budget_message or ""
    most_chars = model.server.limits.budget_message_chars
    bounded("reasoning_budget_message", len(message), most_chars, "characters")
    budget_field, budget = _thinking_budget(fields, usual_budget)
    client_names = {"thinking_budget": budget_field, **renamed}
    try:
        values = _values(fields, model)
        if budget is not None:
            values |= {"thinking_budget": budget, "reasoning_tags": _reasoning_tags(model)}
            if fields.reasoning_budget_message is None:
                message = model.server.answers.budget_message
            values["reasoning_budget_message"] = message
        elif not _has_budget(fields):
            values["reasoning_budget_message"] = message  # which is then refused
        return SamplingParams(**{**values, **own})
    except RequestError as error:
        client_name = client_names.get(error.param or "")
        if error.param is None or client_name is None:
            raise
        message = str(error).replace(error.param, client_name, 1)
        raise RequestError(message, param=client_name, status=error.status) from None


def _values(fields: SamplingFields, model: ServedModel) -> dict[str, Any]:
    """The values of the checkpoint, the preset and the client, within the bounds of the API."""
    limits, vocab_size = model.server.limits, model.engine.tokenizer.vocab_size
    values: dict[str, Any] = {
        **model.engine.default_sampling,
        **preset_values(fields.preset),
        **_texts(fields, limits),
    }
    values |= {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if fields.repetition_detection is not None:
        values["repetition_detection"] = RepetitionDetectionParams(
            **asdict(fields.repetition_detection)
        )
    values["logit_bias"] = _logit_bias(fields.logit_bias or {}, limits, vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(fields, name) or ()
        bounded(name, len(ids), limits.stop_token_ids, "entries")
        values[name] = token_ids_of(name, ids, vocab_size)
    bounded("n", fields.n or 1, limits.n)
    return values


def num_alternatives(name: str, value: int | None, model: ServedModel) -> int | None:
    """How many alternatives per token; as in vLLM, -1 is the complete vocabulary, if the limit
    allows so many. Raises RequestError.
    """
    limit, vocab_size = model.server.limits.logprobs, model.engine.tokenizer.vocab_size
    if value is None:
        return None
    if value == -1:
        if -1 < limit < vocab_size:
            raise RequestError(
                f"{name} is -1, the complete vocabulary of {vocab_size} tokens, and the limit is "
                f"{limit}; send a smaller number, or start the server with --max-logprobs -1",
                param=name,
            )
        return vocab_size
    bounded(name, value, vocab_size if limit == -1 else limit)
    return value


def label(name: str, value: str | None, limits: RequestLimits) -> str:
    """A short text from the client, "" if not set. Raises RequestError if it is too long."""
    bounded(name, len(value or ""), limits.label_chars, "characters")
    return value or ""


def token_ids_of(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as a tuple. Raises RequestError for one that the model does not have."""
    check_token_ids(name, ids, vocab_size)
    return tuple(ids)


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for an id that the model does not have."""
    if not _are_below(vocab_size, ids):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{name} holds token id {wrong}, the model has ids 0 to {vocab_size - 1}", param=name
        )


def _are_below(end: int, ids: Sequence[int]) -> bool:
    """Whether all `ids` are from 0 to `end - 1`: a sixth of the time of `min` and `max`, in which
    no other thread runs.
    """
    import numpy as np  # which the server listens without, and the tokenizer has imported

    try:
        unsigned = array("I", ids)
    except OverflowError:
        return False
    return not unsigned or int(np.frombuffer(unsigned, np.uintc).max()) < end


def engine_request(
    fields: SamplingFields, sampling: SamplingParams, limits: RequestLimits, tenant: str = ""
) -> Request:
    """The request to the engine, without prompt: when it is served, and until when.

    Raises RequestError.
    """
    for name in ("timeout_s", "ttft_deadline_ms", "retain_s"):
        value = getattr(fields, name)
        if value is not None and not 0 < value < math.inf:
            raise RequestError(f"{name} is {value:g}, it must be above 0", param=name)
    ttft_ms = fields.ttft_deadline_ms
    return Request(
        sampling=sampling,
        priority=fields.priority or 0,
        tenant=tenant,
        cache_salt=label("cache_salt", fields.cache_salt, limits),
        timeout_s=fields.timeout_s,
        request_class=RequestClass(fields.request_class or "interactive"),
        ttft_deadline_s=None if ttft_ms is None else ttft_ms / 1e3,
        speculation=fields.speculation is not False,
        retain_s=fields.retain_s or 0.0,
    )


def _texts(fields: SamplingFields, limits: RequestLimits) -> dict[str, tuple[str, ...]]:
    """The fields that hold texts, if the client set them, within their bounds."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    given = {
        "stop": (stop, limits.stop, limits.stop_chars),
        "bad_words": (fields.bad_words, limits.bad_words, limits.bad_word_chars),
        "dry_sequence_breakers": (
            fields.dry_sequence_breakers,
            limits.dry_breakers,
            limits.dry_breaker_chars,
        ),
    }
    texts = {}
    for name, (values, most, longest) in given.items():
        if values is not None:
            bounded(name, len(values), most, "entries")
            bounded(name, max(map(len, values), default=0), longest, "characters in one entry")
            texts[name] = tuple(values)
    return texts


def _has_budget(fields: SamplingFields) -> bool:
    names = ("thinking_budget", *BUDGET_NAMES)
    return any(getattr(fields, name) is not None for name in names)


def _thinking_budget(fields: SamplingFields, usual_budget: int | None) -> tuple[str, int | None]:
    """The client's name of the reasoning budget, and its tokens; None for no limit.

    Raises RequestError if two of its names have different values.
    """
    given = {
        name: value
        for name in ("thinking_budget", *BUDGET_NAMES)
        if (value := getattr(fields, name)) is not None
    }
    if not given:
        return "thinking_budget", usual_budget
    (first, budget), *others = given.items()
    for name, value in others:
        if value != budget:
            raise RequestError(
                f"{first} is {budget} and {name} is {value}; send one of them", param=name
            )
    return first, None if budget == -1 and first in BUDGET_NAMES else budget


def _reasoning_tags(model: ServedModel) -> tuple[str, str]:
    reasoning = model.formats.reasoning
    tags = None if reasoning is None else (reasoning.opening, reasoning.closing)
    return check_reasoning_tags(tags, model.engine.model_name)


def _logit_bias(
    bias: Mapping[str, float], limits: RequestLimits, vocab_size: int
) -> dict[int, float]:
    bounded("logit_bias", len(bias), limits.logit_bias, "entries")
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(
                f"logit_bias has the key {key!r}, keys are token ids", param="logit_bias"
            )
        if not abs(value) <= _LOGIT_BIAS_LIMIT:
            raise RequestError(
                f"logit_bias of {key} is {value:g}, it must be between -100 and 100",
                param="logit_bias",
            )
        by_id[int(key)] = value
    token_ids_of("logit_bias", list(by_id), vocab_size)
    return by_id
