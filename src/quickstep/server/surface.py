"""What a surface is: a thin adapter from a body to a `GenerationRequest`, and back to JSON.

`completions` and `chat` implement it; `routes` runs any of them in the same way, streamed or not.
A `Rendering` belongs to one request, since some fields (`text_offset`) count along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from quickstep.engine.stream import Delta
from quickstep.engine.tool_calls.formats import OutputFormats, reasoning_format, tool_call_format
from quickstep.errors import RequestError
from quickstep.server.api_errors import RouteNotFound
from quickstep.server.engine_face import ServedEngine
from quickstep.server.generation import Choice, Generation, GenerationRequest
from quickstep.server.options import RequestLimits, ServerOptions
from quickstep.server.schemas import SamplingFields

__all__ = ["Rendering", "Served", "Surface", "check_names", "output_formats", "stream_flags"]


@dataclass(frozen=True, slots=True)
class Served:
    """What an adapter may look at: the engine's facts, the names it goes by, the limits, and how
    the model writes calls and reasoning.
    """

    engine: ServedEngine
    names: tuple[str, ...]
    limits: RequestLimits
    formats: OutputFormats

    @classmethod
    def of(cls, engine: ServedEngine, options: ServerOptions) -> Served:
        """What `options` make of an engine that is open. Raises ConfigError."""
        names = options.served_model_names or (engine.model_name,)
        return cls(engine, names, options.limits, output_formats(engine, options))

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


class Rendering(Protocol):
    """One request's answer in the surface's words."""

    def opening(self) -> Mapping[str, Any] | None:
        """What a stream says of each choice before its first token, without `index`."""

    def news(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        """A stream's word for a delta, without `index` and `finish_reason`; None for nothing."""

    def ending(self) -> dict[str, Any]:
        """A stream's empty word beside the finish reason."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A finished choice, without `index` and `finish_reason`."""

    def finish_reason(self, choice: Choice) -> str | None:
        """Why the choice ended, once its end has been rendered."""


class Surface(Protocol):
    """One of OpenAI's generating routes."""

    @property
    def id_prefix(self) -> str:
        """Response ids start with it."""

    @property
    def object_name(self) -> str:
        """The `object` of a whole response."""

    @property
    def chunk_object_name(self) -> str:
        """The `object` of a stream's chunk."""

    def parse(self, body: bytes, served: Served) -> GenerationRequest:
        """Validate. Raises RequestError."""

    def rendering(self, generation: Generation, served: Served) -> Rendering:
        """The renderer of one request."""


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


def stream_flags(fields: SamplingFields) -> dict[str, Any]:
    """`stream` and `stream_options` as fields of `GenerationRequest`. Raises RequestError."""
    options = fields.stream_options
    if options is None:
        return {"stream": bool(fields.stream)}
    if not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation is not supported: chunks are not padded",
            param="stream_options.include_obfuscation",
        )
    return {
        "stream": True,
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.continuous_usage_stats),
    }
