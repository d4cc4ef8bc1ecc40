"""Every field of every request schema, nested ones included, each with a small body around it.

The bodies are made from the types alone; `EXAMPLES` holds what a type cannot tell.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec
from fake_engine import FakeEngine

from quickstep.server.anthropic.request_types import AssistantTurn, CountTokensRequest
from quickstep.server.batches.request_types import BatchRequest, ExpiresAfter
from quickstep.server.fields import sampling_fields
from quickstep.server.fields.field_classes import RefusedField
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.ollama import request_types as ollama
from quickstep.server.openai import request_types as schemas
from quickstep.server.openai.tokenize import TokenizeRequest
from quickstep.server.operate.metrics import ServerMetrics
from quickstep.server.operate.models import ModelToChange
from quickstep.server.options import ServerOptions
from quickstep.server.reference.field_reference import form_refusal, reference_of
from quickstep.server.reference.openapi import branches, field_types, parts_of
from quickstep.server.responses.request_types import (
    FunctionCallItem,
    ResponsesRequest,
    ResponsesStreamOptions,
)
from quickstep.server.routes import api_routes
from quickstep.server.scores.request_types import RerankRequest, ScoreRequest

Struct = type[msgspec.Struct]
Keys = tuple[str | int, ...]

# What a small body has beside its required fields, or in place of a plain value.
EXAMPLES: dict[Struct, dict[str, Any]] = {
    CountTokensRequest: {"model": "fake"},
    ResponsesRequest: {"input": "a"},
    BatchRequest: {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    ExpiresAfter: {"seconds": 3600},
    RerankRequest: {"documents": ["long one", "b"]},
    ScoreRequest: {"text_1": "a", "text_2": "long one"},
    TokenizeRequest: {"messages": [{"role": "user", "content": "a"}]},
    FunctionCallItem: {"arguments": "{}"},
    sampling_fields.JsonSchema: {"schema": {"type": "array"}},
    sampling_fields.StructuredOutputs: {"regex": "a"},
    sampling_fields.RepetitionDetection: {"max_pattern_size": 8, "min_count": 2},
    schemas.AssistantMessage: {"content": "a"},
    schemas.CalledFunction: {"arguments": "{}"},
    ollama.OllamaModelFields: {"model": "fake"},
    ollama.OllamaGenerateFields: {"stream": False},
    ollama.OllamaChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    ollama.OllamaGenerateRequest: {"prompt": "a"},
    ollama.OllamaShowRequest: {"model": "fake"},
    ModelToChange: {"model": "fake"},
    ollama.OllamaMessage: {"content": "a"},
}
# What has to stand behind it in a list.
BEHIND: dict[Struct, list[Any]] = {AssistantTurn: [{"role": "user", "content": "a"}]}
# What the body has to have around an optional struct.
AROUND: dict[Struct, dict[str, Any]] = {
    sampling_fields.StreamOptions: {"stream": True},
    ResponsesStreamOptions: {"stream": True},
}
# Or around a plain field.
BESIDE: dict[tuple[Struct, str], dict[str, Any]] = {
    (schemas.ChatRequest, "top_logprobs"): {"logprobs": True},
    (schemas.ChatRequest, "logprob_token_ids"): {"logprobs": True},
    (schemas.CompletionRequest, "logprob_token_ids"): {"logprobs": 1},
    (schemas.ChatRequest, "max_tokens"): {"prompt_logprobs": 0},
    (schemas.ChatRequest, "max_completion_tokens"): {"prompt_logprobs": 0},
    (schemas.CompletionRequest, "max_tokens"): {"prompt_logprobs": 0},
    (TokenizeRequest, "prompt"): {"messages": None},
    (TokenizeRequest, "content"): {"messages": None},
    **{
        (TokenizeRequest, name): {"messages": None, "content": "a"}
        for name in ("add_special", "parse_special", "with_pieces")
    },
    (ResponsesRequest, "top_logprobs"): {"include": ["message.output_text.logprobs"]},
    (ollama.OllamaChatRequest, "top_logprobs"): {"logprobs": True},
    (ollama.OllamaGenerateRequest, "top_logprobs"): {"logprobs": True},
    (schemas.CompletionRequest, "min_tokens"): {"max_tokens": 2**31 - 1},
    **{
        (struct, "reasoning_budget_message"): {"thinking_budget": 7}
        for struct in (schemas.ChatRequest, schemas.CompletionRequest, ResponsesRequest)
    },
}


@dataclass(frozen=True)
class Place:
    """A field at `keys` in a body that holds all structs on the way to it."""

    route: ApiRoute
    struct: Struct
    name: str
    keys: Keys
    body: dict[str, Any]

    @property
    def path(self) -> str:
        """As errors name it: `messages[0].content`."""
        parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys]
        return "".join(parts).removeprefix(".")

    @property
    def declared(self) -> Any:
        """Its type."""
        return field_types(self.struct)[self.name]

    @property
    def is_required(self) -> bool:
        """Whether null is wrong."""
        return type(None) not in branches(self.declared) and self.declared is not Any

    def with_value(self, value: Any) -> dict[str, Any]:
        """The body with `value` in this field."""
        body = copy.deepcopy(self.body)
        target: Any = body
        for key in self.keys[:-1]:
            target = target[key]
        target[self.keys[-1]] = value
        return body

    def without(self) -> dict[str, Any]:
        """The body without this field."""
        body = self.with_value(None)
        target: Any = body
        for key in self.keys[:-1]:
            target = target[key]
        del target[self.keys[-1]]
        return body

    def __str__(self) -> str:
        return f"{self.route.path}:{self.path}:{self.struct.__name__}"


def url_of(path: str) -> str:
    """A URL of a route, without those parameters of its path that a body goes with."""
    return {"/slots/{id_slot}": "/slots/0?action=restore"}.get(path, path)


def json_routes() -> list[ApiRoute]:
    """The routes that take a JSON body."""
    engine, options = FakeEngine(), ServerOptions()
    models = ModelRegistry.of_one(engine, options)
    routes = api_routes(models, ServerMetrics(models, options.metrics), options)
    return [
        route
        for route in routes
        if route.request and route.request_type.endswith("json") and not route.takes_list
    ]


def places() -> Iterator[Place]:
    """Every field of every route's body."""
    for route in json_routes():
        assert route.request is not None
        body = minimal(route.request)
        yield from _within(route, route.request, (), body, frozenset())


