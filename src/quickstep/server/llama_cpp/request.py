"""From llama.cpp's `/completion` body to the internal request; unsupported values are refused here.

Two fields have fewer values than llama.cpp's: penalties look back over the complete context
(`repeat_last_n` is -1, or 0 for no penalties), and the order of the samplers is fixed; `samplers`
may omit any of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.server.fields.sampling_fields import SamplingFields
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.generate.prompts import TextPrompt, TokenPrompt
from quickstep.server.generate.sampling import (
    num_alternatives,
    sampling_params,
    token_ids_of,
)
from quickstep.server.llama_cpp.request_types import (
    LlamaCompletionRequest,
    PromptObject,
)
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import bounded
from quickstep.types import Grammar, Request, SamplingParams

# In the order of `SamplingParams`, under llama.cpp's names.
SAMPLERS = ("penalties", "dry", "temperature", "top_k", "typ_p", "top_p", "min_p", "xtc")
_OTHER_NAMES = MappingProxyType(
    {"typical_p": "typ_p", "typical": "typ_p", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p"}
)
# sampler -> the values that switch it off
_OFF: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "penalties": {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        },
        "dry": {"dry_multiplier": 0.0},
        "temperature": {"temperature": 1.0},
        "top_k": {"top_k": 0},
        "typ_p": {"typical_p": 1.0},
        "top_p": {"top_p": 1.0},
        "min_p": {"min_p": 0.0},
        "xtc": {"xtc_probability": 0.0},
    }
)
_SAME_NAME = ("model", "temperature", "top_k", "top_p", "min_p", "stop", "ignore_eos")
_PENALTIES = ("presence_penalty", "frequency_penalty")
# fields with the same name in `SamplingParams`
_OWN = (
    "typical_p",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "xtc_probability",
    "xtc_threshold",
)
_RENAMED = MappingProxyType(
    {
        "repetition_penalty": "repeat_penalty",
        "max_tokens": "n_predict",
        "logprobs": "n_probs",
        "n": "n_cmpl",
        "dry_range": "dry_penalty_last_n",
    }
)
_BANNED = -100.0


def llama_request(fields: LlamaCompletionRequest, model: ServedModel) -> ParsedRequest:
    """The internal request. Raises RequestError that names the client's field."""
    grammar, grammar_field = _grammar(fields)
    return ParsedRequest(
        model=model.name_or_default(fields.model),
        prompts=_prompts(fields, model),
        request=Request(
            sampling=_sampling(fields, grammar, model),
            # a unique salt, so that no cached prefix matches
            cache_salt=secrets.token_hex(8) if fields.cache_prompt is False else "",
        ),
        stream=bool(fields.stream),
        adapter=None if fields.lora is None else model.adapters.mix(fields.lora),
        grammar_field=grammar_field,
    )


def _sampling(
    fields: LlamaCompletionRequest, grammar: Grammar | None, model: ServedModel
) -> SamplingParams:
    n_probs = num_alternatives("n_probs", fields.n_probs, model)
    bounded("n_cmpl", fields.n_cmpl or 1, model.server.limits.n)
    shared = {name: getattr(fields, name) for name in _SAME_NAME}
    shared |= {name: getattr(fields, name) for name in _PENALTIES}
    shared["repetition_penalty"] = fields.repeat_penalty
    shared["seed"] = None if fields.seed == -1 else fields.seed
    shared["n"] = fields.n_cmpl
    shared["repetition_detection"] = fields.repetition_detection
    shared["dry_sequence_breakers"] = fields.dry_sequence_breakers
    own: dict[str, Any] = {
        name: value for name in _OWN if (value := getattr(fields, name)) is not None
    }
    own["logit_bias"] = _logit_bias(fields, model)
    own["logprobs"] = n_probs or None
    own["grammar"] = grammar
    own |= _max_tokens(fields, model)
    length = "n_predict" if fields.max_tokens is None else "max_tokens"
    renamed = {**_RENAMED, "max_tokens": length}
    dry = _dry(fields)
    own |= {name: value for name, value in dry.items() if name != "dry_multiplier"}
    sampling = sampling_params(SamplingFields(**shared), model, own, renamed)
    # switched off last: values without effect are validated, too
    off = dry | switched_off_penalties(fields) | _omitted_samplers(fields, model)
    return replace(sampling, **off)


def _max_tokens(fields: LlamaCompletionRequest, model: ServedModel) -> dict[str, int | None]:
    """`n_predict` or `max_tokens`, which some clients send; -1 and None mean no limit."""
    limit = fields.n_predict if fields.max_tokens is None else fields.max_tokens
    if None not in (fields.n_predict, fields.max_tokens) and fields.n_predict != fields.max_tokens:
        raise RequestError(
            f"n_predict is {fields.n_predict} and max_tokens is {fields.max_tokens}; send one",
            param="max_tokens",
        )
    if limit is None and "max_tokens" in model.engine.default_sampling:
        return {}
    return {"max_tokens": None if limit in (None, -1) else limit}


def _dry(fields: LlamaCompletionRequest) -> dict[str, Any]:
    """How far DRY looks back: -1 for the complete context, 0 for off."""
    own: dict[str, Any] = {}
    if fields.dry_penalty_last_n == 0:
        own["dry_multiplier"] = 0.0
    elif fields.dry_penalty_last_n is not None:
        # values below -1 are refused by the range of `dry_range`
        own["dry_range"] = 0 if fields.dry_penalty_last_n == -1 else fields.dry_penalty_last_n
    return own


