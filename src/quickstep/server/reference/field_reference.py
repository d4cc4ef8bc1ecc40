"""What the documentation says of a field beyond its type: what it does, and its bounds.

`reference_of` collects the declarations at the fields (`field_classes`); fields with the names of
`SamplingParams` have its descriptions and bounds. `bounds_of` gives the bounds as keywords of JSON
Schema. The numbers are those that the checks read: the declarations of `SamplingParams`, the
operator's `RequestLimits`, the size of the vocabulary. The tests demand an effect of each field,
and try every bound from both sides; `openapi` writes both into the schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from quickstep.sampling_params import PRESETS, sampling_fields
from quickstep.server.anthropic import request_types as anthropic_schema
from quickstep.server.batches.request_types import BatchRequest
from quickstep.server.fields.field_classes import (
    FieldClass,
    Hint,
    Honoured,
    Note,
    Row,
    declared_effects,
    field_classes,
)
from quickstep.server.fields.sampling_fields import BUDGET_NAMES, SamplingFields
from quickstep.server.fields.shared_fields import FunctionSpec
from quickstep.server.generate.tools import FUNCTION_NAME
from quickstep.server.llama_cpp.request_types import LlamaCompletionRequest
from quickstep.server.ollama import request_types as ollama
from quickstep.server.openai import request_types as schemas
from quickstep.server.openai.request_types import EmbeddingRequest
from quickstep.server.openai.tokenize import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quickstep.server.operate.debug import StepsQuery
from quickstep.server.options import FieldRules, RequestLimits
from quickstep.server.responses import request_types as responses_schema
from quickstep.server.responses.endpoint import INCLUDES, INCLUDES_NOTHING
from quickstep.server.scores.request_types import ClassifyRequest, RerankRequest, ScoreRequest
from quickstep.server.usage.api_keys import PriorityRange

Keywords = Mapping[str, Any]

_LOGIT_BIAS = 100.0
_NAMED_FUNCTION = {"name": {"pattern": f"^(?:{FUNCTION_NAME.pattern})$"}}
_METADATA_KEY_CHARS = 64
_METADATA_VALUE_CHARS = 512


# Fields with a name of `SamplingParams` have its description if they declare no effect.
_SAMPLING_SCHEMAS = (
    SamplingFields,
    LlamaCompletionRequest,
    anthropic_schema.MessagesRequest,
    ollama.OllamaOptions,
)


def reference_of(struct: type[msgspec.Struct]) -> dict[str, Row]:
    """What each field of a schema does, inherited ones included; empty for a response."""
    effects: dict[str, str | Note] = {}
    if issubclass(struct, _SAMPLING_SCHEMAS):
        known = sampling_fields()
        effects |= {
            name: known[name].description for name in struct.__struct_fields__ if name in known
        }
    effects |= declared_effects(struct)
    classes = field_classes(struct)
    rows = {name: _row(effect, classes.get(name)) for name, effect in effects.items()}
    return {**classes, **rows}


def _row(effect: str | Note, declared: FieldClass | None) -> Row:
    if isinstance(effect, Note):
        return effect
    if declared is None:
        return Honoured(effect)
    if isinstance(declared, Hint) and declared.conditional:
        return Honoured(effect, declared)
    return declared  # a schema may refuse what it inherits


def form_refusal(struct: type[msgspec.Struct]) -> str | None:
    """Why this form of a message, a part or a tool is refused; None if it is not."""
    reason: str | None = getattr(struct, "refused_form", None)
    return reason


class SchemaFacts(msgspec.Struct, frozen=True):
    """The bounds and names of one server. `vocab_size` None leaves token ids unbounded."""

    limits: RequestLimits = msgspec.field(default_factory=RequestLimits)
    vocab_size: int | None = None
    model_names: tuple[str, ...] = ()
    field_rules: FieldRules = msgspec.field(default_factory=FieldRules)
    priorities: PriorityRange = msgspec.field(default_factory=PriorityRange)


def bounds_of(schema: type[msgspec.Struct], facts: SchemaFacts) -> dict[str, Keywords]:
    """The keywords of every bounded field of `schema`, inherited ones included."""
    known = _bounds(facts)
    found: dict[str, Keywords] = {}
    for parent in reversed(schema.__mro__):
        found |= known.get(parent, {})
    return found


@lru_cache(maxsize=1)  # a document needs those of one server for each of its schemas
def _bounds(facts: SchemaFacts) -> Mapping[type, Mapping[str, Keywords]]:
    return {
        **_of_openai(facts),
        **_of_responses(facts),
        **_of_messages(facts.limits),
        **_of_llama_cpp(facts),
        **_of_ollama(facts),
        **_of_others(facts),
    }


def _label(limits: RequestLimits) -> Keywords:
    return {"maxLength": limits.label_chars}


def _metadata(limits: RequestLimits) -> Keywords:
    return {
        "maxProperties": limits.metadata,
        "propertyNames": {"maxLength": _METADATA_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": _METADATA_VALUE_CHARS},
    }


def _of_openai(facts: SchemaFacts) -> Mapping[type, Mapping[str, Keywords]]:
    limits = facts.limits
    return {
        SamplingFields: _of_sampling(facts),
        schemas.ChoiceFields: {
            "prompt_logprobs": _num_logprobs(facts),
            "logprob_token_ids": {
                "maxItems": limits.logprob_token_ids,
                "items": _token_id(facts),
            },
            "truncate_prompt_tokens": {"minimum": -1},
        },
        schemas.CompletionRequest: {
            "prompt": {"anyOf": _prompts(facts)},
            "logprobs": _num_logprobs(facts),
            "best_of": {**_range("n"), "maximum": limits.n},
        },
        schemas.ChatRequest: {
            "messages": {"minItems": 1},
            "max_completion_tokens": _range("max_tokens"),
            "top_logprobs": _num_logprobs(facts),
            "metadata": _metadata(limits),
            "safety_identifier": _label(limits),
            "prompt_cache_key": _label(limits),
            "tools": {"maxItems": limits.tools},
            "tool_choice": {"anyOf": _TOOL_CHOICES},
        },
        FunctionSpec: _NAMED_FUNCTION,
    }


def _of_responses(facts: SchemaFacts) -> Mapping[type, Mapping[str, Keywords]]:
    limits = facts.limits
    return {
        responses_schema.ResponsesRequest: {
            "max_output_tokens": {**_range("max_tokens"), "minimum": 1},
            "max_tool_calls": {"minimum": 1},
            "top_logprobs": _num_logprobs(facts),
            "metadata": _metadata(limits),
            "safety_identifier": _label(limits),
            "prompt_cache_key": _label(limits),
            "tools": {"maxItems": limits.tools},
            "input": {"minItems": 1},
            "include": {"items": {"enum": [*INCLUDES, *INCLUDES_NOTHING]}},
        },
        responses_schema.FunctionToolSpec: _NAMED_FUNCTION,
    }


def _of_messages(limits: RequestLimits) -> Mapping[type, Mapping[str, Keywords]]:
    return {
        anthropic_schema.CountTokensRequest: {
            "messages": {"minItems": 1},
            "tools": {"maxItems": limits.tools},
        },
        anthropic_schema.MessagesRequest: {
            "max_tokens": {**_range("max_tokens"), "minimum": 1},
            "temperature": {"minimum": 0, "maximum": 1},
            "top_k": _range("top_k"),
            "top_p": _range("top_p"),
            "stop_sequences": _list_of_texts(limits.stop, limits.stop_chars),
        },
        anthropic_schema.RequestMetadata: {"user_id": _label(limits)},
        anthropic_schema.CustomToolSpec: _NAMED_FUNCTION,
    }


def _of_llama_cpp(facts: SchemaFacts) -> Mapping[type, Mapping[str, Keywords]]:
    limits = facts.limits
    length = {**_range("max_tokens"), "minimum": -1}
    return {
        LlamaCompletionRequest: {
            **_same_names(LlamaCompletionRequest),
            "repeat_penalty": _range("repetition_penalty"),
            "n_predict": length,
            "max_tokens": length,
            "dry_penalty_last_n": {**_range("dry_range"), "minimum": -1},
            "dry_sequence_breakers": _list_of_texts(limits.dry_breakers, limits.dry_breaker_chars),
            "prompt": {"minItems": 1},
            "stop": _texts(limits.stop, limits.stop_chars),
            "n_probs": _num_logprobs(facts),
            "n_cmpl": {**_range("n"), "maximum": limits.n},
        },
    }


def _of_ollama(facts: SchemaFacts) -> Mapping[type, Mapping[str, Keywords]]:
    limits = facts.limits
    return {
        ollama.OllamaOptions: {
            **_same_names(ollama.OllamaOptions),
            "repeat_penalty": _range("repetition_penalty"),
            "num_predict": {**_range("max_tokens"), "minimum": -2},
            "stop": _texts(limits.stop, limits.stop_chars),
        },
        ollama.OllamaGenerateFields: {
            "think": {"enum": ["low", "medium", "high"]},
            "top_logprobs": _num_logprobs(facts),
        },
        ollama.OllamaChatRequest: {"tools": {"maxItems": limits.tools}},
        ollama.OllamaEmbedRequest: {
            "input": {"maxItems": limits.prompts},
            "dimensions": {"minimum": 1},
        },
    }


def _of_others(facts: SchemaFacts) -> Mapping[type, Mapping[str, Keywords]]:
    limits = facts.limits
    return {
        EmbeddingRequest: {
            "input": {"anyOf": _prompts(facts)},
            "dimensions": {"minimum": 1},
            **_of_prompt_runs(facts),
        },
        RerankRequest: {
            "documents": _pairs(limits),
            **_of_prompt_runs(facts),
        },
        ClassifyRequest: {"input": _pairs(limits), **_of_prompt_runs(facts)},
        ScoreRequest: {
            "text_1": {"minItems": 1},  # as many as in text_2, or one
            "text_2": _pairs(limits),
            **_of_prompt_runs(facts),
        },
        BatchRequest: {"metadata": _metadata(limits)},
        StepsQuery: {"last_s": {"minimum": 0}},
        ApplyTemplateRequest: {"messages": {"minItems": 1}},
        TokenizeRequest: {"messages": {"minItems": 1}},
        DetokenizeRequest: {"tokens": {"maxItems": limits.detokenized, "items": _token_id(facts)}},
    }


def _pairs(limits: RequestLimits) -> Keywords:
    return {"minItems": 1, "maxItems": limits.prompts}


def _of_prompt_runs(facts: SchemaFacts) -> Mapping[str, Keywords]:
    """The fields of embeddings, rerank and score."""
    return {
        "timeout_s": {"exclusiveMinimum": 0},
        "priority": _priority(facts),
        "user": _label(facts.limits),
        "cache_salt": _label(facts.limits),
        "truncate_prompt_tokens": {"minimum": -1},
    }


def _priority(facts: SchemaFacts) -> Keywords:
    """A key may have a narrower range than the widest of all."""
    return {"minimum": facts.priorities.low, "maximum": facts.priorities.high}


def _num_logprobs(facts: SchemaFacts) -> Keywords:
    """-1, the complete vocabulary, is for a limit that allows so many."""
    limit, vocab_size = facts.limits.logprobs, facts.vocab_size
    if limit == -1:
        return {**_range("logprobs"), "minimum": -1}
    lowest = {"minimum": -1} if vocab_size is not None and vocab_size <= limit else {}
    return {**_range("logprobs"), **lowest, "maximum": limit}


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


def _texts(most: int, longest: int) -> Keywords:
    """A text or a list of them."""
    return {"minLength": 1, "maxLength": longest, **_list_of_texts(most, longest)}


def _list_of_texts(most: int, longest: int) -> Keywords:
    text = {"type": "string", "minLength": 1, "maxLength": longest}
    return {"maxItems": most, "items": text}


def _of_sampling(facts: SchemaFacts) -> dict[str, Keywords]:
    limits = facts.limits
    token_ids = {"maxItems": limits.stop_token_ids, "items": _token_id(facts)}
    return {
        **_same_names(SamplingFields),
        "n": {**_range("n"), "maximum": limits.n},
        **{name: {**_range("thinking_budget"), "minimum": -1} for name in BUDGET_NAMES},
        "reasoning_budget_message": {"maxLength": limits.budget_message_chars},
        "preset": {"enum": list(PRESETS)},
        "timeout_s": {"exclusiveMinimum": 0},
        "ttft_deadline_ms": {"exclusiveMinimum": 0},
        "retain_s": {"exclusiveMinimum": 0},
        "priority": _priority(facts),
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
        "stop": _texts(limits.stop, limits.stop_chars),
        "bad_words": _list_of_texts(limits.bad_words, limits.bad_word_chars),
        "dry_sequence_breakers": _list_of_texts(limits.dry_breakers, limits.dry_breaker_chars),
        "user": _label(limits),
        "cache_salt": _label(limits),
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


def _same_names(schema: type[msgspec.Struct]) -> dict[str, Keywords]:
    """The bounds of the fields that have the names of `SamplingParams`."""
    known = sampling_fields()
    names = [name for name in schema.__struct_fields__ if name in known]
    return {name: _range(name) for name in names if known[name].bounds is not None}


def _range(name: str) -> Keywords:
    bounds = sampling_fields()[name].bounds
    assert bounds is not None, "the callers name numbers"
    low = {"exclusiveMinimum" if bounds.above else "minimum": bounds.low}
    return low if bounds.high is None else {**low, "maximum": bounds.high}