def _within(
    route: ApiRoute, struct: Struct, at: Keys, body: dict[str, Any], seen: frozenset[Struct]
) -> Iterator[Place]:
    for name, declared in field_types(struct).items():
        keys = (*at, name)
        yield Place(route, struct, name, keys, {**body, **BESIDE.get((struct, name), {})})
        if isinstance(reference_of(struct).get(name), RefusedField):
            continue
        parts = [(part, (0,)) for part in parts_of(struct).get(name, ())]
        for inner, more in (*structs_in(declared), *parts):
            if inner in seen or form_refusal(inner) is not None:
                continue
            value = minimal(inner)
            listed = [value, *BEHIND.get(inner, [])]
            place = Place(route, struct, name, keys, {**body, **AROUND.get(inner, {})})
            around = place.with_value(listed if more else value)
            yield from _within(route, inner, (*keys, *more), around, seen | {inner})


def structs_in(declared: Any) -> Iterator[tuple[Struct, Keys]]:
    """The structs that may stand in a field, with the way from the field to each."""
    for branch in branches(declared):
        if get_origin(branch) is list:
            for item in _structs(get_args(branch)[0]):
                yield item, (0,)
        for struct in _structs(branch):
            yield struct, ()


def _structs(declared: Any) -> Iterator[Struct]:
    for branch in branches(declared):
        if isinstance(branch, type) and issubclass(branch, msgspec.Struct):
            yield branch


def minimal(declared: Any) -> Any:
    """A small value of a type."""
    first = branches(declared)[0]
    if isinstance(first, type) and issubclass(first, msgspec.Struct):
        return _minimal_struct(first)
    if get_origin(first) is list:
        return [minimal(get_args(first)[0])]
    if get_origin(first) is Literal:
        return get_args(first)[0]
    plain = {str: "a", int: 1, float: 1.0, bool: True, type(None): None}
    return plain.get(first, {})


def _minimal_struct(struct: Struct) -> dict[str, Any]:
    config = struct.__struct_config__
    body = {config.tag_field: config.tag} if config.tag_field else {}
    for field in msgspec.structs.fields(struct):
        if field.required:
            body[field.encode_name] = minimal(field_types(struct)[field.encode_name])
    for parent in reversed(struct.__mro__):
        body |= EXAMPLES.get(parent, {})
    return body


PLACES = list(places())