class LookBack(Protocol):
    """The penalties of a request, and how far they look back."""

    @property
    def repeat_last_n(self) -> int | None:
        """Tokens; -1 for the complete context, 0 for no penalties."""

    @property
    def repeat_penalty(self) -> float | None:
        """1 is off."""

    @property
    def presence_penalty(self) -> float | None:
        """0 is off."""

    @property
    def frequency_penalty(self) -> float | None:
        """0 is off."""


def switched_off_penalties(fields: LookBack, field: str = "repeat_last_n") -> dict[str, float]:
    """The values that switch the penalties off if they look back over 0 tokens.

    Raises RequestError that names the client's `field` if they look back over a part of the
    context, which is not supported.
    """
    look_back = fields.repeat_last_n
    if look_back == 0:
        return dict(_OFF["penalties"])
    penalised = (
        (fields.repeat_penalty or 1.0) != 1.0 or fields.presence_penalty or fields.frequency_penalty
    )
    if look_back not in (None, -1) and penalised:
        raise RequestError(
            f"{field} is {look_back}, which is not supported: penalties look back over the "
            "whole context (-1) or are off (0)",
            param=field,
        )
    return {}


def _omitted_samplers(fields: LlamaCompletionRequest, model: ServedModel) -> dict[str, float]:
    """The values that switch off the samplers that `samplers` omits. Raises RequestError."""
    if fields.samplers is None:
        return {}
    bounded("samplers", len(fields.samplers), 32, "entries")
    names = [_OTHER_NAMES.get(name, name) for name in fields.samplers]
    unknown = [name for name in names if name not in SAMPLERS]
    if unknown:
        raise RequestError(
            f"samplers holds {unknown[0][:64]!r}, known are {', '.join(SAMPLERS)}",
            param="samplers",
        )
    temperature = fields.temperature
    if temperature is None:
        temperature = model.engine.default_sampling.get("temperature", 1.0)
    # the position of the temperature matters only if it changes more than the argmax
    is_neutral = "temperature" not in names or temperature in (0.0, 1.0)
    order = [name for name in names if not (is_neutral and name == "temperature")]
    if order != sorted(set(order), key=SAMPLERS.index):
        raise RequestError(
            f"samplers is in the order {', '.join(names)}; it is fixed: {', '.join(SAMPLERS)}",
            param="samplers",
        )
    off: dict[str, float] = {}
    for sampler in SAMPLERS:
        if sampler not in names:
            off |= _OFF[sampler]
    return off


def _logit_bias(fields: LlamaCompletionRequest, model: ServedModel) -> dict[int, float]:
    """The bias by token id, from pairs or an object of ids or texts; `false` bans a token."""
    entries = fields.logit_bias or []
    pairs = list(entries.items()) if isinstance(entries, dict) else entries
    bounded("logit_bias", len(pairs), model.server.limits.logit_bias, "entries")
    tokenizer = model.engine.tokenizer
    by_id: dict[int, float] = {}
    for key, value in pairs:
        bias = _bias(key, value)
        if isinstance(entries, dict) and isinstance(key, str) and key.isascii() and key.isdigit():
            key = int(key[:20])
        if isinstance(key, str):
            bounded(
                "logit_bias", len(key), model.server.limits.stop_chars, "characters in one text"
            )
            ids = tokenizer.encode(key, False)
        else:
            ids = [key]
        by_id |= dict.fromkeys(token_ids_of("logit_bias", ids, tokenizer.vocab_size), bias)
    bounded("logit_bias", len(by_id), model.server.limits.logit_bias, "tokens")
    return by_id


def _bias(key: int | str, value: float | bool) -> float:
    if value is True:
        raise RequestError(
            f"logit_bias of {str(key)[:64]!r} is true, it must be a number or false",
            param="logit_bias",
        )
    if value is False:
        return _BANNED
    if not abs(value) <= -_BANNED:
        raise RequestError(
            f"logit_bias of {str(key)[:64]!r} is {value:g}, it must be between -100 and 100",
            param="logit_bias",
        )
    return value


def _grammar(fields: LlamaCompletionRequest) -> tuple[Grammar | None, str]:
    """The grammar that the output must match, and the field that requests it."""
    if fields.grammar and fields.json_schema is not None:
        raise RequestError("grammar and json_schema both constrain the output", param="grammar")
    if fields.json_schema is not None:
        return Grammar.of_json_schema(fields.json_schema), "json_schema"
    if fields.grammar:
        return Grammar.of_gbnf(fields.grammar), "grammar"
    return None, ""


def _prompts(
    fields: LlamaCompletionRequest, model: ServedModel
) -> tuple[TextPrompt | TokenPrompt, ...]:
    """One prompt, or several in a list that contains no number."""
    prompt = fields.prompt
    if not isinstance(prompt, list):
        return (_text(prompt),)
    if not prompt:
        raise RequestError("prompt is an empty list", param="prompt")
    if any(isinstance(part, int) for part in prompt):
        return (_mixed(prompt, model),)
    bounded("prompt", len(prompt), model.server.limits.prompts, "entries")
    return tuple(
        _mixed(item, model) if isinstance(item, list) else _text(item)
        for item in prompt
        if not isinstance(item, int)
    )


def _text(prompt: str | PromptObject) -> TextPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    return TextPrompt(prompt.prompt_string)


def _mixed(parts: list[Any], model: ServedModel) -> TokenPrompt:
    """A prompt of token ids and texts; a text at the start gets the tokens that begin a prompt."""
    tokenizer = model.engine.tokenizer
    ids: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            ids += tokenizer.encode(part, index == 0)
        elif isinstance(part, int):
            ids += token_ids_of("prompt", [part], tokenizer.vocab_size)
        else:
            raise RequestError("prompt mixes token ids with lists of them", param="prompt")
    return TokenPrompt(tuple(ids))
