"""What the checks demand of a field beyond its type, in the keywords of JSON Schema.

The numbers are those that the checks read (`sampling_params.RANGES`, the operator's
`RequestLimits`, the size of the vocabulary); which field they belong to stands here, and the
tests try every bound from both sides. `openapi` writes them into the schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quickstep.sampling_params import PRESETS, RANGES
from quickstep.server import anthropic_schema, responses_schema, schemas
from quickstep.server.embedding_schema import EmbeddingRequest
from quickstep.server.options import RequestLimits
from quickstep.server.responses import INCLUDES
from quickstep.server.schemas_files import BatchRequest
from quickstep.server.schemas_llama_cpp import LlamaCompletionRequest
from quickstep.server.schemas_tokens import DetokenizeRequest
from quickstep.server.tools import FUNCTION_NAME

__all__ = ["Keywords", "SchemaFacts", "bounds_of"]

Keywords = Mapping[str, Any]

_LOGIT_BIAS = 100.0
_METADATA_KEY_CHARS = 64
_METADATA_VALUE_CHARS = 512


@dataclass(frozen=True, slots=True)
class SchemaFacts:
    """What the document says of one server. `vocab_size` None leaves token ids open."""

    limits: RequestLimits = field(default_factory=RequestLimits)
    vocab_size: int | None = None
    model_names: tuple[str, ...] = ()


def bounds_of(schema: type[msgspec.Struct], facts: SchemaFacts) -> dict[str, Keywords]:
    """The keywords of every bounded field of `schema`, inherited ones included."""
    known = _bounds(facts)
    found: dict[str, Keywords] = {}
    for parent in reversed(schema.__mro__):
        found |= known.get(parent, {})
    return found


def _bounds(facts: SchemaFacts) -> Mapping[type, Mapping[str, Keywords]]:
    limits = facts.limits
    label = {"maxLength": limits.label_chars}
    function_name = {"name": {"pattern": f"^(?:{FUNCTION_NAME.pattern})$"}}
    metadata = {
        "maxProperties": limits.metadata,
        "propertyNames": {"maxLength": _METADATA_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": _METADATA_VALUE_CHARS},
    }
    shared = schemas.SamplingFields.__struct_fields__
    return {
        schemas.SamplingFields: {
            **{name: _range(name) for name in RANGES if name in shared},
            **_of_sampling(facts),
            "user": label,
            "cache_salt": label,
        },
        schemas.ChoiceFields: {
            "prompt_logprobs": {**_range("prompt_logprobs"), "maximum": limits.logprobs},
        },
        EmbeddingRequest: {
            "input": {"anyOf": _prompts(facts)},
            "dimensions": {"minimum": 1},
            "user": label,
            "cache_salt": label,
        },
        BatchRequest: {"metadata": metadata},
        DetokenizeRequest: {
            "tokens": {"maxItems": limits.detokenized, "items": _token_id(facts)},
        },
        LlamaCompletionRequest: {
            **{
                name: _range(name)
                for name in ("top_k", "min_p", "presence_penalty", "frequency_penalty")
            },
            "temperature": _range("temperature"),
            "stop": _stops(limits),
            "n_probs": {**_range("logprobs"), "maximum": limits.logprobs},
            "n_cmpl": {**_range("n"), "maximum": limits.n},
        },
        schemas.CompletionRequest: {
            "prompt": {"anyOf": _prompts(facts)},
            "logprobs": {**_range("logprobs"), "maximum": limits.logprobs},
        },
        schemas.ChatRequest: {
            "messages": {"minItems": 1},
            "max_completion_tokens": _range("max_tokens"),
            "top_logprobs": {**_range("logprobs"), "maximum": limits.logprobs},
            "metadata": metadata,
            "safety_identifier": label,
            "prompt_cache_key": label,
            "tools": {"maxItems": limits.tools},
            "tool_choice": {"anyOf": _TOOL_CHOICES},
        },
        responses_schema.ResponsesRequest: {
            "max_output_tokens": {**_range("max_tokens"), "minimum": 1},
            "max_tool_calls": {"minimum": 1},
            "top_logprobs": {**_range("logprobs"), "maximum": limits.logprobs},
            "metadata": metadata,
            "safety_identifier": label,
            "prompt_cache_key": label,
            "tools": {"maxItems": limits.tools},
            "input": {"minItems": 1},
            "include": {"items": {"enum": list(INCLUDES)}},
        },
        anthropic_schema.CountTokensRequest: {
            "messages": {"minItems": 1},
            "tools": {"maxItems": limits.tools},
        },
        anthropic_schema.MessagesRequest: {
            "max_tokens": {**_range("max_tokens"), "minimum": 1},
            "temperature": {"minimum": 0, "maximum": 1},
            "top_k": _range("top_k"),
            "top_p": {"exclusiveMinimum": 0, "maximum": 1},
            "stop_sequences": _stops(limits),
        },
        anthropic_schema.RequestMetadata: {"user_id": label},
        anthropic_schema.CustomToolSpec: function_name,
        responses_schema.FunctionToolSpec: function_name,
        schemas.FunctionSpec: function_name,
    }


def _token_id(facts: SchemaFacts) -> Keywords:
    lowest = {"type": "integer", "minimum": 0}
    return lowest if facts.vocab_size is None else {**lowest, "maximum": facts.vocab_size - 1}


def _prompts(facts: SchemaFacts) -> list[Keywords]:
    """A text, one prompt's token ids, or a list of either."""
    token_ids = {"type": "array", "items": _token_id(facts), "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": facts.limits.prompts}
    return [
        {"type": "string"},
        {**several, "items": {"type": "string"}},
        token_ids,
        {**several, "items": token_ids},
    ]


def _stops(limits: RequestLimits) -> Keywords:
    text = {"minLength": 1, "maxLength": limits.stop_chars}
    return {**text, "maxItems": limits.stop, "items": {"type": "string", **text}}


def _of_sampling(facts: SchemaFacts) -> dict[str, Keywords]:
    limits = facts.limits
    token_ids = {"maxItems": limits.stop_token_ids, "items": _token_id(facts)}
    return {
        "n": {**_range("n"), "maximum": limits.n},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "typical_p": {"exclusiveMinimum": 0, "maximum": 1},
        "preset": {"enum": list(PRESETS)},
        "timeout_s": {"exclusiveMinimum": 0},
        "bad_words": _texts(limits.bad_words, limits.bad_word_chars),
        "dry_sequence_breakers": _texts(limits.dry_breakers, limits.dry_breaker_chars),
        "logit_bias": {
            "maxProperties": limits.logit_bias,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -_LOGIT_BIAS,
                "maximum": _LOGIT_BIAS,
            },
        },
        "allowed_token_ids": token_ids,
        "stop_token_ids": token_ids,
        "stop": _stops(limits),
    }


_TOOL_CHOICES = [
    {"enum": ["auto", "none", "required"]},
    {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        "required": ["type", "function"],
        "additionalProperties": False,
    },
]


def _texts(most: int, longest: int) -> Keywords:
    text = {"type": "string", "minLength": 1, "maxLength": longest}
    return {"maxItems": most, "items": text}


def _range(name: str) -> Keywords:
    low, high = RANGES[name]
    return {"minimum": low} if high is None else {"minimum": low, "maximum": high}
