"""The protocol of an API's adapter, and what an adapter may read of the server.

    Adapter.parse: bytes -> ParsedRequest, which names the Writer of its response

`endpoint` runs any adapter in the same way, streaming or not.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from quickstep.engine.tool_calls.formats import OutputFormats, reasoning_format, tool_call_format
from quickstep.errors import RequestError
from quickstep.server.api_keys import ApiKeys
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.openai.request_types import SamplingFields
from quickstep.server.options import (
    AnswerOptions,
    Deadlines,
    FieldRules,
    RequestLimits,
    ServerOptions,
)

__all__ = [
    "Adapter",
    "LineResult",
    "Served",
    "check_names",
    "output_formats",
    "stream_flags",
]


class Served(msgspec.Struct, frozen=True):
    """What an adapter may look at: the engine's facts, the names it goes by, the limits, how the
    model writes calls and reasoning, how long requests may take, what becomes of fields without
    effect, what answers hold beyond what was asked for, whether the prompts of one API key may hit
    the cached prompts of another; which priorities each key may have; and the threads for what
    takes longer.
    """

    engine: ServedEngine
    names: tuple[str, ...]
    limits: RequestLimits
    formats: OutputFormats
    deadlines: Deadlines = msgspec.field(default_factory=Deadlines)
    field_rules: FieldRules = msgspec.field(default_factory=FieldRules)
    answers: AnswerOptions = msgspec.field(default_factory=AnswerOptions)
    shares_prefix_cache: bool = False
    api_keys: ApiKeys = msgspec.field(default_factory=ApiKeys)
    lanes: WorkLanes = msgspec.field(default_factory=WorkLanes)

    @classmethod
    def of(cls, engine: ServedEngine, options: ServerOptions) -> Served:
        """What `options` make of an engine that is open. Raises ConfigError."""
        names = options.served_model_names or (engine.model_name,)
        formats = output_formats(engine, options)
        return cls(
            engine,
            names,
            options.limits,
            formats,
            options.deadlines,
            options.field_rules,
            options.answers,
            options.share_prefix_cache,
            options.api_keys,
        )

    def model(self, name: str | None) -> str:
        """The name to answer with. Raises RequestError 404 for a model that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RouteNotFound(
                f"the model {name!r} does not exist; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name


class LineResult(msgspec.Struct, frozen=True):
    """The JSON answer to a body that came without HTTP; `ignored` are its fields without effect."""

    body: object
    ignored: tuple[str, ...] = ()


class Adapter(Protocol):
    """One generating API."""

    def parse(self, body: bytes, served: Served, caller: str) -> ParsedRequest:
        """Validate a body of the API key `caller` ("" without keys). Raises RequestError."""


def output_formats(engine: ServedEngine, options: ServerOptions) -> OutputFormats:
    """What the operator set, else what the chat template tells. Raises ConfigError."""
    template = engine.chat_template
    return _chosen(OutputFormats() if template is None else template.formats, options)


def check_names(options: ServerOptions) -> None:
    """Raise ConfigError for a format that does not exist, before a model is loaded."""
    _chosen(OutputFormats(), options)


def _chosen(told: OutputFormats, options: ServerOptions) -> OutputFormats:
    calls, reasoning = options.tool_call_parser, options.reasoning_parser
    return replace(
        told,
        tool_calls=told.tool_calls if calls is None else tool_call_format(calls),
        reasoning=told.reasoning if reasoning is None else reasoning_format(reasoning),
    )


def stream_flags(fields: SamplingFields, served: Served) -> dict[str, Any]:
    """`stream` and `stream_options` as fields of `ParsedRequest`. Raises RequestError."""
    options = fields.stream_options
    always_usage = served.answers.always_usage
    if options is None:
        return {"stream": bool(fields.stream), "include_usage": always_usage}
    if not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return {
        "stream": True,
        "include_usage": bool(options.include_usage) or always_usage,
        "continuous_usage": bool(options.continuous_usage_stats),
    }
